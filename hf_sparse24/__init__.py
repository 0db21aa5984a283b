"""2:4 sparse training for Hugging Face Transformers.

Importing this package tells Transformers how to load 2:4 checkpoints (`quant_method: "sparse24"`), and nothing else:
it touches no device and no environment variable.
"""

from . import quantizer as _quantizer  # noqa: F401  registers quant_method "sparse24" with Transformers
from .callback import Sparse24Callback
from .checkpoint import export_model
from .config import PRESETS, Sparse24Config
from .controller import Sparse24Controller
from .gated import fuse_gated_mlps, unfuse_gated_mlps
from .inference import drop_master_weights
from .linear import Sparse24Conv1D, Sparse24Linear
from .oneshot import OneshotReport, oneshot
from .patching import patch_model, unpatch_model
from .report import PatchReport
from .step_adamw import StepAdamW, step_param_groups
from .trainer import Sparse24Trainer
from .version import __version__

__all__ = [
    "PRESETS",
    "OneshotReport",
    "PatchReport",
    "Sparse24Callback",
    "Sparse24Config",
    "Sparse24Controller",
    "Sparse24Conv1D",
    "Sparse24Linear",
    "Sparse24Trainer",
    "StepAdamW",
    "__version__",
    "drop_master_weights",
    "export_model",
    "fuse_gated_mlps",
    "oneshot",
    "patch_model",
    "step_param_groups",
    "unfuse_gated_mlps",
    "unpatch_model",
]
