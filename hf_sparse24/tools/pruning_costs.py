"""What pruning and packing move in a training step, in bytes, beside the sparse GEMMs that must pay for it."""

from typing import NamedTuple

import torch

from ..methods.masked_decay import MaskedDecayMethod
from ..weights.gemms import PRUNED
from ..weights.sparse_weight import SparseWeight
from .doctor import sparse_problems
from .sizes import Part, Setting

MASTER_BYTES = 4
"""Bytes of an element of a Parameter, a gradient, and each of AdamW's two moments: fp32, as Transformers' Trainer has
them in mixed precision."""
COMPRESSED = 9 / 16
"""Bytes of a 2:4 matrix as sparse tensor cores read it, over those of the dense one: half the values, 2 bits each."""
FLOPS_PER_BYTE = 295
"""What an H100 SXM computes while it moves a byte, by its data sheet: 989 TFLOPS (dense, bf16) over 3.35 TB/s."""
_MASK = 1 / 8  # bytes of an element of a packed mask


class LayerCost(NamedTuple):
    """What a layer, or a stack of experts, costs in a step.

    Attributes:
        part: the layer.
        sparse: names of the GEMMs that sparse tensor cores can run.
        flops: of these GEMMs as dense math.
        pruning: bytes moved by pruning weights and gradients, by masked decay and by mask refreshes.
        encodings: bytes of the encodings of its weight, or of one in a stack.
    """

    part: Part
    sparse: tuple[str, ...]
    flops: float
    pruning: float
    encodings: float


def break_even(flops: float, pruning: float, flops_per_byte: float) -> float | None:
    """The speed-up of the sparse GEMMs from which they save the time that pruning takes.

    None where it is above 2, which sparse tensor cores cannot reach.

    Args:
        flops: of the sparse GEMMs as dense math. pruning: bytes moved.
        flops_per_byte: of the GPU.
    """
    saved = 1 - pruning * flops_per_byte / flops if flops else 0.0
    return 1 / saved if saved >= 0.5 else None


def layer_cost(part: Part, weight: SparseWeight, setting: Setting, refreshes: float) -> LayerCost:
    """The cost of a layer; `refreshes` is how often per step a mask or scale is computed anew."""
    rows, itemsize = max(1, round(setting.tokens * part.token_share)), setting.dtype.itemsize
    runs_again = setting.checkpointing and part.block is not None
    sparse = () if weight.run.backend == "dense" else tuple(sparse_problems(weight, rows, setting.dtype))
    passes = sum(2 if name == "output" and runs_again else 1 for name in sparse)
    elements = part.out * part.inputs
    forms = _forms(weight, sparse, itemsize)
    if setting.parallel == "fsdp2":  # frees weights between the passes, and no encoding of them is kept
        pruned = [forms[:1], forms[-1:], *([forms[:1]] if runs_again else [])]
        read_bytes, local_share, held = itemsize, 1 / setting.gpus, max(forms)
    else:
        pruned, read_bytes, local_share, held = [forms], MASTER_BYTES, 1.0, sum(forms)
    moved = elements * (
        sum(read_bytes + _kept_mask(weight) + sum(written) for written in pruned)
        + _decay_bytes(weight) * local_share
        + (MASTER_BYTES + _kept_mask(weight)) * refreshes
    )
    moved += rows * part.out * _gradient_bytes(weight, sparse, itemsize)
    flops = 2.0 * rows * elements * passes
    return LayerCost(part, sparse, part.matrices * flops, part.matrices * moved, held * elements)


def _forms(weight: SparseWeight, sparse: tuple[str, ...], itemsize: int) -> list[float]:
    """Bytes per element of the encodings that a step needs: the output GEMM's first, grad_input's last.

    One that both GEMMs take counts once.
    """
    gemms = weight.method.gemms
    found = {}
    for gemm, form in ((gemms.output, "compressed"), (gemms.grad_input, "compressed-transposed")):
        is_sparse = gemm.name in sparse
        found[gemm.weight or PRUNED, form if is_sparse else "dense"] = itemsize * (COMPRESSED if is_sparse else 1)
    return list(found.values())


def _kept_mask(weight: SparseWeight) -> float:
    """Bytes per element of a mask that the method keeps, which pruning reads and a refresh writes."""
    return _MASK if any(tensor.dtype == torch.uint8 for tensor in weight.state.values()) else 0.0


def _decay_bytes(weight: SparseWeight) -> float:
    """Bytes per element that masked decay moves: it reads gradient, weight and mask, and writes the gradient. A mask
    that is not kept is made from the weight first."""
    method = weight.method
    if not (isinstance(method, MaskedDecayMethod) and method.settings.masked_decay):
        return 0.0
    return 3 * MASTER_BYTES + _MASK + (0.0 if _kept_mask(weight) else MASTER_BYTES + _MASK)


def _gradient_bytes(weight: SparseWeight, sparse: tuple[str, ...], itemsize: int) -> float:
    """Bytes per element that pruning the output's gradient moves: each GEMM that asks for it reads the gradient and
    writes it in one form."""
    gemms = weight.method.gemms
    pruned = [gemm for gemm in (gemms.grad_input, gemms.grad_weight) if gemm.estimator != "none"]
    return sum(itemsize * (1 + (COMPRESSED if gemm.name in sparse else 1)) for gemm in pruned)
