"""The teacher of a distillation: a frozen model, its checks, and its logits in chunks of tokens.

A batch of logits can be larger than the teacher. So its output embedding computes one token of each row, and its input
is kept and turned into logits chunk by chunk when they are compared. A model that changes the logits behind the output
embedding, as by scaling or capping them, makes all logits of a batch at once.
"""

import inspect
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ..progress import get_logger

logger = get_logger(__name__)

CHUNK = 2**24  # elements of a chunk of logits: 64 MiB in fp32
Chunks = Iterator[tuple[Tensor, Tensor]]
"""Flat positions of some tokens [n], and the teacher's logits there [n, vocabulary]."""

_OF_THE_STUDENT = ("labels", "shift_labels", "num_items_in_batch", "return_dict", "use_cache")


class Teacher:
    """A model in eval mode whose weights are frozen; a plain object, so that no Trainer wraps or saves it.

    A name or directory is loaded in the dtype that it has there. The student's tokenizer tells padding of the
    vocabulary from tokens; any other processor is ignored.
    """

    def __init__(self, teacher: nn.Module | str | PathLike, student: nn.Module, tokenizer: object):
        known = tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None
        if isinstance(teacher, str | PathLike):
            _check_tokens(known, str(teacher))
            auto = AutoModelForCausalLM if shifts_labels(student) else AutoModelForMaskedLM
            teacher = auto.from_pretrained(teacher, dtype="auto")
        _check_models(teacher, student, known)
        self.model: Any = teacher.eval().requires_grad_(False)
        self.chunk = max(CHUNK // _vocabulary(teacher), 1)
        self.by_chunks: bool | None = None  # whether the output embedding gives the logits; shown by the first batch

    def to(self, device: torch.device) -> None:
        """Move it where the student's logits are, unless it has a device map."""
        if getattr(self.model, "hf_device_map", None) is None:
            self.model.to(device)

    def logits(self, inputs: Mapping[str, Any], positions: Tensor) -> Chunks:
        """The logits at flat `positions` [n] of a batch, chunk by chunk."""
        head = self.model.get_output_embeddings()
        source = None if head is None or self.by_chunks is False else self._hidden(inputs, head)
        if source is None:
            source, head = self._all_logits(inputs), nn.Identity()
        labels = inputs["labels"] if inputs.get("shift_labels") is None else inputs["shift_labels"]
        if source.shape[1] != labels.shape[1]:
            lengths = f"{source.shape[1]} positions where the labels have {labels.shape[1]}"
            raise ValueError(f"the teacher has {lengths}; a tuned prompt is not supported")
        flat = source.flatten(0, 1)
        return ((chunk, head(flat[chunk.to(flat.device)])) for chunk in positions.split(self.chunk))

    def _hidden(self, inputs: Mapping[str, Any], head: nn.Module) -> Tensor | None:
        """The inputs [batch, tokens, hidden] of the output embedding; None where it does not give the last logits."""
        before: list[Tensor] = []
        behind: list[Tensor] = []

        def keep(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            before.append(args[0])
            return (args[0][:, :1], *args[1:]) if args[0].dim() == 3 else None

        def see(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            behind.append(output)

        with head.register_forward_pre_hook(keep), head.register_forward_hook(see):
            logits = self._all_logits(inputs)
        if self.by_chunks is None:
            is_last = len(behind) == 1 and behind[0].dim() == 3
            self.by_chunks = is_last and torch.equal(behind[0].float(), logits.float())
            if not self.by_chunks:
                why = f"the teacher, {type(self.model).__name__}, changes its logits behind its output embedding"
                logger.warning(f"distillation: {why}, so all logits of a batch are made at once")
        return before[0] if self.by_chunks else None

    @torch.no_grad()
    def _all_logits(self, inputs: Mapping[str, Any]) -> Tensor:
        """The logits [batch, tokens, vocabulary], from those inputs of a batch that the teacher knows."""
        takes = inspect.signature(self.model.forward).parameters
        takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in takes.values())
        names = [name for name in inputs if (takes_all or name in takes) and name not in _OF_THE_STUDENT]
        cache = {"use_cache": False} if "use_cache" in takes else {}
        return self.model(**{name: inputs[name] for name in names}, return_dict=True, **cache).logits


def shifts_labels(model: Any) -> bool:
    """Whether logits at position i predict label i + 1, as in causal models, or label i, as in masked ones; ValueError
    for a model of another kind."""
    model = _base_of_peft(model)
    names = {cls.__name__ for cls in type(model).__mro__}
    if names & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}:
        return True
    if names & {*MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()} and not model.config.is_encoder_decoder:
        return False
    raise ValueError(f"teacher=: {type(model).__name__} is no causal or masked language model of Transformers")


def _base_of_peft(model: Any) -> Any:
    """The model of Transformers in one of PEFT; any other as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _vocabulary(model: nn.Module) -> int:
    return _base_of_peft(model).config.get_text_config().vocab_size


def _check_tokens(tokenizer: PreTrainedTokenizerBase | None, teacher: str) -> None:
    """Raise ValueError where the teacher's own tokenizer has another token than `tokenizer` under an id."""
    try:
        theirs = AutoTokenizer.from_pretrained(teacher).get_vocab() if tokenizer is not None else {}
    except (OSError, ValueError):  # a directory without one
        return
    tokens = {index: token for token, index in theirs.items()}
    for token, index in tokenizer.get_vocab().items() if tokenizer is not None else ():
        if tokens.get(index, token) != token:
            found = f"id {index} is {tokens[index]!r} there and {token!r} here"
            raise ValueError(f"teacher={teacher!r} has another tokenizer: {found}; take a teacher with the model's")


def _check_models(teacher: nn.Module, student: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> None:
    if not isinstance(teacher, nn.Module) or shifts_labels(teacher) != shifts_labels(student):
        kind = type(teacher).__name__
        raise ValueError(f"teacher={kind}: must be a language model of the student's kind, causal or masked, or a name")
    if any(parameter.is_meta for parameter in teacher.parameters()):
        raise ValueError("the teacher is on the meta device, and has no weights; load it by from_pretrained")
    own = {id(parameter) for parameter in student.parameters()}
    if any(id(parameter) in own for parameter in teacher.parameters()):
        way = "load it a second time, or pass its name or directory"
        raise ValueError(f"the teacher shares weights with the model that it teaches: {way}")
    sizes = _vocabulary(student), _vocabulary(teacher)
    if sizes[0] != sizes[1] and (tokenizer is None or len(tokenizer) > min(sizes)):
        known = "no tokenizer is given" if tokenizer is None else f"the tokenizer has {len(tokenizer)} tokens"
        way = "take a teacher with the model's tokens; if only padding differs, pass processing_class=tokenizer"
        raise ValueError(f"the model has a vocabulary of {sizes[0]}, the teacher one of {sizes[1]}, and {known}: {way}")
