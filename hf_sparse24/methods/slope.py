"""SLoPe: one row-wise mask for life, another mask along columns in the backward pass, low-rank adapters at the end.

Method card
    Forward          Z = X (R * W)^T, R one row-wise mask: N of every M along the input dimension
    Backward         dX = dZ (C * R * W), C the N largest magnitudes of every M of R * W along the output dimension, so
                     that this GEMM can be sparse without a transposable mask.  dW = R * (dZ^T X)
    Mask             R is chosen when the model is patched (`initial_mask`) or by `oneshot`, and kept. C follows
                     the weights in every optimizer step. Of what R keeps, it keeps 81 % (13/16) at 2:4, 90 % at
                     8:16 and 93 % at 16:32 (the paper's formula, for independent rows)
    Dropped weights  zero from the first optimizer step on, as with `fixed-mask`: no gradient, decay or moments
    Adapters         with `adapter_rank` r > 0, in the last `adapter_steps`: Z = X (R * W)^T + (X A) B / r, where A is
                     N(0, 1) [in, r] and B zero [r, out] at first. The weight goes on training
    Hyper-parameters initial_mask: "random" is the paper's; "magnitude" is that of the authors' code, and our default.
                     With it a trained model keeps more of what it learned, and the mask of random initial weights is
                     uniform too. "transposable" is ours: C then drops nothing, and R drops more. adapter_rank: 0 is
                     exactly 2:4; the paper takes 4, 16 and 64 at a width of 1024, in the last 1 % of steps
    Bias of dX       the paper shows dX to be unbiased for a column mask that is uniformly random, with M/N as factor.
                     Its C is by magnitude and without a factor, in its code as here, so dX is biased. Of Gaussian
                     weights, C keeps 88 % of the L1 norm of R * W with R by magnitude, 92 % with R at random
    Known limits     both sizes of a layer must be multiples of M. Stacked experts stay dense, as they have one weight
                     for both passes. "random" drops half of a trained model, also of one that has zeros already.
                     Merged adapters make a weight dense: only the dense export works, without zeros in these weights.
                     A schedule that decays to zero leaves the last 1 % almost no learning rate: give adapters longer.
                     Until they take part they have no gradient, so DDP needs `find_unused_parameters=True`; tensor
                     parallelism and a dense tail are refused with them
    Deviations       C is made once in each step; the authors' fast code makes it every 100 steps, their other code in
                     each backward pass. Their Parameter has the kept values alone, as ours with `master="packed"`.
                     Adapters decay by the optimizer's groups (theirs: 1e-4). Their kernel computes X W and X A at once
    Beware           the paper's baseline "Extended SR-STE" also prunes dZ by magnitude, which the paper itself calls
                     divergent. So it does not compare with the published SR-STE
    Measured here    recipes/results/methods.md, on a small Llama; docs/measured/pretrained.md, on SmolLM2-135M
    Reference        Mozaffari et al. 2025 (arXiv 2405.16325).
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import sparse24_kernels as kernels
import torch
from torch import Tensor

from ..weights.rules import Values
from ..weights.storage import WeightView
from .fixed_mask import FixedMask
from .registry import register_method
from .settings import LENGTH, is_positive_length, one_of, setting, to_steps

ADAPTERS = "adapters"  # the phase in which low-rank adapters take part


def _random(view: WeightView, draw: Callable[..., Tensor], *shape: int) -> Tensor:
    """Random numbers of `draw`, `torch.rand` or `randn`, from the layer's name and some 4096 values of its weight."""
    # An odd stride, so that the values are not all of one column.
    values = view.matrix.flatten()[:: view.matrix.numel() // 4096 | 1].float().cpu()
    seed = zlib.crc32(f"{draw.__name__} {view.name}".encode() + values.numpy().tobytes())
    generator = torch.Generator().manual_seed(seed)
    return draw(shape, generator=generator, dtype=torch.float32, device="cpu").to(view.matrix.device)


@register_method("slope")
class SLoPe(FixedMask):
    transposable = True  # by the weight of grad_input, not by the mask that is state
    phases = ("sparse", ADAPTERS, "dense")
    settings_of_state = ("initial_mask", "adapter_rank", "master")

    @dataclass(frozen=True, kw_only=True)
    class Settings(FixedMask.Settings):
        initial_mask: str = setting(
            "magnitude",
            one_of("magnitude", "random", "transposable"),
            "what the row-wise mask keeps for life: 'magnitude' the N largest of every M (the authors' code), 'random' "
            "any N of them (the paper), drawn by a generator that the layer's name and weight seed; 'transposable' the "
            "largest N of every M both ways, of which the second mask drops nothing, also by `oneshot`",
        )
        adapter_rank: int = setting(
            0,
            lambda value: None if type(value) is int and value >= 0 else "must be an int >= 0",
            "rank of the low-rank adapters that train at the end; 0: none, the model stays exactly N:M",
        )
        adapter_steps: int | float = setting(
            0.01, is_positive_length, f"length of training at the end in which adapters take part: {LENGTH}"
        )

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.adapter_rank and self.dense_tail:
                given = f"adapter_rank={self.adapter_rank}, dense_tail={self.dense_tail}"
                raise ValueError(f"{given}: adapters have no place in a dense layer; set one of the two to 0")

    @property
    def both_ways(self) -> str | None:
        return "exact" if self.settings.initial_mask == "transposable" else None

    def init_state(self, view: WeightView, step: int, total_steps: int) -> dict[str, Tensor]:
        if self.settings.initial_mask == "random" and not view.matrix.is_meta:
            view = view._replace(matrix=_random(view, torch.rand, *view.matrix.shape))
        return super().init_state(view, step, total_steps)

    def prune_grad_input(self, view: WeightView) -> Values:
        bits = view.state.get("mask_bits")  # none of packed values, which are masked already
        kept = view.matrix if bits is None else kernels.apply_mask(view.matrix, bits)
        return Values(kernels.nm_prune(kept, *self.pattern, 1 - view.dim))

    def phase(self, step: int, total_steps: int, optimizer: torch.optim.Optimizer) -> str:
        """`"adapters"` in the last steps of the sparse phase, where there are any."""
        phase = super().phase(step, total_steps, optimizer)
        late = step >= total_steps - to_steps(self.settings.adapter_steps, total_steps)
        return ADAPTERS if self.settings.adapter_rank and late and phase == "sparse" else phase

    def init_parameters(self, view: WeightView) -> dict[str, Tensor]:
        matrix, rank = view.matrix, self.settings.adapter_rank
        if not rank:
            return {}
        left = matrix.new_empty(matrix.shape[view.dim], rank)
        if not matrix.is_meta:
            left.copy_(_random(view, torch.randn, *left.shape))
        return {"adapter_left": left, "adapter_right": matrix.new_zeros(rank, matrix.shape[1 - view.dim])}

    def adapt_output(self, x: Tensor, output: Tensor, parameters: dict[str, Tensor], phase: str) -> Tensor:
        if phase != ADAPTERS:
            return output
        return output + x @ parameters["adapter_left"] @ parameters["adapter_right"] / self.settings.adapter_rank

    def merge(self, pruned: Tensor, parameters: dict[str, Tensor], phase: str) -> Tensor:
        if phase != ADAPTERS:
            return pruned
        return pruned + (parameters["adapter_left"] @ parameters["adapter_right"]).t() / self.settings.adapter_rank
