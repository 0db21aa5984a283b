"""The search for a masked decay by probes of the warm-up: `Sparse24Trainer.tune_masked_decay` says how and why."""

import copy
import random
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from sparse24_kernels.masks import count_flips
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl, TrainerState

from ..methods.masked_decay import MaskedDecayMethod
from ..progress import get_logger
from ..run import SparseRun, set_phase, sparse_run
from ..tables import TableReport
from ..weights.sparse_weight import SparseWeight, sparse_weights
from .callback import Sparse24Callback
from .checks import model_of
from .step_masks import fresh_masks

logger = get_logger(__name__)

CANDIDATES = (2e-6, 6e-6, 2e-5, 6e-5, 2e-4, 6e-4, 2e-3, 6e-3, 2e-2, 6e-2)
FEASIBLE = (0.60, 0.95)  # mu; at 1 and above masks never settle, and far below they freeze before anything is learnt
MIDDLE = sum(FEASIBLE) / 2
MIN_STEPS = 4
STEPS_WITHOUT_WARM_UP = 100


@dataclass(frozen=True)
class DecayTuning(TableReport):
    """The flip rates that the probes measured, and the decay that follows. Print it.

    Attributes:
        dense_flip_rate: of the would-be masks of dense training, at the end of its probe.
        mu: of the candidates that were probed, lowest first: flip rate over the dense one.
        chosen: the feasible candidate whose mu is nearest to the middle of [0.60, 0.95]; None if none is feasible.
    """

    dense_flip_rate: float
    mu: dict[float, float]
    chosen: float | None
    _columns = ("masked_decay", "mu", "")

    def _title(self) -> str:
        return f"masked decay, by flip rate over that of dense training ({self.dense_flip_rate:.2e} per step)"

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        for candidate, mu in self.mu.items():
            is_feasible = FEASIBLE[0] <= mu <= FEASIBLE[1]
            yield f"{candidate:.1e}", f"{mu:5.3f}", "chosen" if candidate == self.chosen else "feasible" * is_feasible


def tune_masked_decay(trainer: Trainer, candidates: tuple[float, ...], steps: int | None) -> DecayTuning:
    """Probe dense training and, by bisection, candidates: each by the trainer's own `train()` on a copy of the model;
    sparse ones leave out the run's dense phases, where no decay acts. The trainer and its random states stay as is."""
    run = sparse_run(model_of(trainer))
    if run is None or run.facts.finished or not isinstance(run.method, MaskedDecayMethod):
        raise ValueError(f"method {run and run.config.method!r} has no masked_decay that acts now; set a number")
    if trainer.optimizer is not None and trainer.state.global_step == 0:
        raise ValueError("the probes make their own optimizers: leave `optimizers=` to the Trainer")
    dense = probe(trainer, None, steps)
    if dense == 0:
        way = "tune_masked_decay(steps=...), raise the learning rate, or set masked_decay to a number"
        raise ValueError(f"no mask flipped at the end of the dense probe: unfreeze weights, probe longer, by {way}")
    mu: dict[float, float] = {}

    def below_dense(candidate: float) -> float:
        mu[candidate] = probe(trainer, candidate, steps) / dense
        logger.info(f"masked_decay={candidate:.1e}: masks flip {mu[candidate]:.3f} times as often as in dense training")
        return -mu[candidate]

    bisect_left(sorted(set(candidates)), -MIDDLE, key=below_dense)
    feasible = [candidate for candidate in mu if FEASIBLE[0] <= mu[candidate] <= FEASIBLE[1]]
    chosen = min(feasible, key=lambda value: abs(mu[value] - MIDDLE), default=None)
    return DecayTuning(dense, dict(sorted(mu.items())), chosen)


def probe(trainer: Trainer, decay: float | None, steps: int | None) -> float:
    """Train a copy, dense where `decay` is None; the mean flip rate of the last quarter of its steps."""
    with torch.random.fork_rng(), ExitStack() as states:  # probes have the same random states, and the caller keeps its
        states.callback(random.setstate, random.getstate())
        states.callback(np.random.set_state, np.random.get_state())
        model = copy.deepcopy(model_of(trainer))
        run, watch = cast(SparseRun, sparse_run(model)), _Watch(sparse_weights(model_of(trainer)), steps)
        run.change_settings(masked_decay=decay or 0.0)
        copied = copy.copy(trainer)
        vars(copied)["model_init"] = None  # it would make another model
        if trainer.is_in_train:
            copied.neftune_noise_alpha = None  # the copied model has its noise already
        copied.model = copied.model_wrapped = model
        copied.optimizer = copied.lr_scheduler = None
        copied.args = args = copy.copy(trainer.args)
        args.save_strategy = args.eval_strategy = args.logging_strategy = "no"
        args.load_best_model_at_end, args.push_to_hub, args.report_to = False, False, []
        copied.callback_handler = CallbackHandler([DefaultFlowCallback(), watch], model, None, None, None)
        if decay is None:
            set_phase(model, "dense")
        else:
            run.change_settings(**{name: 0 for name in ("dense_start", "dense_tail") if hasattr(run.config, name)})
            Sparse24Callback.add_to(copied, check_reference=False)
        copied.create_accelerator_and_postprocess()  # another loss scale
        copied.train()
    done = copied.state.global_step
    if done < watch.steps or not watch.flips:
        way = f"give steps at least {MIN_STEPS} and at most those of the run, or set masked_decay to a number"
        raise ValueError(f"a probe of steps={watch.steps} ended after {done}: {way}")
    return sum(watch.flips) / len(watch.flips)


class _Watch(TrainerCallback):
    """Counts the flips of the masks that the weights ask for, whatever masks the model holds, and ends the probe."""

    def __init__(self, weights: dict[str, SparseWeight], steps: int | None):
        self.weights, self.steps = weights, steps or 0
        self.size = sum(weight.parameter.numel() for weight in weights.values())
        self.flips: list[float] = []
        self.last: list[Tensor] | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        warm_up = args.get_warmup_steps(state.max_steps)
        self.steps = self.steps or (warm_up if warm_up >= MIN_STEPS else min(STEPS_WITHOUT_WARM_UP, state.max_steps))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        if state.global_step >= self.steps - self.steps // 4:
            masks = fresh_masks(self.weights, kwargs["model"])
            if self.last is not None:
                self.flips.append(int(count_flips(self.last, masks).sum()) / self.size)
            self.last = masks
        control.should_training_stop |= state.global_step >= self.steps
