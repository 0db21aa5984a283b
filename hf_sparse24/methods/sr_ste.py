"""SR-STE: STE plus a pull on the pruned weights towards zero, so that masks settle.

Method card
    Forward          as STE
    Backward         as STE
    Regularisation   g <- g + lambda_W (1 - mask) W, once per optimizer step, right before the optimizer steps
    Hyper-parameters masked_decay = lambda_W = 2e-4 (the paper's, for SGD on ImageNet). With Adam the term is divided
                     by sqrt(v), so the right size is another: watch `flip_rate` in the logs. It should rise, then
                     fade; a late rise asks for a larger lambda_W, a rate that is zero from early on for a smaller one.
    Deviations       The paper and its code add the term inside backward, once per micro-batch, before clipping and
                     blind to the loss scale. Its strength then depends on gradient accumulation and on AMP. We add it
                     to the clipped, unscaled gradient instead (Hu et al. 2024's placement). decay_on="weight" takes
                     lr lambda_W (1 - mask) W off the weight itself, as decoupled weight decay does; with plain SGD
                     both are the same. Convolutions, of which most of the paper's networks consist, stay dense.
    Known limits     as STE's, milder
    Measured here    recipes/results/methods.md, on a small Llama; docs/measured/pretrained.md, on SmolLM2-135M
    Reference        Zhou et al. 2021 (arXiv 2102.04010), eq. (7).
"""

from dataclasses import dataclass

from .masked_decay import MaskedDecayMethod, MaskedDecaySettings
from .registry import register_method
from .settings import GemmSettings, PhaseSettings
from .ste import STE


@register_method("sr-ste")
class SRSTE(MaskedDecayMethod, STE):
    @dataclass(frozen=True, kw_only=True)
    class Settings(MaskedDecaySettings, PhaseSettings, GemmSettings):
        pass
