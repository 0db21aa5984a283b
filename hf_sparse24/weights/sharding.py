"""Sharded tensors: the part of one that this process holds, and all of it.

FSDP2 (`fully_shard`) and Transformers' tensor parallelism keep Parameters as `DTensor`s, which know how they are split
over the processes of a mesh. These functions take any tensor; a plain one is all of itself.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

if dist.is_available():
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor


def rank() -> int:
    """The number of this process, 0 where there is one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def is_sharded(tensor: object) -> bool:
    """Whether `tensor` is a DTensor."""
    return dist.is_available() and isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on the device of its mesh, without gradients. Every process of the mesh must call it."""
    if not is_sharded(tensor):
        return tensor.detach()
    sharded = cast("DTensor", tensor.detach())
    mesh = sharded.device_mesh
    if sharded.device.type != mesh.device_type:  # offloaded to the CPU: collectives run where the mesh is
        sharded = cast("DTensor", sharded.to(mesh.device_type))
    return sharded.full_tensor()


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds: the same memory, without gradients."""
    return cast("DTensor", tensor.detach()).to_local() if is_sharded(tensor) else tensor.detach()


def local_gradient(parameter: Tensor) -> Tensor | None:
    """The part of a parameter's gradient that this process holds, None without one. All processes must ask: tensor
    parallelism leaves gradients of embeddings whole, or still to be summed."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if is_sharded(parameter) and cast("DTensor", gradient).placements != cast("DTensor", parameter).placements:
        gradient = cast("DTensor", gradient).redistribute(placements=cast("DTensor", parameter).placements)
        parameter.grad = gradient
    return local(gradient)


def compute_device(tensor: Tensor) -> torch.device:
    """Where a Parameter is multiplied: with FSDP2's CPU offloading not where it is kept."""
    if not is_sharded(tensor) or tensor.device.type == cast("DTensor", tensor).device_mesh.device_type:
        return tensor.device
    return torch.device(cast("DTensor", tensor).device_mesh.device_type, torch.accelerator.current_device_index())


def split_like(tensor: Tensor, like: Any) -> Tensor:
    """Split a plain tensor, the same on all processes, as the DTensor `like` is, without communication: masks as the
    weight is. Of scales, which have other dimensions, only those of a stack are divided, by its matrices."""
    dims = like.dim()
    divided = range(dims if tensor.dim() == dims else dims - 2)
    kept = [each if each.is_replicate() or each.dim % dims in divided else Replicate() for each in like.placements]
    return distribute_tensor(tensor, like.device_mesh, kept, src_data_rank=None)


def cuts(tensor: Any, dim: int, unit: int) -> bool:
    """Whether `tensor` is split along dimension `dim` into parts that are no multiples of `unit`."""
    if not is_sharded(tensor):
        return False
    placed, dims = zip(tensor.device_mesh.shape, tensor.placements), tensor.dim()
    parts = math.prod(size for size, each in placed if not each.is_replicate() and each.dim % dims == dim % dims)
    return parts > 1 and tensor.shape[dim] % (parts * unit) != 0


def total(sums: Sequence[Tensor], of: Sequence[Tensor]) -> Tensor:
    """Sums over whole tensors, stacked on the first one's device, from those over parts; all processes must call."""
    result = torch.stack([each.to(sums[0].device) for each in sums])
    layouts: dict[Any, list[int]] = {}
    for index, tensor in enumerate(of):
        if is_sharded(tensor):
            split = tuple(not placement.is_replicate() for placement in cast("DTensor", tensor).placements)
            layouts.setdefault((cast("DTensor", tensor).device_mesh, split), []).append(index)
    for (mesh, split), indices in layouts.items():
        placements = [Partial() if one else Replicate() for one in split]
        part = result[indices].to(mesh.device_type)
        result[indices] = DTensor.from_local(part, mesh, placements, run_check=False).full_tensor().to(result.device)
    return result


def check_supported(name: str, parameter: Tensor) -> None:
    """Raise ValueError where the weight `name` is split in a way that this library cannot train."""
    placements = cast("DTensor", parameter).placements if is_sharded(parameter) else ()
    if hasattr(parameter, "ds_id"):
        raise ValueError(f"{name} is partitioned by DeepSpeed ZeRO-3; use ZeRO-1 or ZeRO-2, or FSDP2")
    if parameter.dim() < 2:
        shape = tuple(parameter.shape)
        raise ValueError(f"{name} is of shape {shape}, flattened by FSDP1; use FSDP2 (fsdp_version: 2, or fully_shard)")
    if sum(not placement.is_replicate() for placement in placements) > 1:
        raise ValueError(f"{name} is split twice, {placements}, as by FSDP2 and tensor parallelism; use one of them")


def check_whole(name: str, parameter: Tensor) -> None:
    """Raise ValueError where a process holds only a part of the weight `name`."""
    check_supported(name, parameter)
    if is_sharded(parameter):
        raise ValueError(f"{name} is a DTensor, sharded by FSDP2 or tensor parallelism; do this before sharding")
