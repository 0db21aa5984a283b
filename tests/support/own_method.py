"""A method as a user would write one, in a module outside the package: every part that a method can have.

Method card
    Forward          Z = X S(W)^T, S the 2:4 mask of largest magnitudes, chosen when sparsity begins and then kept;
                     late in training Z = X (S(W) + left right)^T
    Backward         dX = dZ D(W), D(W) is S(W) pruned 2:4 once more along the output dimension, so that all GEMMs can
                     be sparse without a transposable mask
    Hyper-parameters `ridge`, the strength of a term of the loss; `rank` and `adapt_last` of the adapters
    Known limits     made for tests; dX belongs to another weight than Z
    Measured here    nowhere
    Reference        after SLoPe (Mozaffari et al. 2024, arXiv 2405.16325): double-pruned backward pass, lazy adapters
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sparse24_kernels as kernels
import torch
from torch import Tensor

from hf_sparse24 import SparseMethod, register_method
from hf_sparse24.methods import StepContext
from hf_sparse24.methods.schedule import to_steps
from hf_sparse24.methods.settings import GemmSettings, PhaseSettings, is_length, is_non_negative, setting
from hf_sparse24.weights.encodings import Forms
from hf_sparse24.weights.gemms import Gemms
from hf_sparse24.weights.sharding import whole
from hf_sparse24.weights.sparse_weight import SparseWeight, WeightView, first_of_each

ADAPTING = "adapting"
TWICE_PRUNED = "twice-pruned"


class OwnAdamW(torch.optim.AdamW):
    """The optimizer of the method; there is nothing special about it but its class."""


def is_rank(value: Any) -> str | None:
    return None if type(value) is int and value > 0 else "must be an int > 0"


@register_method("own")
class OwnMethod(SparseMethod):
    phases = ("sparse", ADAPTING, "dense")
    accepts_masks = True

    @dataclass(frozen=True, kw_only=True)
    class Settings(PhaseSettings, GemmSettings):
        ridge: float = setting(1e-3, is_non_negative, "strength of the ridge on sparse weights")
        rank: int = setting(2, is_rank, "rank of the adapters")
        adapt_last: int | float = setting(0.25, is_length, "length of training at the end in which adapters take part")

    def make_gemms(self) -> Gemms:
        gemms = super().make_gemms()
        if gemms.grad_input.sparse == "grad":  # two sparse operands have no hardware
            return gemms
        return gemms._replace(grad_input=replace(gemms.grad_input, sparse="weight", weight=TWICE_PRUNED))

    def init_state(self, view: WeightView) -> dict[str, Tensor]:
        return {"mask_bits": kernels.nm_mask(view.matrix, *self.pattern, view.dim, packed=True)}

    def adopt_mask(self, view: WeightView, mask: Tensor) -> dict[str, Tensor]:
        return {"mask_bits": kernels.pack_bits(mask)}

    def mask(self, view: WeightView, packed: bool) -> Tensor:
        bits = view.state["mask_bits"]
        return bits if packed else kernels.unpack_bits(bits, view.matrix.shape[1])

    def prune(self, view: WeightView, operand: str, forms: Forms, dtype: torch.dtype) -> Sequence[Tensor]:
        if operand != TWICE_PRUNED:
            return self.prune_by(view, forms, dtype, "mask", mask=view.state["mask_bits"])
        pruned = kernels.apply_mask(view.matrix, view.state["mask_bits"])
        return self.forms_of(kernels.nm_prune(pruned, *self.pattern, 1 - view.dim), forms, dtype)

    def unsupported(self, out: int, inputs: int) -> str | None:
        if out % self.pattern.m:
            return f"output size {out} is not a multiple of {self.pattern.m}"
        return super().unsupported(out, inputs)

    def init_parameters(self, view: WeightView) -> dict[str, Tensor]:
        matrix = view.matrix if view.dim == 1 else view.matrix.t()
        rank = self.settings.rank
        right = matrix[:rank].clone(memory_format=torch.contiguous_format)  # as it comes back from a file
        return {"left": matrix.new_zeros(len(matrix), rank), "right": right}

    def phase(self, step: int, total_steps: int, optimizer: torch.optim.Optimizer) -> str:
        phase = super().phase(step, total_steps, optimizer)
        is_late = step >= total_steps - to_steps(self.settings.adapt_last, total_steps)
        return ADAPTING if phase == "sparse" and is_late else phase

    def adapt_output(self, weight: SparseWeight, x: Tensor, output: Tensor) -> Tensor:
        if weight.run_state.phase != ADAPTING:
            return output
        left, right = weight.parameters["left"], weight.parameters["right"]
        return output + x @ right.t() @ left.t()

    def merged(self, weight: SparseWeight) -> Tensor:
        pruned = weight.pruned()
        if weight.run_state.phase != ADAPTING:
            return pruned
        low_rank = whole(weight.parameters["left"]) @ whole(weight.parameters["right"])
        return pruned + (low_rank if weight.input_dim == -1 else low_rank.t())

    def check_run(self, total_steps: int, optimizer: torch.optim.Optimizer) -> None:
        super().check_run(total_steps, optimizer)
        if not isinstance(optimizer, OwnAdamW):
            raise ValueError(f"method 'own' needs OwnAdamW, not {type(optimizer).__name__}")

    def make_optimizer(self, groups: list[dict[str, Any]], total_steps: int, **arguments: Any) -> OwnAdamW:
        return OwnAdamW(groups, **arguments)

    def loss(self, weights: Mapping[str, SparseWeight], context: StepContext) -> Tensor | None:
        if not self.settings.ridge:
            return None
        squares = [weight.master.square().sum() for weight in first_of_each(weights).values()]
        return self.settings.ridge / 2 * torch.stack(squares).sum()

    def metrics(self, weights: Mapping[str, SparseWeight], optimizer: torch.optim.Optimizer) -> dict[str, float]:
        return {"adapter_norm": sum(float(whole(weight.parameters["left"]).norm()) for weight in weights.values())}
