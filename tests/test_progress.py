"""Long work shows itself: a bar where somebody watches, a few lines in logs elsewhere, one line at the end; and the
library prints nothing by itself."""

import ast
import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import pytest
import torch
import zoo
from paths import ROOT
from transformers.utils import logging

from hf_sparse24 import Sparse24Config, export_model, oneshot, progress
from hf_sparse24.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def bars():
    """conftest turns them off for all tests."""
    logging.enable_progress_bar()
    yield
    logging.disable_progress_bar()


@contextmanager
def watching() -> Iterator[Terminal]:
    with redirect_stderr(Terminal()) as stream:
        yield stream


def test_a_terminal_gets_a_bar_and_the_log_one_line():
    said = []
    with watching() as terminal, Progress("calibration", 3, "batch", said.append) as progress:
        for _ in range(3):
            progress.update(note="layer")
    shown = terminal.getvalue()
    assert "calibration: 100%" in shown and "3/3" in shown and "batch/s" in shown and "layer" in shown
    assert len(said) == 1 and said[0].startswith("calibration: 3 batches in 0.")


def test_a_log_gets_no_bar_but_a_line_every_half_minute(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    said = []
    with Progress("tuning", 10, "GEMM", said.append) as bar:
        for _ in range(10):
            now[0] += 12.5
            bar.update(note="64 x 64")
    assert said == [
        "tuning: 3 of 10 GEMMs in 37.5 s, 64 x 64",
        "tuning: 6 of 10 GEMMs in 75.0 s, 64 x 64",
        "tuning: 9 of 10 GEMMs in 2 min, 64 x 64",
        "tuning: 10 GEMMs in 2 min",
    ]
    assert capsys.readouterr() == ("", "")


def test_interrupted_work_and_other_processes_say_nothing(monkeypatch):
    said = []
    with pytest.raises(KeyboardInterrupt), Progress("export", 2, "tensor", said.append):
        raise KeyboardInterrupt
    monkeypatch.setattr(progress, "rank", lambda: 1)
    with watching() as terminal, Progress("export", 1, "tensor", said.append) as bar:
        bar.update()
    assert said == [] and terminal.getvalue() == ""


def test_transformers_switch_turns_bars_off():
    logging.disable_progress_bar()
    with watching() as terminal, Progress("export", 1, "tensor") as bar:
        bar.update()
    assert terminal.getvalue() == ""


def test_oneshot_and_export_say_what_they_did(tmp_path, caplog):
    model = zoo.build("llama")
    batches = [torch.randint(64, (2, 16)) for _ in range(3)]
    with watching() as terminal, caplog.at_level("INFO", logger="hf_sparse24"):
        oneshot(model, batches, Sparse24Config(method="fixed-mask"), passes=1)
        export_model(model, tmp_path)
    shown = terminal.getvalue()
    for part in ("calibration", "pruning by sparsegpt", "export", "error"):
        assert part in shown
    said = [message.partition(" in ")[0].partition(" about ")[0] for message in caplog.messages]
    assert said == [
        "pruning the other 1 block takes",
        "calibration: 6 batches",
        "pruning by sparsegpt: 6 layers",
        f"export: {len(model.state_dict()) - 6} tensors",
    ]


def test_loggers_of_other_processes_are_silent(caplog, monkeypatch):
    logger = progress.get_logger("hf_sparse24.config")
    assert progress.get_logger("hf_sparse24.config") is logger and len(logger.filters) == 1
    logger.warning("said by the first process")
    monkeypatch.setattr(progress, "rank", lambda: 1)
    logger.warning("said by another one")
    assert caplog.messages == ["said by the first process"]


def prints(path: Path) -> list[int]:
    """Lines on which a file calls print."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


def test_the_library_prints_nothing():
    """Only the command line does."""
    for folder in ("hf_sparse24", "kernels/sparse24_kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            if "tools" not in path.parts:
                assert not prints(path), path


@pytest.mark.parametrize("package", ["hf_sparse24", "kernels/sparse24_kernels"])
def test_tqdm_is_used_in_one_place(package):
    """So that bars look alike, and are hidden alike; the kernels tell a callback instead."""
    for path in (ROOT / package).rglob("*.py"):
        assert "tqdm" not in path.read_text() or path.name == "progress.py" or "disable_tqdm" in path.read_text(), path
