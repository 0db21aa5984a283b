"""The published methods by name. One file per paper, each opening with its method card.

`register_method` adds one of your own.
"""

from . import fixed_mask, s_ste, sr_ste, ste, step, t_sr_ste  # noqa: F401  each registers its method
from .base import METHODS, SparseMethod, StepContext, method_class, register_method
from .fixed_mask import FixedMask
from .s_ste import SSTE
from .step_adamw import StepAdamW

DEFAULT_METHOD = SSTE.name
ONESHOT_METHOD = FixedMask.name
"""The method that `oneshot` uses by default: it keeps the masks that it is given."""

__all__ = [
    "DEFAULT_METHOD",
    "METHODS",
    "ONESHOT_METHOD",
    "SparseMethod",
    "StepAdamW",
    "StepContext",
    "method_class",
    "register_method",
]
