"""Sparse24Trainer: a Trainer that patches its model and runs its sparsity."""

from torch import nn
from transformers import Trainer

from .callback import Sparse24Callback
from .config import Sparse24Config
from .patching import patch_model, patched_config
from .report import PatchReport


class Sparse24Trainer(Trainer):
    """`transformers.Trainer` for 2:4 sparse training; takes everything a Trainer takes.

    Args:
        sparse24_config: how to patch the model. `None` keeps a model that is patched as it is, and patches any other
            with `Sparse24Config()`.

    Attributes:
        patch_report: what `patch_model` said of the model.

    Raises:
        ValueError: what `patch_model` raises, and, when training starts, a schedule that does not fit the number of
            steps.
    """

    def __init__(self, model=None, args=None, *trainer_args, sparse24_config: Sparse24Config | None = None, **kwargs):
        self.sparse24_config = sparse24_config
        self.patch_report: PatchReport | None = None
        if model is not None:
            self._patch(model)
        super().__init__(model, args, *trainer_args, **kwargs)
        self.sparse24_callback = Sparse24Callback.add_to(self)

    def call_model_init(self, trial=None) -> nn.Module:
        model = super().call_model_init(trial)
        self._patch(model)
        return model

    def _patch(self, model: nn.Module) -> None:
        config = self.sparse24_config
        if config is None and patched_config(model) is None:
            config = Sparse24Config()
        self.patch_report = patch_model(model, config)
