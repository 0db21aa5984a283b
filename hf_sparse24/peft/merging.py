"""Merging adapters into sparse layers, so that they stay sparse.

PEFT merges by writing to `base_layer.weight`, the dense master of a sparse layer, which would then prune the sum. So
while an adapter around a sparse layer is merged, `.weight` is the sparse weight Ws itself, with state that prunes it to
itself. If the merged weight is not pruned to itself, the merge is undone with an error. Unmerging restores the layer as
it was before the merge, bit for bit.
"""

import warnings
from collections import Counter
from typing import Any

import sparse24_kernels as kernels
import torch
from sparse24_kernels import Packed
from torch import Tensor, nn

from ..extensions import adapters_in, is_adapter
from ..layers.packed import PackedLayer, pack_weight, unpack_weight
from ..methods import ONESHOT_METHOD
from ..progress import get_logger
from ..weights.input_dim import input_dim_of
from ..weights.packed_weight import pack_exactly
from ..weights.rules import encode
from ..weights.sparse_weight import SparseWeight, sparse_weights
from ..weights.storage import Storage
from .masked import is_pruned, out_in

logger = get_logger(__name__)

UNMERGED = "sparse24_unmerged"  # attribute of a merged adapter with the `Unmerged` of its base layer


class Unmerged:
    """A linear layer before something is merged into it, which `restore` makes it again, bit for bit."""

    def __init__(self, layer: Any):
        self.layer = layer
        weights = layer.__dict__.get("sparse24", {})
        self.packed = weights["weight"].storage.packed if isinstance(layer, PackedLayer) else None
        self.run = None if self.packed is None else weights["weight"].run
        self.pattern = weights["weight"].pattern if weights else None
        self.sparse: SparseWeight | None = weights["weight"] if is_pruned(layer) else None
        self.state = {} if self.sparse is None else dict(self.sparse.state)
        own = {name: p for name, p in layer._parameters.items() if p is not None and not name.startswith("packed_")}
        self.tensors = {name: parameter.data for name, parameter in own.items()}

    @torch.no_grad()
    def expose(self) -> "Unmerged":
        """Let `.weight` be the weight that the layer computes with. All its tensors are copies, to be written to, and a
        packed layer is unpacked."""
        layer = self.layer
        if self.packed is not None:
            unpack_weight(layer.sparse24["weight"])
        for name, tensor in self.tensors.items():
            layer._parameters[name].data = tensor.clone()
        if self.sparse is not None:
            layer.weight.data = self.sparse.pruned()
            (view,) = self.sparse.views()
            self.sparse.set_state(self.sparse.method.state_of_pruned(view))  # prunes the weight to itself
        return self

    @torch.no_grad()
    def weight(self) -> Tensor:
        """Return the weight `[out, in]` that the layer computed with."""
        if self.packed is not None:
            return kernels.unpack_nm(self.packed)
        weight = self.tensors["weight"]
        if self.sparse is not None:
            (view,) = self.sparse.storage.views(weight, self.state)
            method = self.sparse.method
            (weight,) = encode(method.prune(view), view, method.pattern, weight.dtype)
        return out_in(self.layer, weight)

    @torch.no_grad()
    def accept(self) -> bool:
        """Let the layer compute with `.weight` as it is now; return False where it cannot, as that is not N:M."""
        if self.packed is None:
            return self.sparse is None or torch.equal(self.sparse.pruned(), self.layer.weight.detach())
        packed = pack_exactly(self.layer.weight, input_dim_of(self.layer), self.packed.pattern)
        if packed is not None:
            self._pack(packed)
        return packed is not None

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the layer on its current device."""
        if self.packed is not None:
            self._pack(self.packed)
        for name, tensor in self.tensors.items():
            parameter = self.layer._parameters[name]
            parameter.data = tensor.to(parameter.device, parameter.dtype)
        if self.sparse is not None:
            device = self.layer.weight.device
            self.sparse.set_state({name: tensor.to(device) for name, tensor in self.state.items()})

    def _pack(self, packed: Packed) -> None:
        assert self.packed is not None
        layer, device, dtype = self.layer, self.layer.weight.device, self.layer.weight.dtype
        if isinstance(layer, PackedLayer):
            unpack_weight(layer.sparse24["weight"])
        trains = self.packed.values.requires_grad
        pack_weight(layer, "weight", input_dim_of(layer), packed.to(dtype, device), self.run, trains)


def merge(adapter: Any, *args: Any, **kwargs: Any) -> None:
    layer, merged_before = adapter.get_base_layer(), list(adapter.merged_adapters)
    if isinstance(layer, PackedLayer) and layer.sparse24["weight"].storage.packed.scales is not None:
        way = "call unpack_model(model) first, which keeps what the model computes, then merge"
        raise ValueError(f"the base has int8 values, and merging would round the sum to int8: {way}")
    before = Unmerged(layer).expose()
    if not merged_before:
        setattr(adapter, UNMERGED, before)
    is_done = False
    try:
        type(adapter).merge(adapter, *args, **kwargs)
        if not before.accept():
            what = f"merging {type(adapter).__module__}.{type(adapter).__name__} would change what the model computes"
            way = "to stay sparse, use LoRA. To merge into dense weights, call unpatch_model(model) first"
            raise ValueError(f"{what}: the sum is not {before.pattern}, or not finite; {way}")
        is_done = adapter.merged_adapters != merged_before
    finally:
        if not is_done:
            before.restore()
            adapter.merged_adapters[:] = merged_before
            if not merged_before:
                delattr(adapter, UNMERGED)


def unmerge(adapter: Any, *args: Any, **kwargs: Any) -> None:
    type(adapter).unmerge(adapter, *args, **kwargs)
    before = adapter.__dict__.pop(UNMERGED, None)
    if before is not None:
        before.restore()


def sharing_adapters(model: nn.Module) -> list[str]:
    """The adapters in a sparse model whose weight another layer has too, as with PEFT's `layer_replication`."""
    uses = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    del uses[id(None)]
    is_sparse = bool(sparse_weights(model, Storage))
    own = {name: one for name, one in model.named_modules() if is_adapter(one) and (is_sparse or "merge" in vars(one))}
    return [name for name, one in own.items() if uses[id(one.get_base_layer()._parameters.get("weight"))] > 1]


def check_mergeable(model: nn.Module) -> None:
    """Raise ValueError where the active adapters cannot be merged into sparse layers, before PEFT merges any layer."""
    if shared := sharing_adapters(model):
        way = "keep the adapter, leave both layers out of target_modules, or copy the weight of one before patch_model"
        raise ValueError(f"{shared[0]} shares its weight with another layer, which a merge would change too: {way}")
    for adapter in adapters_in(model):
        if "merge" not in vars(adapter) or adapter.merged:
            continue
        with warnings.catch_warnings(action="ignore"):  # PEFT's of what it cannot undo exactly; `unmerge` restores it
            adapter.merge()
            if adapter.merged:
                adapter.unmerge()


def warn_of_filled_zeros(model: nn.Module) -> None:
    """Warn where a merge fills the zeros of weights that are sparse on their own, as those of a dense export are."""
    filled = [name for name, module in model.named_modules() if is_adapter(module) and _fills_zeros(module)]
    if filled:
        way = f"to keep them, load the base with quantization_config=Sparse24Config(method={ONESHOT_METHOD!r}, ...)"
        logger.warning(f"merging fills the zeros of {len(filled)} weights, such as {filled[0]}; {way}")


def _fills_zeros(adapter: Any) -> bool:
    """Whether a merge adds to a linear layer of which a quarter or more is zero, and keeps no mask."""
    weight = getattr(adapter.get_base_layer(), "weight", None)
    keeps_zeros = "merge" in vars(adapter) or hasattr(adapter, "ia3_l") or adapter.merged
    if keeps_zeros or weight is None or weight.dim() != 2 or weight.is_meta or not weight.is_floating_point():
        return False
    return bool(4 * weight.count_nonzero() <= 3 * weight.numel())
