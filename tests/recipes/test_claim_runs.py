"""The page of claims: rows of losses are recomputed from the files, rules decide, and one run is repeated."""

import json
import re

import claims_page
import pytest
from claims_page import CONTRADICTED, ELSEWHERE, NOT_SEEN, SEEN, VERDICTS, Claim, Results, cheap, ordered
from paths import ROOT

from recipes import claims  # not tests/support/claims.py

COMMITTED = ROOT / "recipes" / "results"
PAGE = ROOT / "docs" / "measured" / "claims.md"


def test_the_page_is_that_of_the_files():
    assert PAGE.read_text() == claims_page.page(COMMITTED)


def test_every_row_has_a_number_and_either_a_statistic_or_a_verdict():
    found = [claim for section in Results(COMMITTED).sections() for claim in section.claims]
    rows = re.findall(r"^\| ?([A-Z]\d+) \|.*\| ([^|]+?) ?\|$", PAGE.read_text(), re.MULTILINE)
    assert [number for number, _ in rows] == [claim.id for claim in found] and len(found) >= 25
    assert {verdict.strip("*") for _, verdict in rows} <= set(VERDICTS)
    assert len({claim.id for claim in found}) == len(found)
    for claim in found:
        assert bool(claim.statistic) == bool(claim.gaps) != bool(claim.verdict), claim.id
        assert claim.frozen or claim.statistic or claim.verdict == ELSEWHERE, claim.id


@pytest.mark.parametrize(
    ("rule", "differences", "verdict"),
    [
        (ordered, [], NOT_SEEN),
        (ordered, [0.01], NOT_SEEN),  # one seed, less than noise
        (ordered, [0.03], SEEN),
        (ordered, [0.01, 0.002], SEEN),
        (ordered, [0.01, -0.002], NOT_SEEN),
        (ordered, [-0.01, -0.002], NOT_SEEN),
        (ordered, [-0.03], CONTRADICTED),
        (ordered, [-0.03, -0.02], CONTRADICTED),
        (cheap, [], NOT_SEEN),
        (cheap, [0.01], NOT_SEEN),
        (cheap, [-0.01], SEEN),
        (cheap, [0.05], CONTRADICTED),
        (cheap, [0.01, 0.02], SEEN),
        (cheap, [0.01, 0.05], NOT_SEEN),
        (cheap, [0.03, 0.05], CONTRADICTED),
    ],
)
def test_orders_and_costs(rule, differences, verdict):
    assert rule(differences) == verdict


@pytest.mark.parametrize(
    ("verdicts", "each", "worst"),
    [
        ([SEEN, SEEN], SEEN, SEEN),
        ([SEEN, NOT_SEEN], NOT_SEEN, NOT_SEEN),
        ([SEEN, CONTRADICTED], NOT_SEEN, CONTRADICTED),
        ([CONTRADICTED, CONTRADICTED], CONTRADICTED, CONTRADICTED),
    ],
)
def test_several_parts(verdicts, each, worst):
    assert (claims_page.together(verdicts), claims_page.worst(verdicts)) == (each, worst)


def copied(folder, losses):
    """Results of seed 0 alone, with other losses."""
    (folder / "claims").mkdir()
    for name, loss in losses.items():
        path = COMMITTED / "claims" / f"{name}-seed0.json"
        (folder / "claims" / path.name).write_text(json.dumps(json.loads(path.read_text()) | {"eval_loss": loss}))
    return Results(folder)


@pytest.mark.parametrize(("cost", "verdict"), [(0.03, SEEN), (0.05, NOT_SEEN), (0.075, NOT_SEEN), (0.09, CONTRADICTED)])
def test_comparable_with_dense(tmp_path, cost, verdict):
    results = copied(tmp_path, {"dense": 3.0, "mvue": 3.0 + cost})
    claim = Claim("X1", "", "", "{} {share:.1%}", [["claims/dense", "claims/mvue"]], "comparable")
    assert claims_page.judged(claim, results) == (f"+{cost:.3f}, 1 seed {cost / 3:.1%}", verdict)


def test_a_changed_file_changes_the_verdict(tmp_path):
    results = copied(tmp_path, {"mvue": 3.0, "greedy": 3.1})

    def judged(one, other, statistic, **options):
        gaps = [[f"claims/{one}", f"claims/{other}"]]
        return claims_page.judged(Claim("X1", "", "", "over it {}", gaps, statistic, **options), results)

    assert judged("mvue", "greedy", "lower") == ("over it +0.100, 1 seed", SEEN)
    assert judged("greedy", "mvue", "lower") == ("over it -0.100, 1 seed", CONTRADICTED)
    assert judged("greedy", "mvue", "cheap") == ("over it -0.100, 1 seed", SEEN)
    assert judged("mvue", "greedy", "cheap", taken="each", of=[0]) == ("over it +0.100, 1 seed", CONTRADICTED)
    with pytest.raises(FileNotFoundError, match="claims/dense"):
        judged("dense", "mvue", "lower")
    typed = Claim("X1", "", "", "no GPU", verdict=ELSEWHERE)
    assert claims_page.judged(typed, results) == ("no GPU", ELSEWHERE)


def test_a_run_that_has_its_file_is_not_repeated(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(claims, "measure", lambda name, run, seed, data: made.append((name, seed)) or {"seed": seed})
    monkeypatch.setattr(claims.stdlib_text, "prepare", lambda directory: None)
    options = ["--only", "mvue-fp8-seed0", "step-geometric-seed0", "--results", str(tmp_path)]
    (tmp_path / "step-geometric-seed0.json").write_text("{}")
    claims.main(options)
    claims.main(options)
    assert made == [("mvue-fp8", 0)]
    assert json.loads((tmp_path / "mvue-fp8-seed0.json").read_text()) == {"seed": 0}


@pytest.mark.slow
def test_a_run_repeats(tmp_path):
    """600 steps of another machine round otherwise, so the loss is close and no more."""
    name = "t-sr-ste-gradient-0.006-seed0"
    claims.main(["--only", name, "--results", str(tmp_path), "--data", str(tmp_path / "text")])
    again, before = (json.loads((folder / f"{name}.json").read_text()) for folder in (tmp_path, claims.RESULTS))
    assert again["eval_loss"] == pytest.approx(before["eval_loss"], abs=0.03)
    assert again["settings"] == before["settings"] and again["steps"] == before["steps"]
