"""The files of autotuning: cached, damaged, shared by two processes."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from autotune_stage import CPU, HERE, PROBLEM, measured, remember, tune, user_file
from sparse24_kernels import Algorithm
from sparse24_kernels.gemm import autotune
from sparse24_kernels.gemm.autotune import choose, reset
from sparse24_kernels.gemm.autotune import table as autotune_table
from sparse24_kernels.gemm.autotune.table import Table

pytestmark = pytest.mark.usefixtures("autotune_stage")


def test_a_file_holds_what_was_measured():
    path = remember(PROBLEM, measured(3, 80.0))
    (entry,) = json.loads(path.read_text())["entries"]
    assert list(entry.values())[:3] == [64, 4096, 128]


def edited(**changes):
    return lambda text: json.dumps(json.loads(text) | changes)


def edited_entry(**changes):
    def edit(text):
        data = json.loads(text)
        data["entries"][0] |= changes
        return json.dumps(data)

    return edit


def edited_candidate(**changes):
    def edit(text):
        data = json.loads(text)
        data["entries"][0]["candidates"][0] |= changes
        return json.dumps(data)

    return edit


NONSENSE = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "no JSON": lambda text: "hello",
    "binary": lambda text: "\x00\udcff\udcfe",
    "a list": lambda text: "[]",
    "nested": lambda text: "[" * 100_000,
    "a number of 10000 digits": lambda text: text.replace("50.0", "9" * 10000),
    "a time beyond floats": lambda text: text.replace("50.0", "9" * 1000),
    "other format": edited(format=1),
    "format 2.0": edited(format=2.0),
    "format true": edited(format=True),
    "no entries": edited(entries=None),
    "entries of numbers": edited(entries=[1]),
    "failures of strings": edited(failures=["x"]),
    "another environment": edited(environment=HERE._replace(cusparselt="701")._asdict()),
    "text for m": edited_entry(m="64"),
    "negative n": edited_entry(n=-1),
    "unknown dtype": edited_entry(dtype="float7"),
    "dtype of no string": edited_entry(dtype=["bfloat16"]),
    "0 for false": edited_entry(transposed=0),
    "candidates of text": edited_entry(candidates="ab"),
    "zero time": edited_candidate(sparse_us=0.0),
    "negative time": edited_candidate(dense_us=-5.0),
    "infinite time": edited_candidate(dense_us=float("inf")),
    "nan": edited_candidate(sparse_us=float("nan")),
    "id of text": edited_candidate(id="1"),
    "id true": edited_candidate(id=True),
    "negative id": edited_candidate(id=-3),
    "split_k 10^9": edited_candidate(split_k=10**9),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_nonsense_is_ignored_with_one_warning_and_overwritten(nonsense):
    path = remember(PROBLEM, measured(1, 50.0))
    path.write_bytes(NONSENSE[nonsense](path.read_text()).encode(errors="surrogateescape"))
    with pytest.warns(UserWarning, match="is ignored") as caught:
        assert choose(PROBLEM, CPU).reason == autotune.NOT_TUNED
        table = autotune._table(HERE)
        table.add(PROBLEM, (measured(2, 50.0),))
        table.save()
    assert len(caught) == 1 and str(path) in str(caught[0].message)
    reset()
    assert choose(PROBLEM, CPU).algorithm.id == 2


def test_a_directory_in_the_files_place_and_a_folder_that_cannot_be_made(stand_in, monkeypatch, tmp_path):
    user_file().mkdir(parents=True)
    with pytest.warns(UserWarning, match="is ignored"):
        assert choose(PROBLEM, CPU).backend == "dense"
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARSE24_CACHE", str(tmp_path / "file" / "cache"))  # unwritable, even for root
    reset()
    with pytest.warns(UserWarning, match="autotune: .*file") as caught:
        verdicts = tune([PROBLEM, PROBLEM._replace(m=128)], CPU, worker=stand_in(_0=50).command)
    assert len(caught) <= 2
    assert [verdict.algorithm for verdict in verdicts.values()] == [Algorithm(0)] * 2
    assert choose(PROBLEM, CPU).backend == "cusparselt"  # of this process's memory


def test_a_save_that_fails_leaves_the_old_file(monkeypatch):
    path = remember(PROBLEM, measured(1, 50.0))
    before = path.read_text()
    monkeypatch.setattr(autotune_table.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.warns(UserWarning, match=r"cannot be written \(disk full\)"):
        remember(PROBLEM, measured(2, 50.0))
    assert path.read_text() == before
    assert {file.name for file in path.parent.iterdir()} == {path.name, path.with_suffix(".lock").name}


def test_cache_directory(monkeypatch):
    monkeypatch.delenv("SPARSE24_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert autotune_table.user_directory() == Path("/xdg/sparse24")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somebody")
    assert autotune_table.user_directory() == Path("/somebody/.cache/sparse24")


def test_two_processes_that_save_at_once_lose_nothing():
    code = textwrap.dedent(
        f"""
        import sys, torch
        from sparse24_kernels.gemm.autotune.table import *
        from sparse24_kernels.gemm.autotune.records import *
        from sparse24_kernels import Algorithm, GemmProblem
        table, own = Table(Environment(*{tuple(HERE)!r})), int(sys.argv[1])
        print("ready", flush=True)
        sys.stdin.read(1)
        for i in range(12):
            problem = GemmProblem(16 + 16 * own, 16 + 16 * i, 64, torch.bfloat16, True, True)
            table.add(problem, (Measured(Algorithm(i), 1.0, 2.0),))
            table.fail(problem, Algorithm(i, 2 + own), "hung")
            table.save()
        """
    )
    variables = os.environ | {"PYTHONPATH": str(Path(autotune.__file__).parents[3])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": variables}
    savers = [subprocess.Popen([sys.executable, "-c", code, str(i)], **pipes) for i in range(2)]
    for saver in savers:
        assert saver.stdout.readline() == b"ready\n"
    for saver in savers:
        saver.stdin.close()
    while any(saver.poll() is None for saver in savers):  # a reader sees a whole file at any time
        Table(HERE)
        time.sleep(0.01)
    for saver in savers:
        saver.stdout.close()
    assert [saver.returncode for saver in savers] == [0, 0]
    table = Table(HERE)
    assert len(table.entries) == len(table.failures) == 24
