"""The claims: rules decide, rows are computed from the files, and the runs have what the table says."""

import json
import re
from functools import partial

import claims_page
import pytest
from claims_page import CONTRADICTED, NO_EFFECT, NOT_SEEN, SEEN, Claim, Results, cheap, costly, lower
from paths import ROOT

from recipes import claims, stdlib_text
from recipes.claims import Run

COMMITTED = ROOT / "recipes" / "results"
PAGE = ROOT / "docs" / "measured" / "claims.md"


def test_every_row_has_a_number_and_either_a_statistic_or_a_verdict():
    found = [claim for section in Results(COMMITTED).sections() for claim in section.claims]
    rows = re.findall(r"^\| ?([A-Z]\d+) \|.*\| ([^|]+?) ?\|$", PAGE.read_text().partition("## S-STE")[2], re.M)
    assert [number for number, _ in rows] == [claim.id for claim in found] and len(found) >= 25
    assert {verdict.strip("*") for _, verdict in rows} <= set(claims_page.VERDICTS)
    assert len({claim.id for claim in found}) == len(found)
    for claim in found:
        assert bool(claim.statistic) != bool(claim.verdict) and bool(claim.was) == bool(claim.why), claim.id
        assert claim.frozen or claim.gaps or claim.values or claim.verdict == claims_page.ELSEWHERE, claim.id


@pytest.mark.parametrize(
    ("rule", "differences", "verdict"),
    [
        (lower, [0.03, 0.02, 0.03, 0.02], SEEN),
        (lower, [-0.03, -0.02, -0.03, -0.02], CONTRADICTED),
        (lower, [0.006, 0.0061] * 2, NO_EFFECT),  # and not "seen": too small
        (lower, [0.02, -0.02] * 4, NOT_SEEN),
        (cheap, [-0.03], NOT_SEEN),
        (cheap, [0.012, 0.008] * 4, SEEN),
        (cheap, [0.07, 0.069], CONTRADICTED),
        (costly, [0.07, 0.069], SEEN),
    ],
)
def test_orders_and_costs(rule, differences, verdict):
    assert rule(differences) == verdict


def test_a_changed_file_changes_the_verdict(tmp_path):
    (tmp_path / "claims").mkdir()
    for name, losses in {"mvue": (3.0, 3.5), "greedy": (3.1, 3.61), "fp8": (3.1, 3.61)}.items():
        for seed, loss in enumerate(losses):
            (tmp_path / "claims" / f"{name}-seed{seed}.json").write_text(json.dumps({"eval_loss": loss}))

    def judged(*names, statistic="lower", **options):
        gaps = [[f"claims/{name}" for name in names]]
        return claims_page.judged(Claim("X1", "", "", "over it {}", gaps, statistic, **options), Results(tmp_path))

    precision = "±0.064; 0.02 would look like -0.044 to +0.084"
    assert judged("mvue", "greedy") == ("over it +0.105 [+0.100, +0.110], 2 seeds", precision, SEEN)
    assert judged("greedy", "mvue")[-1] == judged("mvue", "greedy", statistic="cheap")[-1] == CONTRADICTED
    assert judged("mvue", "greedy", seeds_from=1) == ("over it +0.110, 1 seed", "one seed", NOT_SEEN)
    assert judged("mvue", "greedy", "mvue", "fp8")[0].startswith("over it +0.000")  # as much as the control's
    assert judged("mvue", "fp8", values=[["claims/mvue", *["eval_loss"] * 2, "claims/fp8"]], of=[1])[-1] == CONTRADICTED
    with pytest.raises(FileNotFoundError, match="claims/dense"):
        judged("dense", "mvue")


@pytest.fixture
def made(monkeypatch):
    """The names and factors of the runs that were made; the loss of each is its factor's distance from 1."""
    found = []

    def measure(name, run, seed, data, factor):
        found.append((name, seed, factor))
        return {"eval_loss": abs(factor - 1)}

    monkeypatch.setattr(claims, "measure", measure)
    monkeypatch.setattr(claims.stdlib_text, "prepare", lambda directory: None)
    return found


def test_a_run_that_has_its_file_is_not_repeated(tmp_path, made):
    options = ["--only", "mvue-fp8-seed0", "--results", str(tmp_path)]
    claims.main(options)
    claims.main(options)
    assert made == [("mvue-fp8", 0, 1.0)]
    assert json.loads((tmp_path / "mvue-fp8-seed0.json").read_text()) == {"eval_loss": 0.0}


def test_other_seeds_take_the_best_of_the_search(tmp_path, made):
    names = ["fork-transposable-1-2-seed0", "fork-transposable-2-4-seed0"]
    with pytest.raises(claims.UsageError, match=r"fork-transposable-2-4: .* fork-transposable-2-4-x1-seed9 "):
        claims.main(["--only", *names, "--results", str(tmp_path)])
    search = [f"fork-transposable-2-4-x{factor}-seed9" for factor in ("1", "1.6", "2.5")]
    claims.main(["--only", *search, *names, "--results", str(tmp_path)])
    assert [factor for *_, factor in made] == [1, 1.6, 2.5, 1.0, 1.0]


@pytest.mark.slow
def test_what_a_run_has_besides_its_training(tmp_path, monkeypatch):
    """Second moments are kept, compared, frozen. The factor holds from the fork on. Adam sees no scale of the loss."""
    stdlib_text.prepare(tmp_path / "text", max_files=50)

    def run(name, **fields):
        flags = {"block_size": 32, "logging_steps": 1} | fields.pop("flags", {})
        one = Run(fields.pop("method", "dense"), like="dense", flags=flags, **fields)
        return claims.measure(name, one, 0, str(tmp_path / "text"), factor=3.0 if one.fork else 1.0, steps=8)

    plain = run("plain", moments=True)
    same = run("same", against=("plain",))
    assert same["loss"] == plain["loss"] and same["log_ratio"] == {"plain": (0.0, 0.0)}
    scaled = run("scaled", loss_scale=10, flags={"max_grad_norm": 10})
    assert scaled["loss"] == pytest.approx([10 * loss for loss in plain["loss"]], rel=2e-3)
    assert scaled["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-3)
    forked = run("forked", fork=4)
    assert forked["loss"][:5] == plain["loss"][:5] and forked["loss"][5:] != plain["loss"][5:]
    frozen = run("frozen", frozen_from="plain")
    (_, mean, _), (_, kept, _) = frozen["variance"][-1], plain["variance"][3]
    assert mean == pytest.approx(kept, rel=1e-3) and frozen["loss"] != plain["loss"]
    monkeypatch.setitem(claims.PROBES, "descent", partial(claims.PROBES["descent"], steps=2, micro_batches=4))
    held = {"probe": "descent", "flags": {"lr_scheduler_type": "constant", "max_samples": 1}}  # 7 batches, for 8
    probes = {method: run(method, method=method, **held)["probe"] for method in ("ste", "s-ste")}
    assert abs(probes["s-ste"]["gain of flips"]) < abs(probes["ste"]["gain of flips"]) / 2, "it is continuous"
    found = run("unstructured", probe="unstructured")["probe"]["over unstructured"]
    assert found["2:4"]["at once"] > found["8:16"]["at once"]
    monkeypatch.setitem(claims.PROBES, "fine_tuned", partial(claims.PROBES["fine_tuned"], steps=2))
    losses = run("fine-tuned", method="s-ste", probe="fine_tuned")["probe"]["losses"]
    assert losses["s-ste"][8e-3] < losses["s-ste"][1e-3] != losses["fixed-mask"][1e-3]


@pytest.mark.slow
def test_a_run_repeats(tmp_path):
    """600 steps of another machine round otherwise, so the loss is close and no more."""
    name = "t-sr-ste-gradient-0.006-seed0"
    claims.main(["--only", name, "--results", str(tmp_path), "--data", str(tmp_path / "text")])
    again, before = (json.loads((folder / f"{name}.json").read_text()) for folder in (tmp_path, claims.RESULTS))
    assert again["eval_loss"] == pytest.approx(before["eval_loss"], abs=0.03)
    assert again["settings"] == before["settings"] and again["steps"] == before["steps"]
