"""Terms of the loss that are made of what a model returns, in any Trainer and in loops of one's own.

A forward hook changes `outputs.loss` while the model trains, so whoever takes the model's own loss takes them along.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from ..methods import Batch

IGNORED = -100

ChangeLoss = Callable[[Tensor, Any, Batch], Tensor]
"""From a model's own loss, its outputs and its batch to the loss in its place."""


class LossHook:
    """Changes the loss that a model returns in training.

    Args:
        change: gives the new loss.
        is_shared: whether copies of the model get it too, as the probes of a decay search must.
    """

    def __init__(self, change: ChangeLoss | None, is_shared: bool):
        self.change, self.is_shared = change, is_shared

    def attach(self, model: nn.Module) -> RemovableHandle:
        """Let `model` return the changed loss from now on, until `remove` is called of the result."""
        return model.register_forward_hook(self, with_kwargs=True)

    @torch.compiler.disable
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        if self.change is None or not model.training or not torch.is_grad_enabled():
            return None
        named = zip(_names_of_arguments(model), args) if args else ()
        batch = dict(named) | kwargs
        is_dict = isinstance(outputs, dict)
        loss = outputs.get("loss") if is_dict else outputs[0] if isinstance(outputs, tuple) else None
        if loss is None:
            raise ValueError(
                "the model returned no loss to add to: pass it labels. Losses that are computed outside of the model "
                "(label_smoothing_factor, compute_loss_func) leave no place for a teacher or a method's own term"
            )
        changed = self.change(loss, outputs, batch)
        if is_dict:
            outputs["loss"] = changed
            return outputs
        return (changed, *outputs[1:])

    def __deepcopy__(self, memo: dict[int, Any]) -> "LossHook":
        return self if self.is_shared else LossHook(None, False)


def share_of_batch(batch: Batch, labels: int) -> Tensor | float:
    """By what a mean over the `labels` of a micro-batch is multiplied to weigh as the model's own loss does: that is
    divided by the labels of the whole batch where a Trainer says how many they are."""
    num_items = batch.get("num_items_in_batch")
    return 1.0 if num_items is None else labels / torch.as_tensor(num_items).flatten()[0]


def count_labels(batch: Batch, shifted: bool) -> int:
    """How many labels of a micro-batch are predicted; 1 where it has none that can be counted."""
    shifts = shifted and batch.get("shift_labels") is None
    labels = batch.get("labels") if batch.get("shift_labels") is None else batch["shift_labels"]
    if not isinstance(labels, Tensor) or not labels.dim():
        return 1
    return len(predicting_positions(labels, shifts))


def predicting_positions(labels: Tensor, shifted: bool) -> Tensor:
    """The flat positions [n] whose logits predict a label: `labels` [batch, tokens] without -100, and one to the left
    where the loss shifts them."""
    targets = pad(labels, (0, 1), value=IGNORED)[..., 1:] if shifted else labels
    return (targets != IGNORED).flatten().nonzero().squeeze(1)


def language_model_kind(model: Any) -> str | None:
    """`"causal"`, `"masked"`, or None for a model of another kind."""
    model = base_of_peft(model)
    names = {cls.__name__ for cls in type(model).__mro__}
    if names & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}:
        return "causal"
    if names & {*MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()} and not model.config.is_encoder_decoder:
        return "masked"
    return None


def base_of_peft(model: Any) -> Any:
    """The model of Transformers in one of PEFT; any other as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _names_of_arguments(model: nn.Module) -> list[str]:
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(model.forward).parameters
    return [name for name, found in parameters.items() if found.kind == found.POSITIONAL_OR_KEYWORD]
