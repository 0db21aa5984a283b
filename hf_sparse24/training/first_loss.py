"""The first loss of a run tells whether a method disturbs a model that has been trained before.

Just before the first training forward pass, the loss of its batch is computed twice without gradients, with the sparse
weights and with the dense master weights. Of a model that starts from nothing both are about ln(vocabulary); of one
that `oneshot` has pruned they are the same.
"""

import math
from typing import Any

import torch
from torch import nn

from ..methods import ONESHOT_METHOD
from ..patching.surgery import set_phase
from ..progress import get_logger
from ..weights.sharding import is_sharded
from .controller import Sparse24Controller
from .step_work import trains
from .teacher import language_model_kind
from .zero import ZeroOptimizer

logger = get_logger(__name__)

TOO_MUCH = 0.5
"""Nats by which the sparse loss may be above the dense one."""


def check_first_loss(controller: Sparse24Controller) -> None:
    """Warn once where the first batch's loss is much higher with sparse weights than with dense ones.

    Not where the weights are sharded, or flat in DeepSpeed: a forward pass by itself is then not what the engine runs.
    """
    weights = controller.weights.values()
    is_split = isinstance(controller.optimizer, ZeroOptimizer) or any(is_sharded(weight.master) for weight in weights)
    if is_split or controller.run.is_dense or not any(map(trains, weights)):
        return

    @torch.compiler.disable
    def before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not model.training or not torch.is_grad_enabled():
            return
        handle.remove()
        if controller.is_running and controller.step == 0 and kwargs.get("labels") is not None:
            _compare(controller, model, args, kwargs)

    handle = controller.model.register_forward_pre_hook(before_forward, with_kwargs=True)


@torch.no_grad()
def _compare(controller: Sparse24Controller, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    run, modes = controller.run, {module: module.training for module in model.modules()}
    kwargs = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}  # losses are means then
    phase, losses = run.phase, []
    model.eval()  # without dropout, so that no random number is drawn
    try:
        for shown in (phase, "dense"):
            set_phase(model, shown)
            outputs = model.forward(*args, **kwargs)  # no hooks: a teacher's term is none of this
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs[0]
            losses.append(math.nan if loss is None else float(loss.mean()))
    finally:
        set_phase(model, phase)
        for module, mode in modes.items():
            module.training = mode
    sparse, dense = losses
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None) if language_model_kind(model) else None
    if sparse > dense + TOO_MUCH and dense < math.log(vocabulary or math.inf):
        logger.warning(
            f"the first loss is {sparse:.2f} with the sparse weights and {dense:.2f} with the dense ones: method "
            f"{run.method.name!r} disturbs a model that is trained already. If it is not to be trained for long, prune "
            f"it by oneshot(model, batches) first, and train that ({ONESHOT_METHOD!r}) with the dense model as teacher"
        )
