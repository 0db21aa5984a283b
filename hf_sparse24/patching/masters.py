"""Packed masters: sparse layers whose Parameter is the kept values alone (`master="packed"`).

Such a layer is a `PackedLinear` whose values train. Its mask never changes, so it has no state, and nothing happens
between steps; its run, and the model's config, are those of a patched model.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from sparse24_kernels import apply_mask, pack_nm

from ..config import SavedConfig, Sparse24Config
from ..layers.packed import pack_weight
from ..layers.sparse_module import make_dense
from ..packed_format import PackedFormat
from ..run import SparseRun, wants_packed_master
from ..weights.packed_weight import not_packable
from ..weights.sparse_weight import SparseWeight, first_of_each
from ..weights.storage import layer_name
from .ownership import list_masters


def check_dense_master(config: Sparse24Config, what: str) -> None:
    """Raise ValueError, which goes on with `what`, where a config asks for packed masters."""
    if wants_packed_master(config):
        raise ValueError(f"master='packed': {what}")


def packed_config(saved: SavedConfig, packed: PackedFormat | None) -> SavedConfig:
    """The saved config of a packed model, or of a dense export: no master trains."""
    config = saved.config.replace(master="dense") if wants_packed_master(saved.config) else saved.config
    return SavedConfig(config, replace(saved.facts, packed=packed, finished=False))


def check_masters(weights: Mapping[str, SparseWeight], run: SparseRun) -> None:
    """Raise ValueError where these weights of a patched model cannot become packed masters."""
    if run.config.backend != "auto":
        raise ValueError(f"backend={run.config.backend!r}: master='packed' has dense math only; leave it 'auto'")
    first = first_of_each(weights)
    for name, weight in weights.items():
        reasons = {
            "is a stack of experts": weight.is_stack,
            f"has no packed form ({not_packable(weight)})": not_packable(weight),
            f"has {list(weight.parameters)} of its method, which would train too": weight.parameters,
            "shares its weight with another layer": name not in first,
        }
        reason = next((text for text, applies in reasons.items() if applies), None)
        if reason:
            way = "leave it dense with exclude_modules, or take master='dense'"
            raise ValueError(f"{layer_name(name)} {reason}, and master='packed' cannot train it: {way}")


@torch.no_grad()
def pack_masters(weights: Mapping[str, SparseWeight], run: SparseRun) -> None:
    """Let every sparse weight be its packed values alone."""
    for weight in weights.values():  # one after the other, so that only one is there twice
        out_in = weight.storage.out_in
        matrix, mask = out_in(weight.parameter.detach()), out_in(weight.mask())
        packed = pack_nm(apply_mask(matrix, mask), *weight.pattern, mask=mask)
        module, trains = weight.module, weight.parameter.requires_grad
        make_dense(weight)
        pack_weight(module, weight.name, weight.input_dim, packed, run, trains)
    for owner in run.owners:
        list_masters(owner, run)
