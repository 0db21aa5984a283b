"""`hf-sparse24 plan`: the bytes that training holds and that pruning moves, and when sparse GEMMs pay for it.

Computed for one GPU, AdamW on fp32 parameters and one micro-batch per step. Nothing is measured, and no time predicted.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..methods import SparseMethod
from ..methods.masked_decay import MaskedDecayMethod
from ..tables import shown_patterns
from ..weights.gemms import PRUNED
from ..weights.sparse_weight import SparseWeight, first_of_each, sparse_weights
from . import print_table
from .doctor import sparse_problems

MASTER_BYTES = 4  # of an element of a Parameter, a gradient, and each of AdamW's two moments in mixed precision: fp32
COMPRESSED = 9 / 16  # bytes of a 2:4 matrix for sparse tensor cores over those of the dense one: half, and 2 bits each
FLOPS_PER_BYTE = 295  # of an H100 SXM, by its data sheet: 989 TFLOPS (dense, bf16) over 3.35 TB/s
_MASK = 1 / 8  # bytes of an element of a packed mask
_LONG_RUN = 10_000  # optimizer steps, at least, of the run that schedules and refreshes are averaged over
_ASSUMED = (
    "assumed: every GEMM that can be sparse runs sparse; pruning takes as long as moving its bytes, and compresses in "
    "the same pass, as on Hopper. Not counted: activations, traffic between GPUs, the host"
)


class LayerCost(NamedTuple):
    """What a layer, or a stack of experts, costs in a sparse step."""

    sparse: tuple[str, ...]  # names of the GEMMs that sparse tensor cores can run
    flops: float  # of these GEMMs as dense math
    pruning: float  # bytes moved by pruning weights and gradients, by masked decay and by mask refreshes
    encodings: float  # bytes of the encodings of its weight


class Plan(NamedTuple):
    """What one sparse step costs."""

    memory: dict[str, float]  # bytes held, by what they are for
    layers: list[LayerCost]
    sparse_share: float  # of a run's steps; the others gain nothing

    @property
    def flops(self) -> float:
        return sum(layer.flops for layer in self.layers)

    @property
    def pruning(self) -> float:
        return sum(layer.pruning for layer in self.layers)


def plan_step(model: PreTrainedModel, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Plan:
    """The plan of a sparse step of so many tokens. The model is patched, and may be on the meta device."""
    weights = first_of_each(sparse_weights(model))
    method: Any = next(iter(weights.values())).method
    sparse_share, refreshes = _averages(method)
    layers = [_layer_cost(weight, tokens, dtype, refreshes) for weight in weights.values()]
    fp32 = sum(parameter.numel() for parameter in model.parameters()) * MASTER_BYTES
    memory: dict[str, float] = {
        "parameters, fp32": fp32,
        "gradients, fp32": fp32,
        "AdamW's moments, fp32": 2 * fp32,
        "masks, scales and other buffers": sum(buffer.nbytes for buffer in model.buffers()),
        "encodings, kept for the step": sum(layer.encodings for layer in layers),
    }
    return Plan(memory, layers, sparse_share)


def break_even(flops: float, pruning: float, flops_per_byte: float) -> float | None:
    """The speed-up of sparse GEMMs from which they pay for the bytes of pruning; None above 2, which no GPU reaches."""
    saved = 1 - pruning * flops_per_byte / flops if flops else 0.0
    return 1 / saved if saved >= 0.5 else None


def print_plan(name: str, model: PreTrainedModel, tokens: int, dtype: torch.dtype, flops_per_byte: int) -> None:
    """Print the plan of a patched model for a GPU that computes so many FLOP per byte that it moves."""
    plan, weights = plan_step(model, tokens, dtype), first_of_each(sparse_weights(model)).values()
    method = next(iter(weights)).method.name
    total = sum(parameter.numel() for parameter in model.parameters())
    share = sum(weight.parameter.numel() for weight in weights) / total
    patterns = shown_patterns(weight.pattern for weight in weights)
    print(f"{name}, {method}: {total / 1e9:.3g} billion parameters, {share:.0%} of them sparse ({patterns})")
    print(f"{tokens} tokens per step, {str(dtype).removeprefix('torch.')}: computed, not measured\n")
    held = [[what, _gb(nbytes)] for what, nbytes in plan.memory.items()]
    print_table([["held", "GB"], *held, ["total", _gb(sum(plan.memory.values()))]])
    print("", *_summary(plan, flops_per_byte), _ASSUMED, sep="\n")


def _summary(plan: Plan, flops_per_byte: int) -> Iterator[str]:
    yield f"{plan.flops / 1e12:.3g} TFLOP in GEMMs that can be sparse; pruning moves {_gb(plan.pruning)} GB"
    speedup = break_even(plan.flops, plan.pruning, flops_per_byte)
    if speedup is None:
        yield "pruning takes longer than sparse GEMMs can save, which is half of their time; try more tokens per step"
    else:
        yield f"sparse GEMMs pay for pruning from {speedup:.2f} times the speed of dense ones; 2 is the most they reach"
    yield f"at {flops_per_byte} FLOP per byte moved (--flops-per-byte); {plan.sparse_share:.0%} of the steps are sparse"


def _averages(method: SparseMethod) -> tuple[float, float]:
    """The share of a long run's steps that are sparse, and how often one of them refreshes masks or scales."""
    dense = [getattr(method.settings, name, 0) for name in ("dense_start", "dense_tail", "switch_by")]
    total = max(_LONG_RUN, 10 * sum(steps for steps in dense if isinstance(steps, int)))
    steps = method.schedule(total)
    last = min(steps.stop, total)
    # What is computed when sparsity begins is no cost of a step.
    refreshed = sum(method.refreshes_state(step, total) for step in range(steps.start + 1, last + 1))
    sparse = last - steps.start
    return sparse / total, refreshed / sparse


def _layer_cost(weight: SparseWeight, tokens: int, dtype: torch.dtype, refreshes: float) -> LayerCost:
    """`refreshes` masks or scales are computed per step. Stacked experts have no sparse GEMM, and exact gradients."""
    matrices, itemsize = len(weight.parameter) if weight.is_stack else 1, dtype.itemsize
    sparse = () if weight.run.backend == "dense" else tuple(sparse_problems(weight, tokens, dtype))
    out, inputs = weight.sizes
    elements, kept_mask = out * inputs, _kept_mask(weight)
    encodings = _encoding_bytes(weight, sparse, itemsize)
    per_element = MASTER_BYTES + kept_mask + encodings + _decay_bytes(weight) + (MASTER_BYTES + kept_mask) * refreshes
    of_gradients = 0 if weight.is_stack else _gradient_bytes(weight, sparse, itemsize)
    pruning = elements * per_element + tokens * out * of_gradients
    flops = 2.0 * tokens * elements * len(sparse)
    return LayerCost(sparse, matrices * flops, matrices * pruning, matrices * elements * encodings)


def _encoding_bytes(weight: SparseWeight, sparse: tuple[str, ...], itemsize: int) -> float:
    """Bytes per element of the encodings of a step, each of which is written once."""
    gemms = weight.method.gemms
    written = {
        (gemm.weight or PRUNED, gemm.name if gemm.name in sparse else "dense")
        for gemm in (gemms.output, gemms.grad_input)
    }
    return itemsize * sum(1 if form == "dense" else COMPRESSED for _, form in written)


def _kept_mask(weight: SparseWeight) -> float:
    """Bytes per element of a mask that the method keeps, which pruning reads and a refresh writes."""
    return _MASK if any(tensor.dtype == torch.uint8 for tensor in weight.state.values()) else 0.0


def _decay_bytes(weight: SparseWeight) -> float:
    """Bytes per element of masked decay: it reads gradient, weight and mask (or makes it), and writes the gradient."""
    method = weight.method
    if not (isinstance(method, MaskedDecayMethod) and method.settings.masked_decay):
        return 0.0
    return 3 * MASTER_BYTES + _MASK + (0.0 if _kept_mask(weight) else MASTER_BYTES + _MASK)


def _gradient_bytes(weight: SparseWeight, sparse: tuple[str, ...], itemsize: int) -> float:
    """Bytes per element to prune the output's gradient: read, and written with zeros or compressed."""
    gemms = weight.method.gemms
    pruned = [gemm for gemm in (gemms.grad_input, gemms.grad_weight) if gemm.estimator != "none"]
    return sum(itemsize * (1 + (COMPRESSED if gemm.name in sparse else 1)) for gemm in pruned)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.0f}" if nbytes >= 1e11 else f"{nbytes / 1e9:.3g}" if nbytes >= 1e6 else "<0.001"
