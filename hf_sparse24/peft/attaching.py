"""Attaching adapters to sparse layers: PEFT's layers get masks, and merges that keep the weight 2:4."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..extensions import adapters_in, is_adapter
from ..layers.linear import Sparse24Layer
from ..layers.packed import PackedLayer
from .masked import has_mask
from .merging import Unmerged, merge, unmerge


def attach_adapters(model: nn.Module) -> None:
    """Attach every adapter of `model` around a sparse layer, unless it is attached already."""
    for adapter in adapters_in(model):
        if isinstance(adapter.get_base_layer(), Sparse24Layer | PackedLayer):
            for name in adapter._get_available_adapters():
                _attach(adapter, name)


@contextmanager
def attaching(parent: nn.Module, child: str, adapter_name: str) -> Iterator[None]:
    """Attach the adapter that PEFT puts around a layer within the block, or adds to the adapter that is there.

    Within the block the `.weight` of a sparse layer is its sparse weight, so that adapters are initialised from what
    the layer computes with. PiSSA and its like subtract the adapter from the base weight; through the mask, the rest is
    2:4. Where an adapter that is not masked changes the weight, it is restored, with ValueError.
    """
    adapter: Any = getattr(parent, child)
    layer = adapter.get_base_layer() if is_adapter(adapter) else adapter
    is_sparse = isinstance(layer, Sparse24Layer | PackedLayer)
    if not is_sparse or layer.weight.is_meta or not has_mask(layer):
        yield
        if is_sparse:
            _attach(getattr(parent, child), adapter_name)
        return
    before, exposed = Unmerged(layer).expose(), layer.weight.detach().clone()
    try:
        yield
        adapter = getattr(parent, child)
        is_masked = _attach(adapter, adapter_name)
        has_changed = not torch.equal(layer.weight, exposed)
        if has_changed and not is_masked:
            kind = f"{type(adapter).__module__}.{type(adapter).__name__}"
            way = "call unpatch_model(model) before you add it, or use PiSSA, OLoRA or CorDA with plain LoRA"
            raise ValueError(f"{child}: adding {kind} leaves a weight that is not {before.pattern}; {way}")
    except BaseException:
        before.restore()
        raise
    if has_changed:
        layer.weight.data = layer.weight.data.masked_fill(exposed == 0, 0)
        before.accept()
    else:
        before.restore()


def _attach(adapter: Any, name: str) -> bool:
    """Let an adapter merge as `merging` says, mask it if its kind allows, and return whether it is masked."""
    from .variants import mask_adapter  # PEFT is optional

    if not is_adapter(adapter):
        return False
    if not adapter.merged:
        adapter.merge, adapter.unmerge = partial(merge, adapter), partial(unmerge, adapter)
    return mask_adapter(adapter, name)
