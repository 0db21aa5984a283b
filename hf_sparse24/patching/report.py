"""PatchReport: what became sparse, what stayed dense, and why, as a table."""

import re
from dataclasses import dataclass

from torch import nn

from ..config import Sparse24Config
from ..html_tables import html_table
from .targets import Candidate


@dataclass(frozen=True)
class ReportRow:
    """Layers that differ only in their numbers: `model.layers.*.mlp.up_proj`. A stack of experts counts as a layer.

    Attributes:
        group: what their names have in common.
        layers: how many they are.
        weights: elements of their weight matrices, shared ones once: no biases, and nothing that a method or an adapter
            keeps beside them.
        skipped: why they stayed dense; None where they are sparse.
        note: in what sparse ones differ from what the method does elsewhere; None where they do not.
    """

    group: str
    layers: int
    weights: int
    skipped: str | None
    note: str | None = None


@dataclass(frozen=True, repr=False)
class PatchReport:
    """What `patch_model` did. Print it, show it in a notebook, or read its fields.

    Attributes:
        config: the config that is in force.
        patched: names of the sparse layers, in module order; stacks of experts by their Parameters' names.
        skipped: name to reason, for every linear layer and stack of experts that stayed dense.
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

    def __repr__(self) -> str:
        return f"<PatchReport: {self._summary()}>"

    def __str__(self) -> str:
        table = [_COLUMNS, *map(_cells, self.rows)]
        widths = [max(len(line[i]) for line in table) for i in range(3)]
        lines = [f"{g:<{widths[0]}}  {n:>{widths[1]}}  {w:>{widths[2]}}  {why}" for g, n, w, why in table]
        return "\n".join([self._summary(), *lines])

    def _repr_html_(self) -> str:
        return html_table(self._summary(), _COLUMNS, map(_cells, self.rows))

    def _summary(self) -> str:
        layers = len(self.patched) + len(self.skipped)
        return (
            f"{self.config.pattern} sparse by {self.config.method}: {len(self.patched)} of {layers} linear layers, "
            f"{shown_count(self.patched_parameters)} of {shown_count(self.total_parameters)} parameters; "
            f"{self.sparse_share:.1%} of all parameters are zero"
        )


_COLUMNS = ("module group", "layers", "weights", "sparse")


def _cells(row: ReportRow) -> tuple[str, str, str, str]:
    sparse = f"yes; {row.note}" if row.note else "yes"
    return row.group, str(row.layers), shown_count(row.weights), row.skipped or sparse


def make_report(model: nn.Module, config: Sparse24Config, candidates: list[Candidate]) -> PatchReport:
    groups: dict[tuple[str, str | None, str | None], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault((group_name(candidate.name), candidate.skipped, candidate.note), []).append(candidate)
    rows = [ReportRow(name, len(group), _weights(group), *why) for (name, *why), group in groups.items()]
    # With shared parameters once, as `parameters()` counts the total.
    patched = [candidate for candidate in candidates if candidate.skipped is None]
    return PatchReport(
        config=config,
        patched=tuple(candidate.name for candidate in patched),
        skipped={candidate.name: candidate.skipped for candidate in candidates if candidate.skipped is not None},
        rows=tuple(rows),
        patched_parameters=_weights(patched),
        total_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def group_name(name: str) -> str:
    """What layers that differ only in their numbers have in common: `model.layers.*.mlp.up_proj`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def _weights(candidates: list[Candidate]) -> int:
    sizes = {id(candidate.weight): candidate.weight.numel() for candidate in candidates}
    return sum(sizes.values())


def shown_count(count: int) -> str:
    """A number of weights, in millions where it is large."""
    return f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count:,}"
