"""The page of claims: verdicts are recomputed from the files, rules decide as they say, and one run is repeated."""

import json
import re
from dataclasses import replace

import claims_once
import claims_page
import pytest
import torch
import zoo
from claims_page import CONTRADICTED, ELSEWHERE, NOT_SEEN, SEEN, VERDICTS, Results
from paths import ROOT

from recipes import claims  # not tests/support/claims.py

COMMITTED = ROOT / "recipes" / "results"
PAGE = ROOT / "docs" / "measured" / "claims.md"


def test_the_page_is_that_of_the_files():
    assert PAGE.read_text() == claims_page.page(COMMITTED)


def test_every_claim_has_a_number_and_a_verdict():
    found = [claim for paper in claims_page.read_papers() for claim in paper.claims]
    rows = re.findall(r"^\| ?([A-Z]\d+) \|.*\| ([^|]+?) ?\|$", PAGE.read_text(), re.MULTILINE)
    assert [number for number, _ in rows] == [claim.number for claim in found] and len(found) >= 25
    assert {verdict for _, verdict in rows} <= set(VERDICTS)
    assert len({claim.number for claim in found}) == len(found)
    assert all(claim.judge for claim in found if isinstance(claim.judge, str))  # a typed verdict has its reason


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([], NOT_SEEN),
        ([0.01], NOT_SEEN),  # one seed, less than noise
        ([0.03], SEEN),
        ([0.01, 0.002], SEEN),
        ([0.01, -0.002], NOT_SEEN),
        ([-0.01, -0.002], NOT_SEEN),
        ([-0.03], CONTRADICTED),
        ([-0.03, -0.02], CONTRADICTED),
    ],
)
def test_orders(differences, verdict):
    assert claims_page.ordered(differences) == verdict


@pytest.mark.parametrize(
    ("costs", "verdict"),
    [
        ([], NOT_SEEN),
        ([0.01], NOT_SEEN),
        ([-0.01], SEEN),
        ([0.05], CONTRADICTED),
        ([0.01, 0.02], SEEN),
        ([0.01, 0.05], NOT_SEEN),
        ([0.03, 0.05], CONTRADICTED),
    ],
)
def test_costs(costs, verdict):
    assert claims_page.cheap(costs) == verdict


@pytest.mark.parametrize(("cost", "verdict"), [(0.03, SEEN), (0.05, NOT_SEEN), (0.075, NOT_SEEN), (0.09, CONTRADICTED)])
def test_what_is_comparable_with_dense(cost, verdict):
    assert claims_page.comparable([cost], {0: {"eval_loss": 3.0}}) == verdict


def test_a_changed_file_changes_the_verdict(tmp_path):
    for name in ("mvue", "greedy"):
        path = COMMITTED / "claims" / f"{name}-seed0.json"
        run = json.loads(path.read_text()) | {"eval_loss": 3.0 if name == "mvue" else 3.1}
        (tmp_path / "claims").mkdir(exist_ok=True)
        (tmp_path / "claims" / path.name).write_text(json.dumps(run))
    assert claims_page.lower("mvue", "greedy", Results(tmp_path))[1] == SEEN
    assert claims_page.lower("greedy", "mvue", Results(tmp_path))[1] == CONTRADICTED
    assert claims_page.costs("mvue", "greedy", Results(tmp_path)) == ("`mvue` over `greedy` -0.100, 1 seed", SEEN)
    with pytest.raises(claims_page.NotRun, match="dense"):
        Results(tmp_path).short("dense")
    typed = replace(claims_page.read_papers()[0].claims[0], judge="no GPU")
    assert claims_page.found(typed, Results(tmp_path)) == ("no GPU", ELSEWHERE)


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


def test_masks_keep_what_they_say_and_adaprune_lowers_the_error():
    torch.manual_seed(0)
    model = zoo.build("llama").eval()
    batch = {"input_ids": torch.randint(3, 60, (2, 12))}
    grams = claims_once._grams(model, [batch])
    held_out = [batch | {"labels": batch["input_ids"]}]
    for kind in ("unstructured", "2:4", "2:4 transposable"):
        row, adapted, masks = claims_once._pruned(model, kind, grams, held_out)
        assert row.keys() == {"kept", "loss", "adaprune"} and set(masks) == {f"{name}.weight" for name in grams}
        for name, layer in claims_once._mlps(model).items():
            weight, mask = layer.weight.detach(), masks[f"{name}.weight"]
            assert mask.float().mean() == pytest.approx(0.5, abs=0.01)
            new = adapted.get_submodule(name).weight.detach()
            assert (new[~mask] == 0).all()
            errors = [((w - weight) @ grams[name] * (w - weight)).sum() for w in (new, weight * mask)]
            assert errors[0] <= errors[1]


@pytest.mark.slow
def test_a_run_repeats(tmp_path):
    """600 steps of another machine round otherwise, so the loss is close and no more."""
    name = "t-sr-ste-gradient-0.006-seed0"
    claims.main(["--only", name, "--results", str(tmp_path), "--data", str(tmp_path / "text")])
    again, before = (json.loads((folder / f"{name}.json").read_text()) for folder in (tmp_path, claims.RESULTS))
    assert again["eval_loss"] == pytest.approx(before["eval_loss"], abs=0.03)
    assert again["settings"] == before["settings"] and again["steps"] == before["steps"]
