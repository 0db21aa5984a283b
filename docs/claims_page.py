"""The page of what the papers' abstracts claim and what was seen: a table of the rows of recipes/results/claims.

Figures are computed from the committed runs, and so are verdicts on losses; `rows.yaml` has the others.
"""

import json
import math
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
from scipy.stats import t as student

from hf_sparse24.tables import markdown_table

Run = dict[str, Any]
LIMIT = 0.02
"""Nats. What costs no more costs little."""
NULL = 0.01
"""Nats. An effect whose interval lies within this of zero is none."""
SPREAD, FORKED = 0.020, 0.002
"""Standard deviation of the difference of two runs of 4.1M tokens from scratch (45 contrasts of three seeds in
results/methods), and of two that are one dense training up to a step. They stand in for that of a few seeds."""
ENOUGH = 8
"""Seeds from which on their own standard deviation counts."""

SEEN, NO_EFFECT, NOT_SEEN, CONTRADICTED, ELSEWHERE = VERDICTS = (
    "seen",
    "no effect",
    "not seen",
    "contradicted",
    "needs a GPU or their data",
)


@dataclass(frozen=True)
class Claim:
    """A row: a sentence of a paper, how it was tried, and either a statistic of losses or a verdict with its text.
    rows.yaml says what each field is."""

    id: str
    claim: str
    tried: str
    finding: str
    gaps: tuple[tuple[str, str], ...] = ()
    statistic: str = ""
    taken: str = "pooled"
    of: tuple[int, ...] = ()
    values: tuple[tuple[str, str], ...] = ()
    forked: bool = False
    seeds_from: int = 0
    verdict: str = ""
    frozen: str = ""
    was: str = ""
    why: str = ""


@dataclass(frozen=True)
class Section:
    """A paper: its heading and figure, its rows, and what they say together."""

    section: str
    paper: str
    image: str
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
            paths = (self.folder / "claims").glob(f"{variant}-seed*.json")
            found = {int(path.stem.rpartition("-seed")[2]): json.loads(path.read_text()) for path in paths}
            found = dict(sorted(found.items()))
        if not found:
            raise FileNotFoundError(f"{self.folder}: no run of {name}")
        return found

    def short(self, name: str) -> dict[int, Run]:
        """The runs of `recipes/claims.py` by seed."""
        return self.runs(f"claims/{name}")

    @cached_property
    def _methods(self) -> list[Run]:
        return methods_runs.read_runs(self.folder / "methods")


def shown(values: list[float], form: str = "+.3f") -> str:
    """The mean of some values, with their range and number."""
    if len(values) == 1:
        return f"{values[0]:{form}}, 1 seed"
    low, high = min(values), max(values)
    return f"{statistics.mean(values):{form}} [{low:{form}}, {high:{form}}], {len(values)} seeds"


def margin(differences: list[float], forked: bool = False) -> float:
    """Half of the 95 % interval of the mean: of Student's t from eight seeds on, else two standard errors."""
    count = len(differences)
    spread = statistics.stdev(differences) if count > 1 else 0.0
    if count < ENOUGH:
        return 2 * max(spread, FORKED if forked else SPREAD) / math.sqrt(count)
    return float(student.ppf(0.975, count - 1)) * spread / math.sqrt(count)


def ordered(differences: list[float], forked: bool = False) -> str:
    """The verdict on "the first is lower": of differences that are then above zero, one for each seed."""
    mean, error = statistics.mean(differences), margin(differences, forked)
    if abs(mean) + error <= NULL:
        return NO_EFFECT
    return NOT_SEEN if abs(mean) <= error else SEEN if mean > 0 else CONTRADICTED


def cheap(costs: list[float], forked: bool = False) -> str:
    """The verdict on "it costs little": of losses over the control, one for each seed."""
    mean, error = statistics.mean(costs), margin(costs, forked)
    if mean + error <= LIMIT:
        return SEEN
    return CONTRADICTED if mean - error > LIMIT else NOT_SEEN


def together(verdicts: Iterable[str]) -> str:
    """The verdict on a claim of several parts: that of all, or not seen."""
    found = set(verdicts)
    return found.pop() if len(found) == 1 else NOT_SEEN


def worst(verdicts: Iterable[str]) -> str:
    """The verdict on a claim that one part contradicts."""
    found = set(verdicts)
    return CONTRADICTED if CONTRADICTED in found else together(found)


ALT = (
    "Differences of validation loss by row, and the number of seeds: blue where the claim is seen, green where there "
    "is no effect, orange where it is contradicted. The band is 0.02 nats on either side"
)

RULES: dict[str, Callable[[list[float], bool], str]] = {"lower": ordered, "cheap": cheap}


def differences(claim: Claim, results: Results) -> list[list[float]]:
    """For each pair of a row, the loss of the second run over that of the first, seed by seed."""
    pairs = [(results.runs(one), results.runs(other)) for one, other in claim.gaps]
    fresh = [{seed: run for seed, run in one.items() if seed >= claim.seeds_from} for one, _ in pairs]
    return [gaps(one, other) for one, (_, other) in zip(fresh, pairs)]


def judged(claim: Claim, results: Results) -> tuple[str, str, str]:
    """The finding of a row, how precise it is, and its verdict."""
    found = differences(claim, results)
    values = [[_at(run, path) for run in results.runs(name).values()] for name, path in claim.values]
    finding = claim.finding.format(*map(shown, found), *(shown(each, ".3g") for each in values))
    if claim.verdict:
        return finding, "", claim.verdict
    deciding = [(found + values)[place] for place in claim.of or range(len(found))]
    if claim.taken == "pooled":
        deciding = [[value for part in deciding for value in part]]
    errors = [margin(part, claim.forked) for part in deciding]
    precision = f"±{max(errors):.3f}; 0.02 would look like {0.02 - max(errors):+.3f} to {0.02 + max(errors):+.3f}"
    parts = [RULES[claim.statistic](part, claim.forked) for part in deciding]
    return finding, precision, {"pooled": together, "each": together, "worst": worst}[claim.taken](parts)


def _at(run: Run, path: str) -> float:
    """What a run's JSON has at a path such as `log_ratio/moments-dense/1`."""
    found: Any = run
    for key in path.split("/"):
        found = found[int(key) if isinstance(found, list) else key]
    return float(found)


INTRO = """# What the papers claim, and what was seen

{claims} claims of five papers, tried as far as a CPU can: **{counts}**.

{table}

- **The models are tiny**: unless a row says otherwise, a Llama of 0.46M parameters on Python's standard library.
  Runs of `claims.py` have {steps} steps of 1,024 tokens (0.6M tokens), those of [methods side by side](methods.md)
  4,000 (4.1M). At 0.6M tokens the model is far from using what it has: dropping half of the MLPs' weights costs nothing
  there. So rows on the cost of sparsity use the longer runs, where there are any. A claim that is not seen here may
  hold at the papers' sizes.
- Differences are of validation loss in nats per token, seed by seed; brackets have the lowest and the highest seed.
- ± is half of the 95 % interval of the mean. With {enough} seeds or more it is Student's t. With fewer it is two
  standard errors, of the seeds' spread or of {spread:g} nats, whichever is larger: 45 pairs of methods with three seeds
  have that spread. Pairs that *fork*, that are one training up to a step, have {forked:g}.
- *No effect*: the interval lies within {null:g} nats of zero. *Seen*: it lies above zero. *Contradicted*: below. *Not
  seen*: none of these; the claim may hold.
- *Costs little*: seen where the interval ends at {limit:g} nats or below, contradicted where it begins above.
- `python docs/build_site.py` computes the figures from the result files, and the verdicts that have a ±. The code of
  commit 79372d2b judged {frozen} others. The rest are our reading of the figures. `rows.yaml` says which is which.
- Commands stand for `python recipes/...`; those of frozen rows are of that commit, and some are gone. What repeats the
  papers' own experiments, at their size, is in [the papers' experiments](papers.md)."""


def page(folder: Path) -> str:
    """The page of a folder of results."""
    results = Results(folder)
    sections = results.sections()
    claims = [claim for section in sections for claim in section.claims]
    findings = {claim.id: judged(claim, results) for claim in claims}
    now = {name: verdict for name, (*_, verdict) in findings.items()}
    verdicts = list(now.values())
    kinds = [kind for kind in VERDICTS if kind in verdicts]
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds)
    lines = []
    for section in sections:
        own = [now[claim.id] for claim in section.claims]
        link = f"[{section.section}](#{section.section.lower().replace(' ', '-')})"
        lines.append([link, *(str(own.count(kind) or "") for kind in kinds)])
    table = markdown_table(["paper", *kinds], lines)
    run = results.short("dense")[0]
    sizes = {"claims": len(verdicts), "counts": counts, "table": table, "steps": run["arguments"]["max_steps"]}
    limits = {"limit": LIMIT, "null": NULL, "spread": SPREAD, "forked": FORKED, "enough": ENOUGH}
    parts = [INTRO.format(**sizes, **limits, frozen=sum(bool(claim.frozen) for claim in claims))]
    changed = [[one.id, one.was, now[one.id], one.why] for one in claims if one.was not in ("", now[one.id])]
    parts += ["## Verdicts that changed", markdown_table(["", "before", "now", "why"], changed)]
    for section in sections:
        parts += [f"## {section.section}", section.paper, f"![{ALT}](../images/{section.image}.svg)"]
        rows = [[each.id, each.claim, each.tried, *_cells(*findings[each.id])] for each in section.claims]
        parts += [markdown_table(["", "claim", "tried by", "result", "precision", "verdict"], rows), section.reading]
    versions = ", ".join(f"{key} {value}" for key, value in run["versions"].items())
    parts.append(f"Made on a CPU by one thread; {versions}. One JSON for each run in `recipes/results/claims/`.")
    return "\n\n".join(parts) + "\n"


def _cells(finding: str, precision: str, verdict: str) -> tuple[str, str, str]:
    """A finding, its precision and its verdict, bold where the claim does not hold."""
    return finding, precision, verdict if verdict in (SEEN, ELSEWHERE) else f"**{verdict}**"
