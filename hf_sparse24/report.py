"""PatchReport: what became sparse, what stayed dense, and why, as a table."""

import re
from dataclasses import dataclass

from torch import nn

from .config import Sparse24Config
from .targets import Candidate


@dataclass(frozen=True)
class ReportRow:
    """Layers that differ only in their numbers: `model.layers.*.mlp.up_proj`."""

    group: str
    layers: int
    parameters: int
    skipped: str | None


@dataclass(frozen=True)
class PatchReport:
    """What `patch_model` did. Print it, or read its fields.

    Attributes:
        config: the config that is in force.
        patched: names of the sparse layers, in module order.
        skipped: name to reason, for every linear layer that stayed dense.
        rows: the same by groups of like-named layers.
        patched_parameters: number of weights under an N:M pattern.
        total_parameters: number of parameters of the whole model, shared ones once.
    """

    config: Sparse24Config
    patched: tuple[str, ...]
    skipped: dict[str, str]
    rows: tuple[ReportRow, ...]
    patched_parameters: int
    total_parameters: int

    @property
    def sparse_share(self) -> float:
        """Share of the model's parameters that are zero while it is sparse."""
        return self.patched_parameters * (1 - self.config.n / self.config.m) / self.total_parameters

    def __str__(self) -> str:
        layers = len(self.patched) + len(self.skipped)
        head = (
            f"{self.config.pattern} sparse by {self.config.method}: {len(self.patched)} of {layers} linear layers, "
            f"{_count(self.patched_parameters)} of {_count(self.total_parameters)} parameters; "
            f"{self.sparse_share:.1%} of all parameters are zero"
        )
        table = [("module group", "layers", "parameters", "sparse")]
        for row in self.rows:
            table.append((row.group, str(row.layers), _count(row.parameters), row.skipped or "yes"))
        widths = [max(len(line[i]) for line in table) for i in range(3)]
        lines = [f"{g:<{widths[0]}}  {n:>{widths[1]}}  {p:>{widths[2]}}  {why}" for g, n, p, why in table]
        return "\n".join([head, *lines])


def make_report(model: nn.Module, config: Sparse24Config, candidates: list[Candidate]) -> PatchReport:
    groups: dict[tuple[str, str | None], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault((group_name(candidate.name), candidate.skipped), []).append(candidate)
    rows = [ReportRow(name, len(group), _parameters(group), why) for (name, why), group in groups.items()]
    # With shared parameters once, as `parameters()` counts the total.
    patched = [candidate for candidate in candidates if candidate.skipped is None]
    weights = {id(candidate.weight): candidate.weight.numel() for candidate in patched}
    return PatchReport(
        config=config,
        patched=tuple(candidate.name for candidate in patched),
        skipped={candidate.name: candidate.skipped for candidate in candidates if candidate.skipped is not None},
        rows=tuple(rows),
        patched_parameters=sum(weights.values()),
        total_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def group_name(name: str) -> str:
    """What layers that differ only in their numbers have in common: `model.layers.*.mlp.up_proj`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def _parameters(group: list[Candidate]) -> int:
    return sum(p.numel() for candidate in group for p in candidate.module.parameters(recurse=False))


def _count(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count:,}"
