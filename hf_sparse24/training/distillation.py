"""Distillation: a teacher's predictions as a second target; `DistillationConfig` has the loss.

The KL divergence is a sum over the tokens that have a label, divided as the model divides its cross entropy, so that
micro-batches add up. A step holds the logits of both models.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, kl_div, pad
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

IGNORED = -100
_OF_THE_STUDENT = ("labels", "shift_labels", "num_items_in_batch", "return_dict", "use_cache")


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """How much a teacher counts, and how much the labels.

        loss = (1 - weight) * cross entropy + weight * T^2 KL(teacher || student)

    The defaults are AST's for GPT-2 (arXiv 2407.20584): 1/3 cross entropy + 2/3 KL at T = 2.

    Args:
        weight: of the KL divergence, in (0, 1]; the model's own loss has the rest, with what it adds to the cross
            entropy, such as a router's loss.
        temperature: T > 0, which divides both models' logits. T^2 keeps the size of the gradients.

    Raises:
        ValueError: a number out of its range.

    Examples:
        >>> DistillationConfig(weight=0.5, temperature=1.0)
        DistillationConfig(weight=0.5, temperature=1.0)
    """

    weight: float = 2 / 3
    temperature: float = 2.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r}: must be a finite number above 0; without a teacher, pass none")
        if self.weight > 1:
            raise ValueError(f"weight={self.weight!r}: must be in (0, 1]; the cross entropy has the rest")


class KLDivergence(torch.autograd.Function):
    """T^2 KL(teacher || student) at temperature T of logits [tokens, vocabulary]: a 0-d tensor in at least fp32. The
    gradient is T (student - teacher) of the probabilities."""

    @staticmethod
    def forward(ctx, student, teacher, temperature):
        dtype = torch.promote_types(student.dtype, torch.float32)
        ours, theirs = ((logits.to(dtype) / temperature).log_softmax(-1) for logits in (student, teacher))
        loss = temperature**2 * kl_div(ours, theirs, reduction="sum", log_target=True)
        ctx.save_for_backward(ours.exp_().sub_(theirs.exp_()).mul_(temperature).to(student.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None, None


class Distiller:
    """The teacher's terms in the loss of a model, by a forward hook on `outputs.loss` while it trains, until `end`.

    A copy of the model, such as a probe of the decay search, learns from the same teacher.

    Attributes:
        teacher: the frozen model; out of any Module, so that no Trainer wraps or saves it.
        is_mean: whether losses are means over a micro-batch, not shares of one over the whole batch of a Trainer.
    """

    def __init__(self, model: nn.Module, teacher: nn.Module, config: DistillationConfig):
        self.config, self.teacher, self.shifted = config, teacher, shifts_labels(model)
        self._is_divided: bool | None = None  # whether the model divides its loss by the number that a Trainer passes
        self.reset()
        self._handle = model.register_forward_hook(self, with_kwargs=True)

    def end(self) -> None:
        """Let the model learn without the teacher."""
        self._handle.remove()

    def reset(self) -> None:
        """Start new means."""
        self._sums: dict[str, Tensor] = {}
        self._micro_batches, self.is_mean = 0, True

    def means(self, steps: int | None = None) -> dict[str, Tensor]:
        """The mean `cross_entropy` and `distillation_loss` since the last `reset`, 0-d tensors of this process: over
        `steps` optimizer steps where a Trainer divides losses by a whole step's labels, else over micro-batches."""
        count = self._micro_batches if self.is_mean or steps is None else steps
        return {name: total / max(count, 1) for name, total in self._sums.items()}

    def __deepcopy__(self, memo: object) -> Self:
        return self

    @torch.compiler.disable
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        if not model.training or not torch.is_grad_enabled():
            return None
        loss, logits = (outputs.get(x) if isinstance(outputs, dict) else None for x in ("loss", "logits"))
        if loss is None or logits is None:
            missing = "loss" if loss is None else "logits"
            way = "pass labels and leave return_dict on; no use_liger_kernel, label_smoothing_factor, compute_loss_func"
            raise ValueError(f"the model returned no {missing}, and a teacher needs them: {way}")
        names = inspect.signature(model.forward).parameters if args else ()
        outputs["loss"] = self.add_teacher(loss, logits, dict(zip(names, args)) | kwargs)
        return outputs

    def add_teacher(self, loss: Tensor, logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The loss with the teacher's terms."""
        labels = self._labels(logits, batch)
        positions = (labels != IGNORED).nonzero().squeeze(1)
        flat, tokens, number = logits.flatten(0, -2), len(positions), batch.get("num_items_in_batch")
        # Sums over tokens, divided as the model divides its own loss. Without tokens, that divides by 0 in the end.
        count: int | Tensor = tokens
        self.is_mean = number is None
        if number is not None:
            number = torch.as_tensor(number, device=logits.device).flatten()[0]
            # Some classes take the number, and return a mean. Found once, where the two differ; NaN shows nothing.
            if self._is_divided is None and tokens and number != tokens and bool(loss.isfinite().all()):
                mean = cross_entropy(flat.detach()[positions].float(), labels[positions])
                self._is_divided = bool((loss * number / tokens - mean).abs() <= (loss - mean).abs())
            count = tokens if self._is_divided is False else number
        theirs = self._teacher_logits(logits, batch)[positions]
        shared = min(flat.shape[-1], theirs.shape[-1])  # of a longer vocabulary the rest is padding
        kl = KLDivergence.apply(flat[positions, :shared], theirs[:, :shared], self.config.temperature)
        kl = kl * (1 / count if tokens else 0.0)
        own = loss.detach().mean()
        parts = {"cross_entropy": own if tokens else torch.zeros_like(own), "distillation_loss": kl.detach()}
        self._sums = {name: self._sums.get(name, 0) + part for name, part in parts.items()}
        self._micro_batches += bool(tokens)
        return (1 - self.config.weight) * loss + self.config.weight * kl

    def _labels(self, logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The label that each of the student's logits predicts, or `IGNORED`, flat."""
        shifted = batch.get("shift_labels")
        labels = batch.get("labels") if shifted is None else shifted
        if labels is None or labels.shape != logits.shape[:2]:
            found = "there are none" if labels is None else f"they are {list(labels.shape)}"
            needed = f"distillation needs a label for each of the logits, {list(logits.shape[:2])}, and {found}"
            raise ValueError(f"{needed}; prompt tuning, which adds tokens, is not supported")
        if self.shifted and shifted is None:  # by the model's loss: a position predicts the label to its right
            labels = pad(labels, (0, 1), value=IGNORED)[..., 1:]
        return labels.flatten().to(logits.device)

    @torch.no_grad()
    def _teacher_logits(self, logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The teacher's logits [tokens, vocabulary] for the student's, from those inputs that the teacher knows."""
        teacher: Any = self.teacher
        if getattr(teacher, "hf_device_map", None) is None:
            teacher.to(logits.device)
        takes = inspect.signature(teacher.forward).parameters
        takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in takes.values())
        names = [name for name in batch if (takes_all or name in takes) and name not in _OF_THE_STUDENT]
        cache = {"use_cache": False} if "use_cache" in takes else {}
        theirs = teacher(**{name: batch[name] for name in names}, return_dict=True, **cache).logits
        if theirs.shape[:2] != logits.shape[:2]:
            shapes = f"logits for {list(theirs.shape[:2])} tokens where the model has them for {list(logits.shape[:2])}"
            raise ValueError(f"the teacher has {shapes}; a tuned prompt is not supported")
        return theirs.flatten(0, 1).to(logits.device)


def distill(
    model: nn.Module,
    teacher: nn.Module | str | PathLike,
    config: DistillationConfig | None = None,
    tokenizer: Any = None,
) -> Distiller:
    """Let a model learn a teacher's predictions too, in any Trainer or training loop.

    The loss that the model returns in training is then that of `DistillationConfig`; in evaluation it is the model's
    own. `Sparse24Callback` logs its parts.

    Args:
        model: a causal or masked language model that returns its loss, patched or not; as the training gets it, before
            DDP, FSDP2 or torch.compile wraps it.
        teacher: a dense or sparse language model of the same tokens, or its name or directory, which is loaded in the
            dtype of its files. Frozen, and no part of checkpoints.
        config: how much the teacher counts; None for `DistillationConfig()`.
        tokenizer: of the model, where its vocabulary and the teacher's differ by padding.

    Returns:
        A `Distiller`, whose `end()` takes the teacher away and whose `means()` are the parts of the loss.

    Raises:
        ValueError: the model is no causal or masked language model, has a teacher already, or the teacher shares
            weights with it, or has other tokens.
    """
    if find_distiller(model) is not None:
        raise ValueError("the model has a teacher already; call end() of what distill returned first")
    # It tells padding of the vocabulary from tokens; a processor that is no tokenizer is ignored.
    known = tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None
    if isinstance(teacher, str | PathLike):
        if known is not None:
            _check_tokens(known, str(teacher))
        auto = AutoModelForCausalLM if shifts_labels(model) else AutoModelForMaskedLM
        teacher = auto.from_pretrained(teacher, dtype="auto")
    _check_models(teacher, model, known)
    return Distiller(model, teacher.eval().requires_grad_(False), config or DistillationConfig())


def find_distiller(model: nn.Module) -> Distiller | None:
    """The `Distiller` of a model, or of the model inside of it; None without a teacher."""
    hooks = (hook for module in model.modules() for hook in module._forward_hooks.values())
    return next((hook for hook in hooks if isinstance(hook, Distiller)), None)


def shifts_labels(model: Any) -> bool:
    """Whether logits predict the next label, as in causal models, or their own, as in masked ones. ValueError: none."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT
    names = {cls.__name__ for cls in type(model).__mro__}
    if names & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}:
        return True
    if names & {*MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()} and not model.config.is_encoder_decoder:
        return False
    raise ValueError(f"teacher=: {type(model).__name__} is no causal or masked language model of Transformers")


def _check_tokens(tokenizer: PreTrainedTokenizerBase, teacher: str) -> None:
    """Raise ValueError where the teacher's own tokenizer has another token than `tokenizer` under an id."""
    try:
        theirs = AutoTokenizer.from_pretrained(teacher).get_vocab()
    except (OSError, ValueError):  # a directory without one
        return
    tokens = {index: token for token, index in theirs.items()}
    for token, index in tokenizer.get_vocab().items():
        if tokens.get(index, token) != token:
            found = f"id {index} is {tokens[index]!r} there and {token!r} here"
            raise ValueError(f"teacher={teacher!r} has another tokenizer: {found}; take a teacher with the model's")


def _check_models(teacher: nn.Module, student: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> None:
    if not isinstance(teacher, nn.Module) or shifts_labels(teacher) != shifts_labels(student):
        kind = type(teacher).__name__
        raise ValueError(f"teacher={kind}: must be a language model of the student's kind, causal or masked, or a name")
    if {*map(id, teacher.parameters())} & {*map(id, student.parameters())}:
        way = "load it a second time, or pass its name or directory"
        raise ValueError(f"the teacher shares weights with the model that it teaches: {way}")
    configs: list[Any] = [student.config, teacher.config]
    sizes = [config.get_text_config().vocab_size for config in configs]
    if sizes[0] != sizes[1] and (tokenizer is None or len(tokenizer) > min(sizes)):
        known = "no tokenizer is given" if tokenizer is None else f"the tokenizer has {len(tokenizer)} tokens"
        way = "take a teacher with the model's tokens; if only padding differs, pass processing_class=tokenizer"
        raise ValueError(f"the model has a vocabulary of {sizes[0]}, the teacher one of {sizes[1]}, and {known}: {way}")
