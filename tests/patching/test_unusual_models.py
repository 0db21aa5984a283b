"""patch_model on weights, configs and wrappers that are not those of an ordinary model of Transformers."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
import zoo
from torch import nn
from transformers import PreTrainedConfig

from hf_sparse24 import Sparse24Config, patch_model, sparse_run, sparse_weights, unpatch_model
from hf_sparse24.run import patched_config


def two_layers(**changes) -> nn.Module:
    """A model of two layers `first` and `second`; `changes` are what their Parameters are replaced by."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({name: nn.Linear(8, 8) for name in ("first", "second")})])
    for name, weight in changes.items():
        model.layers[0][name].weight = nn.Parameter(weight, requires_grad=False)
    return model


EVERYTHING = Sparse24Config(target_modules="all-linear")


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (torch.zeros(8, 8, dtype=torch.int8), "its weight is torch.int8; fp64, fp32, bf16 and fp16 can be pruned"),
        (torch.zeros(8, 8, dtype=torch.complex64), "its weight is torch.complex64; "),
        (torch.zeros(8, 8).to(torch.float8_e4m3fn), "its weight is torch.float8_e4m3fn; "),
        (torch.eye(8).to_sparse(), "its weight is a Parameter with torch.sparse_coo, not an ordinary dense tensor"),
        (torch.zeros(8, 0), "its weight is empty"),
        (torch.zeros(8, 1).expand(8, 8), "its weight is expanded: elements share memory"),
    ],
)
def test_weights_that_cannot_be_pruned_are_skipped_with_the_reason(weight, reason):
    model = two_layers(second=weight)
    report = patch_model(model, EVERYTHING)
    assert report.patched == ("layers.0.first",)
    assert report.skipped["layers.0.second"].startswith(reason)
    unpatch_model(model)
    alone = two_layers(first=weight, second=weight)
    with pytest.raises(ValueError, match=f"nothing to patch.*{reason[:20]}"):
        patch_model(alone, EVERYTHING)


def test_weights_that_are_not_contiguous_are_pruned_where_they_are():
    weight = torch.randn(8, 16)[:, ::2]
    transposed = torch.randn(8, 8).t()
    model = two_layers(first=weight, second=transposed)
    dense = two_layers(first=weight.contiguous(), second=transposed.contiguous())
    for each in (model, dense):
        assert len(patch_model(each, Sparse24Config(method="ste", target_modules="all-linear")).patched) == 2
    strides = [parameter.stride() for parameter in (model.layers[0]["first"].weight, model.layers[0]["second"].weight)]
    assert strides == [(16, 2), (1, 8)]
    for name in ("first", "second"):
        assert torch.equal(model.layers[0][name].sparse_weight(), dense.layers[0][name].sparse_weight())
        unpatched = unpatch_model(copy.deepcopy(model)).layers[0][name].weight
        assert torch.equal(unpatched, dense.layers[0][name].sparse_weight())


def test_weights_that_are_views_of_each_other_stay_dense():
    weight = torch.randn(8, 8)
    model = two_layers(first=weight, second=weight.t())
    model.layers.append(nn.ModuleDict({"third": nn.Linear(8, 8)}))
    report = patch_model(model, EVERYTHING)
    assert report.patched == ("layers.1.third",)
    assert report.skipped["layers.0.first"] == (
        "its weight shares memory with layers.0.second.weight, another Parameter"
    )
    big = torch.randn(16, 8)
    halves = two_layers(first=big[:8], second=big[8:])  # one storage, but no common memory
    assert len(patch_model(halves, EVERYTHING).patched) == 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden_size: int = 8


@pytest.mark.parametrize("config", [None, {"model_type": "custom"}, Frozen(), SimpleNamespace(hidden_size=8)])
def test_a_config_that_is_not_one_of_transformers_stays_what_it_is(config):
    model, before = two_layers(), copy.deepcopy(config)
    model.config = config
    patch_model(model, EVERYTHING)
    assert model.config is config and config == before
    assert patched_config(model) == EVERYTHING
    unpatch_model(model)
    assert model.config is config and config == before


class ReadOnly(PreTrainedConfig):
    def __setattr__(self, name, value):
        if name == "quantization_config":
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)


def test_a_config_that_cannot_be_written_leaves_the_model_unchanged():
    model = two_layers()
    model.config = ReadOnly()
    with pytest.raises(dataclasses.FrozenInstanceError):
        patch_model(model, EVERYTHING)
    assert not sparse_weights(model)
    assert type(model.layers[0]["first"]) is nn.Linear


class Wrapper(nn.Module):
    """Passes its model's config on, read-only."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    @property
    def config(self):
        return self.model.config


def test_a_wrapper_passes_the_config_on():
    model = Wrapper(zoo.build("llama"))
    patch_model(model)
    assert model.config.quantization_config is model.model.model.config.quantization_config is sparse_run(model).saved
    unpatch_model(model)
    assert not hasattr(model.model.config, "quantization_config")
