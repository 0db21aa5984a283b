"""Block reconstruction: the kept weights of a pruned block, trained to give what the dense model's block gives.

A block's layers can make up for each other. Its inputs come from the pruned blocks before it and its targets from the
dense model, so it makes up for those blocks too.

Reference: the local reconstruction of arXiv 2510.14444. Our deviations: norms and biases train as well; the rate is
relative to each parameter's size, so that one default fits models of all sizes; each token counts by its relative
error, because a few tokens of most language models hold nearly all of the variance.
"""

import math
from collections.abc import Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from ..progress import Progress, get_logger
from .calibration import Block, BlockExample
from .prune_layer import Options

logger = get_logger(__name__)

WARM_UP = 0.05  # share of the steps in which the learning rate rises


def reconstruct_block(
    block: Block, masks: dict[Tensor, Tensor], before: Container[Tensor], options: Options, progress: Progress
) -> tuple[float, float]:
    """Train a block's kept weights, biases and norms in place, and return its `BlockReport.error` before and after.

    A block whose training gains nothing stays as it was, and so do Parameters of blocks `before`. Each example is one
    step of Adam in every pass, at `learning_rate` times the root mean square of each parameter. ValueError: the
    block's outputs have NaN or inf, or it writes into its inputs.
    """
    name, module, examples, passes = block.name, block.module, block.examples, options.passes
    trained = [
        p for p in module.parameters() if p in masks or (p not in before and p.dim() == 1 and p.is_floating_point())
    ]
    start = [parameter.detach().clone() for parameter in trained]
    versions = [example.call.versions() for example in examples]
    error = _mean_error(examples)
    if not math.isfinite(error):
        raise ValueError(f"{name} gives NaN or inf, so block reconstruction cannot train it: take bf16, not fp16")
    if versions != [example.call.versions() for example in examples]:
        way = "take reconstruct='layer'"
        raise ValueError(f"{name} writes into its inputs, so block reconstruction cannot compute it again: {way}")
    if not trained:  # it shares all that it has with blocks before it
        return error, error
    with _trainable(module, trained), _autocast(start[0].device.type, start[0].dtype):
        kept = [p[masks[p]] if p in masks else p for p in trained]
        sizes = [values.float().square().mean().sqrt().item() for values in kept]
        smallest = min((size for size in sizes if size), default=1.0)  # for biases that are zero, and could not move
        groups = [{"params": [p], "lr": options.learning_rate * (size or smallest)} for p, size in zip(trained, sizes)]
        optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95), fused=True)
        steps = passes * len(examples)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share_of_rate(step, steps))
        order = torch.Generator().manual_seed(0)
        for _ in range(passes):
            for i in torch.randperm(len(examples), generator=order, device="cpu").tolist():
                with torch.enable_grad():
                    examples[i].error().mean().backward(inputs=trained)
                for parameter, mask in masks.items():
                    if parameter.grad is not None:
                        parameter.grad.mul_(mask)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                progress.update(0, f"training {name}: step {schedule.last_epoch:,} of {steps:,}")
    after = _mean_error(examples)
    if not after < error:
        for parameter, values in zip(trained, start):
            parameter.copy_(values)
        way = "lower learning_rate, or take bf16"
        logger.warning(f"{name}: reconstruction undone (error {error:.3f}, then {after:.3f}); {way}")
        after = error
    return error, after


def _mean_error(examples: list[BlockExample]) -> float:
    return torch.cat([example.error() for example in examples]).mean().sqrt().item()


def _share_of_rate(step: int, steps: int) -> float:
    warm_up = max(1.0, WARM_UP * steps)
    return min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / steps))


@contextmanager
def _trainable(block: nn.Module, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Give gradients to these parameters of a block alone, in at least fp32, within the context."""
    states = [(parameter, parameter.requires_grad, parameter.grad) for parameter in block.parameters()]
    dtypes = [parameter.dtype for parameter in parameters]
    try:
        for parameter, _, _ in states:
            parameter.requires_grad_(False).grad = None
        for parameter in parameters:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
            parameter.requires_grad_()
        yield
    finally:
        for parameter, dtype in zip(parameters, dtypes):
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)
        for parameter, needed, grad in states:
            parameter.requires_grad_(needed).grad = grad


def _autocast(device: str, dtype: torch.dtype) -> AbstractContextManager[object]:
    """The caller's autocast, or else that of half-precision weights, without a cache: weights change at every step."""
    if torch.is_autocast_enabled(device):
        return nullcontext()
    is_half = dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(device, dtype, cache_enabled=False) if is_half else nullcontext()
