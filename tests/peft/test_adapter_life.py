"""Adapters of sparse models: attached by themselves, trained, merged, exported, and loaded onto their base again."""

import copy
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

from hf_sparse24 import (
    Sparse24Callback,
    Sparse24Config,
    Sparse24Controller,
    export_model,
    patch_model,
    sparse_weights,
)
from hf_sparse24.methods import step_param_groups
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.run import set_phase, sparse_run

peft = pytest.importorskip("peft")
pytestmark = lora_models.EXPECTED_WARNINGS

METHODS = ["s-ste", "t-sr-ste", "step", "own"]
TARGETS = lora_models.TARGETS["llama"]
lora = partial(lora_models.lora, task_type=None)  # unless a test gives one
load = AutoModelForCausalLM.from_pretrained


@pytest.fixture
def dense(tmp_path) -> Path:
    """The directory of a dense model."""
    zoo.build("llama", num_hidden_layers=1).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def patched(directory: Path, method: str = "s-ste", **settings) -> nn.Module:
    model = load(directory)
    patch_model(model, Sparse24Config(method=method, **settings))
    return model


def test_every_way_to_add_an_adapter_masks_it(dense, tmp_path):
    model = peft.get_peft_model(patched(dense), lora())
    model.add_adapter("second", lora())
    assert masks(model) == [True] * 4
    model.save_pretrained(tmp_path / "adapter", selected_adapters=["default"])
    expected = logits(model)
    loaded = peft.PeftModel.from_pretrained(patched(dense), tmp_path / "adapter")
    loaded.load_adapter(tmp_path / "adapter", "again")
    assert masks(loaded) == [True] * 4
    assert torch.equal(logits(loaded), expected)
    of_transformers = patched(dense)
    of_transformers.load_adapter(tmp_path / "adapter")
    assert masks(of_transformers) == [True] * 2
    assert torch.equal(logits(of_transformers), expected)
    added = patched(dense)
    added.add_adapter(lora())
    assert masks(added) == [True] * 2


@pytest.mark.filterwarnings("ignore")  # PEFT's own
def test_mixed_adapters_are_masked_and_refused_where_their_merge_is_dense(dense):
    model = peft.get_peft_model(patched(dense), lora(), mixed=True)
    model.add_adapter("loha", peft.LoHaConfig(target_modules=TARGETS, init_weights=False))
    assert masks(model) == [True] * 2
    expected = logits(model)
    model.merge_adapter(["default"])
    torch.testing.assert_close(logits(model), expected)
    model.unmerge_adapter()
    model.set_adapter(["default", "loha"])
    expected = logits(model)
    with pytest.raises(ValueError, match="is not 2:4"):
        model.merge_adapter()
    torch.testing.assert_close(logits(model), expected)


def test_an_adapter_that_peft_makes_past_its_registry_is_masked_once_a_controller_trains_it(dense):
    model = peft.LoraModel(patched(dense), lora(), "default")
    assert masks(model) == [False] * 2
    Sparse24Controller(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad]), 12).end()
    assert masks(model) == [True] * 2


def test_dense_layers_and_dense_models_get_what_peft_gives_them(dense, tmp_path):
    model = peft.get_peft_model(patched(dense), lora(target_modules="all-linear"))
    attention = model.base_model.model.model.layers[0].self_attn.q_proj
    assert not attention.lora_variant and "merge" not in vars(attention)
    config = lora()
    peft.get_peft_model(patched(dense), config)
    plain = peft.get_peft_model(load(dense), config)  # the same config, used again
    assert masks(plain) == [False] * 2 and not sparse_weights(plain)
    plain.save_pretrained(tmp_path)
    assert not sparse_weights(peft.PeftModel.from_pretrained(load(dense), tmp_path))
    assert isinstance(plain.base_model, peft.LoraModel) and type(plain.base_model).__name__ == "LoraModel"


@pytest.mark.parametrize("method", ["s-ste", "t-sr-ste"])
def test_train_merge_export_reload_and_the_adapter_alone(method, dense, tmp_path):
    model = peft.get_peft_model(patched(dense, method), lora(task_type="CAUSAL_LM", r=2))
    args = arguments(tmp_path / "run", max_steps=6, learning_rate=1e-2)
    base = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    before = logits(model)
    trainer = Trainer(model.train(), args, train_dataset=dataset())
    Sparse24Callback.add_to(trainer)
    trainer.train()
    assert sparse_run(model).phase == "sparse"  # frozen weights follow no schedule
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters() if name in base)
    expected = logits(model)
    assert (expected - before).abs().max() > 0.01

    model.save_pretrained(tmp_path / "adapter")
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected)
    export_model(merged, tmp_path / "export")
    exported = load(tmp_path / "export")
    torch.testing.assert_close(logits(exported), expected)
    assert all(is_nm_sparse(layer.mlp.up_proj.weight) for layer in exported.model.layers)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(load(tmp_path / "merged")), expected)

    reloaded = peft.PeftModel.from_pretrained(patched(dense, method), tmp_path / "adapter")
    torch.testing.assert_close(logits(reloaded), expected)


@pytest.mark.filterwarnings("ignore")  # PEFT's own
def test_pissa_is_saved_with_its_base_and_converted_to_plain_lora(dense, tmp_path):
    model = peft.get_peft_model(patched(dense), lora(init_lora_weights="pissa"))
    model.save_pretrained(tmp_path / "start")
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "pissa")
    expected = logits(model)
    model.save_pretrained(tmp_path / "lora", path_initial_model_for_weight_conversion=tmp_path / "start")
    for saved in ("pissa", "lora"):
        torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(patched(dense), tmp_path / saved)), expected)


@pytest.mark.parametrize("method", METHODS)
def test_copies_that_modules_to_save_trains_are_trained_by_the_method(method, dense, tmp_path):
    model = peft.get_peft_model(patched(dense, method), lora(target_modules=["up_proj"], modules_to_save=["down_proj"]))
    down = model.base_model.model.model.layers[0].mlp.down_proj
    copied, original = down.modules_to_save["default"], down.original_module
    assert copied.sparse24["weight"].run is original.sparse24["weight"].run
    groups = step_param_groups(model)
    bound = sparse_run(model).method
    optimizer = bound.make_optimizer(groups, 12, lr=1e-2) or torch.optim.AdamW(groups, lr=1e-2)
    controller = Sparse24Controller(model.train(), optimizer, 12)
    before = original.weight.clone(), copied.weight.clone()
    for _ in range(12):
        model(**zoo.batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(original.weight, before[0]) and not torch.equal(copied.weight, before[1])
    assert copied.sparse24["weight"].run is original.sparse24["weight"].run is controller.run
    controller.end()
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(patched(dense, method), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), expected)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(load(tmp_path / "merged")), expected)


def test_copies_in_another_phase_are_refused(dense):
    model = peft.get_peft_model(patched(dense), lora(modules_to_save=["lm_head"]))
    twin = copy.deepcopy(model.base_model.model.model.layers[0].mlp.gate_proj)
    set_phase(twin, "dense")
    with pytest.raises(ValueError, match="patched apart"):
        Sparse24Controller(nn.ModuleList([model, twin]), torch.optim.SGD(model.parameters()), 12)
