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
from scipy.stats import t as student

from hf_sparse24.tables import markdown_table

Run = dict[str, Any]
LIMIT = 0.02
"""Nats. What costs no more costs little."""
NULL = 0.01
"""Nats. An effect whose interval lies within this of zero is none."""

SEEN, NO_EFFECT, NOT_SEEN = "seen", "no effect", "not seen"
CONTRADICTED, ELSEWHERE = "contradicted", "needs a GPU or their data"
VERDICTS = (SEEN, NO_EFFECT, NOT_SEEN, CONTRADICTED, ELSEWHERE)


@dataclass(frozen=True)
class Claim:
    """A row: a sentence of a paper, how it was tried, and either a statistic of losses or a verdict with its text.
    rows.yaml says what each field is."""

    id: str
    claim: str
    tried: str
    finding: str
    gaps: tuple[tuple[str, ...], ...] = ()
    statistic: str = ""
    of: tuple[int, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()
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

    @cached_property
    def _methods(self) -> list[Run]:
        return methods_runs.read_runs(self.folder / "methods")


def shown(values: list[float], form: str = "+.3f") -> str:
    """The mean of some values, with their range and number."""
    if len(values) == 1:
        return f"{values[0]:{form}}, 1 seed"
    return f"{statistics.mean(values):{form}} [{min(values):{form}}, {max(values):{form}}], {len(values)} seeds"


def margin(differences: list[float]) -> float:
    """Half of the 95 % interval of the mean by Student's t, which one seed does not have."""
    count = len(differences)
    if count < 2:
        return math.inf
    return float(student.ppf(0.975, count - 1)) * statistics.stdev(differences) / math.sqrt(count)


def lower(differences: list[float]) -> str:
    """The verdict on "the first is lower": of differences that are then above zero, one for each seed."""
    mean, error = statistics.mean(differences), margin(differences)
    if abs(mean) + error <= NULL:
        return NO_EFFECT
    return NOT_SEEN if abs(mean) <= error else SEEN if mean > 0 else CONTRADICTED


def cheap(costs: list[float]) -> str:
    """The verdict on "it costs little": of losses over the control, one for each seed."""
    mean, error = statistics.mean(costs), margin(costs)
    if mean + error <= LIMIT:
        return SEEN
    return CONTRADICTED if mean - error > LIMIT else NOT_SEEN


def costly(costs: list[float]) -> str:
    """The verdict on "it costs much", of the same losses."""
    return {SEEN: CONTRADICTED, CONTRADICTED: SEEN}.get(cheap(costs), NOT_SEEN)


def together(verdicts: Iterable[str]) -> str:
    """The verdict on a claim of several parts: contradicted where one part is, else that of all, or not seen."""
    found = set(verdicts)
    return CONTRADICTED if CONTRADICTED in found else found.pop() if len(found) == 1 else NOT_SEEN


ALT = (
    "Differences of validation loss by row, and the number of seeds: blue where the claim is seen, green where there "
    "is no effect, orange where it is contradicted. The band is 0.02 nats on either side"
)

RULES: dict[str, Callable[[list[float]], str]] = {"lower": lower, "cheap": cheap, "costly": costly}


def differences(claim: Claim, results: Results) -> list[list[float]]:
    """For each gap of a row, the loss of the second run over that of the first, seed by seed. Of four runs: by how much
    that is more than the fourth's over the third."""

    def gap(names: tuple[str, ...]) -> list[float]:
        first, *others = (results.runs(name) for name in names)
        seeds = [seed for seed in first if seed >= claim.seeds_from and all(seed in other for other in others)]
        one, other, *control = ({seed: runs[seed] for seed in seeds} for runs in (first, *others))
        found = methods_runs.gaps(one, other)
        return [gross - net for gross, net in zip(found, methods_runs.gaps(*control))] if control else found

    return [gap(names) for names in claim.gaps]


def values(claim: Claim, results: Results) -> list[list[float]]:
    """For each value of a row, what its runs' JSON has at a path, seed by seed, less what another path or run has."""

    def value(name: str, path: str, less: str = "", other: str = "") -> list[float]:
        runs = results.runs(name)
        others = results.runs(other) if other else runs
        seeds = [seed for seed in runs if seed >= claim.seeds_from and seed in others]
        return [_at(runs[seed], path) - (_at(others[seed], less) if less else 0) for seed in seeds]

    return [value(*names) for names in claim.values]


def judged(claim: Claim, results: Results) -> tuple[str, str, str]:
    """The finding of a row, how precise it is, and its verdict."""
    found, more = differences(claim, results), values(claim, results)
    finding = claim.finding.format(*map(shown, found), *(shown(each, ".3g") for each in more))
    if claim.verdict:
        return finding, "", claim.verdict
    deciding = [(found + more)[place] for place in claim.of or range(len(found))]
    error = max(map(margin, deciding))
    precision = f"±{error:.3f}; 0.02 would look like {0.02 - error:+.3f} to {0.02 + error:+.3f}"
    verdict = together(RULES[claim.statistic](part) for part in deciding)
    return finding, precision if math.isfinite(error) else "one seed", verdict


def _at(run: Run, path: str) -> float:
    """What a run's JSON has at a path such as `log_ratio/moments-dense/1`; of a list the mean."""
    found: Any = run
    for key in path.split("/"):
        found = found[int(key) if isinstance(found, list) else key]
    return statistics.fmean(found) if isinstance(found, list) else float(found)


INTRO = """# What the papers claim, and what was seen

{claims} claims of five papers, tried as far as a CPU can: **{counts}**.

{table}

- **The models are tiny**: unless a row says otherwise, a Llama of 0.46M parameters on Python's standard library.
  Runs of `claims.py` have {steps} steps of 1,024 tokens (0.6M tokens), those of [methods side by side](methods.md)
  4,000 (4.1M). At 0.6M tokens the model is far from using what it has: dropping half of the MLPs' weights costs nothing
  there, so the cost of masks is judged at 4.1M. A claim that is not seen here may hold at the papers' sizes.
- Differences are of validation loss in nats per token, seed by seed; brackets have the lowest and the highest seed.
- ± is half of the 95 % interval of the mean, by Student's t, of the least precise difference that decides. "0.02 would
  look like" is what the mean would be, nineteen times of twenty, if the true difference were 0.02.
- *Ends lower*: B minus A is *no effect* where the interval lies within {null:g} nats of zero, else *seen* above zero,
  *contradicted* below, *not seen* across it; the claim may hold.
- *Costs little*: loss over the control, by {limit:g} nats alone. *Seen*: the interval ends there or below.
  *Contradicted*: it begins above. A *drop* is the reverse.
- A claim of several parts is contradicted where one part is, and else has the verdict that all parts share. S7
  rests on runs of S6.
- *Forked* runs are one dense training up to step 1,000 of 4,000, compiled, in bf16; they say what masks do after a
  dense start. A seed that does not judge chose the learning rates of eight arms among 1, 1.6 and 2.5 times dense
  training's; variants take that of the arm they vary. The transposable arms took 2.5, the largest tried.
- `claims.py --list` shows the seeds that are planned. Until all are there, those that are judge.
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
    run = results.runs("claims/dense")[0]
    sizes = {"claims": len(verdicts), "counts": counts, "table": table, "steps": run["arguments"]["max_steps"]}
    parts = [INTRO.format(**sizes, limit=LIMIT, null=NULL, frozen=sum(bool(claim.frozen) for claim in claims))]
    changed = [[one.id, one.was, now[one.id], one.why] for one in claims if one.was not in ("", now[one.id])]
    parts += ["## Verdicts that changed", markdown_table(["", "before", "now", "why"], changed)]
    for section in sections:
        parts += [f"## {section.section}", section.paper, f"![{ALT}](../images/{section.image}.svg)"]
        rows = [[each.id, each.claim, each.tried, *_cells(*findings[each.id])] for each in section.claims]
        parts += [markdown_table(["", "claim", "tried by", "result", "precision", "verdict"], rows), section.reading]
    versions = ", ".join(f"{key} {value}" for key, value in run["versions"].items())
    forked = results.runs("claims/fork-dense")[0]["versions"]["hf_sparse24"]
    made = f"Made on a CPU by one thread; {versions}; forked runs by hf_sparse24 {forked}."
    parts.append(f"{made} One JSON for each run in `recipes/results/claims/`.")
    return "\n\n".join(parts) + "\n"


def _cells(finding: str, precision: str, verdict: str) -> tuple[str, str, str]:
    """A finding, its precision and its verdict, bold where the claim does not hold."""
    return finding, precision, verdict if verdict in (SEEN, ELSEWHERE) else f"**{verdict}**"
