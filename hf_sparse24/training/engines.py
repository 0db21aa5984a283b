"""Check of accelerate's engines: settings with which sparse weights cannot train."""

import os
from typing import Any

from accelerate import Accelerator
from torch import nn

from ..progress import get_logger
from ..run import sparse_run
from ..weights.sparse_weight import sparse_weights
from ..weights.storage import TRAINED
from .zero import check_method

logger = get_logger(__name__)


def check_engine(accelerator: Accelerator, model: nn.Module) -> None:
    """Raise ValueError, with the setting to change, where accelerate is going to wrap `model` in a way that fails.

    FSDP1 flattens weights. `cpu_ram_efficient_loading` fails in accelerate 1.15 where a model saves buffers, such as
    masks and scales. DeepSpeed ZeRO cannot do what some methods need; `patch_model` refuses ZeRO-3.
    """
    run = sparse_run(model)
    zero: Any = getattr(accelerator.state, "deepspeed_plugin", None)
    if run is not None and zero is not None and zero.zero_stage:
        check_method(run.method)
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
            logger.warning("accelerate has no FSDP on this device: it runs DDP, and every process has all weights")
        return
    if getattr(plugin, "fsdp_version", 1) != 2:
        raise ValueError(
            "FSDP1 flattens weights: use FSDP2, by `fsdp_version: 2` in accelerate's config file, or "
            'fsdp_config={"version": 2} in TrainingArguments'
        )
    state = [name for weight in sparse_weights(model, TRAINED).values() for name in weight.state]
    if plugin.cpu_ram_efficient_loading and state:
        raise ValueError(
            f"cpu_ram_efficient_loading=True: accelerate does not send {state[0]!r}, which the method keeps; set "
            f"`fsdp_cpu_ram_efficient_loading: false` in its config file, or "
            f'fsdp_config={{"cpu_ram_efficient_loading": false}}'
        )
