"""The published methods by name. One file per paper, each opening with its method card."""

from .base import SparseMethod
from .fixed_mask import FixedMask
from .s_ste import SSTE
from .sr_ste import SRSTE
from .ste import STE
from .step import STEP
from .t_sr_ste import TSRSTE

METHODS: dict[str, type[SparseMethod]] = {
    "ste": STE,
    "sr-ste": SRSTE,
    "t-sr-ste": TSRSTE,
    "s-ste": SSTE,
    "step": STEP,
    "fixed-mask": FixedMask,
}

__all__ = ["METHODS", "SRSTE", "SSTE", "STE", "STEP", "TSRSTE", "FixedMask", "SparseMethod"]
