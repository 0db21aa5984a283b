"""A model that was patched through a part of it says so in its own config, which is what gets saved."""

import copy

import model_kinds
import pytest
import torch
import zoo
from sparse_models import logits
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from hf_sparse24 import (
    Sparse24Config,
    Sparse24Controller,
    patch_model,
    sparse_run,
    sparse_weights,
    unpatch_model,
)
from hf_sparse24.run import patched_config

LLAVA = {
    "text_config": {"model_type": "llama", "vocab_size": zoo.VOCAB, **zoo.CAUSAL["llama"]},
    "vision_config": {"model_type": "clip_vision_model", **model_kinds.VISION},
    "image_token_index": 3,
}


def llava():
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(AutoConfig.for_model("llava", **LLAVA))


def assert_reloads_the_same(model, directory) -> None:
    model.eval().save_pretrained(directory)
    kind = model.config.model_type
    loaded = (AutoModelForImageTextToText if kind == "llava" else zoo.auto_class(kind)).from_pretrained(directory)
    assert list(sparse_weights(loaded)) == list(sparse_weights(model)) != []
    ids = zoo.batch()["input_ids"] + 1  # without image tokens
    assert torch.equal(logits(loaded, input_ids=ids), logits(model, input_ids=ids))


@pytest.mark.parametrize("targets", ["mlp", "all-linear", ["down_proj", "output.dense", "c_proj"], "all-but-first"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_base_model(name, targets, tmp_path):
    model = zoo.build(name)
    layers = [1] if targets == "all-but-first" else None
    targets = "mlp" if layers else targets
    if isinstance(targets, list):
        targets = [ending for ending in targets if any(n.endswith(ending) for n, _ in model.named_modules())]
    report = patch_model(model.base_model, Sparse24Config(target_modules=targets, layers_to_transform=layers))
    assert report.patched
    assert patch_model(model).patched == tuple(name.removesuffix(".weight") for name in sparse_weights(model))
    assert model.config.quantization_config is sparse_run(model).saved is model.base_model.config.quantization_config
    assert_reloads_the_same(model, tmp_path)


def test_the_language_model_of_a_multi_modal_one(tmp_path):
    model = llava()
    other = llava()
    patch_model(model.model.language_model, Sparse24Config(method="t-sr-ste", target_modules="all-linear"))
    patch_model(model)
    assert all("language_model" in name for name in sparse_weights(model))
    assert getattr(other.config, "quantization_config", None) is None
    assert_reloads_the_same(model, tmp_path)


def test_a_part_that_was_sparse_before_it_became_one(tmp_path):
    base = zoo.build("llama").model
    patch_model(base, Sparse24Config(method="s-ste"))
    model = zoo.build("llama", seed=1)
    model.model = base
    assert getattr(model.config, "quantization_config", None) is None
    Sparse24Controller(model, torch.optim.AdamW(model.parameters()), total_steps=3)
    assert_reloads_the_same(model, tmp_path / "trained")
    del model.config.quantization_config
    patch_model(model)
    assert_reloads_the_same(model, tmp_path / "patched")


def test_the_report_of_a_model_of_which_a_part_is_sparse():
    model = zoo.build("llama")
    patch_model(nn.ModuleList(model.model.layers[:1]), Sparse24Config(target_modules=["up_proj"]))
    report = patch_model(model)
    assert report.patched == ("model.layers.0.mlp.up_proj",)
    assert report.skipped["model.layers.1.mlp.up_proj"] == "dense when the rest was patched"


def test_a_copy_has_the_config_of_its_model():
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(target_modules="mlp"))
    Sparse24Controller(again := copy.deepcopy(model), torch.optim.AdamW(again.parameters()), total_steps=3)
    assert patched_config(again) == patched_config(model) == Sparse24Config(target_modules="mlp")


def test_parts_with_configs_of_their_own_are_refused():
    first, second = zoo.build("llama"), zoo.build("llama")
    patch_model(first, Sparse24Config(method="ste"))
    patch_model(second, Sparse24Config(method="t-sr-ste"))
    both = torch.nn.ModuleList([first, second])
    with pytest.raises(ValueError, match=r"1\.model\..*patched apart"):
        Sparse24Controller(both, torch.optim.AdamW(both.parameters()), total_steps=12)
    with pytest.raises(ValueError, match="patched apart"):
        patch_model(both)


@pytest.mark.parametrize("unpatched", ["part", "whole"])
@pytest.mark.parametrize("name", ["llama", "llava"])
def test_unpatching_the_whole_or_the_part(name, unpatched):
    model = llava() if name == "llava" else zoo.build(name)
    part = model.model.language_model if name == "llava" else model.model
    patch_model(part, Sparse24Config())
    unpatch_model(part if unpatched == "part" else model)
    assert not sparse_weights(model)
    assert "quantization_config" not in str(model.config)
    patch_model(model, Sparse24Config(method="ste", target_modules="attention"))  # as if nothing had been
    assert patched_config(model).method == "ste"


def test_another_model_from_the_same_config_stays_dense():
    config = zoo.build("llama").config
    model, other = AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_config(config)
    patch_model(model.model, Sparse24Config())
    assert getattr(other.config, "quantization_config", None) is None
    assert getattr(model.config, "quantization_config", None) is None  # a part does not know of the whole
    patch_model(model)
    assert getattr(other.config, "quantization_config", None) is None
    assert model.model.config is model.config


@pytest.mark.parametrize("method", ["ste", "s-ste"])
def test_unpatching_a_part_leaves_the_rest_sparse(method, tmp_path):
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method=method))
    unpatch_model(model.model.layers[0])
    unpatch_model(model.model.layers[1].mlp.up_proj)
    assert len(sparse_weights(model)) == 2
    assert_reloads_the_same(model, tmp_path)
    assert patch_model(model).patched == tuple(name.removesuffix(".weight") for name in sparse_weights(model))


@pytest.mark.parametrize("patched", [lambda lm: lm.model.layers, lambda lm: torch.nn.ModuleDict({"lm": lm})])
def test_layers_of_a_model_or_a_module_around_it(patched, tmp_path):
    model = zoo.build("llama")
    patch_model(patched(model), Sparse24Config(method="ste"))
    patch_model(model)
    assert_reloads_the_same(model, tmp_path)
