"""Adapters loaded onto what is or is not their base: in another dtype or form, sparse by another method, dense."""

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

from hf_sparse24 import Sparse24Callback, Sparse24Config, export_model, patch_model, unpatch_model
from hf_sparse24.run import set_phase, sparse_run

peft = pytest.importorskip("peft")
pytestmark = lora_models.EXPECTED_WARNINGS

lora = partial(lora_models.lora, task_type="CAUSAL_LM")
load = AutoModelForCausalLM.from_pretrained


@pytest.fixture
def dense(tmp_path) -> Path:
    """The directory of a dense model."""
    zoo.build("llama", num_hidden_layers=1).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def patched(directory: Path, method: str = "s-ste", dtype: torch.dtype = torch.float32, **settings) -> nn.Module:
    model = load(directory, dtype=dtype)
    patch_model(model, Sparse24Config(method=method, **settings))
    return model


def mapping(adapter: Path) -> dict:
    return json.loads((adapter / "adapter_config.json").read_text())["auto_mapping"] or {}


@pytest.mark.parametrize("task_type", [None, "CAUSAL_LM"])
def test_the_files_of_an_adapter_say_by_what_its_base_is_sparse(task_type, dense, tmp_path):
    base = patched(dense)
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(load(tmp_path / "base"), lora(task_type=task_type))
    model.save_pretrained(tmp_path / "adapter")
    saved = mapping(tmp_path / "adapter")
    assert saved["sparse24"] == {"method": "s-ste", "pattern": "2:4"}
    assert saved.get("base_model_class") == (None if task_type else "LlamaForCausalLM")
    again = peft.PeftModel.from_pretrained(patched(dense, dtype=torch.bfloat16), tmp_path / "adapter")
    torch.testing.assert_close(logits(again), logits(model), atol=0.1, rtol=0.1)
    again.save_pretrained(tmp_path / "second")
    assert mapping(tmp_path / "second") == saved
    auto = peft.AutoPeftModelForCausalLM if task_type else peft.AutoPeftModel
    assert torch.equal(logits(auto.from_pretrained(tmp_path / "adapter")), logits(model))


def test_the_base_is_a_checkpoint_an_export_or_a_patched_dense_model(dense, tmp_path):
    base = patched(dense, "t-sr-ste")
    base.save_pretrained(tmp_path / "base")
    export_model(base, tmp_path / "export")
    export_model(base, tmp_path / "packed", "packed")
    model = peft.get_peft_model(base, lora())
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    bases = load(tmp_path / "base"), load(tmp_path / "packed"), patched(dense, "t-sr-ste")
    for found in (*bases, patched(tmp_path / "export", "t-sr-ste")):
        loaded = peft.PeftModel.from_pretrained(found, tmp_path / "adapter")
        assert masks(loaded) == [True] * 2
        torch.testing.assert_close(logits(loaded), expected)
        torch.testing.assert_close(logits(loaded.merge_and_unload()), expected)


LOADERS = {
    "PeftModel": lambda base, adapter: peft.PeftModel.from_pretrained(load(base), adapter),
    "PeftMixedModel": lambda base, adapter: peft.PeftMixedModel.from_pretrained(load(base), adapter),
    "AutoPeftModel": lambda base, adapter: peft.AutoPeftModelForCausalLM.from_pretrained(adapter),
    "from_pretrained": lambda base, adapter: load(adapter),
    "load_adapter": lambda base, adapter: load(base).load_adapter(adapter),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_dense_base_is_refused(loader, dense, tmp_path):
    peft.get_peft_model(patched(dense), lora()).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"is dense: .*='.*dense'.*method='s-ste', pattern='2:4'"):
        LOADERS[loader](dense, tmp_path / "adapter")


@pytest.mark.parametrize("settings", [{"method": "ste"}, {"pattern": "1:4"}])
def test_a_base_that_is_sparse_in_another_way_is_refused(settings, dense, tmp_path):
    peft.get_peft_model(patched(dense), lora()).save_pretrained(tmp_path / "adapter")
    ((field, value),) = settings.items()
    with pytest.raises(ValueError, match=f"this model is .*'{field}': '{value}'"):
        peft.PeftModel.from_pretrained(patched(dense, **settings), tmp_path / "adapter")


def test_an_adapter_of_a_dense_base_is_told_that_masks_change_it(dense, tmp_path, caplog):
    model = peft.get_peft_model(load(dense), lora())
    model.save_pretrained(tmp_path / "adapter")
    assert "sparse24" not in mapping(tmp_path / "adapter")
    peft.PeftModel.from_pretrained(load(dense), tmp_path / "adapter")
    peft.get_peft_model(patched(dense), lora())
    assert not caplog.text
    peft.PeftModel.from_pretrained(patched(dense), tmp_path / "adapter")
    assert "trained on a dense base" in caplog.text


def test_a_merge_that_fills_zeros_of_a_dense_export_warns(dense, tmp_path, caplog):
    export_model(patched(dense), tmp_path / "export")
    ia3 = peft.IA3Config(target_modules=["up_proj"], feedforward_modules=["up_proj"])
    for directory, config in ((dense, lora()), (tmp_path / "export", ia3), (tmp_path / "export", lora())):
        assert not caplog.text
        peft.get_peft_model(load(directory), config).merge_and_unload()
    assert "zeros of 2 weights, such as model.layers.0.mlp." in caplog.text


def test_an_adapter_whose_base_computes_densely_is_saved_as_one_of_a_dense_base(dense, tmp_path):
    model = patched(dense, "t-sr-ste")
    set_phase(model, "dense")
    peft.get_peft_model(model, lora()).save_pretrained(tmp_path / "adapter")
    assert "sparse24" not in mapping(tmp_path / "adapter")


def test_adapters_that_are_combined_have_masks_again(dense, tmp_path):
    model = peft.get_peft_model(patched(dense), lora())
    model.add_adapter("second", lora())
    model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "both")
    model.save_pretrained(tmp_path, selected_adapters=["both"])
    model.set_adapter("both")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(patched(dense), tmp_path / "both")), logits(model))


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_model_with_adapters_is_not_patched_or_made_dense_again(wrapped, dense):
    model = peft.get_peft_model(load(dense), lora())
    with pytest.raises(ValueError, match="patch it first"):
        patch_model(model if wrapped else model.get_base_model())
    assert sparse_run(model) is None
    model = peft.get_peft_model(patched(dense), lora())
    with pytest.raises(ValueError, match="sparse=False: the model has adapters"):
        unpatch_model(model if wrapped else model.get_base_model(), sparse=False)
    assert sparse_run(model) is not None


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
