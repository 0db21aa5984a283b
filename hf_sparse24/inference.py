"""Inference from compressed weights alone, with the dense master weights given up."""

import sparse24_kernels as kernels
import torch
from torch import nn

from .encodings import Wanted
from .gemms import PRUNED
from .weight import SparseWeight, sparse_weights


def drop_master_weights(model: nn.Module) -> int:
    """Keep of every patched layer only what the output GEMM needs: 9/16 of its bytes in bf16 and fp16.

    In place, and one way: afterwards the model computes under `torch.no_grad()` and nothing else. To train, save,
    export or move it, load it again. Layers whose GEMMs cannot run on sparse tensor cores stay as they are.
    GEMMs run sparse from now on even where dense math was faster, as it can be for a few tokens; where every
    algorithm has failed the autotuner's checks for a number of tokens, they raise.

    Args:
        model: a patched model in its sparse phase, in the dtype it will compute in, on its device.

    Returns:
        Bytes of memory freed.

    Raises:
        ValueError: the model is not patched, is in its dense phase, or has no layer that could give up its weight (the
            reason of the first is told).
    """
    weights = sparse_weights(model)
    if not weights:
        raise ValueError("the model is not patched; call patch_model(model) first")
    if any(weight.run_state.phase == "dense" for weight in weights.values()):
        raise ValueError("the model is in its dense phase: it computes with the dense weights, and needs them")
    reasons = {name: _unsupported(weight) for name, weight in weights.items()}
    droppable = [weight for name, weight in weights.items() if reasons[name] is None]
    if not droppable:
        name, reason = next(iter(reasons.items()))
        raise ValueError(f"no weight can be dropped: {name}: {reason}")
    freed, dropped = 0, {}
    for weight in droppable:
        master = weight.parameter
        if id(master) not in dropped:  # layers may share one
            gemm = weight.method.gemms.output
            plan = gemm.plan(1, *weight.sizes, master.dtype, master.device, "cusparselt")
            wanted = Wanted(gemm.weight or PRUNED, "compressed", plan.compression)
            (compressed,) = weight.encoded([wanted], master.dtype, 1)
            freed += master.nbytes - compressed.nbytes
            empty = nn.Parameter(torch.empty_like(master, device="meta"), requires_grad=False)
            dropped[id(master)] = master, compressed, empty
        _, compressed, empty = dropped[id(master)]
        weight.drop_master(compressed, empty)
    return freed


def _unsupported(weight: SparseWeight) -> str | None:
    """Why the output GEMM of this weight cannot run on sparse tensor cores, whatever its speed; None where it can."""
    if weight.is_dropped:
        return "dropped already"
    if weight.is_stack:
        return "stacked experts have no sparse grouped GEMM"
    gemm, master = weight.method.gemms.output, weight.parameter
    problem = gemm.problem(1, *weight.sizes, master.dtype)
    if problem is None:
        return gemm.unsupported()
    return kernels.gemm_unsupported(problem, master.device, weight.config.backend)
