"""LoRA as a user runs it, on tiny models and texts."""

import os

import pytest
from task_runs import MLP, assert_merged, results, text_flags
from transformers import AutoModelForCausalLM

from hf_sparse24 import Sparse24Config, patch_model
from hf_sparse24.metrics import is_nm_sparse

pytestmark = [
    # TRL and PEFT still use names of Transformers 4 that Transformers 5 is renaming.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.usefixtures("own_cache"),
]

peft = pytest.importorskip("peft")
pytest.importorskip("trl")

import lora  # noqa: E402


def eval_losses(trainer) -> list[float]:
    return [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]


@pytest.mark.parametrize(
    ("base", "settings"),
    [
        ("sparse", {"method": "s-ste"}),
        ("sparse", {"method": "s-ste", "lora_dropout": 0.1, "gradient_checkpointing": True}),
        ("zeros", {"method": "fixed-mask", "lora_modules": "up_proj"}),
    ],
    ids=["checkpoint", "dropout", "zeros"],
)
def test_lora(tmp_path, models, capsys, base, settings):
    trainer = lora.main(text_flags(tmp_path, models / base, **settings))
    base_loss, *_, loss = eval_losses(trainer)
    assert loss < base_loss - 0.05 and results(tmp_path)["eval_loss"] == loss
    assert "verified: all 3 weights are 2:4" in capsys.readouterr().out
    assert {"adapter_config.json", "merged"} <= {*os.listdir(tmp_path / "out")} and trainer.state.global_step == 4
    model = AutoModelForCausalLM.from_pretrained(models / base)
    if base == "zeros":
        patch_model(model, Sparse24Config(method="fixed-mask"))
    assert_merged(tmp_path / "out" / "merged", peft.PeftModel.from_pretrained(model, tmp_path / "out"), MLP)


def test_lora_exports_packed(tmp_path, models):
    lora.main(text_flags(tmp_path, models / "sparse", method="s-ste", export_format="packed"))
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
    assert type(packed.model.layers[0].mlp.up_proj).__name__ == "PackedLinear"


def test_lora_on_a_dense_model_is_the_control_run(tmp_path, models):
    lora.main(text_flags(tmp_path, models / "dense", method="dense"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
    assert not is_nm_sparse(merged.model.layers[0].mlp.up_proj.weight)
