"""The page of what the papers' abstracts claim and what was seen, each verdict computed from committed result files."""

import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

# ruff: noqa: E402 (imports come after the path that they need)
ROOT = Path(__file__).resolve().parents[1]
sys.path += [path for path in (str(ROOT / "recipes"),) if path not in sys.path]

import analysis_page
import gpu_page
import methods_runs

from hf_sparse24.tables import markdown_table

Run = dict[str, Any]
NOISE = 0.02
"""Nats. What is less needs two seeds; what costs no more counts as costing nothing."""
COMPARABLE = 0.02
"""A loss within this share of the dense one counts as comparable with it: the papers' own figures are 1 to 2 % off."""

SHORT = "`claims.py --only {}`"
METHODS = "`compare_methods.py`"
NOT_TIMED = "not timed on a GPU"

SEEN, NOT_SEEN, CONTRADICTED, ELSEWHERE = "seen", "**not seen**", "**contradicted**", "needs a GPU or their data"
NOT_RUN = "**not run**"
VERDICTS = (SEEN, NOT_SEEN, CONTRADICTED, ELSEWHERE, NOT_RUN)
Finding = tuple[str, str]
"""What came out, and the verdict."""


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, how it was tried, and what finds the result in the files; or the reason why none does."""

    number: str
    claim: str
    how: str
    judge: Callable[["Results"], Finding] | str


@dataclass(frozen=True)
class Paper:
    title: str
    text: str
    image: str
    alt: str
    claims: tuple[Claim, ...]


class NotRun(Exception):
    """No run of that name has finished."""


class Results:
    """The result files by name, in `recipes/results` or a copy of it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def short(self, name: str, needed: bool = True) -> dict[int, Run]:
        """The runs of `recipes/claims.py` by seed.

        Raises:
            NotRun: there are none, and one is needed.
        """
        paths = sorted((self.folder / "claims").glob(f"{name}-seed[0-9].json"))
        if needed and not paths:
            raise NotRun(name)
        return {int(path.stem[-1]): json.loads(path.read_text()) for path in paths}

    def long(self, variant: str) -> dict[int, Run]:
        """The runs of `recipes/compare_methods.py` at the variant's best rate by seed."""
        return methods_runs.best_runs(self._methods, variant)

    def descent(self, variant: str) -> dict[str, Run]:
        """The runs of `recipes/analysis.py` by seed, and that of the larger model."""
        small = analysis_page.of_variant(self._analysis, variant)
        larger = {f"1.6M, seed {seed}": run for seed, run in self.short(f"descent-{variant}", False).items()}
        return {f"0.46M, seed {seed}": run for seed, run in small.items()} | larger

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def h100_step(self, method: str) -> str:
        """How a step of the Trainer compares with the dense one."""
        step = gpu_page.steps(self.folder / "gpu")
        return f"on an H100 a step of four layers of Llama 8B {step['dense'] / step[method]:.2f}"

    @cached_property
    def _methods(self) -> list[Run]:
        return methods_runs.read_runs(self.folder / "methods")

    @cached_property
    def _analysis(self) -> list[Run]:
        return self.json("analysis.json")["runs"]


def gaps(lower: dict[Any, Run], higher: dict[Any, Run]) -> list[float]:
    """Validation loss of `higher` over that of `lower` for each seed that both have."""
    return methods_runs.gaps(lower, higher)


def shown(values: Iterable[float], form: str = "+.3f") -> str:
    """The mean of some values, with their range and number."""
    values = list(values)
    if not values:
        return "no run"
    if len(values) == 1:
        return f"{values[0]:{form}}, 1 seed"
    middle = statistics.mean(values)
    return f"{middle:{form}} [{min(values):{form}}, {max(values):{form}}], {len(values)} seeds"


def ordered(differences: list[float]) -> str:
    """The verdict on "the first is lower": of differences that are then above zero, one for each seed."""
    if not differences or (len(differences) == 1 and abs(differences[0]) < NOISE):
        return NOT_SEEN
    if min(differences) > 0:
        return SEEN
    return CONTRADICTED if max(differences) < 0 and statistics.mean(differences) <= -NOISE else NOT_SEEN


def cheap(costs: list[float], limit: float = NOISE, noise: float = NOISE) -> str:
    """The verdict on "it costs little": of losses over the control, one for each seed. A single one must be further
    than noise from the limit."""
    if not costs or (len(costs) == 1 and abs(costs[0] - limit) < noise):
        return NOT_SEEN
    if statistics.mean(costs) <= limit:
        return SEEN
    return CONTRADICTED if min(costs) > limit else NOT_SEEN


def comparable(costs: list[float], dense: dict[int, Run]) -> str:
    """The verdict on "as good as dense": costs as a share of the dense loss."""
    loss = statistics.mean(run["eval_loss"] for run in dense.values())
    return cheap(costs, COMPARABLE * loss)


def in_all(facts: Iterable[bool]) -> str:
    """The verdict on something that is there or not in each run: its absence from tiny ones contradicts nothing."""
    facts = list(facts)
    return SEEN if facts and all(facts) else NOT_SEEN


def together(verdicts: Iterable[str]) -> str:
    """The verdict on a claim of several parts: that of all, or not seen."""
    found = set(verdicts)
    return found.pop() if len(found) == 1 else NOT_SEEN


def lower(one: str, other: str, results: Results) -> Finding:
    """Whether short runs of `one` end lower than those of `other`."""
    found = gaps(results.short(one), results.short(other))
    return f"`{other}` over `{one}` {shown(found)}", ordered(found)


def lower_long(one: str, other: str, results: Results) -> Finding:
    """Whether long runs of `one` end lower than those of `other`."""
    found = gaps(results.long(one), results.long(other))
    return f"`{other}` over `{one}` {shown(found)}, 4.1M tokens", ordered(found)


def costs(with_it: str, without: str, results: Results) -> Finding:
    """Whether short runs of `with_it` end no more than a little above those of `without`."""
    found = gaps(results.short(without), results.short(with_it))
    return f"`{with_it}` over `{without}` {shown(found)}", cheap(found)


def comparable_long(method: str, results: Results) -> Finding:
    dense = results.long("dense")
    found = gaps(dense, results.long(method))
    share = statistics.mean(found) / statistics.mean(run["eval_loss"] for run in dense.values())
    return f"`{method}` over dense {shown(found)}, 4.1M tokens: {share:.1%} of the loss", comparable(found, dense)


def speeds(part: str, case: str, ways: tuple[str, ...], results: Results) -> str:
    """Speed-ups on CPUs in `cpu_training.json`, as lowest to highest median over paths and cases."""
    texts, rows = [], results.json("cpu_training.json")["sections"]["training"]["rows"]
    facts = [row["facts"] for name, row in rows.items() if row["facts"]["part"] == part and case in name]
    for way in ways:
        found = [ratios[f"{way} over dense"][1] for ratios in facts if f"{way} over dense" in ratios]
        texts.append(f"{way} {min(found):.2f} to {max(found):.2f}")
    return "; ".join(texts)


def found(claim: Claim, results: Results) -> Finding:
    """The result of a claim and its verdict, from the files."""
    if isinstance(claim.judge, str):
        return claim.judge, ELSEWHERE
    try:
        return claim.judge(results)
    except NotRun as name:
        return f"waits for `claims.py --only {name}-seed0`", NOT_RUN


def read_papers() -> tuple[Paper, ...]:
    """The papers, from the modules that import this one."""
    import claims_masks
    import claims_thresholds

    return claims_thresholds.PAPERS + claims_masks.PAPERS


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
- Verdicts are computed from the result files by `python docs/build_site.py`, and again by the tests.
- Commands stand for `python recipes/...`. What repeats the papers' own experiments, at their size, is in
  [the papers' experiments](papers.md)."""


READINGS = {
    "S-STE": """Three figures in a row are two runs of 0.46M parameters and one of 1.6M. Hard thresholds do no harm
there: none of their steps ascends (S1). Descent is predicted as well as in dense training at 0.46M; in the larger model
it is predicted worse, and worst with `s-ste` (S2). S-STE is continuous (S4), and ends where the baselines end (S12). At
0.6M tokens smaller scales than that of least squares are better (S6, S7), at the one learning rate that was searched
for with it; at 4.1M tokens no scale at all is as good. The paper's models have 124M to 774M parameters and train for
300,000 steps: oscillation may begin between these sizes.""",
    "T-SR-STE": """The decay decides more than anything else here (T2 to T6). The default, that of GPT-2 124M, is too
small for this model. The paper's rule finds 6e-3, and with it the loss at 0.6M tokens is no higher than that of dense
training; at 4.1M tokens it halves the distance to dense (T8). Decays above the rule's range do no harm here (T4), and
decay on the weight does as well, at a factor that is larger by orders of magnitude (T3). The learning rate is that
which was searched for with the default decay.""",
    "Transposable masks and AdaPrune": """Put on a trained model, patterns with more masks lose less
(H1, H2), and 4:8 both ways loses what 2:4 along rows loses (H4), although there are fewer of it: the paper's count is
too large (H3). AdaPrune alone takes back a third to a half of what N:M adds to an unstructured model (H9). The paper's
networks are convolutional, but for BERT, and larger.""",
    "MVUE": """Pruned gradients cost next to nothing at this size, by MVUE of any kind (M4, M5). The two largest of four
cost more, but no run fails (M2).""",
    "STEP": """How long the masks train decides here: ways that are dense for the first half lose more the sparser the
ratio, whether Adam's variance is frozen or not (P4, P6 to P9), and masks from the first step on hardly lose. At 1:16
the variance is not that of dense training, as the paper says (P3), and does no harm. AutoSwitch's statistic is nearly
constant after warm-up, so its threshold decides whether it fires at once or never (P10, P11). The paper trains to
convergence or fine-tunes, and its variance remembers 1,000 steps where ours remembers 20.""",
}


def page(folder: Path) -> str:
    """The page of a folder of results."""
    papers = read_papers()
    results = Results(folder)
    findings = {claim.number: found(claim, results) for paper in papers for claim in paper.claims}
    verdicts = [verdict for _, verdict in findings.values()]
    counts = ", ".join(f"{verdicts.count(kind)} {kind.strip('*')}" for kind in VERDICTS if kind in verdicts)
    run = next(iter(results.short("dense").values()))
    steps = run["arguments"]["max_steps"]
    kinds = [kind for kind in VERDICTS if kind in verdicts]
    lines = []
    for paper in papers:
        own = [findings[claim.number][1] for claim in paper.claims]
        link = f"[{paper.title}](#{paper.title.lower().replace(' ', '-')})"
        lines.append([link, *(str(own.count(kind) or "") for kind in kinds)])
    table = markdown_table(["paper", *(kind.strip("*") for kind in kinds)], lines)
    sizes = {"claims": len(verdicts), "counts": counts, "table": table, "steps": steps}
    parts = [INTRO.format(**sizes, noise=NOISE, share=COMPARABLE)]
    for paper in papers:
        parts += [f"## {paper.title}", paper.text, f"![{paper.alt}](../images/{paper.image}.svg)"]
        rows = [[c.number, c.claim, c.how, *findings[c.number]] for c in paper.claims]
        parts.append(markdown_table(["", "claim", "tried by", "result", "verdict"], rows))
        parts.append(READINGS[paper.title])
    versions = ", ".join(f"{key} {value}" for key, value in run["versions"].items())
    parts.append(f"Made on a CPU by one thread; {versions}. One JSON for each run in `recipes/results/claims/`.")
    return "\n\n".join(part for part in parts if part) + "\n"
