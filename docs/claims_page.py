"""The page of what the papers' abstracts claim and what was seen: a table of the rows of recipes/results/claims.

Rows of losses are computed from the committed runs. The others are frozen: `rows.yaml` has their text and verdict.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

# ruff: noqa: E402 (imports come after the path that they need)
ROOT = Path(__file__).resolve().parents[1]
sys.path += [path for path in (str(ROOT / "recipes"),) if path not in sys.path]

import methods_runs
from methods_runs import gaps

from hf_sparse24.tables import markdown_table

Run = dict[str, Any]
NOISE = 0.02
"""Nats. What is less needs two seeds; what costs no more counts as costing nothing."""
COMPARABLE = 0.02
"""A loss within this share of the dense one counts as comparable with it: the papers' own figures are 1 to 2 % off."""

SEEN, NOT_SEEN, CONTRADICTED, ELSEWHERE = VERDICTS = ("seen", "not seen", "contradicted", "needs a GPU or their data")


@dataclass(frozen=True)
class Claim:
    """A row: a sentence of a paper, how it was tried, and either a statistic of losses or a verdict with its text."""

    id: str
    claim: str
    tried: str
    finding: str
    gaps: tuple[tuple[str, str], ...] = ()
    statistic: str = ""
    taken: str = "pooled"
    of: tuple[int, ...] = ()
    verdict: str = ""
    frozen: str = ""


@dataclass(frozen=True)
class Section:
    """A paper: its heading and figure, its rows, and what they say together."""

    section: str
    paper: str
    image: str
    alt: str
    reading: str
    claims: tuple[Claim, ...]


class Results:
    """The result files by name, in `recipes/results` or a copy of it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def sections(self) -> list[Section]:
        """The rows of the page."""
        found = yaml.safe_load((self.folder / "claims" / "rows.yaml").read_text())
        return [Section(**paper | {"claims": tuple(Claim(**row) for row in paper["claims"])}) for paper in found]

    def runs(self, name: str) -> dict[int, Run]:
        """The runs of claims/NAME, or of methods/NAME at the variant's best learning rate, by seed.

        Raises:
            FileNotFoundError: there are none.
        """
        folder, variant = name.split("/")
        if folder == "methods":
            found = methods_runs.best_runs(self._methods, variant)
        else:
            paths = sorted((self.folder / "claims").glob(f"{variant}-seed[0-9].json"))
            found = {int(path.stem[-1]): json.loads(path.read_text()) for path in paths}
        if not found:
            raise FileNotFoundError(f"{self.folder}: no run of {name}")
        return found

    def short(self, name: str) -> dict[int, Run]:
        """The runs of `recipes/claims.py` by seed."""
        return self.runs(f"claims/{name}")

    @cached_property
    def _methods(self) -> list[Run]:
        return methods_runs.read_runs(self.folder / "methods")


def shown(values: list[float]) -> str:
    """The mean of some values, with their range and number."""
    if len(values) == 1:
        return f"{values[0]:+.3f}, 1 seed"
    return f"{statistics.mean(values):+.3f} [{min(values):+.3f}, {max(values):+.3f}], {len(values)} seeds"


def ordered(differences: list[float]) -> str:
    """The verdict on "the first is lower": of differences that are then above zero, one for each seed."""
    if not differences or (len(differences) == 1 and abs(differences[0]) < NOISE):
        return NOT_SEEN
    if min(differences) > 0:
        return SEEN
    return CONTRADICTED if max(differences) < 0 and statistics.mean(differences) <= -NOISE else NOT_SEEN


def cheap(costs: list[float], limit: float = NOISE) -> str:
    """The verdict on "it costs little": of losses over the control, one for each seed. A single one must be further
    than noise from the limit."""
    if not costs or (len(costs) == 1 and abs(costs[0] - limit) < NOISE):
        return NOT_SEEN
    if statistics.mean(costs) <= limit:
        return SEEN
    return CONTRADICTED if min(costs) > limit else NOT_SEEN


def together(verdicts: Iterable[str]) -> str:
    """The verdict on a claim of several parts: that of all, or not seen."""
    found = set(verdicts)
    return found.pop() if len(found) == 1 else NOT_SEEN


def worst(verdicts: Iterable[str]) -> str:
    """The verdict on a claim that one part contradicts."""
    found = set(verdicts)
    return CONTRADICTED if CONTRADICTED in found else together(found)


def judged(claim: Claim, results: Results) -> tuple[str, str]:
    """The finding of a row and its verdict."""
    if claim.verdict:
        return claim.finding, claim.verdict
    found = [gaps(results.runs(one), results.runs(other)) for one, other in claim.gaps]
    deciding = claim.of or range(len(found))
    pooled = [value for place in deciding for value in found[place]]
    loss = statistics.mean(run["eval_loss"] for run in results.runs(claim.gaps[deciding[0]][0]).values())
    finding = claim.finding.format(*map(shown, found), share=statistics.mean(pooled) / loss)
    rules: dict[str, Callable[[list[float]], str]] = {
        "lower": ordered,
        "cheap": cheap,
        "comparable": lambda costs: cheap(costs, COMPARABLE * loss),
    }
    rule = rules[claim.statistic]
    if claim.taken == "pooled":
        return finding, rule(pooled)
    parts = [rule(found[place]) for place in deciding]
    return finding, {"each": together, "worst": worst}[claim.taken](parts)


INTRO = """# What the papers claim, and what was seen

{claims} claims of five papers, each tried as far as a CPU can: **{counts}**.

{table}

- **The models are tiny**: unless a row says otherwise, a Llama of 0.46M parameters on Python's standard library.
  Runs of `claims.py` have {steps} steps of 1,024 tokens (0.6M tokens), those of [methods side by side](methods.md)
  4,000 (4.1M). At 0.6M tokens the model is far from using what it has: dropping half of the MLPs' weights costs nothing
  there. So rows on the cost of sparsity use the longer runs, where there are any. A claim that is not seen here may
  hold at the papers' sizes.
- Differences are of validation loss in nats per token, seed by seed; brackets have the lowest and the highest seed.
- *Seen*: in every seed; in a single seed by {noise:g} nats. *Contradicted*: the opposite in every seed, by
  {noise:g} nats in the mean. *Not seen*: neither.
- *Costs little*: {noise:g} nats at most. *Comparable*: {share:.0%} of the loss at most. Both in the mean of two seeds,
  or in one seed that is {noise:g} nats away from that limit.
- Verdicts on losses alone are computed from the result files by `python docs/build_site.py`, and again by the tests.
  The code of commit 79372d2b computed {frozen} others; `recipes/results/claims/rows.yaml` says which.
- Commands stand for `python recipes/...`; those of frozen rows are of that commit, and some are gone. What repeats the
  papers' own experiments, at their size, is in [the papers' experiments](papers.md)."""


def page(folder: Path) -> str:
    """The page of a folder of results."""
    results = Results(folder)
    sections = results.sections()
    findings = {claim.id: judged(claim, results) for section in sections for claim in section.claims}
    verdicts = [verdict for _, verdict in findings.values()]
    kinds = [kind for kind in VERDICTS if kind in verdicts]
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds)
    lines = []
    for section in sections:
        own = [findings[claim.id][1] for claim in section.claims]
        link = f"[{section.section}](#{section.section.lower().replace(' ', '-')})"
        lines.append([link, *(str(own.count(kind) or "") for kind in kinds)])
    table = markdown_table(["paper", *kinds], lines)
    run = results.short("dense")[0]
    sizes = {"claims": len(verdicts), "counts": counts, "table": table, "steps": run["arguments"]["max_steps"]}
    sizes["frozen"] = sum(bool(claim.frozen) for section in sections for claim in section.claims)
    parts = [INTRO.format(**sizes, noise=NOISE, share=COMPARABLE)]
    for section in sections:
        parts += [f"## {section.section}", section.paper, f"![{section.alt}](../images/{section.image}.svg)"]
        rows = [[each.id, each.claim, each.tried, *_cells(*findings[each.id])] for each in section.claims]
        parts += [markdown_table(["", "claim", "tried by", "result", "verdict"], rows), section.reading]
    versions = ", ".join(f"{key} {value}" for key, value in run["versions"].items())
    parts.append(f"Made on a CPU by one thread; {versions}. One JSON for each run in `recipes/results/claims/`.")
    return "\n\n".join(parts) + "\n"


def _cells(finding: str, verdict: str) -> tuple[str, str]:
    """A finding and its verdict, bold where the claim does not hold."""
    return finding, f"**{verdict}**" if verdict in (NOT_SEEN, CONTRADICTED) else verdict
