"""2:4 sparse training for Hugging Face Transformers.

Importing this package tells Transformers how to load 2:4 checkpoints (`quant_method: "sparse24"`), and PEFT, where it
is installed, how to put adapters around 2:4 layers. It registers these and changes nothing else: no device, no
environment variable, no setting of torch, no optimizer of yours.
"""

from .checkpoints import quantizer as _quantizer  # noqa: F401  registers quant_method "sparse24" with Transformers
from .checkpoints.export import export_model
from .config import Sparse24Config
from .hub.card import make_model_card
from .hub.push import push_to_hub
from .layers.gated import fuse_gated_mlps
from .layers.linear import Sparse24Conv1D, Sparse24Linear
from .methods import register_method
from .methods.registry import describe_settings
from .metrics import is_nm_sparse
from .patching.packing import pack_model, unpack_model
from .patching.report import PatchReport
from .patching.surgery import patch_model, unpatch_model
from .peft.tuners import register_tuners as _register_tuners
from .pruning.oneshot import oneshot
from .pruning.own_text import own_text
from .run import set_phase, sparse_run
from .training.callback import Sparse24Callback
from .training.controller import Sparse24Controller
from .training.distillation import DistillationConfig, distill
from .training.trainer import Sparse24Seq2SeqTrainer, Sparse24Trainer
from .version import __version__ as __version__
from .weights.sparse_weight import sparse_weights

_register_tuners()

__all__ = [
    "DistillationConfig",
    "PatchReport",
    "Sparse24Callback",
    "Sparse24Config",
    "Sparse24Controller",
    "Sparse24Conv1D",
    "Sparse24Linear",
    "Sparse24Seq2SeqTrainer",
    "Sparse24Trainer",
    "describe_settings",
    "distill",
    "export_model",
    "fuse_gated_mlps",
    "is_nm_sparse",
    "make_model_card",
    "oneshot",
    "own_text",
    "pack_model",
    "patch_model",
    "push_to_hub",
    "register_method",
    "set_phase",
    "sparse_run",
    "sparse_weights",
    "unpack_model",
    "unpatch_model",
]
