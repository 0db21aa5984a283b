"""RunFacts: what a run has learned. config.json has these facts and the config."""

import copy
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, Self

from .packed_format import PackedFormat

MARKER = "saved_by_hf_sparse24"  # a tensor in files of training checkpoints, which dense models do not keep


def check_phase(phase: object, phases: Collection[str]) -> None:
    """Raise ValueError unless `phase` is one of a method's `phases`."""
    if phase not in phases:
        raise ValueError(f"phase={phase!r}: must be one of {list(phases)}")


@dataclass(frozen=True)
class RunFacts:
    """The facts that a model's run has learned. A packed model keeps those of its run."""

    phase: str = "sparse"  # how the model computes: "sparse", "dense", or another phase of its method
    finished: bool = False  # whether a run has ended in another phase than "sparse". Further training stays in it
    packed: PackedFormat | None = None  # which weights are packed; None where none is
    pruning: dict[str, object] | None = None  # settings and size of the data of the `oneshot` that pruned the model
    marked: bool = False  # whether the files that are being written with `config.json` have a `MARKER`

    def to_dict(self) -> dict[str, object]:
        """The facts as `config.json` has them: the phase, and what differs from a run that begins."""
        packed, pruning = self.packed and self.packed.to_dict(), copy.deepcopy(self.pruning)
        learned = {"finished": self.finished, "marked": self.marked, "packed": packed, "pruning": pruning}
        return {"phase": self.phase} | {name: value for name, value in learned.items() if value}

    @classmethod
    def from_dict(cls, values: dict[str, Any], phases: Collection[str]) -> Self:
        """Read the facts among the keys of a `quantization_config`; ValueError for a phase that is not in `phases`."""
        phase, packed, pruning = values.get("phase", "sparse"), values.get("packed"), values.get("pruning")
        check_phase(phase, phases)
        if not isinstance(pruning, dict | None):
            raise ValueError(f"pruning={pruning!r}: must be a dict of what oneshot was called with")
        form = None if packed is None else PackedFormat.from_dict(packed)
        return cls(phase, values.get("finished") is True, form, pruning, values.get("marked") is True)


FACTS = tuple(field.name for field in fields(RunFacts))  # keys of `config.json`; all others belong to the config
