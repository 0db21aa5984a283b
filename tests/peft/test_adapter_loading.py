"""Adapters loaded onto what may or may not be their base: in another dtype, by an earlier version, without us."""

import json
from functools import partial
from pathlib import Path

import lora_models
import pytest
import torch
import zoo
from lora_models import logits, masks
from torch import nn
from training_runs import arguments, dataset
from transformers import AutoModelForCausalLM, Trainer

from hf_sparse24 import Sparse24Callback, Sparse24Config, patch_model, unpatch_model
from hf_sparse24.peft.tuners import MASKED_TYPE
from hf_sparse24.run import set_phase, sparse_run

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore:Unable to fetch remote file"),  # PEFT looks for the base's vocabulary
    pytest.mark.filterwarnings("ignore:Could not find a config file"),
]

lora = partial(lora_models.lora, task_type="CAUSAL_LM")
load = AutoModelForCausalLM.from_pretrained


@pytest.fixture
def dense(tmp_path) -> Path:
    """The directory of a dense model."""
    zoo.build("llama", num_hidden_layers=1).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def patched(directory: Path, method: str = "s-ste", dtype: torch.dtype = torch.float32) -> nn.Module:
    model = load(directory, dtype=dtype)
    patch_model(model, Sparse24Config(method=method))
    return model


@pytest.mark.parametrize("method", ["ste", "fixed-mask", "t-sr-ste"])
def test_an_adapter_fits_its_base_in_every_dtype_and_no_other_method(method, dense, tmp_path):
    peft.get_peft_model(patched(dense, method), lora()).save_pretrained(tmp_path / "adapter")
    for dtype in (torch.float32, torch.bfloat16):
        loaded = peft.PeftModel.from_pretrained(load(dense, dtype=dtype), tmp_path / "adapter")
        assert masks(loaded) == [True] * 2
    other = patched(dense, "ste" if method == "t-sr-ste" else "t-sr-ste")
    with pytest.raises(ValueError, match=f"method='{method}', this model "):
        peft.PeftModel.from_pretrained(other, tmp_path / "adapter")


def test_an_adapter_whose_files_have_no_names_of_weights_loads(dense, tmp_path):
    """Files of 0.1, and those with a sketch of the base's weights in place of names."""
    peft.get_peft_model(patched(dense, "ste"), lora()).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    saved = json.loads(file.read_text())
    del saved["auto_mapping"]["sparse24"]["weights"]
    file.write_text(json.dumps(saved | {"peft_type": "LORA"}))
    assert masks(peft.PeftModel.from_pretrained(load(dense), tmp_path)) == [True] * 2


LOADERS = {
    "PeftModel": lambda base, adapter: peft.PeftModel.from_pretrained(load(base), adapter),
    "PeftMixedModel": lambda base, adapter: peft.PeftMixedModel.from_pretrained(load(base), adapter),
    "AutoPeftModel": lambda base, adapter: peft.AutoPeftModelForCausalLM.from_pretrained(adapter),
    "from_pretrained": lambda base, adapter: load(adapter),
    "load_adapter": lambda base, adapter: load(base).load_adapter(adapter),
    "PeftConfig": lambda base, adapter: peft.PeftConfig.from_pretrained(adapter),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_an_adapter_with_masks_is_not_loaded_without_this_library(loader, dense, tmp_path, monkeypatch):
    peft.get_peft_model(patched(dense), lora()).save_pretrained(tmp_path / "adapter")
    LOADERS[loader](dense, tmp_path / "adapter")
    monkeypatch.delitem(peft.PEFT_TYPE_TO_CONFIG_MAPPING, MASKED_TYPE)  # what the import has added
    with pytest.raises(KeyError, match=r"LORA \(import hf_sparse24, version 0\.2 or later"):
        LOADERS[loader](dense, tmp_path / "adapter")


def test_adapters_without_masks_have_the_type_that_peft_gives_them(dense, tmp_path):
    ia3 = peft.IA3Config(target_modules=["up_proj"], feedforward_modules=["up_proj"])
    for config in (lora(target_modules=["q_proj"]), ia3, peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2)):
        peft.get_peft_model(patched(dense), config).save_pretrained(tmp_path)
        assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == config.peft_type.value
    in_dense_phase = patched(dense, "t-sr-ste")
    set_phase(in_dense_phase, "dense")
    peft.get_peft_model(in_dense_phase, lora()).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"


def test_an_adapter_of_a_dense_export_is_told_that_masks_change_it(dense, tmp_path, caplog):
    model = peft.get_peft_model(load(dense), lora())
    model.save_pretrained(tmp_path / "adapter")
    peft.PeftModel.from_pretrained(load(dense), tmp_path / "adapter")
    peft.get_peft_model(patched(dense), lora())
    assert not caplog.text
    peft.PeftModel.from_pretrained(patched(dense), tmp_path / "adapter")
    assert "adapter 'default' was trained without masks" in caplog.text


def test_adapters_that_are_combined_have_masks_again(dense, tmp_path):
    model = peft.get_peft_model(patched(dense), lora())
    model.add_adapter("second", lora())
    model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "both")
    model.save_pretrained(tmp_path, selected_adapters=["both"])
    model.set_adapter("both")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(load(dense), tmp_path / "both")), logits(model))


@pytest.mark.parametrize("wrapped", [True, False])
def test_an_adapter_that_was_there_before_the_model_was_patched_is_saved_with_its_base(wrapped, dense, tmp_path):
    model = peft.get_peft_model(load(dense), lora())
    patch_model(model if wrapped else model.get_base_model())
    model.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(load(dense), tmp_path / "adapter")), logits(model))


def test_random_masks_below_an_adapter_are_those_of_the_base_alone(dense, tmp_path):
    model = peft.get_peft_model(load(dense), lora())
    patch_model(model, Sparse24Config(method="slope", initial_mask="random"))
    model.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(load(dense), tmp_path / "adapter")), logits(model))


def test_an_adapter_out_of_the_dense_weights_is_refused(dense):
    model = peft.get_peft_model(load(dense), lora(init_lora_weights="pissa"))
    with pytest.raises(ValueError, match="call patch_model first, then get_peft_model"):
        patch_model(model)
    assert sparse_run(model) is None


def test_an_adapter_whose_base_is_dense_again_is_saved_as_one_of_a_dense_base(dense, tmp_path):
    model = peft.get_peft_model(patched(dense), lora())
    unpatch_model(model, sparse=False)
    model.save_pretrained(tmp_path / "adapter")
    assert "sparse24" not in (tmp_path / "adapter" / "adapter_config.json").read_text()


def test_a_trainer_resumes_adapters_with_masks(dense, tmp_path):
    results = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        model = peft.get_peft_model(patched(dense), lora())
        args = arguments(tmp_path, save_strategy="steps", save_steps=2, learning_rate=1e-2)
        trainer = Trainer(model, args, train_dataset=dataset())
        Sparse24Callback.add_to(trainer)
        trainer.train(resume_from_checkpoint=checkpoint)
        results.append(logits(model))
    assert torch.equal(*results)
