"""recover.py makes a 2:4 model of a dense one: pruned, trained, exported, with a card; its wrong flags are one line."""

import math

import pytest
import recover
import torch
from running import run
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sparse24.metrics import is_nm_sparse

pytestmark = pytest.mark.usefixtures("own_cache")


def flags(tmp_path, model, text_file, **settings) -> list[str]:
    settings = {
        "model": model,
        "text": text_file,
        "output": tmp_path / "out",
        "tokens": 640,
        "calibration_tokens": 320,
        "own_tokens": 160,
        "block_size": 16,
        "batch_size": 4,
        "learning_rate": 1e-2,
        **settings,
    }
    return [f"--{name}={value}" for name, value in settings.items()]


def table(text: str) -> dict[str, str]:
    """Rows of the Markdown tables in a text, by their first cell."""
    rows = [line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1] for row in rows if len(row) == 2}


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_it_recovers_and_exports(tmp_path, models, text_file, capsys, format):
    losses = recover.main(flags(tmp_path, models / "dense", text_file, format=format))
    assert list(losses) == ["dense", "pruned", "trained"] and losses["trained"] < losses["pruned"] - 0.05
    printed = capsys.readouterr().out
    assert "one-shot 2:4 by sparsegpt masks, weights reconstructed by block" in printed
    assert {name: f"{loss:.4f} | {math.exp(loss):.2f}" for name, loss in losses.items()}.items() <= table(
        printed
    ).items()

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(exported.model.layers[0].mlp.up_proj).__name__ == ("Linear" if format == "dense" else "PackedLinear")
    if format == "dense":
        layers = [module for module in exported.model.modules() if isinstance(module, torch.nn.Linear)]
        assert len(layers) == 7 and all(is_nm_sparse(layer.weight) for layer in layers)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<eos>"
    card = (tmp_path / "out" / "README.md").read_text()
    rows = table(card)
    assert rows["loss"].startswith(f"{losses['trained']:.4g} | {losses['dense']:.4g} | ")
    assert rows["loss before training"] == f"{losses['pruned']:.4g}"
    assert rows["reconstruct"] == "block" and "| tokens | 480 |" in card and "| tokens | 640 |" in card
    assert "| own tokens | 160 |" in card
    assert str(tmp_path) not in card and str(models) not in card


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tokens": -1}, "tokens=-1: must be at least 0"),
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
        ({"block_size": 1}, "block_size=1: must be at least 2"),
        ({"calibration_tokens": 8}, "calibration_tokens=8: must be at least block_size=16, and less than the "),
        ({"format": "int8"}, "argument --format: invalid choice: 'int8'"),
    ],
)
def test_wrong_flags(tmp_path, models, text_file, capsys, settings, expected):
    with pytest.raises(SystemExit) as stopped:
        run(lambda: recover.main(flags(tmp_path, models / "dense", text_file, **settings)))
    assert stopped.value.code == 2
    assert expected in capsys.readouterr().err.splitlines()[-1] and not (tmp_path / "out").exists()
