"""Modules that are replaced or removed after patching: what is saved says what the model is, or nothing is saved."""

import copy

import pytest
import torch
import zoo
from sparse_models import assert_same_state, patched
from torch import nn

from hf_sparse24 import Sparse24Controller, export_model, pack_model, sparse_weights
from hf_sparse24.weights.storage import Storage

THREE = {"num_hidden_layers": 3}
UNTIED = {"tie_word_embeddings": False}


def remove_block(model, number: int = 1) -> None:
    del model.base_model.get_submodule("decoder" if model.config.model_type == "opt" else "").layers[number]
    model.config.num_hidden_layers -= 1


def copy_first(model) -> None:
    model.model.layers[0] = copy.deepcopy(model.model.layers[1])
    remove_block(model)


def replace_all(model) -> None:
    for name in [name for name, module in model.named_modules() if "sparse24" in vars(module)]:
        rows, columns = model.get_submodule(name).weight.shape
        model.set_submodule(name, nn.Linear(columns, rows, bias=False))


CASES = {
    "head": (
        "llama",
        UNTIED,
        {"target_modules": ["lm_head", "up_proj"]},
        lambda model: model.resize_token_embeddings(99),
    ),
    "blocks": ("opt", THREE, {"layers_to_transform": [0, 2]}, remove_block),
    "experts": (
        "qwen3_moe",
        THREE,
        {"target_modules": [f"model.layers.{i}.mlp.experts" for i in range(3)]},
        remove_block,
    ),
    "patterns": ("llama", THREE, {"layer_patterns": {"model.layers.2.mlp.up_proj": "1:4"}}, remove_block),
    "a copy first": ("llama", THREE, {"layers_to_transform": [1, 2]}, copy_first),
    "all": ("llama", {}, {"target_modules": "up_proj"}, replace_all),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["sparse", "packed", "packed master"])
def test_what_is_saved_after_surgery_loads(case, kind, tmp_path):
    name, sizes, settings, change = CASES[case]
    master = {"method": "fixed-mask", "master": "packed"} if kind == "packed master" and case != "experts" else {}
    model = patched(name, sizes, **settings, **master)
    if kind == "packed":
        pack_model(model)
    change(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_same_state(loaded, model)
    patterns = [{name: x.pattern for name, x in sparse_weights(m, Storage).items()} for m in (loaded, model)]
    assert patterns[0] == patterns[1] and bool(patterns[0]) == (case != "all")


@pytest.mark.parametrize(
    "save", [lambda model, path: model.save_pretrained(path), export_model], ids=["save", "export"]
)
@pytest.mark.parametrize("method", ["s-ste", "ste"])
def test_a_model_of_another_architecture_than_its_config_is_not_saved(save, method, tmp_path):
    model = patched("mistral", method=method)
    del model.model.layers[1]
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.down_proj: .* such as num_hidden_layers"):
        save(model, tmp_path)


@pytest.mark.parametrize(
    "change", [remove_block, lambda model: model.resize_token_embeddings(99)], ids=["block", "head"]
)
def test_a_controller_notices_at_its_next_step(change):
    model = patched("llama", UNTIED, target_modules=["lm_head", "model.layers.1.mlp.up_proj", "down_proj"])
    controller = Sparse24Controller(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=3)
    change(model)
    model(**zoo.batch()).loss.backward()
    gone = "lm_head" if change is not remove_block else r"model.layers.1.mlp.up_proj"
    with pytest.raises(RuntimeError, match=rf"{gone}.weight is no sparse weight of the model any more.* step=0"):
        controller.optimizer.step()
