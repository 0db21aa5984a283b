"""HubTrainer pushes the export of a sparse model where a Trainer would push its training checkpoint.

The output directory keeps what Transformers writes there, the training checkpoint. The repository gets an export with
a model card: at `push_to_hub()` and `save_model()`, and with `hub_strategy="every_save"` also at every save, in the
background.
"""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from transformers import PreTrainedModel, Trainer
from transformers.modelcard import extract_hyperparameters_from_trainer
from transformers.trainer_utils import HubStrategy
from transformers.utils.hub import PushInProgress

from ..checkpoints.card import CARD, Format, write_model_card
from ..checkpoints.hub import card_on_hub, check_pushable, read_card, stage_push
from ..progress import get_logger
from ..run import patched_config
from .decay_search import model_of

logger = get_logger(__name__)

_HUB = HfApi()  # its pushes in the background run one after the other

_NAMES = {"dataset_tags": "datasets", "finetuned_from": "base_model", "model_name": "model_id"}
"""What `make_model_card` calls arguments of `Trainer.create_model_card`; `_UNUSED` are not in the card's metadata."""
_UNUSED = ("tasks", "dataset", "dataset_args")


class HubTrainer(Trainer):
    """A Trainer whose model, where it is a patched one of Transformers, is pushed as an export with a model card.

    Any other model, such as one with adapters, is pushed as Transformers does it.
    """

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        strategy = HubStrategy(self.args.hub_strategy)
        if self._is_patched and strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            raise ValueError(
                f"hub_strategy={strategy.value!r}: of a sparse model the export is pushed, and no training "
                f"checkpoints; pass 'every_save' or 'end', and upload a checkpoint's directory with `hf upload`"
            )
        super().init_hf_repo(token, private)

    def create_model_card(self, **card: Any) -> None:  # type: ignore[override]  # no arguments by position
        """Write the card of the training checkpoint in the output directory.

        Args:
            card: what `Trainer.create_model_card` takes, or `make_model_card`, such as `dense_control`.
        """
        if not self._is_patched:
            super().create_model_card(**card)
        elif self.is_world_process_zero():
            model_id = self.args.hub_model_id or self._card_file.parent.absolute().name
            write_model_card(self._model, self._card_file.parent, format="training", **self._details(model_id, card))

    def push_to_hub(  # type: ignore[override]  # a Future where it does not block, as the original's text says
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        format: Format = "dense",
        **card: Any,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Save the model to the output directory, and push its export with a model card.

        The card in the output directory, or else the one in the repository, keeps its author's text.

        Args:
            commit_message, blocking, token, revision, private: as for `Trainer.push_to_hub`.
            format: what to push: `"dense"`, `"packed"` or `"training"`, as for `push_to_hub` of a model.
            card: what `create_model_card` takes; `checkpoint=True` pushes the training checkpoint too, and
                `values="int8"` rounds a packed export, as there.
        """
        if not self._is_patched:
            return super().push_to_hub(commit_message, blocking, token, revision, private, **card)
        check_pushable(self._model)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        push = self._staged(commit_message, token, revision, format, card)
        return push() if blocking else _HUB.run_as_future(push)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the export in the background at a save, where Trainer would push the training checkpoint."""
        if not self._is_patched:
            return super()._push_from_checkpoint(checkpoint_folder)
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return None
        last: Any = self.push_in_progress
        if last is not None and not last.is_done() and not self.args.hub_always_push:
            return None
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        step = self.state.global_step
        try:
            check_pushable(self._model)
            push = self._staged(f"Training in progress, step {step}", None, None, "dense", {})
        except (OSError, ValueError) as error:
            logger.warning(f"nothing was pushed at step {step}, training goes on: {error}")
            return None
        job = _HUB.run_as_future(push)
        job.add_done_callback(_warn_if_failed)
        jobs: Any = [job]  # PushInProgress is annotated to take a single one
        self.push_in_progress = PushInProgress(jobs)  # type: ignore[assignment]  # annotated as None
        return None

    @property
    def _model(self) -> Any:
        return self.accelerator.unwrap_model(model_of(self), keep_torch_compile=False)

    @property
    def _is_patched(self) -> bool:
        return isinstance(self._model, PreTrainedModel) and patched_config(self._model) is not None

    @property
    def _card_file(self) -> Path:
        return Path(str(self.args.output_dir)) / CARD

    def _staged(
        self, message: str | None, token: str | None, revision: str | None, format: Format, card: dict[str, Any]
    ) -> Any:
        """The call that pushes the model as it is now."""
        repo_id = str(self.hub_model_id)
        commit = {
            "commit_message": message,
            "token": self.args.hub_token if token is None else token,
            "revision": revision or self.args.hub_revision,
        }
        details = self._details(repo_id, card)
        details["existing"] = details["existing"] or card_on_hub(repo_id, commit["token"], commit["revision"])
        return stage_push(self._model, repo_id, format, self.processing_class, "5GB", commit, **details)

    def _details(self, model_id: str, card: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `make_model_card`, from this run and from those of `create_model_card`."""
        hyperparameters = extract_hyperparameters_from_trainer(self)
        hyperparameters.pop("optimizer", None)  # that of the arguments; the method may have made another
        details = {"model_id": model_id, "log_history": self.state.log_history, "hyperparameters": hyperparameters}
        details["existing"] = read_card(self._card_file, str(self._card_file))
        given = {name: value for name, value in card.items() if value is not None and name not in _UNUSED}
        return details | {_NAMES.get(name, name): value for name, value in given.items()}


def _warn_if_failed(push: Future) -> None:
    if error := push.exception():
        logger.warning(f"a push in the background failed, training goes on: {error}")
