"""PEFT's adapters around sparse layers: they act through the mask, and merge into weights that stay 2:4.

    tuners.py      how PEFT finds sparse layers by itself, and which base an adapter's files name
    attaching.py   what happens where PEFT puts an adapter around a sparse layer
    masked.py      LoRA's change of a weight, through the mask; without PEFT
    variants.py    the same as PEFT's `LoraVariant`s
    merging.py     merging and unmerging, so that the weight stays N:M
    bypass.py      which adapters would compute with the dense weight

Importing this package registers `PeftAdapters`, which answers the core's questions, and needs no PEFT.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import nn

from ..extensions import Adapters, extensions
from .attaching import attach_adapters
from .bypass import bypasses_layer, check_adapters, is_adapter
from .merging import check_unmerged, without_adapters
from .tuners import record_late, recorded_config


class PeftAdapters(Adapters):
    """The answers for PEFT's adapters."""

    def is_adapter(self, module: nn.Module) -> bool:
        return is_adapter(module)

    def bypasses_layer(self, adapter: nn.Module) -> bool:
        return bypasses_layer(adapter)

    def attach(self, model: nn.Module) -> None:
        attach_adapters(model)
        record_late(model)

    def check(self, model: nn.Module) -> None:
        check_adapters(model)

    def check_unmerged(self, model: nn.Module) -> None:
        check_unmerged(model)

    def merged(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        return without_adapters(model)

    def recorded_config(self, directory: str | Path) -> Any:
        return recorded_config(directory)


extensions.adapters = PeftAdapters()
