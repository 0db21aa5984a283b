"""AST: a straight-through mask, an optimizer that lets dropped weights fade, and the dense model as teacher.

An example of a method outside the package: it imports public names alone, and is registered by importing this file
(`python recipes/train.py --method_module methods.ast --method ast ...`). On a pretrained model it does not beat the
kept mask of `fixed-mask` (docs/measured/pretrained.md).

Method card
    Forward          Z = X (M * W)^T, M the N largest magnitudes of every M
    Backward         dX = dZ (M * W),  dW = dZ^T X (unmasked: the straight-through estimator)
    Mask             refreshed every `mask_interval` = 10 optimizer steps, fixed in between
    Optimizer        `AdamS`: u = mu + lambda_t (1 - M) W, v the variance of u, W <- W - lr u^ / (sqrt(v^) + eps).
                     `Sparse24Trainer` makes it; in a loop of your own you make it
    Loss             1/3 cross entropy + 2/3 T^2 KL(teacher || student), T = 2, once a teacher is given: the dense model
                     before it was patched (`Sparse24Trainer(teacher=...)`, `distill`)
    Hyper-parameters masked_decay = lambda = 1e-4 (GPT-2), reached linearly over the first quarter (`decay_ramp`).
                     It is added to the momentum of the gradient, so smaller models and batches need more:
                     `kept_magnitude` in the logs should rise, and `flip_rate` fade
    Deviations       For LLaMA2-7B the authors add up to 6e-5 W to the gradient instead, after 3,000 of 15,000 steps,
                     with 1/3 KL; here there is one way. No low-rank boost (SLoRB): merged, its weight is dense. Their
                     GPT-2 code takes `~mask` of an int32 mask, so it makes weights grow; their LLaMA code and this do
                     not. They train without weight decay on LLaMA; here it is AdamW's, as the optimizer is given it
    Known limits     without a teacher it is SR-STE with another placement of the decay. DeepSpeed ZeRO is refused, as
                     for every method with its own optimizer
    Measured here    recipes/results/methods.md, on a small Llama; docs/measured/pretrained.md, on SmolLM2-135M
    Reference        Huang et al. 2024 (arXiv 2407.20584), sections 3.2 to 3.4, and the authors' code.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sparse24_kernels import masked_decay_
from torch import Tensor

from hf_sparse24 import register_method
from hf_sparse24.methods import (
    GemmSettings,
    GroupTensors,
    KeptMaskMethod,
    MaskedAdamW,
    Piece,
    StepContext,
    is_length,
    is_non_negative,
    is_positive_length,
    setting,
    to_steps,
)

Decay = Callable[[Tensor, Tensor, Tensor], None]
"""Changes an update in place, given the weight and its mask (bool, or packed bits): `decay(update, weight, mask)`."""


class AdamS(MaskedAdamW):
    """Adam whose update includes a decay of the weights that the masks drop.

        mu <- beta1 mu + (1 - beta1) g         of the gradient alone
        u  <- decay(mu, W, M)                  changes what the mask M drops, leaves what it keeps
        v  <- beta2 v + (1 - beta2) u^2        of the update, so decay and gradient are normalised together
        W  <- W - lr u^ / (sqrt(v^) + eps)     hats are bias corrections

    A decay added to the gradient would be smeared over later steps by mu; one taken off the weight would not be
    normalised. v follows mu, whose noise is averaged out, so steps are longer than Adam's at the same learning rate:
    about lr for every entry, and 1 / (1 - beta1) times that at the first step. Take a lower rate, with a warm-up.

    The method brings the masks and the decay of a step through the controller, right before the step. Weight decay is
    AdamW's, and parameters that are not masked are updated by AdamW. The arguments are those of `torch.optim.AdamW`.

    Reference: AST (arXiv 2407.20584); CAST (arXiv 2509.25996) names it AdamS. Neither states the betas: torch's are the
    defaults.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        super().__init__(params, lr, betas, eps, weight_decay)
        self._masks: Mapping[Tensor, Tensor] = {}
        self._decay: Decay | None = None

    def set_decay(self, masks: Mapping[Tensor, Tensor], decay: Decay) -> None:
        """Set what the next step alone uses: the mask of each masked Parameter that has a gradient, and the decay."""
        masked = {parameter for group in self.param_groups if group["masked"] for parameter in group["params"]}
        if set(masks) - masked:
            raise ValueError(
                "a sparse weight is in a group without 'masked': True, where AdamS would not decay it; make the groups "
                "with step_param_groups(model)"
            )
        self._masks, self._decay = masks, decay

    def masked_step(self, group: dict[str, Any], tensors: GroupTensors) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        for weight, gradient, mu, v, step, owner in zip(*tensors):
            if self._decay is None or (owner not in self._masks and weight.numel()):
                raise RuntimeError(
                    "AdamS has no mask for a masked parameter: it trains the sparse weights of method 'ast', with a "
                    "Sparse24Controller(model, optimizer, total_steps) or Sparse24Trainer, which bring the masks"
                )
            step += 1
            mu.lerp_(gradient, 1 - beta1)
            update = mu.clone()
            if weight.numel():  # there may be more processes than rows
                self._decay(update, weight, self._masks[owner])
            v.mul_(beta2).addcmul_(update, update, value=1 - beta2)
            denominator = v.div(1 - beta2 ** step.item()).sqrt_().add_(group["eps"])
            weight.mul_(1 - lr * group["weight_decay"])
            weight.addcdiv_(update, denominator, value=-lr / (1 - beta1 ** step.item()))

    def after_groups(self) -> None:
        self._masks, self._decay = {}, None


@register_method("ast")
class AST(KeptMaskMethod):
    flips_at_refresh = True

    @dataclass(frozen=True, kw_only=True)
    class Settings(GemmSettings):
        mask_interval: int | float = setting(10, is_positive_length, "length between mask refreshes")
        masked_decay: float = setting(
            1e-4, is_non_negative, "lambda >= 0: lambda * weight is added to the update of pruned weights; GPT-2's"
        )
        decay_ramp: int | float = setting(
            0.25, is_length, "length of training over which masked_decay rises linearly from 0"
        )

    def refreshes_state(self, step: int, total_steps: int) -> bool:
        return step % max(1, to_steps(self.settings.mask_interval, total_steps)) == 0

    def make_optimizer(self, groups: list[dict[str, Any]], total_steps: int, **arguments: Any) -> AdamS:
        return AdamS(groups, **arguments)

    def check_run(self, total_steps: int, optimizer: torch.optim.Optimizer) -> None:
        super().check_run(total_steps, optimizer)
        if not isinstance(optimizer, AdamS):
            raise ValueError(
                f"method {self.name!r} needs its own optimizer, AdamS, not {type(optimizer).__name__}: use "
                f"AdamS(step_param_groups(model), ...), or leave the optimizer to Sparse24Trainer"
            )

    def change_gradients(self, pieces: list[Piece], context: StepContext) -> None:
        if not isinstance(context.optimizer, AdamS):
            return  # any other trains adapters alone, or what has no masks
        ramp = to_steps(self.settings.decay_ramp, context.total_steps)
        strength = self.settings.masked_decay * (min(1.0, context.step / ramp) if ramp else 1.0)

        def decay(update: Tensor, weight: Tensor, mask: Tensor) -> None:
            masked_decay_(update, weight, mask, strength)

        context.optimizer.set_decay({context.weights[piece.name].master: piece.mask for piece in pieces}, decay)
