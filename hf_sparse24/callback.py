"""Sparse24Callback: the controller in any Trainer. The only file that knows Trainer's events."""

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from .controller import Sparse24Controller
from .patching import patched_config


class Sparse24Callback(TrainerCallback):
    """Trains a patched model's sparsity in any `transformers.Trainer`, TRL's included.

    `Sparse24Trainer` has it already. For another trainer, add it with `Sparse24Callback.add_to(trainer)`, which puts
    it in front of the reporting callbacks, so that TensorBoard and W&B see `flip_rate`, `kept_magnitude` and
    `sparse_phase`; passed as `callbacks=[Sparse24Callback()]` it works too, but then only the console and
    `trainer_state.json` show them.

    It keeps no state of its own in checkpoints: the phase follows from the step, masks and scales are buffers of the
    model, and MVUE's streams follow from seed, process, step, micro-step and layer. So a resumed run equals an
    uninterrupted one.

    Attributes:
        controller: the run's `Sparse24Controller`, None before training starts.
    """

    def __init__(self):
        self.controller: Sparse24Controller | None = None

    @classmethod
    def add_to(cls, trainer: Trainer) -> "Sparse24Callback":
        """Install the callback in `trainer`, ahead of the callbacks that report logs; returns it."""
        callback = cls()
        trainer.callback_handler.callbacks.insert(0, callback)
        return callback

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        config = patched_config(kwargs["model"])
        if args.fp16 and config is not None and config.fp8:
            # A loss scale finds its size by overflowing, and FP8 refuses to round what has overflowed.
            raise ValueError("fp16=True and fp8=True: loss scaling overflows on purpose; train with bf16=True instead")
        self.controller = Sparse24Controller(
            kwargs["model"],
            kwargs["optimizer"],
            total_steps=state.max_steps,
            seed=args.seed + args.process_index,
            step=state.global_step,
            metrics_interval=max(1, int(state.logging_steps)),
        )

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self.controller.after_micro_step()

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        _unscale(kwargs["optimizer"])
        self.controller.before_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self.controller.after_step()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs=None, **kwargs):
        if self.controller is None or "loss" not in logs:  # evaluation and the closing summary
            return
        metrics = self.controller.metrics()
        logs.update(metrics)
        state.log_history[-1].update(metrics)  # the Trainer has copied `logs` there already


def _unscale(optimizer: torch.optim.Optimizer) -> None:
    """Divide fp16 gradients by the loss scale, if nobody has: the Trainer does so only where it clips them.

    `optimizer` is accelerate's wrapper; a GradScaler notes by itself that an optimizer's gradients are unscaled.
    """
    scaler = getattr(optimizer, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return
    inner = optimizer.optimizer
    if scaler._per_optimizer_states[id(inner)]["stage"].name == "READY":
        scaler.unscale_(inner)
