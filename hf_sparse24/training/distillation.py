"""Distillation: a teacher's predictions, and its hidden states if asked, as a second target beside the labels.

    loss = (1 - weight) * cross entropy + weight * T^2 KL(teacher || student) + hidden_weight * SquareHead

The cross entropy is the loss that the model itself returns. The KL divergence compares the predictions at temperature
T, SquareHead the hidden states, both at the tokens whose prediction has a label. Both are sums over tokens, divided as
the Trainer divides the cross entropy, so that micro-batches add up to one batch.

No tensor of the size [tokens, vocabulary] is made for the teacher, whose logits come in chunks of tokens. The gradient
of the student's logits is made in the same pass, and is the one such tensor that a step holds in addition. (TRL and
Liger have losses that project the student's hidden states in chunks as well. They go around the model's own forward
pass, which adapters, wrappers and auxiliary losses need, and Liger's runs on a GPU alone.)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import kl_div, pad
from transformers import Trainer

from .teacher import Chunks, Teacher, shifts_labels

IGNORED = -100
EPS = 1e-6
"""Keeps SquareHead finite where a teacher's hidden state is zero."""


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """How much the teacher of a `Sparse24Trainer` counts beside the labels.

        loss = (1 - weight) * cross entropy + weight * T^2 KL(teacher || student) + hidden_weight * SquareHead

    The defaults are AST's for GPT-2 (arXiv 2407.20584): 1/3 cross entropy + 2/3 KL at T = 2. CAST (arXiv 2509.25996)
    has weight=1/3 and temperature=1, and found hidden states to hurt.

    Args:
        weight: of the KL divergence, in [0, 1]; the cross entropy has the rest.
        temperature: T > 0, which divides both models' logits. The KL divergence is multiplied by T^2, so that its
            gradients keep their size.
        hidden_weight: of SquareHead, >= 0: squared difference of the hidden states behind every block over the mean
            square of the teacher's, summed over blocks, averaged over tokens (arXiv 2310.06927). Ours takes that mean
            token by token: the mean of a whole batch is that of its few largest tokens, and differs by micro-batch.

    Raises:
        ValueError: a number out of its range, or weights that give the teacher no effect.

    Examples:
        >>> DistillationConfig(weight=0.5, temperature=1.0)
        DistillationConfig(weight=0.5, temperature=1.0, hidden_weight=0.0)
    """

    weight: float = 2 / 3
    temperature: float = 2.0
    hidden_weight: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{name}={value!r}: must be a finite number >= 0")
        if self.weight > 1:
            raise ValueError(f"weight={self.weight!r}: must be in [0, 1]; the cross entropy has the rest")
        if self.temperature == 0:
            raise ValueError("temperature=0: must be above 0")
        if not self.weight and not self.hidden_weight:
            raise ValueError("weight=0 and hidden_weight=0: the teacher would have no effect; leave out teacher=")


def predicting_positions(labels: Tensor, shifted: bool) -> Tensor:
    """The flat positions [n] whose logits predict a label: `labels` [batch, tokens] without -100, and one to the left
    where the loss shifts them."""
    targets = pad(labels, (0, 1), value=IGNORED)[..., 1:] if shifted else labels
    return (targets != IGNORED).flatten().nonzero().squeeze(1)


def kl_divergence(logits: Tensor, chunks: Chunks, temperature: float) -> Tensor:
    """T^2 KL(teacher || student) at temperature T, summed over the tokens of `chunks`: a 0-d tensor in at least fp32.

    `logits` [..., vocabulary] are the student's. Where one vocabulary is longer, what both have counts: the rest is
    padding. Can be differentiated once, and backward can run once.
    """
    total: Tensor = _KLDivergence.apply(logits, chunks, temperature)
    return total


class _KLDivergence(torch.autograd.Function):
    """Makes the gradient, T (student - teacher) of the probabilities, in forward, where each chunk is at hand."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, chunks: Chunks, temperature: float) -> Tensor:
        flat = logits.detach().flatten(0, -2)
        dtype = torch.promote_types(flat.dtype, torch.float32)
        gradient = torch.zeros_like(flat) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), dtype=dtype, device=flat.device)
        for positions, of_teacher in chunks:
            shared = min(flat.shape[-1], of_teacher.shape[-1])
            ours = (flat[positions, :shared].to(dtype) / temperature).log_softmax(-1)
            theirs = (of_teacher[:, :shared].to(flat.device, dtype) / temperature).log_softmax(-1)
            total += temperature**2 * kl_div(ours, theirs, reduction="sum", log_target=True)
            if gradient is not None:
                difference = ours.exp_().sub_(theirs.exp_()).mul_(temperature)
                gradient[positions, :shared] = difference.to(gradient.dtype)
        ctx.save_for_backward(gradient)
        ctx.shape = logits.shape
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(grad).view(ctx.shape), None, None  # in place: autograd refuses a second backward pass


def square_head(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], positions: Tensor) -> Tensor:
    """SquareHead of two models' hidden states, each [batch, tokens, hidden], summed over blocks and `positions`. The
    first of them, the embeddings, are left out."""
    total = torch.zeros((), device=ours[0].device)
    for own, other in zip(ours[1:], theirs[1:]):
        own, other = own.flatten(0, -2)[positions].float(), other.flatten(0, -2)[positions].to(own.device).float()
        total = total + ((own - other).square().mean(-1) / (other.square().mean(-1) + EPS)).sum()
    return total


@dataclass(frozen=True)
class LossParts:
    """Sums of what losses are made of, over the micro-batches since the optimizer step `since`."""

    since: int
    sums: dict[str, Tensor]

    def plus(self, parts: Mapping[str, Tensor], factor: float) -> "LossParts":
        return LossParts(self.since, {name: self.sums.get(name, 0) + factor * part for name, part in parts.items()})

    def means(self, step: int) -> dict[str, Tensor]:
        """Per optimizer step, as the Trainer logs `loss`."""
        return {name: total / max(step - self.since, 1) for name, total in self.sums.items()}


class Distiller:
    """The loss of a Trainer whose model has a teacher.

    Args:
        trainer: whose `model` learns; its processing class, where it is a tokenizer, tells which logits are padding.
        teacher: a model, or the name or directory of one (see `Teacher`).
        config: how much it counts.

    Raises:
        ValueError: the Trainer computes its loss in another way, the model is no causal or masked language model, or
            the teacher shares weights with the model, or has other tokens, layers or sizes than it must have.
    """

    def __init__(self, trainer: Trainer, teacher: nn.Module | str | PathLike, config: DistillationConfig):
        self.args, self.config = trainer.args, config
        if self.args.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={self.args.label_smoothing_factor}: the teacher's predictions smooth the "
                f"labels already; leave it at 0, or leave out teacher="
            )
        if trainer.compute_loss_func is not None:
            raise ValueError("compute_loss_func and teacher= both say what the loss is; pass one of them")
        self.shifted = shifts_labels(trainer.model)
        self.teacher = Teacher(teacher, trainer.model, trainer.processing_class, bool(config.hidden_weight))
        self.teacher.to(self.args.device)

    def student_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What the student is called with."""
        return {**inputs, "output_hidden_states": True} if self.config.hidden_weight else dict(inputs)

    def loss(
        self, loss: Tensor, outputs: Any, inputs: Mapping[str, Any], num_items: Tensor | int | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss with the teacher's terms, and its parts without gradients, for the log.

        Args:
            loss: the cross entropy as `Trainer.compute_loss` returns it; one per device under DataParallel.
            outputs: the student's: `logits` [batch, tokens, vocabulary], and `hidden_states` where they count.
            inputs: the batch, with `labels` or `shift_labels` [batch, tokens].
            num_items: the labels of the whole step, as `Trainer.compute_loss` gets it.

        Raises:
            ValueError: there are no logits, or no label for each.
        """
        logits, positions = self._predictions(outputs, inputs)
        share = self._share(len(positions), num_items)
        parts = {"cross_entropy": loss.detach().mean()}
        total = (1 - self.config.weight) * loss
        hidden, states = self.teacher.run(inputs)
        if self.config.weight:
            chunks = self.teacher.logits(hidden, inputs, positions)
            kl = kl_divergence(logits, chunks, self.config.temperature) * share
            parts["distillation_loss"] = kl.detach()
            total = total + self.config.weight * kl
        if self.config.hidden_weight:
            square = square_head(outputs["hidden_states"], states, positions) * share
            parts["hidden_state_loss"] = square.detach()
            total = total + self.config.hidden_weight * square
        return total, parts

    def _predictions(self, outputs: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The student's logits, and the positions where they predict a label."""
        logits = outputs.get("logits") if isinstance(outputs, dict) else None
        if logits is None:
            raise ValueError(
                "distillation needs the model's logits, and it returned none; leave use_liger_kernel and other fused "
                "losses off, which do not make them"
            )
        shifted = inputs.get("shift_labels")
        labels = inputs.get("labels") if shifted is None else shifted
        if labels is None or labels.shape != logits.shape[:2]:
            found = "there are none" if labels is None else f"they are {list(labels.shape)}"
            raise ValueError(
                f"distillation needs a label for each of the logits, {list(logits.shape[:2])}, and {found}; prompt "
                f"tuning, which adds tokens of its own, is not supported"
            )
        return logits, predicting_positions(labels, self.shifted and shifted is None).to(logits.device)

    def _share(self, tokens: int, num_items: Tensor | int | None) -> Tensor | float:
        """What one token counts, as `Trainer.compute_loss` has it for the cross entropy."""
        if num_items is None:
            return 1 / max(tokens, 1)
        step = torch.as_tensor(num_items, device=self.args.device).flatten()[0]  # DataParallel repeats it
        if self.args.average_tokens_across_devices:
            return self.args.world_size / step
        return 1 / (step * max(self.args.n_gpu, 1))
