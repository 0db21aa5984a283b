"""PEFT's adapters around sparse layers: they act through the mask, and merge into weights that stay 2:4.

    tuners.py      how PEFT finds sparse layers by itself, and the check that an adapter fits its base
    attaching.py   the mask and the merge of an adapter that PEFT puts around a layer
    masked.py      LoRA's change of a weight, through the mask; without PEFT
    variants.py    the same as PEFT's `LoraVariant`
    merging.py     merging and unmerging, so that the weight stays N:M
    bypass.py      which adapters would compute with the dense weight

Importing this package registers what a controller asks of adapters, and needs no PEFT.
"""

from torch import nn

from ..extensions import extensions
from .attaching import attach_adapters
from .bypass import check_adapters


def _attach_and_check(model: nn.Module) -> None:
    attach_adapters(model)  # those that PEFT has not found by its registry
    check_adapters(model)


extensions.check_adapters = _attach_and_check
