"""A method as a user would write one, in a module outside the package: every part that a method can have.

Method card
    Forward          Z = X S(W)^T, S the 2:4 mask of largest magnitudes, chosen when sparsity begins and then kept;
                     late in training Z = X (S(W) + left right)^T
    Backward         dX = dZ D(W), D(W) is S(W) pruned 2:4 once more along the output dimension, so that all GEMMs can
                     be sparse without a transposable mask
    Hyper-parameters `ridge`, the strength of weight decay through the gradient; `rank` and `adapt_last` of the adapters
    Known limits     made for tests; dX belongs to another weight than Z
    Measured here    nowhere
    Reference        after SLoPe (Mozaffari et al. 2024, arXiv 2405.16325): double-pruned backward pass, lazy adapters
"""

from dataclasses import dataclass
from typing import Any

import torch
from sparse24_kernels import apply_mask, nm_mask, nm_prune, pack_bits
from torch import Tensor

from hf_sparse24 import register_method
from hf_sparse24.methods import (
    GemmSettings,
    Mask,
    PhaseSettings,
    Piece,
    SparseMethod,
    StepContext,
    Values,
    WeightView,
    is_length,
    is_non_negative,
    setting,
    to_steps,
    whole,
)

ADAPTING = "adapting"


class OwnAdamW(torch.optim.AdamW):
    """The optimizer of the method; there is nothing special about it but its class."""


def is_rank(value: Any) -> str | None:
    return None if type(value) is int and value > 0 else "must be an int > 0"


@register_method("own")
class OwnMethod(SparseMethod):
    phases = ("sparse", ADAPTING, "dense")
    transposable = True  # the weight of grad_input is 2:4 along the output dimension

    @dataclass(frozen=True, kw_only=True)
    class Settings(PhaseSettings, GemmSettings):
        ridge: float = setting(1e-3, is_non_negative, "strength of the ridge on sparse weights")
        rank: int = setting(2, is_rank, "rank of the adapters")
        adapt_last: int | float = setting(0.25, is_length, "length of training at the end in which adapters take part")

    def init_state(self, view: WeightView, step: int, total_steps: int) -> dict[str, Tensor]:
        return {"mask_bits": nm_mask(view.matrix, *self.pattern, view.dim, packed=True)}

    def adopt_mask(self, view: WeightView, mask: Tensor) -> dict[str, Tensor]:
        return {"mask_bits": pack_bits(mask)}

    def prune(self, view: WeightView) -> Mask:
        return Mask(view.state["mask_bits"])

    def prune_grad_input(self, view: WeightView) -> Values:
        pruned = apply_mask(view.matrix, view.state["mask_bits"])
        return Values(nm_prune(pruned, *self.pattern, 1 - view.dim))

    def init_parameters(self, view: WeightView) -> dict[str, Tensor]:
        matrix = view.matrix if view.dim == 1 else view.matrix.t()
        rank = self.settings.rank
        right = matrix[:rank].clone(memory_format=torch.contiguous_format)  # as it comes back from a file
        return {"left": matrix.new_zeros(len(matrix), rank), "right": right}

    def phase(self, step: int, total_steps: int, optimizer: torch.optim.Optimizer) -> str:
        phase = super().phase(step, total_steps, optimizer)
        is_late = step >= total_steps - to_steps(self.settings.adapt_last, total_steps)
        return ADAPTING if phase == "sparse" and is_late else phase

    def adapt_output(self, x: Tensor, output: Tensor, parameters: dict[str, Tensor], phase: str) -> Tensor:
        return output + x @ parameters["right"].t() @ parameters["left"].t() if phase == ADAPTING else output

    def merge(self, pruned: Tensor, parameters: dict[str, Tensor], phase: str) -> Tensor:
        return pruned + parameters["left"] @ parameters["right"] if phase == ADAPTING else pruned

    def check_run(self, total_steps: int, optimizer: torch.optim.Optimizer) -> None:
        super().check_run(total_steps, optimizer)
        if not isinstance(optimizer, OwnAdamW):
            raise ValueError(f"method 'own' needs OwnAdamW, not {type(optimizer).__name__}")

    def make_optimizer(self, groups: list[dict[str, Any]], total_steps: int, **arguments: Any) -> OwnAdamW:
        return OwnAdamW(groups, **arguments)

    def change_gradients(self, pieces: list[Piece], context: StepContext) -> None:
        for piece in pieces:
            piece.gradient.add_(piece.values, alpha=self.settings.ridge)

    def metrics(self, context: StepContext) -> dict[str, float]:
        lefts = [weight.parameters["left"] for weight in context.weights.values()]
        return {"adapter_norm": sum(float(whole(left).norm()) for left in lefts)}
