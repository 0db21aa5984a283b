"""The published methods by name. One file per paper, each opening with its method card."""

from .base import SparseMethod
from .s_ste import SSTE
from .sr_ste import SRSTE
from .ste import STE
from .t_sr_ste import TSRSTE

METHODS: dict[str, type[SparseMethod]] = {"ste": STE, "sr-ste": SRSTE, "t-sr-ste": TSRSTE, "s-ste": SSTE}

__all__ = ["METHODS", "SRSTE", "SSTE", "STE", "TSRSTE", "SparseMethod"]
