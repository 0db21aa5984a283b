"""Options: the arguments of `oneshot` that say how to prune, checked."""

import math
from dataclasses import dataclass

from ..config import Sparse24Config
from ..methods import ONESHOT_METHOD, method_class
from ..packed_format import format_version
from ..patching.masters import wants_packed_master
from ..patching.packing import check_within_24
from .criteria import CRITERIA
from .statistics import Gram, InputNorms

RECONSTRUCTIONS = ("block", "layer", None)

PASSES, STEPS = 8, 1_000
"""Of block reconstruction by default: passes, or as many as make so many steps where that is fewer."""


@dataclass(frozen=True)
class Options:
    """The arguments of `oneshot` of these names.

    Raises:
        ValueError: one of them is out of its range.
    """

    criterion: str
    reconstruct: str | None
    passes: int
    learning_rate: float
    damping: float
    values: str

    def __post_init__(self):
        format_version(self.values)
        for name, allowed in (("criterion", tuple(CRITERIA)), ("reconstruct", RECONSTRUCTIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {list(allowed)}")
        if self.passes < 1:
            raise ValueError(f"passes={self.passes!r}: must be at least 1; reconstruct=None trains nothing")
        if not 0 < self.learning_rate < 1:
            raise ValueError(
                f"learning_rate={self.learning_rate!r}: must be between 0 and 1, as a share of the weights' size"
            )
        if not 0 <= self.damping < math.inf:
            raise ValueError(f"damping={self.damping!r}: must be a finite number >= 0")

    @property
    def statistics(self) -> type[Gram] | type[InputNorms]:
        """What to keep of a layer's inputs. A Gram matrix costs as much as running the block."""
        moves_weights = self.reconstruct == "layer" or self.values == "int8"
        return Gram if moves_weights else CRITERIA[self.criterion].statistics


def check_config(config: Sparse24Config, values: str) -> None:
    """Raise ValueError unless a config's method keeps the masks that `oneshot` chooses, and can have these values."""
    if values == "int8":
        for pattern in (config.pattern, *(config.layer_patterns or {}).values()):
            check_within_24(pattern)
    if not method_class(config.method).overrides("adopt_mask"):
        raise ValueError(
            f"method={config.method!r}: does not keep the masks that oneshot chooses; {ONESHOT_METHOD!r} does"
        )
    if wants_packed_master(config):
        raise ValueError(
            "master='packed': oneshot prunes dense weights; leave it out, and afterwards call patch_model("
            "unpatch_model(model), config) with it, which keeps the zeros"
        )
    if getattr(config, "dense_start", 0):
        raise ValueError(f"dense_start={config.dense_start!r}: other masks would be chosen after it; leave it at 0")
