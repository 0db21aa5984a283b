"""Sparse24Trainer and Sparse24Seq2SeqTrainer: Trainers that patch their model and run its sparsity."""

from os import PathLike
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from torch import nn, optim
from transformers import PreTrainedModel, Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput
from transformers.training_args import OptimizerNames

from ..config import Sparse24Config
from ..extensions import extensions
from ..methods import step_param_groups
from ..methods.masked_decay import AUTO
from ..patching.report import PRETRAINED, PatchReport
from ..patching.surgery import patch_model
from ..progress import get_logger
from ..run import patched_config, sparse_run
from ..weights.sparse_weight import sparse_weights
from ..weights.storage import PACKED
from .callback import Sparse24Callback
from .checks import check_engine, model_of
from .decay_search import CANDIDATES, DecayTuning, tune_masked_decay
from .distillation import DistillationConfig, distill
from .resume import check_resumed, checkpoint_damage, last_whole_checkpoint, save_config, saved_config
from .step_masks import trains

logger = get_logger(__name__)


class Sparse24Trainer(Trainer):
    """`transformers.Trainer` for 2:4 sparse training; takes everything a Trainer takes.

    It makes the optimizer of a method that has one, determines `masked_decay="auto"` before it trains, and its
    `push_to_hub` shares the export of the model.

    Args:
        model: as for `Trainer`: dense, patched or packed; None with `model_init=`, whose model is patched when it is
            made.
        args: as for `Trainer`. `ddp_broadcast_buffers` becomes False where it is None.
        trainer_args: further arguments of `Trainer`, by position.
        sparse24_config: how to patch the model. `None` keeps a model that is patched or packed as it is, and patches
            any other with `Sparse24Config()`.
        teacher: a language model of the same tokens, or its name or directory, whose predictions the model learns
            in addition to the labels (see `distill`). The log then has `cross_entropy` and `distillation_loss`.
        distillation: how much the teacher counts; None for `DistillationConfig()`.
        kwargs: further arguments of `Trainer`, by name.

    Attributes:
        patch_report: what `patch_model` said of the model; None before there is one, and for a packed model.
        decay_tuning: what the search for `masked_decay="auto"` found; None before it, and without it.

    Raises:
        ValueError: what `patch_model` raises, a teacher that does not fit the model, and, when training starts, a
            schedule that does not fit the number of steps, or probes that find no feasible decay.

    Examples:
        >>> from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments
        >>> model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("gpt2"))
        >>> ids = torch.randint(300, (16,))
        >>> data = [{"input_ids": ids, "labels": ids}] * 16
        >>> arguments = TrainingArguments("out", max_steps=2, logging_steps=1, report_to="none")
        >>> config = Sparse24Config(target_modules="all-linear")
        >>> trainer = Sparse24Trainer(model, arguments, train_dataset=data, sparse24_config=config)
        >>> output = trainer.train()
        >>> "flip_rate" in trainer.state.log_history[0]
        True
    """

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | None = None,
        args: TrainingArguments | None = None,
        *trainer_args: Any,
        sparse24_config: Sparse24Config | None = None,
        teacher: nn.Module | str | PathLike | None = None,
        distillation: DistillationConfig | None = None,
        **kwargs: Any,
    ):
        self.sparse24_config = sparse24_config
        self.patch_report: PatchReport | None = None
        self.decay_tuning: DecayTuning | None = None
        self._teaching: tuple[nn.Module, DistillationConfig | None] | None = None
        self._own_optimizer: optim.Optimizer | None = None
        if teacher is None and distillation is not None:
            raise ValueError(f"distillation={distillation!r} without a teacher; pass teacher=, or leave both out")
        if model is not None:
            self._patch(model)
        if args is not None and args.ddp_broadcast_buffers is None:
            args.ddp_broadcast_buffers = False  # masks and scales are the same on all processes
        super().__init__(model, args, *trainer_args, **kwargs)
        if teacher is not None:
            distiller = distill(model_of(self), teacher, distillation, self.processing_class)
            self._teaching = distiller.teacher, distillation
        self.sparse24_callback = Sparse24Callback.add_to(self)

    def call_model_init(self, trial=None) -> nn.Module:
        model = super().call_model_init(trial)
        self._patch(model)
        if self._teaching is not None:
            distill(model, *self._teaching, self.processing_class)
        return model

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As `Trainer.train`. A resumed run equals an uninterrupted one.

        Args:
            resume_from_checkpoint: a checkpoint's directory; True for the newest whole one in the output directory.
            args: further arguments of `Trainer.train`, by position.
            kwargs: further arguments of `Trainer.train`, by name.

        Returns:
            Steps, mean loss and metrics.

        Raises:
            ValueError: the checkpoint is cut short, or is of another method, pattern or choice of layers.
        """
        checkpoint = str(resume_from_checkpoint) if resume_from_checkpoint else None
        if resume_from_checkpoint is True:
            checkpoint = last_whole_checkpoint(str(self.args.output_dir))
        elif checkpoint is not None and (damage := checkpoint_damage(checkpoint)):
            raise ValueError(f"cannot resume from {checkpoint}: {damage}; name a whole checkpoint")
        if checkpoint is not None:
            check_resumed(model_of(self), checkpoint, warn=False)  # before files of another method are loaded
        if self.args.world_size > 1 and self.model_wrapped is self.model:
            # accelerate (1.15) leaves a model that evaluate() has prepared out of DDP: processes would train apart.
            self.accelerator._models.clear()
            vars(model_of(self)).pop("_is_accelerate_prepared", None)
        return super().train(checkpoint, *args, **kwargs)

    def _inner_training_loop(self, batch_size=None, args=None, resume_from_checkpoint=None, *rest, **named):
        # Only here are the model, `model_init`'s too, and the arguments of a hyperparameter trial those of the run.
        model = model_of(self)
        run = sparse_run(model)
        check_engine(self.accelerator, model)
        if self._own_optimizer is not None:  # of the run before, whose steps it has counted
            self.optimizer = self._own_optimizer = None
        # No decay acts once a run has finished.
        if run is not None and getattr(run.config, "masked_decay", None) == AUTO and not run.facts.finished:
            run.change_settings(masked_decay=_determined_decay(self, resume_from_checkpoint))
        return super()._inner_training_loop(batch_size, args, resume_from_checkpoint, *rest, **named)

    def tune_masked_decay(self, candidates: tuple[float, ...] = CANDIDATES, steps: int | None = None) -> DecayTuning:
        """Find the masked decay for this model, data and learning rate by probes of the run's warm-up.

        Trains a copy of the model densely, and copies with some of the candidates, from the same start on the same
        batches, and compares how fast masks flip at the end: mu = sparse / dense. mu falls as the decay grows, so
        bisection finds where it crosses the middle of [0.60, 0.95]. Costs a copy of the model, and `steps` training
        steps for each probe: 5 with the default candidates.

        Args:
            candidates: decay factors >= 0; by default the grid 2, 6 x 10^-k from 2e-6 to 6e-2, as in the paper.
            steps: optimizer steps of a probe, >= 4; None for those of the warm-up, as in the paper, or 100 without one.
                Shorter probes choose a smaller decay: early in the warm-up masks flip less.

        Returns:
            A `DecayTuning`; its `chosen` is the feasible candidate (mu in [0.60, 0.95]) nearest to the middle.

        Raises:
            ValueError: a candidate out of its range, a method without masked decay, sparse weights that are all frozen,
                data that ends before a probe does, or DeepSpeed, which takes no second model.

        Reference: Hu et al. 2024 (arXiv 2404.01847), section 4.3, which compares single refreshes; ours measures flips
        step by step over the last quarter of a probe.
        """
        if self.is_deepspeed_enabled:
            way = "call tune_masked_decay in a run without DeepSpeed, and set the number that it chooses"
            raise ValueError(f"masked_decay='auto' trains copies of the model, and DeepSpeed takes one: {way}")
        return tune_masked_decay(self, tuple(candidates), steps)

    def create_optimizer(self, model: nn.Module | None = None) -> optim.Optimizer:
        model = model_of(self) if model is None else model
        run = sparse_run(model)
        # Where nothing sparse trains, as below adapters or after a dense tail, any optimizer will do.
        is_trained = run is not None and not run.facts.finished and any(map(trains, sparse_weights(model).values()))
        if self.optimizer is None and run is not None and is_trained:
            args = self.args
            groups = step_param_groups(model, args.weight_decay, self.get_decay_parameter_names(model))
            total_steps = max(self.state.max_steps, args.max_steps)  # train() has set the first
            adam = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
            own = run.method.make_optimizer(groups, total_steps, **adam)
            if own is not None:
                _reject_another_optimizer(self, run.method.name)
                self.optimizer = self._own_optimizer = own
        return super().create_optimizer(model)

    def push_to_hub(  # type: ignore[override]  # fewer by position
        self, commit_message: str | None = "End of training", **options: Any
    ) -> Any:
        """Save the model to the output directory, and push its export with a model card.

        A model that is not patched, or is a `PeftModel`, is pushed as by `Trainer`.

        Args:
            commit_message: of the commit.
            options: what `push_to_hub` of a model takes, such as `format="packed"`, `private` and `dense_control`.

        Returns:
            Where the commit is, in the process that pushed; None in the others.
        """
        model = self.accelerator.unwrap_model(model_of(self), keep_torch_compile=False)
        if not isinstance(model, PreTrainedModel) or sparse_run(model) is None:
            return super().push_to_hub(commit_message, **options)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        self._finish_current_push()
        return extensions.push_run(self, model, {"commit_message": commit_message} | options)

    def _save_checkpoint(self, model: nn.Module, trial) -> None:
        if self.state.global_step > self.state.max_steps:
            return  # resuming a run that is done, the Trainer takes one more step, which no run could go on from
        if self.args.should_save:
            # Written last, it says that a checkpoint is whole: one that is written over is not, until then.
            directory = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            (directory / TRAINER_STATE_NAME).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            save_config(model_of(self), str(self.args.output_dir if output_dir is None else output_dir))

    def _patch(self, model: nn.Module) -> None:
        if sparse_weights(model, PACKED) and self.sparse24_config in (None, patched_config(model)):
            return  # its values train, or adapters around them
        self.patch_report = patch_model(model, self.sparse24_config)
        if self.patch_report.is_pretrained:
            logger.warning(f"{type(model).__name__}: {PRETRAINED}")


def _reject_another_optimizer(trainer: Trainer, method: str) -> None:
    """Raise ValueError where an optimizer is asked for that the method's own would silently replace."""
    args, defaults = trainer.args, (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED)
    values: list[tuple[str, object]] = [("optim", OptimizerNames(args.optim).value), ("optim_args", args.optim_args)]
    values += [("optimizer_cls_and_kwargs", trainer.optimizer_cls_and_kwargs)]
    if asked := [f"{name}={value!r}" for name, value in values if value and value not in defaults]:
        used = "learning_rate, adam_beta1, adam_beta2, adam_epsilon and weight_decay"
        way = "leave the others at their defaults, or take another method"
        raise ValueError(f"{', '.join(asked)}: method {method!r} makes its own optimizer, from {used}; {way}")


def _determined_decay(trainer: Sparse24Trainer, checkpoint: str | None) -> float:
    """The number in place of "auto": the one the checkpoint trained with, or a feasible one."""
    if not any(map(trains, sparse_weights(model_of(trainer)).values())):
        logger.warning("masked_decay='auto' becomes 0.0: every sparse weight is frozen, so no decay acts")
        return 0.0
    if checkpoint:
        decay = getattr(saved_config(checkpoint), "masked_decay", None)
        if not isinstance(decay, int | float):
            raise ValueError(f"masked_decay='auto': {checkpoint} does not say which decay it had; set it")
        return decay
    # The first process decides: what rounding does to flip rates must not let them choose differently.
    tuning = trainer.decay_tuning = broadcast_object_list([trainer.tune_masked_decay()])[0]
    logger.info(str(tuning))
    if tuning.chosen is None:
        way = "Call tune_masked_decay with candidates nearer to where mu crosses it, and set the number that it chooses"
        raise ValueError(f"masked_decay='auto': no candidate has mu in [0.60, 0.95]\n{tuning}\n{way}")
    return tuning.chosen


class Sparse24Seq2SeqTrainer(Sparse24Trainer, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` for 2:4 sparse training of encoder-decoder models, as of translation or speech.

    It takes the arguments of `Sparse24Trainer`. With `predict_with_generate=True` of its `Seq2SeqTrainingArguments` it
    evaluates what the sparse model generates.
    """
