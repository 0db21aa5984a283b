"""STE: prune by magnitude in every forward, and let the gradient through to all weights.

Method card
    Forward          Z = X S(W)^T, S keeps the N largest magnitudes of every M along the input dimension
    Backward         dX = dZ S(W),  dW = dZ^T X  (unmasked: the straight-through estimator)
    GEMMs            output sparse, grad_input dense, grad_weight dense
    Hyper-parameters none
    Known limits     S is discontinuous, so a weight that hovers at the border flips in and out of the mask and the
                     loss jumps with it; SR-STE and S-STE are two answers to that.
    Deviations       none: masks are made once per optimizer step, from weights that change no sooner
    Measured here    recipes/results/methods.md, on a small Llama
    Reference        Bengio et al. 2013 (arXiv 1308.3432) for the estimator; the baseline of SR-STE's section 3.1.
"""

from ..weights.rules import Magnitude
from ..weights.storage import WeightView
from .base import SparseMethod
from .registry import register_method


@register_method("ste")
class STE(SparseMethod):
    mask_is_local = True

    def prune(self, view: WeightView) -> Magnitude:
        return Magnitude()
