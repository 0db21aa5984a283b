"""PatchReport: a table of the layers that became sparse, and of those that stayed dense and why."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sparse24_kernels.gemm.planning import in_words
from torch import nn

from ..config import Sparse24Config
from ..run import SparseRun
from ..tables import TableReport, shown_patterns
from ..weights.gemms import Gemm
from .targets import Candidate


@dataclass(frozen=True)
class ReportRow:
    """Layers whose names differ only in numbers. A stack of experts counts as a layer."""

    group: str  # their name with `*` for the numbers, `model.layers.*.mlp.up_proj`
    layers: int  # number of layers
    weights: int  # number of elements of their weight matrices, shared ones counted once, without biases
    skipped: str | None  # why they stayed dense; None if they are sparse
    note: str | None = None  # how these sparse layers differ from others; None if they do not


@dataclass(frozen=True, repr=False)
class PatchReport(TableReport):
    """Which layers `patch_model` made sparse, and why not the others. Print it, show it in a notebook, or read it.

    Attributes:
        config: the config that is in force.
        patched: names of the sparse layers, in module order; stacks of experts by their Parameters' names.
        patterns: N:M of each of them, as text.
        skipped: name to reason, for every linear layer and stack of experts that stayed dense.
        rows: the same by groups of layers whose names differ only in numbers.
        patched_parameters: number of weights under an N:M pattern.
        zero_parameters: number of zeros among them.
        total_parameters: number of parameters of the whole model, shared ones once.
        device: where the first sparse weight is.
        gemms: the GEMMs of each layer, each with the layer's sizes (out, in); none of stacks of experts.
        is_pretrained: whether `from_pretrained` loaded dense weights, of which the method now drops a part.
        is_finished: whether a run of the model has ended dense or with adapters, in which it trains on.
    """

    config: Sparse24Config
    patched: tuple[str, ...]
    patterns: tuple[str, ...]
    skipped: dict[str, str]
    rows: tuple[ReportRow, ...]
    patched_parameters: int
    zero_parameters: int
    total_parameters: int
    device: torch.device
    gemms: tuple[tuple[Gemm, tuple[int, int]], ...]
    is_pretrained: bool = False
    is_finished: bool = False
    _columns = ("module group", "layers", "weights", "sparse")

    @property
    def sparse_share(self) -> float:
        """Share of the model's parameters that are zero while it is sparse."""
        return self.zero_parameters / self.total_parameters

    @property
    def training(self) -> str:
        """What runs the GEMMs of training on `device`, and why; "" on meta, or with another backend than auto."""
        device, is_cpu = self.device, self.device.type == "cpu"
        if device.type == "meta" or self.config.backend != "auto" or (is_cpu and torch.cuda.is_available()):
            return ""  # the last: it will move
        dtype = torch.float32 if is_cpu else torch.bfloat16
        plans = (gemm.plan(2048, *sizes, dtype, device, "auto") for gemm, sizes in self.gemms)
        return f"GEMMs of 2,048 tokens in {dtype}: {in_words(plans) or 'dense'}{'; bf16 runs dense' * is_cpu}"

    def __repr__(self) -> str:
        return f"<PatchReport: {self._title()}>"

    def _title(self) -> str:
        layers = len(self.patched) + len(self.skipped)
        master = getattr(self.config, "master", "dense")
        method = self.config.method + f", master: {master}" * (master != "dense")
        return (
            f"{shown_patterns(self.patterns)} sparse by {method}: {len(self.patched)} of {layers} linear layers, "
            f"{shown_count(self.patched_parameters)} of {shown_count(self.total_parameters)} parameters; "
            f"{self.sparse_share:.1%} of all parameters are zero"
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for row in self.rows:
            sparse = f"yes; {row.note}" if row.note else "yes"
            yield row.group, str(row.layers), shown_count(row.weights), row.skipped or sparse

    def _advice(self) -> str | None:
        advice = FINISHED if self.is_finished else PRETRAINED if self.is_pretrained else ""
        return "\n".join(filter(None, (self.training, advice)))


FINISHED = (
    "the model's sparse training has ended in a dense phase or with adapters, and further training stays in it; "
    'set_phase(model, "sparse") before training starts the method\'s schedule again'
)
PRETRAINED = (
    "its weights are pretrained, and pruning them now loses much of what they learned: for short training, call "
    "oneshot(model, batches) first and train the result, or run hf-sparse24 prune"
)


def make_report(
    model: nn.Module, run: SparseRun, candidates: list[Candidate], is_pretrained: bool, gemms: tuple
) -> PatchReport:
    groups: dict[tuple[str, str | None, str | None], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault((group_name(candidate.name), candidate.skipped, candidate.note), []).append(candidate)
    rows = [ReportRow(name, len(group), _weights(group), *why) for (name, *why), group in groups.items()]
    patched = [candidate for candidate in candidates if candidate.skipped is None]
    patterns = [candidate.pattern or run.method.pattern for candidate in patched]
    zeros = {id(c.weight): c.weight.numel() * (m - n) // m for c, (n, m) in zip(patched, patterns)}
    return PatchReport(
        config=run.config,
        patched=tuple(candidate.name for candidate in patched),
        patterns=tuple(map(str, patterns)),
        skipped={candidate.name: candidate.skipped for candidate in candidates if candidate.skipped is not None},
        rows=tuple(rows),
        patched_parameters=_weights(patched),
        zero_parameters=sum(zeros.values()),
        total_parameters=sum(parameter.numel() for parameter in model.parameters()),
        is_pretrained=is_pretrained,
        is_finished=run.facts.finished,
        device=patched[0].weight.device,
        gemms=gemms,
    )


def group_name(name: str) -> str:
    """Return a layer's name with `*` for its numbers, also of an expert: `model.layers.*.mlp.experts.up_proj[*]`."""
    return re.sub(r"(^|\.|\[)\d+(?=\.|\]|$)", r"\1*", name)


def _weights(candidates: list[Candidate]) -> int:
    """Return the number of weights, shared ones counted once."""
    return sum({id(candidate.weight): candidate.weight.numel() for candidate in candidates}.values())


def shown_count(count: int) -> str:
    """Return a number of weights as text, in millions if it is large."""
    return f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count:,}"
