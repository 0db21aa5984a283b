"""Which masked decay? Short probes of the warm-up decide, before the training that counts (Hu et al. 2024, 4.3).

A decay factor is feasible when the masks of a run with it flip somewhat less than the would-be masks of dense training:
mu = (flip rate, sparse) / (flip rate, dense) within [0.60, 0.95]. At mu >= 1 masks never settle; far below, they freeze
before anything is learnt.
"""

import copy
import random
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import sparse24_kernels as kernels
import torch
from torch import nn
from transformers import Trainer, get_scheduler

from .controller import Sparse24Controller
from .patching import patched_config, set_phase, sparse_layers

CANDIDATES = (2e-6, 6e-6, 2e-5, 6e-5, 2e-4, 6e-4)
FEASIBLE = (0.60, 0.95)


@dataclass(frozen=True)
class DecayTuning:
    """What the probes found. Print it.

    Attributes:
        dense_flip_rate: of the would-be masks of dense training, at the end of its probe.
        mu: candidate to its flip rate over the dense one.
        chosen: the feasible candidate whose mu is nearest to the middle of [0.60, 0.95]; None if none is feasible.
    """

    dense_flip_rate: float
    mu: dict[float, float]
    chosen: float | None

    def __str__(self) -> str:
        low, high = FEASIBLE
        lines = [f"masked decay, by flip rate over that of dense training ({self.dense_flip_rate:.2e} per step)"]
        for candidate, mu in self.mu.items():
            verdict = "chosen" if candidate == self.chosen else "feasible" if low <= mu <= high else ""
            lines.append(f"{candidate:>9.1e}  mu {mu:5.3f}  {verdict}".rstrip())
        return "\n".join(lines)


def tune_masked_decay(trainer: Trainer, candidates: tuple[float, ...], steps: int) -> DecayTuning:
    """Probe dense training and each candidate for `steps` optimizer steps, all from the trainer's model as it is.

    Every probe trains a copy of the model with a fresh optimizer, the real run's learning rates and the first batches
    of its data. The trainer's model, optimizer, random states and data order are left untouched.
    """
    if not candidates:
        raise ValueError("candidates=(): give at least one decay factor to try")
    bad = [value for value in candidates if not isinstance(value, int | float) or not 0 <= value < float("inf")]
    if bad:
        raise ValueError(f"candidates={tuple(candidates)!r}: {bad} are no finite numbers >= 0")
    config = patched_config(trainer.model)
    if config is None or config.masked_decay is None:
        method = None if config is None else config.method
        raise ValueError(f"method {method!r} has no masked_decay to tune")
    if steps < 4:
        raise ValueError(f"steps={steps}: a probe needs at least 4 optimizer steps")
    if trainer.optimizer is not None and trainer.state.global_step == 0:
        raise ValueError("the probes make their own optimizers: leave `optimizers=` to the Trainer")
    dense = _probe(trainer, None, steps)
    if dense == 0:
        raise ValueError(f"no mask flipped in {steps} dense steps; probe longer, or raise the learning rate")
    mu = {candidate: _probe(trainer, candidate, steps) / dense for candidate in candidates}
    low, high = FEASIBLE
    feasible = [candidate for candidate in mu if low <= mu[candidate] <= high]
    middle = (low + high) / 2
    return DecayTuning(dense, mu, min(feasible, key=lambda value: abs(mu[value] - middle), default=None))


def _probe(trainer: Trainer, decay: float | None, steps: int) -> float:
    """Train a copy, dense where `decay` is None; the mean flip rate of the last quarter of its steps."""
    with _untouched_randomness():
        model = copy.deepcopy(trainer.model)
        args = trainer.args
        total = args.max_steps if args.max_steps > 0 else max(steps, _planned_steps(trainer))
        optimizer = _fresh_optimizer(trainer, model)
        scheduler = get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(total), total)
        _set_decay(model, 0.0 if decay is None else decay)
        controller = Sparse24Controller(model, optimizer, total_steps=total, seed=args.seed, metrics_interval=total)
        if decay is None:
            set_phase(model, "dense")
        flips, last = [], None
        weights = sum(layer.weight.numel() for layer in sparse_layers(model).values())
        batches = iter(trainer.get_train_dataloader())
        for step in range(steps):
            micro_batches = list(islice(batches, args.gradient_accumulation_steps))
            if not micro_batches:
                raise ValueError(f"the data ends after {step} steps; probe for fewer than steps={steps}")
            for micro_batch in micro_batches:
                with trainer.accelerator.autocast():
                    loss = trainer.compute_loss(model.train(), trainer._prepare_inputs(micro_batch))
                (loss / len(micro_batches)).backward()
                controller.after_micro_step()
            if args.max_grad_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            if decay is not None:
                controller.before_step()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if decay is not None:
                controller.after_step()
            if step >= steps - steps // 4 - 1:
                masks = list(_fresh_masks(model))
                if last is not None:
                    flips.append(int(kernels.count_flips(last, masks).sum()) / weights)
                last = masks
        return sum(flips) / len(flips)


def _fresh_masks(model: nn.Module):
    """The masks that the weights ask for now, whatever masks the layers hold."""
    for layer in sparse_layers(model).values():
        state = layer.method.init_state(layer.weight.detach(), layer.input_dim)
        yield layer.method.mask(layer.weight.detach(), layer.input_dim, state, packed=True)


def _fresh_optimizer(trainer: Trainer, model: nn.Module) -> torch.optim.Optimizer:
    kept, trainer.optimizer = trainer.optimizer, None
    try:
        return trainer.create_optimizer(model)
    finally:
        trainer.optimizer = kept


def _set_decay(model: nn.Module, decay: float) -> None:
    config = replace(patched_config(model), masked_decay=decay)
    for layer in sparse_layers(model).values():
        layer.method.config = config


def _planned_steps(trainer: Trainer) -> int:
    batches = len(trainer.get_train_dataloader())
    return int(batches / trainer.args.gradient_accumulation_steps * trainer.args.num_train_epochs)


@contextmanager
def _untouched_randomness():
    """Give every probe the same random states, and the caller theirs back."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
