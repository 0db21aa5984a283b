"""HubTrainer pushes the export of a sparse model where a Trainer would push its training checkpoint.

| `hub_strategy` | the repository gets |
|---|---|
| `end` | at `push_to_hub()` and `save_model()`: the export |
| `every_save` | the export, at every save too, in the background |
| `checkpoint` | the same, and the latest training checkpoint in `last-checkpoint` |
| `all_checkpoints` | the same, and all training checkpoints, each in its folder |

The output directory keeps what Transformers writes there, the training checkpoint. Its other files (logs, results) go
to the repository as with any Trainer, without pickles.
"""

import inspect
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi, ModelCard
from huggingface_hub.utils import filter_repo_objects
from transformers import PreTrainedModel, Trainer
from transformers.modelcard import TrainingSummary, extract_hyperparameters_from_trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils.hub import PushInProgress

from ..checkpoints.card import CARD, PLOT, Format, write_model_card
from ..checkpoints.hub import (
    card_in,
    card_on_hub,
    commit_folder,
    hub_api,
    readable_errors,
    reject_sharded,
    stage_model,
)
from ..checkpoints.losses import Control
from ..progress import get_logger
from ..run import patched_config
from .decay_search import model_of

logger = get_logger(__name__)

_FOLDERS: dict[str, str] = {
    HubStrategy.CHECKPOINT: "last-checkpoint",
    HubStrategy.ALL_CHECKPOINTS: f"{PREFIX_CHECKPOINT_DIR}-*",
}
"""Where training checkpoints go in the repository."""
_NOT_SHARED = ["_*", ".*", f"{PREFIX_CHECKPOINT_DIR}-*", "*.bin", "*.pt", "*.pth", "*.safetensors*", CARD, PLOT]


class HubTrainer(Trainer):
    """A Trainer whose model, where it is a patched one of Transformers, is pushed as an export with a model card.

    Any other model, such as one with adapters, is pushed as Transformers does it.
    """

    @cached_property
    def _hub(self) -> HfApi:
        return hub_api()  # its pushes in the background run one after the other

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        with readable_errors(self.args.hub_model_id or self._output.absolute().name):
            super().init_hf_repo(token, private)

    def create_model_card(
        self,
        *args: Any,
        dense_control: Control | None = None,
        format: Format = "training",
        directory: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the card of what is in the output directory, or of an export of the model in another directory.

        Args:
            args, kwargs: those of `Trainer.create_model_card`.
            dense_control: metrics, or the `trainer_state.json`, of a dense run to compare with.
            format: what is in the directory, `"training"`, `"dense"` or `"packed"`.
            directory: None for the output directory.
        """
        if not self._is_patched:
            super().create_model_card(*args, **kwargs)
        elif self.is_world_process_zero():
            names = inspect.signature(super().create_model_card).bind(*args, **kwargs).arguments
            folder = self._output if directory is None else Path(directory)
            model_id = names.get("model_name") or self.args.hub_model_id or self._output.absolute().name
            card = self._card(format, model_id, card_in(folder), dense_control, **names)
            write_model_card(self._model, folder, format=format, **card)

    def push_to_hub(  # type: ignore[override]  # a Future where it does not block, as the original's text says
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        format: Format = "dense",
        **kwargs: Any,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Save the model to the output directory, and push its export with a model card.

        The card that `create_model_card` or you have written to the output directory, or else the one in the
        repository, keeps its text.

        Args:
            commit_message, blocking, token, revision, private: as for `Trainer.push_to_hub`.
            format: what to push: `"dense"`, `"packed"` or `"training"`, as for `push_to_hub` of a model.
            kwargs: what `create_model_card` takes.

        Raises:
            PermissionError, ConnectionError: as `push_to_hub` of a model; what was saved stays.
        """
        if not self._is_patched:
            return super().push_to_hub(commit_message, blocking, token, revision, private, **kwargs)
        reject_sharded(self._model)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = token if token is not None else self.args.hub_token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        push = self._staged(commit_message, token, revision or self.args.hub_revision, format, **kwargs)
        return push() if blocking else self._hub.run_as_future(push)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the export in the background, and after it the checkpoint, at a save.

        A private method of Trainer, as there is no public way: a Trainer with `push_to_hub` pushes the training
        checkpoint as the model here, before it calls `on_save`.
        """
        if not self._is_patched:
            return super()._push_from_checkpoint(checkpoint_folder)
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return None
        last: Any = self.push_in_progress
        if last is not None and not last.is_done() and not self.args.hub_always_push:
            return None
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        step, checkpoints = self.state.global_step, self._checkpoints
        token, revision = self.args.hub_token, self.args.hub_revision
        message = f"Training in progress, step {step}"
        try:
            reject_sharded(self._model)
            push_export = self._staged(message, token, revision, "dense")
        except (OSError, ValueError) as error:
            logger.warning(f"nothing was pushed at step {step}, training goes on: {error}")
            return None

        def push() -> None:
            try:
                push_export()
                if checkpoints is not None:
                    self._hub.upload_folder(
                        repo_id=str(self.hub_model_id),
                        folder_path=checkpoint_folder,
                        path_in_repo=checkpoints.replace("*", str(step)),
                        commit_message=f"{message}, checkpoint",
                        token=token,
                        revision=revision,
                    )
            except Exception as error:  # of the Hub, or of files that are gone
                logger.warning(f"a push in the background failed, training goes on: {error}")

        jobs: Any = [self._hub.run_as_future(push)]  # PushInProgress is annotated to take a single one
        self.push_in_progress = PushInProgress(jobs)  # type: ignore[assignment]  # annotated as None
        return None

    @property
    def _model(self) -> Any:
        return self.accelerator.unwrap_model(model_of(self), keep_torch_compile=False)

    @property
    def _is_patched(self) -> bool:
        return isinstance(self._model, PreTrainedModel) and patched_config(self._model) is not None

    @property
    def _output(self) -> Path:
        return Path(str(self.args.output_dir))

    @property
    def _checkpoints(self) -> str | None:
        return _FOLDERS.get(HubStrategy(self.args.hub_strategy)) if self.args.push_to_hub else None

    def _staged(
        self, message: str | None, token: str | None, revision: str | None, format: Format, **kwargs: Any
    ) -> Callable[[], CommitInfo]:
        """Write the files to push, as they are now, to a folder of their own; returns the call that pushes them."""
        repo_id, output = str(self.hub_model_id), self._output
        card = self._card(format, repo_id, card_in(output) or card_on_hub(repo_id, token, revision), **kwargs)
        output.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix="_push-", dir=output))
        try:
            stage_model(self._model, stage, format, self.processing_class, **card)
            files = (path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file())
            for name in filter_repo_objects(files, ignore_patterns=_NOT_SHARED):
                if not (stage / name).exists():
                    (stage / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(output / name, stage / name)
        except BaseException:
            shutil.rmtree(stage)
            raise

        def push() -> CommitInfo:
            try:
                return commit_folder(
                    stage, repo_id, commit_message=message or "Upload model", token=token, revision=revision
                )
            finally:
                shutil.rmtree(stage)

        return push

    def _card(
        self,
        format: Format,
        model_id: str,
        existing: ModelCard | None,
        dense_control: Control | None = None,
        **names: Any,
    ) -> dict[str, Any]:
        """The arguments of `write_model_card`, from this run and from `names`, those of `Trainer.create_model_card`."""
        # It infers the license of the base model. (And data sets, from how they were read: those are no names.)
        summary = TrainingSummary.from_trainer(self, **names)
        hyperparameters = extract_hyperparameters_from_trainer(self)
        hyperparameters.pop("optimizer", None)  # that of the arguments; the method may have made another
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # out of Accelerate's
        if optimizer is not None:
            settings = {key: value for key, value in optimizer.defaults.items() if key in ("betas", "eps", "momentum")}
            settings["weight_decay"] = self.args.weight_decay
            text = ", ".join(f"{key}={value}" for key, value in settings.items())
            hyperparameters["optimizer"] = f"{type(optimizer).__name__}({text})"
        return {
            "model_id": model_id,
            "existing": existing,
            "tags": summary.tags,
            "language": names.get("language"),
            "license": names.get("license") or (None if existing and existing.data.get("license") else summary.license),
            "datasets": names.get("dataset_tags"),
            "base_model": names.get("finetuned_from"),
            "log_history": self.state.log_history,
            "hyperparameters": hyperparameters,
            "dense_control": dense_control,
            "checkpoints": None if format == "training" else self._checkpoints,
        }
