"""The published methods, one file per paper, each opening with its method card; and all that an author imports.

`register_method` adds your own method. docs/guides/own_method.md builds one step by step.

    base.py              SparseMethod: every hook of a method, and when it runs
    settings.py          settings: each field with its default, check and meaning
    registry.py          METHODS, register_method, describe_settings
    ste.py               straight-through estimator: prune by magnitude in every step
    sr_ste.py            STE with masked decay
    t_sr_ste.py          transposable masks, refreshed every 40 steps, with masked decay and a dense tail
    s_ste.py             soft threshold: masks without jumps
    step.py              dense until Adam's variance has settled, by an optimizer of its own
    fixed_mask.py        one mask for life
    slope.py             one mask for life, another in the backward pass, low-rank adapters at the end
    masked_decay.py      the pull of dropped weights towards zero
    masked_adamw.py      AdamW with another step for masked weights
"""

from ..weights.rules import Magnitude, Mask, SoftThreshold, Values
from ..weights.sharding import whole
from ..weights.storage import WeightView
from . import fixed_mask, s_ste, slope, sr_ste, ste, step, t_sr_ste  # noqa: F401  each registers its method
from .base import Piece, SparseMethod, StepContext
from .fixed_mask import FixedMask, KeptMaskMethod
from .masked_adamw import GroupTensors, MaskedAdamW, step_param_groups
from .masked_decay import MaskedDecayMethod, MaskedDecaySettings
from .registry import METHODS, method_class, register_method
from .s_ste import SSTE
from .settings import (
    GemmSettings,
    MasterSettings,
    MethodSettings,
    PhaseSettings,
    is_length,
    is_non_negative,
    is_positive_length,
    one_of,
    setting,
    to_steps,
    with_default,
)
from .step import StepAdamW

DEFAULT_METHOD = SSTE.name
ONESHOT_METHOD = FixedMask.name  # it keeps the masks that it is given

__all__ = [
    "DEFAULT_METHOD",
    "METHODS",
    "ONESHOT_METHOD",
    "GemmSettings",
    "GroupTensors",
    "KeptMaskMethod",
    "Magnitude",
    "Mask",
    "MaskedAdamW",
    "MaskedDecayMethod",
    "MaskedDecaySettings",
    "MasterSettings",
    "MethodSettings",
    "PhaseSettings",
    "Piece",
    "SoftThreshold",
    "SparseMethod",
    "StepAdamW",
    "StepContext",
    "Values",
    "WeightView",
    "is_length",
    "is_non_negative",
    "is_positive_length",
    "method_class",
    "one_of",
    "register_method",
    "setting",
    "step_param_groups",
    "to_steps",
    "whole",
    "with_default",
]
