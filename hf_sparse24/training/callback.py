"""Sparse24Callback: the controller in any Trainer. The only file that knows Trainer's events."""

from pathlib import Path
from typing import cast

from accelerate.utils import reduce
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState, PrinterCallback, ProgressCallback
from transformers.trainer_utils import HubStrategy

from ..extensions import extensions
from ..methods.base import DENSE_PHASE
from ..patching.ownership import match_config
from ..progress import get_logger
from ..run import sparse_run
from ..weights.sparse_weight import sparse_weights
from ..weights.storage import PACKED
from .checks import check_masters_unread, check_reference_of, model_of
from .controller import Sparse24Controller, State
from .distillation import Distiller, find_distiller
from .resume import check_resumed, restore
from .run_log import OF_LAYER, ConsoleFilter, RunLog
from .step_masks import measuring_interval

logger = get_logger(__name__)


class Sparse24Callback(TrainerCallback, ExportableState):
    """Trains a patched model's sparsity in any `transformers.Trainer`, TRL's included.

    `Sparse24Trainer` has it. `Sparse24Callback.add_to(trainer)` installs it in another trainer, which refuses it as
    `callbacks=[Sparse24Callback()]`.

    Each log gets `flip_rate`, `kept_magnitude`, `sparse_phase` and the metrics of the method. Trackers (TensorBoard,
    W&B, trackio) and `sparse24_log.jsonl` in the output directory also get `flip_rate/<layer>`; the console and
    `trainer_state.json` do not.

    A resumed run equals an uninterrupted one.

    Attributes:
        controller: the run's `Sparse24Controller`; None before training starts, and for a packed model, whose adapters
            train.
        run_log: where the world's first process records the run; None elsewhere, and where nothing is logged.
        checkpoint: the directory that the trainer resumes from; None where none is known.
    """

    def __init__(self):
        self.controller: Sparse24Controller | None = None
        self.run_log: RunLog | None = None
        self.checkpoint: str | Path | None = None
        self._trainer: Trainer | None = None
        self._distiller: Distiller | None = None
        self._logged_step = 0

    def state(self) -> State:
        # The Trainer writes it into trainer_state.json.
        controller = {} if self.controller is None else self.controller.state_dict()
        return {"args": {}, "attributes": {}, "controller": controller}

    @classmethod
    def add_to(cls, trainer: Trainer, check_reference: bool = True) -> "Sparse24Callback":
        """Install the callback in a Trainer, before those that report logs. Call it before `trainer.train()`.

        Args:
            trainer: any `transformers.Trainer` whose model is patched.
            check_reference: compare the reference model that TRL's trainers (DPO, KTO, GRPO, RLOO) load with what the
                patched policy computes; False takes any.

        Returns:
            The trainer's callback, or a new one.

        Raises:
            ValueError: a model that is not patched; a reference that is not what the policy is at the start; or the
                trainer reads dense master weights, such as that of a sparse output embedding.

        Examples:
            >>> from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
            >>> model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("gpt2"))
            >>> _ = patch_model(model)
            >>> ids = torch.randint(300, (16,))
            >>> data = [{"input_ids": ids, "labels": ids}] * 16
            >>> arguments = TrainingArguments("out", max_steps=2, report_to="none")
            >>> trainer = Trainer(model, arguments, train_dataset=data)
            >>> callback = Sparse24Callback.add_to(trainer)
            >>> output = trainer.train()
            >>> callback.controller.step
            2
        """
        if sparse_run(model := model_of(trainer)) is None and not sparse_weights(model, PACKED):
            way = "call patch_model(model) first, or load an export by quantization_config=Sparse24Config(...)"
            raise ValueError(f"the model of the trainer is not patched: {way}, which keeps its zeros")
        callback = next((present for present in trainer.callback_handler.callbacks if isinstance(present, cls)), cls())
        callback._put_first(trainer)
        check_masters_unread(trainer)
        if check_reference and not trainer.state.global_step:
            check_reference_of(trainer)
        if callback._trainer is None:
            callback._trainer = trainer
            load, make_card = trainer._load_optimizer_and_scheduler, trainer.create_model_card

            def load_and_tell(checkpoint: str | None) -> None:
                """The Trainer calls it with the checkpoint's directory before `on_train_begin`, with every engine."""
                if checkpoint is not None:
                    match_config(model_of(trainer))  # as the checkpoint's config names layers
                    check_resumed(model_of(trainer), checkpoint, warn=False)  # before another optimizer is loaded
                    callback.checkpoint = checkpoint
                    callback._put_first(trainer)
                load(checkpoint)

            def make_true_card(*args: object, **kwargs: object) -> None:
                """`Trainer.push_to_hub` calls it before it uploads, and TRL before it saves."""
                make_card(*args, **kwargs)  # type: ignore[arg-type]  # whatever it was called with
                extensions.describe_checkpoint(trainer.model, trainer.args.output_dir, trainer.hub_model_id)

            trainer._load_optimizer_and_scheduler = load_and_tell  # type: ignore[method-assign]
            trainer.create_model_card = make_true_card  # type: ignore[method-assign]
        return callback

    def _put_first(self, trainer: Trainer) -> None:
        """In place of any other, as `restore_callback_states_from_checkpoint` makes one: two would decay twice."""
        callbacks = trainer.callback_handler.callbacks
        others = [callback for callback in callbacks if not isinstance(callback, Sparse24Callback | ConsoleFilter)]
        printing = [i for i, callback in enumerate(others) if isinstance(callback, ProgressCallback | PrinterCallback)]
        others.insert(min(printing, default=len(others)), ConsoleFilter())
        callbacks[:] = [self, *others]

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        model = kwargs["model"]
        self._distiller = find_distiller(model)
        if self._distiller is not None:
            self._distiller.reset()
        self._logged_step = state.global_step
        states = cast(dict[str, State], state.stateful_callbacks)  # by the names of classes
        saved = states.get(type(self).__name__, {})  # none where another trainer began the run
        states.setdefault(type(self).__name__, self.state())
        if sparse_run(model) is None and sparse_weights(model, PACKED):
            return  # adapters train around packed weights
        if self._trainer is None:
            why = "it sees neither the checkpoint of a resumed run nor TRL's reference model"
            raise ValueError(f"callbacks=[Sparse24Callback()]: {why}; call Sparse24Callback.add_to(trainer) instead")
        if state.global_step > state.max_steps:
            done = f"the checkpoint is at step {state.global_step} already"
            raise ValueError(f"max_steps={state.max_steps}: {done}; set more, or start a new run from its weights")
        if self.checkpoint is not None and state.global_step:
            # A model that has been trained before may be in a later phase than the checkpoint that it was loaded from.
            check_resumed(model, self.checkpoint)
            restore(model, self.checkpoint)
        numbers = {"seed": args.seed, "step": state.global_step, "metrics_interval": measuring_interval(args, state)}
        self.controller = Sparse24Controller(model, kwargs["optimizer"], state.max_steps, **numbers)
        if state.global_step and saved.get("controller"):  # in a new run it is of this trainer's last one
            of_this_run = {"step": state.global_step, "micro_step": 0, "seed": args.seed}
            self.controller.load_state_dict(saved["controller"] | of_this_run)
        records = state.is_world_process_zero and args.logging_strategy != "no"
        config = self.controller.run.config.to_dict()
        self.run_log = RunLog(args, state.global_step, config) if records else None
        if state.global_step >= state.max_steps:
            self.controller.end()  # resuming a run that is done, the Trainer takes one more step, after the schedule
            for group in kwargs["optimizer"].param_groups:
                group["lr"] = 0.0

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        if self.controller is not None and state.global_step < state.max_steps:
            self.controller.after_micro_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        if self.controller is not None and state.global_step <= state.max_steps:
            if not self.controller.is_running:
                raise RuntimeError("another Sparse24Controller has taken this model over, or called end() on this one")
            if self.controller.step < state.global_step:
                self.controller.skip_step()  # a GradScaler skipped it, and the Trainer counts it

    def on_push_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        if self._trainer is not None and args.push_to_hub and args.hub_strategy != HubStrategy.END:
            extensions.describe_checkpoint(kwargs["model"], args.output_dir, self._trainer.hub_model_id)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        if self.controller is None:
            return
        self.controller.end()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            run, last = self.controller.run, self.controller.run.phase
            restore(kwargs["model"], state.best_model_checkpoint)
            has_begun = (state.best_global_step or 0) > run.method.schedule(state.max_steps).start
            if run.phase == last != "sparse" and has_begun:
                run.record(finished=True)
            if run.is_dense and last != DENSE_PHASE:
                saved = f"{state.best_model_checkpoint} was saved in the {run.phase} phase, so the model is dense now"
                logger.warning(f"load_best_model_at_end: {saved}; load the last checkpoint for a sparse one")
        if self.run_log is not None:
            extensions.draw_training(Path(str(args.output_dir)), state.log_history)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs=None, **kwargs):
        if "loss" in logs:  # neither an evaluation nor the closing summary
            metrics = self._metrics(args, state, kwargs["model"])
            logs.update(metrics)
            state.log_history[-1].update(metrics)  # the Trainer has copied `logs` there already
            if self.controller is not None:  # these are for trackers: ConsoleFilter keeps them from the console
                logs.update({f"{OF_LAYER}{name}": x for name, x in self.controller.layer_flip_rates().items()})
        if self.run_log is not None:
            self.run_log.write(state.global_step, logs)

    def _metrics(self, args: TrainingArguments, state: TrainerState, model: nn.Module) -> dict[str, float]:
        """The numbers that this callback adds to a log of training."""
        metrics = {} if self.controller is None else self.controller.metrics()
        if self._distiller is None:
            return metrics
        # On every process: they average, and where weights are sharded, all of them compute.
        means = self._distiller.means(state.global_step - self._logged_step)
        # Shares of means are divided by the labels of all processes. Tensor parallelism repeats labels.
        shares = args.world_size // (getattr(model, "_tp_size", None) or 1)
        scale = shares if args.average_tokens_across_devices and not self._distiller.is_mean else 1
        self._distiller.reset()
        self._logged_step = state.global_step
        return {name: reduce(mean, "mean").item() * scale for name, mean in means.items()} | metrics
