"""Attaching adapters to sparse layers: what is done to PEFT's layers, once they stand around a sparse one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..layers.linear import Sparse24Layer
from ..layers.packed import PackedLayer
from .bypass import is_adapter
from .masked import has_mask
from .merging import Unmerged, adapters_in, keep_merges_sparse


def attach_adapters(model: nn.Module) -> None:
    """Attach every adapter of `model` that stands around a sparse layer; those that are attached stay as they are."""
    for adapter in adapters_in(model):
        if isinstance(adapter.get_base_layer(), Sparse24Layer | PackedLayer):
            for name in adapter._get_available_adapters():
                _attach(adapter, name)


@contextmanager
def attaching(parent: nn.Module, child: str, adapter_name: str) -> Iterator[None]:
    """Within the block, PEFT puts an adapter around a layer, or one more into the adapter that is there.

    A sparse layer shows its sparse weight meanwhile, not its master: what an adapter is initialised with, such as
    PiSSA's singular vectors, comes from what the layer computes with. PiSSA and its like take out of the base weight
    what they put into the adapter; through the mask, what remains is 2:4.

    Raises:
        ValueError: an adapter that is not masked changes the weight; it stays as it was.
    """
    layer = _base_layer(getattr(parent, child))
    adapter: Any
    is_sparse = isinstance(layer, Sparse24Layer | PackedLayer)
    if not is_sparse or layer.weight.is_meta or not has_mask(layer):
        yield
        if is_sparse:
            _attach(getattr(parent, child), adapter_name)
        return
    before, shown = Unmerged(layer), layer.weight.detach().clone()
    try:
        yield
        adapter = getattr(parent, child)
        is_masked = _attach(adapter, adapter_name)
        has_changed = not torch.equal(layer.weight, shown)
        if has_changed and not is_masked:
            raise ValueError(
                f"{child}: this adapter ({type(adapter).__module__}.{type(adapter).__name__}) takes a part out of the "
                f"layer's weight when it is added, and what remains is not 2:4; call unpatch_model(model) before you "
                f"add it, which keeps the sparse weights, or use PiSSA, OLoRA or CorDA with plain LoRA or DoRA"
            )
    except BaseException:
        before.restore()
        raise
    if has_changed:
        layer.weight.data = layer.weight.data.masked_fill(shown == 0, 0)
        before.is_settled()
    else:
        before.restore()
    if is_masked:
        from .variants import init_magnitude

        init_magnitude(adapter, adapter_name)


def _base_layer(module: Any) -> Any:
    """The model's own layer in an adapter, or the module itself."""
    return module.get_base_layer() if is_adapter(module) else module


def _attach(adapter: Any, name: str) -> bool:
    """Guard the merges of an adapter, and mask it where it is of a kind that can be: whether it is masked."""
    from .variants import mask_adapter  # PEFT is optional

    if not is_adapter(adapter):
        return False
    if not adapter.merged:
        keep_merges_sparse(adapter)
    return mask_adapter(adapter, name)
