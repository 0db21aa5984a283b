"""STEP: dense at first, until Adam's second moment can be trusted; then 2:4 with that moment frozen.

Method card
    Precondition     dense training with Adam, until AutoSwitch finds the variance v reliable
    Mask learning    STE with an N:M magnitude mask, updates w <- w - lr m^ / (sqrt(v*) + eps), v* frozen
    Why              SR-STE loses accuracy with Adam because v is then estimated from masked weights' gradients
    Hyper-parameters switch_rule "arithmetic" (option I) or "geometric" (option II); not before 10 % (`switch_after`)
                     and by 50 % (`switch_by`) of training; the window and eps are Adam's (see `StepAdamW`)
    Optimizer        `StepAdamW`, made by `Sparse24Trainer` itself; in a loop of your own you make it
    Known limits     the dense phase has no sparse product, so at most 90 % of the run can gain
    Deviations       v* keeps its bias correction; zeros are left out of option II's mean (reasons in `StepAdamW`)
    Measured here    recipes/results/methods.md, on two tiny models
    Reference        Lu et al. 2023 (arXiv 2302.01172), Algorithms 1 and 2. There is no official code.
"""

from .ste import STE


class STEP(STE):
    """STE's mask; the phases are decided by the optimizer."""
