"""choose_patterns: which N:M each layer of an unstructured sparse model allows."""

import torch
from torch import nn

from ..config import Sparse24Config
from ..methods import ONESHOT_METHOD
from ..patching.targets import find_candidates
from ..run import SparseRun


@torch.no_grad()
def choose_patterns(
    model: nn.Module, m: int = 8, confidence: float = 0.95, target_modules: str | list[str] = "all-linear"
) -> dict[str, str]:
    """Return each layer's smallest N, so that nearly all groups of a model with unstructured zeros are N:M already.

    N is the smallest number that at least `confidence` of a layer's groups of M do not exceed. `oneshot` drops what the
    other groups have too much.

    Args:
        model: a dense model of Transformers with zeros. Not changed.
        m: size of the groups along the input dimension, >= 2. Hardware multiplies 1:4, 2:4, 1:8 and 2:8.
        confidence: share of groups, in (0, 1).
        target_modules: which layers, as in `Sparse24Config`.

    Returns:
        The pattern by the layer's name, for `Sparse24Config(layer_patterns=...)`. Layers that would keep all M are left
        out; give the names as `target_modules` too, so that those stay dense.

    Raises:
        ValueError: no targeted layer has enough zeros, or an argument out of its range.

    Reference: Hubara et al. 2021 (arXiv 2102.08124), from unstructured to N:M sparsity by AdaPrune. Their code takes
    the zeros of a group as binomial with the layer's share of zeros; ours counts them.

    Examples:
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained("gpt2")
        >>> for parameter in model.transformer.h.parameters():
        ...     _ = parameter.data.masked_fill_(parameter.abs() < 1.15 * parameter.std(), 0)
        >>> patterns = choose_patterns(model)
        >>> config = Sparse24Config(method="fixed-mask", layer_patterns=patterns, target_modules=list(patterns))
    """
    if type(m) is not int or m < 2:
        raise ValueError(f"m={m!r}: must be an int >= 2")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r}: must be between 0 and 1")
    run = SparseRun(Sparse24Config(method=ONESHOT_METHOD, pattern=f"1:{m}", target_modules=target_modules))
    patterns: dict[str, str] = {}
    for candidate in find_candidates(model, run):
        if candidate.skipped is not None:
            continue
        groups = candidate.weight.movedim(candidate.input_dim, -1).unflatten(-1, (-1, m))
        counts = groups.count_nonzero(-1).flatten().bincount(minlength=m + 1)
        within = counts.cumsum(0).double() / counts.sum()  # share of groups with at most so many non-zeros
        n = max(1, int((within < confidence).sum()))
        if n < m:
            patterns[candidate.name] = f"{n}:{m}"
    if not patterns:
        share = f"{confidence:.0%} of its groups of {m}"
        raise ValueError(f"no targeted layer has a zero in {share}: prune the model unstructured first")
    return patterns
