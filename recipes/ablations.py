"""What the papers' ablations change, as methods outside the package.

    python recipes/train.py recipes/quickstart.yaml --method_module ablations --method s-ste-gamma

| method | what it changes | source |
|---|---|---|
| `s-ste-gamma` | the threshold lies between the second and the third smallest magnitude | S-STE, Table 1 |
| `s-ste-fixed-scale` | one given number is the scale of all weights | S-STE, Fig. 4 |
| `s-ste-moving-scale` | the scale is computed after every step, and grows | S-STE, Fig. 4 |
| `s-ste-mvue-weight` | the weight of grad_input is pruned once more, at random and without bias | S-STE, Table 3 |
| `s-ste-greedy`, `ste-greedy` | grad_weight keeps the two largest of four gradients: biased | arXiv 2203.10991 |
| `dense-weight` | no weight is pruned, only gradients or activations | arXiv 2203.10991 |

They have the settings of `s-ste` (of `ste`) and those below.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import sparse24_kernels as kernels
import torch
from torch import Tensor

from hf_sparse24 import register_method
from hf_sparse24.methods import METHODS, SoftThreshold, Values, WeightView, one_of, setting

SSTE: Any = METHODS["s-ste"]
STE: Any = METHODS["ste"]


def _between(low: float, high: float, also_low: bool) -> Any:
    def check(value: Any) -> str | None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = is_number and (low < value < high or (also_low and value == low))
        return None if fits else f"must be a number from {low:g} to below {high:g}" + ("" if also_low else ", above 0")

    return check


@register_method("s-ste-gamma")
class GammaThreshold(SSTE):
    settings_of_state = ("scale_rule", "gamma")

    @dataclass(frozen=True, kw_only=True)
    class Settings(SSTE.Settings):
        gamma: float = setting(
            0.5,
            _between(0, 1, also_low=True),
            "of the threshold gamma |t3| + (1 - gamma) |t2|, t2 and t3 the second and third smallest of four",
        )

    def init_state(self, view: WeightView, step: int, total_steps: int) -> dict[str, Tensor]:
        rule, weight, pruned = self.settings.scale_rule, view.matrix, self._pruned(view)
        if rule == "mse":
            scale = (weight * pruned).sum() / pruned.square().sum()
        else:
            scale = weight.abs().sum() / pruned.abs().sum()
        return {"scale": torch.where(pruned.any() & (rule != "none"), scale, 1.0).float()}

    def prune(self, view: WeightView) -> Values:
        return Values(view.state["scale"] * self._pruned(view))

    def state_of_pruned(self, view: WeightView) -> dict[str, Tensor]:
        raise ValueError(
            f"gamma={self.settings.gamma} prunes a 2:4 weight once more, so nothing can be merged into one; export the "
            f"model first"
        )

    def _pruned(self, view: WeightView) -> Tensor:
        (n, m), dim = self.pattern, view.dim + 1
        groups = view.matrix.to(torch.promote_types(view.matrix.dtype, torch.float32)).unflatten(view.dim, (-1, m))
        dropped, kept = groups.abs().sort(dim).values.split((m - n, n), dim)
        threshold = dropped.narrow(dim, -1, 1).lerp(kept.narrow(dim, 0, 1), self.settings.gamma)
        return (groups.sign() * (groups.abs() - threshold).clamp(min=0)).flatten(view.dim, dim)


@register_method("s-ste-fixed-scale")
class FixedScale(SSTE):
    settings_of_state = ("scale",)

    @dataclass(frozen=True, kw_only=True)
    class Settings(SSTE.Settings):
        scale: float = setting(1.5, _between(0, 3e38, also_low=False), "the scale of all weights")

    def init_state(self, view: WeightView, step: int, total_steps: int) -> dict[str, Tensor]:
        return {"scale": view.matrix.new_full((), self.settings.scale, dtype=torch.float32)}

    def check_state(self, view: WeightView) -> str | None:
        scale, given = float(view.state["scale"]), self.settings.scale
        return None if math.isclose(scale, given, rel_tol=1e-6) else f"scale is {scale:g}, not {given:g}"


@register_method("s-ste-moving-scale")
class MovingScale(SSTE):
    def refreshes_state(self, step: int, total_steps: int) -> bool:
        return True


@register_method("s-ste-mvue-weight")
class MVUEWeight(SSTE):
    transposable = True  # the weight of grad_input is 2:4 along the output dimension

    def prune_grad_input(self, view: WeightView) -> Values:
        """One draw for each value of the weight, so for each step: a hook is a pure function of its view."""
        rule: SoftThreshold = self.prune(view)
        pruned = kernels.soft_threshold(view.matrix, *self.pattern, view.dim, rule.scale)
        key = view.matrix.sum(dtype=torch.float64).view(torch.int64)
        return Values(kernels.mvue(pruned, dim=1 - view.dim, key=key))


class _GreedyGradients:
    def __init__(self, settings: Any, pattern: kernels.Pattern):
        super().__init__(settings, pattern)
        grad_weight = replace(
            self.gemms.grad_weight, sparse="grad", estimator="magnitude", pattern=kernels.Pattern(2, 4)
        )
        self.gemms = self.gemms._replace(grad_weight=grad_weight)


@register_method("s-ste-greedy")
class GreedySSTE(_GreedyGradients, SSTE):
    pass


@register_method("ste-greedy")
class GreedySTE(_GreedyGradients, STE):
    pass


@register_method("dense-weight")
class DenseWeight(STE):
    @dataclass(frozen=True, kw_only=True)
    class Settings(STE.Settings):
        estimators: str = setting(
            "theirs",
            one_of("theirs", "greedy-gradients", "mvue-activations"),
            "'theirs' as weight_grad, input_grad and activations say; 'greedy-gradients' keeps the two largest of four "
            "gradients in grad_weight, 'mvue-activations' two of four activations at random and without bias",
        )

    def __init__(self, settings: Any, pattern: kernels.Pattern):
        super().__init__(settings, pattern)
        output, grad_input, grad_weight = self.gemms
        if settings.estimators == "greedy-gradients":
            grad_weight = replace(grad_weight, sparse="grad", estimator="magnitude")
        activations = "mvue" if settings.estimators == "mvue-activations" else output.estimator
        self.gemms = type(self.gemms)(replace(output, sparse=None, estimator=activations), grad_input, grad_weight)

    def prune(self, view: WeightView) -> Values:
        """The weight as it is. An export of it is dense."""
        return Values(view.matrix)
