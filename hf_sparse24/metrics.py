"""Measures of masks and sparse weights: tensors in, numbers out."""

import torch
from torch import Tensor


def kept_magnitude(weight: Tensor, mask: Tensor) -> float:
    """Return the share of the L1 norm that the bool mask keeps: of Gaussian weights 0.745, or 0.703 if transposable."""
    magnitude = weight.float().abs()
    return (magnitude * mask).sum().item() / max(magnitude.sum().item(), torch.finfo(torch.float32).tiny)


def is_nm_sparse(tensor: Tensor, n: int = 2, m: int = 4, dim: int = -1) -> bool:
    """Return whether a tensor is N:M sparse.

    Args:
        tensor: any shape and dtype.
        n: how many of `m` consecutive elements may be non-zero.
        m: the size of a group.
        dim: the dimension that the groups run along: -1 for `nn.Linear`, 0 for GPT-2's `Conv1D`.

    Returns:
        False also where `m` does not divide the size of `dim`.
    """
    if tensor.shape[dim] % m:
        return False
    groups = (tensor != 0).unflatten(dim, (-1, m))
    return bool((groups.sum(dim if dim < 0 else dim + 1) <= n).all())


def all_finite(tensor: Tensor) -> Tensor:
    """Return whether no element is NaN or inf, as a 0-d bool tensor; no copy of the tensor is made."""
    tensor = tensor.float() if tensor.itemsize == 1 else tensor  # FP8 has neither operator
    ends = torch.stack(torch.aminmax(tensor)) if tensor.numel() and tensor.is_floating_point() else tensor
    return ends.isfinite().all()
