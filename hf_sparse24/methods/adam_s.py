"""AdamS, the optimizer of AST and CAST: Adam whose update takes in a decay of the weights that the masks drop.

With mu and v Adam's moments, hats for bias correction, and the method's own `decay`:

    mu <- beta1 mu + (1 - beta1) g         of the gradient alone
    u  <- decay(mu, W, M)                  changes what the mask M drops, leaves what it keeps
    v  <- beta2 v + (1 - beta2) u^2        of the update, so decay and gradient are normalised together
    W  <- W - lr u^ / (sqrt(v^) + eps)

A decay that is added to the gradient would be smeared over the steps by mu; one that is taken off the weight would not
be normalised. CAST (arXiv 2509.25996) names it AdamS; AST (arXiv 2407.20584) has the same step with another decay.

As v follows mu and not the gradient, whose noise mu averages out, steps are longer than Adam's at the same learning
rate: about lr for every entry, and 1 / (1 - beta1) times that at the very first step. So take a lower rate, with a
warm-up.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .context import Pieces, StepContext
from .fixed_mask import KeptMaskMethod
from .masked_adamw import Batch, MaskedAdamW
from .schedule import to_steps
from .settings import LENGTH, MethodSettings, is_positive_length, setting

Decay = Callable[[Tensor, Tensor, Tensor], None]
"""Changes an update in place, given the weight and its mask (bool, or packed bits): `decay(update, weight, mask)`."""


class AdamS(MaskedAdamW):
    """Adam with a decay of dropped weights in its update. The methods `ast` and `cast` make it.

    The masks and the decay of a step come from the method, through the controller, right before the step. Weight decay
    is AdamW's; parameters that are not masked are updated by AdamW.

    Args:
        params: parameter groups, as `step_param_groups` makes them.
        lr: as in `torch.optim.AdamW`.
        betas: as there.
        eps: as there.
        weight_decay: as there.

    Raises:
        ValueError: a value out of its range, or no masked group.
        RuntimeError: a step without a `Sparse24Controller`, which brings the masks.

    Reference: CAST (arXiv 2509.25996), AdamS; AST (arXiv 2407.20584). Neither states the betas: torch's are the
    defaults.

    Examples:
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained("gpt2")
        >>> _ = patch_model(model, Sparse24Config(method="cast"))
        >>> optimizer = AdamS(step_param_groups(model), lr=1e-4)
        >>> controller = Sparse24Controller(model, optimizer, total_steps=1000)
        >>> controller.phase
        'dense'
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
        """What the next step, and no other, goes by: the mask of each masked Parameter that has a gradient (of what
        this process updates), and the method's decay."""
        masked = {parameter for group in self.param_groups if group["masked"] for parameter in group["params"]}
        if set(masks) - masked:
            raise ValueError(
                "a sparse weight is in a group without 'masked': True, where AdamS would not decay it; make the groups "
                "with step_param_groups(model)"
            )
        self._masks, self._decay = masks, decay

    def masked_step(self, group: dict[str, Any], batch: Batch) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        for weight, gradient, mu, v, step, owner in zip(*batch):
            if self._decay is None or (owner not in self._masks and weight.numel()):
                raise RuntimeError(
                    "AdamS has no mask for a masked parameter: it trains the sparse weights of the methods 'ast' and "
                    "'cast', with a Sparse24Controller(model, optimizer, total_steps) or Sparse24Trainer, which bring "
                    "the masks"
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


@dataclass(frozen=True, kw_only=True)
class MaskIntervalSettings(MethodSettings):
    """How long a mask stays.

    Attributes:
        mask_interval: length between mask refreshes.
    """

    mask_interval: int | float = setting(
        10, is_positive_length, f"length between mask refreshes, in which masks stay: {LENGTH}"
    )


class AdamSMethod(KeptMaskMethod):
    """A method that trains by AdamS: masks by magnitude, made anew every `mask_interval` steps. `decay` is its own."""

    flips_at_refresh = True

    def decay(self, update: Tensor, weight: Tensor, mask: Tensor, step: int, total_steps: int) -> None:
        """Change the update of dropped weights in place, in the step that comes after `step` of `total_steps`."""
        raise NotImplementedError

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

    def change_gradients(self, pieces: Pieces, context: StepContext) -> None:
        if not isinstance(context.optimizer, AdamS):
            return  # any other trains adapters alone, or what has no masks

        def decay(update: Tensor, weight: Tensor, mask: Tensor) -> None:
            self.decay(update, weight, mask, context.step, context.total_steps)

        masks = {context.weights[piece.name].master: piece.mask for piece in pieces}
        context.optimizer.set_decay(masks, decay)
