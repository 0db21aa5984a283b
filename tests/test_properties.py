"""Any value in any field of a config, and any tree of modules: something that works, or an error and no change."""

import copy
import dataclasses
import json
import warnings

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_sparse24 import Sparse24Config, patch_model, sparse_weights, unpatch_model
from hf_sparse24.methods import METHODS
from hf_sparse24.methods.settings import SHARED
from hf_sparse24.metrics import is_nm_sparse

FIELDS = sorted({*SHARED} | {f.name for method in METHODS.values() for f in dataclasses.fields(method.Settings)})
BOUNDED = settings(max_examples=150, deadline=None, derandomize=True, database=None)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
WORDS = ["2:4", "1:4", "4:8", "mlp", "up_proj", ".*", "dense", "mvue", "gradient", "exact", "auto"]
ALLOWED = st.sampled_from([*METHODS, *WORDS, 0, 1, 40, 0.1])
ANY = st.one_of(
    ALLOWED,
    JSON,
    st.sampled_from([10**400, 10**5000, -1, 2**64, "1e-4", "[[", "(", b"mlp", object(), int, range(3), {1}, 1j, ...]),
    st.sampled_from([np.int64(3), np.float32(0.5), np.bool_(True), np.str_("ste"), np.arange(3), np.array(["ste"])]),
    st.sampled_from([np.array(None), np.datetime64("2020-01-01"), np.float64("nan")]),
    st.builds(torch.tensor, st.sampled_from([1, 0.5, True, [1.0], 1j, float("inf")])),
    st.just(torch.empty((), device="meta")),
)


def check_round_trip(config: Sparse24Config) -> None:
    text = config.to_json_string()
    again = Sparse24Config.from_dict(json.loads(text))
    assert again == config and again.to_json_string() == text
    assert copy.deepcopy(config) == config


@BOUNDED
@given(st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=3), st.sampled_from([None, *METHODS]))
def test_a_config_is_valid_or_its_error_names_a_field(values, method):
    if method is not None:
        values = {"method": method} | values
    try:
        config = Sparse24Config(**values)
    except ValueError as error:
        assert any(f"{name}=" in str(error) for name in FIELDS), error
        assert len(str(error)) < 2000
        return
    check_round_trip(config)


KEYS = st.sampled_from([*FIELDS, "quant_method", "hf_sparse24_version", "phase", "other"])


@BOUNDED
@given(JSON | st.dictionaries(KEYS, JSON | ALLOWED, max_size=4))
def test_any_json_is_a_config_or_an_error(value):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a later version
            config = Sparse24Config.from_dict(value)
    except ValueError:
        return
    check_round_trip(config)


class Tree(nn.Module):
    """Its leaves run one after the other, each on as many inputs as it takes."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for leaf in self.modules():
            if isinstance(leaf, nn.Linear | Conv1D) and leaf.weight.is_floating_point():
                inputs = leaf.weight.shape[0] if isinstance(leaf, Conv1D) else leaf.weight.shape[1]
                total = total + leaf(x[:, :inputs].to(leaf.weight.dtype)).float().sum()
        return total


SIZES = st.sampled_from([8] * 6 + [4, 12, 1, 3])
DTYPES = st.sampled_from([torch.float32] * 8 + [torch.bfloat16, torch.float64, torch.int8, torch.complex64])


@st.composite
def leaves(draw) -> nn.Module:
    inputs, outputs = draw(SIZES), draw(SIZES)
    kind = draw(st.sampled_from(["linear"] * 6 + ["conv1d", "conv1d", "embedding", "norm", "nan"]))
    if kind == "embedding":
        return nn.Embedding(outputs, inputs)
    if kind == "norm":
        return nn.LayerNorm(inputs)
    layer = Conv1D(outputs, inputs) if kind == "conv1d" else nn.Linear(inputs, outputs, bias=draw(st.booleans()))
    dtype = draw(DTYPES)
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter((torch.randn(parameter.shape) * 8).to(dtype), requires_grad=False))
    if kind == "nan" and layer.weight.is_floating_point():
        layer.weight[0, 0] = torch.nan
    return layer


def branches(children: st.SearchStrategy[nn.Module]) -> st.SearchStrategy[nn.Module]:
    lists = st.lists(children, min_size=1, max_size=3)
    named = st.dictionaries(st.sampled_from(["mlp", "attn", "up_proj", "gate", "0"]), children, min_size=1, max_size=3)
    return lists.map(nn.ModuleList) | named.map(nn.ModuleDict)


@st.composite
def trees(draw) -> nn.Module:
    model = Tree()
    model.layers = nn.ModuleList(draw(st.lists(st.recursive(leaves(), branches, max_leaves=4), min_size=1, max_size=3)))
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    holders = [module for module in model.modules() if isinstance(getattr(module, "weight", None), nn.Parameter)]
    if linears and draw(st.booleans()):  # a module that is shared, a weight that is tied, or a view of one
        source = draw(st.sampled_from(linears))
        model.layers.append(source)
        target = draw(st.sampled_from(holders))
        if target.weight.shape == source.weight.shape and target.weight.dtype == source.weight.dtype:
            target.weight = source.weight if draw(st.booleans()) else nn.Parameter(source.weight.data, False)
    return model


def snapshot(model: nn.Module) -> tuple:
    modules = {name: (type(module), id(module), sorted(module.__dict__)) for name, module in model.named_modules()}
    tensors = {name: (id(t), t.detach().clone()) for name, t in model.state_dict(keep_vars=True).items()}
    return modules, tensors


def assert_same(model: nn.Module, before: tuple) -> None:
    modules, tensors = snapshot(model)
    assert modules == before[0] and tensors.keys() == before[1].keys()
    for name, (identity, tensor) in tensors.items():
        old_identity, old = before[1][name]
        assert identity == old_identity and torch.equal(tensor.view(torch.uint8), old.view(torch.uint8))


@settings(BOUNDED, max_examples=100)
@given(
    trees(),
    st.sampled_from(sorted(METHODS)),
    st.sampled_from(["all-linear"] * 5 + ["mlp", ["up_proj"], "0"]),
    st.sampled_from(["2:4", "2:4", "1:2"]),
)
def test_a_model_is_patched_and_unpatched_to_the_bit_or_unchanged(model, method, targets, pattern):
    before = snapshot(model)
    x = torch.randn(2, 12)
    try:
        report = patch_model(model, Sparse24Config(method=method, target_modules=targets, pattern=pattern))
    except ValueError as error:
        assert str(error)
        assert_same(model, before)
        return
    weights = sparse_weights(model)
    assert {f"{name}.weight" for name in report.patched} == weights.keys()
    assert all(is_nm_sparse(w.pruned(), w.method.pattern.n, w.method.pattern.m, w.input_dim) for w in weights.values())
    with torch.no_grad():
        model(x)
    assert len(repr(report)) < 300 and str(report)
    sparse = unpatch_model(copy.deepcopy(model))
    for name in report.skipped:  # what stayed dense is not touched when sparse weights are written
        now, then = sparse.get_submodule(name).weight, model.get_submodule(name).weight
        assert torch.equal(now.view(torch.uint8), then.view(torch.uint8))
    assert_same(unpatch_model(model, sparse=False), before)
