"""Tiny sparse models of the zoo, what they compute, and whether two models hold the same tensors."""

from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zoo
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_sparse24 import Sparse24Config, Sparse24Conv1D, Sparse24Linear, patch_model
from hf_sparse24.layers.sparse_module import choose_class
from hf_sparse24.run import SparseRun, set_phase
from hf_sparse24.weights.input_dim import input_dim_of
from hf_sparse24.weights.sparse_weight import SparseWeight, sparse_weights


def patched(name: str = "llama", sizes: Mapping[str, Any] | None = None, **settings: Any) -> PreTrainedModel:
    """A model of the zoo, in train mode, patched by a `Sparse24Config` with the settings."""
    model = zoo.build(name, **(sizes or {}))
    patch_model(model, Sparse24Config(**settings))
    return model


DENSE_METHODS = ("t-sr-ste", "slope")
"""Methods whose runs may end with dense weights: by a dense tail, by adapters of the method."""


def ended_dense(method: str) -> PreTrainedModel:
    """A model of the zoo whose run has ended with dense weights, by a method of `DENSE_METHODS`."""
    model = patched(method=method, **({"adapter_rank": 2} if method == "slope" else {}))
    set_phase(model, "adapters" if method == "slope" else "dense")
    for weight in sparse_weights(model).values():
        for tensor in weight.parameters.values():
            nn.init.normal_(tensor)
    return model


def sparse_layer(dense: nn.Module, run: SparseRun) -> nn.Module:
    """A linear layer or Conv1D made sparse in place, as `patch_model` makes those of a model."""
    SparseWeight.attach(dense, "weight", input_dim_of(dense), run)
    choose_class(dense, Sparse24Linear, Sparse24Conv1D, None)
    return dense


class Mlp(nn.Module):
    """Two layers, large enough for sparse GEMMs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 48), nn.Linear(48, 16, bias=False)])

    def forward(self, x):
        return self.layers[1](self.layers[0](x).relu())


def model_of(method: str, backend: str = "auto", **settings: Any) -> nn.Module:
    """A sparse `Mlp` in bf16, always with the same weights."""
    torch.manual_seed(0)
    model = Mlp().bfloat16()
    patch_model(model, Sparse24Config(method=method, target_modules="all-linear", backend=backend, **settings))
    return model


def logits(model: nn.Module, **inputs: Any) -> torch.Tensor:
    """What the model computes in eval mode, in its own dtype, of `zoo.batch()` unless inputs are given."""
    with torch.no_grad():
        return model.eval()(**(inputs or zoo.batch())).logits


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the model's state dict."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same_state(model: nn.Module, expected: nn.Module | Mapping[str, torch.Tensor]) -> None:
    """The model's state dict equals that of another model, or a snapshot, bit for bit."""
    one, two = model.state_dict(), expected.state_dict() if isinstance(expected, nn.Module) else expected
    assert one.keys() == two.keys()
    different = [name for name in one if not torch.equal(one[name], two[name])]
    assert not different


@contextmanager
def keep_encodings(run):
    """Keep encodings within the block, as a controller does between two steps."""
    run.open_step = object()
    try:
        yield
    finally:
        run.open_step = None


def count_prunings(monkeypatch: pytest.MonkeyPatch) -> list[SparseWeight]:
    """The weights that are pruned from now on, in the order in which it happens."""
    pruned: list[SparseWeight] = []
    encode = SparseWeight.encode
    monkeypatch.setattr(SparseWeight, "encode", lambda self, *args: pruned.append(self) or encode(self, *args))
    return pruned


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator makes within the block; views are none."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.elements = max(self.elements, tensor.numel())
        return result
