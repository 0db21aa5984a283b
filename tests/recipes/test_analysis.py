"""The analysis of predicted and actual descent: its maps, gaps and counts against other ways to compute them."""

import copy
import itertools
import json

import analysis
import pytest
import stdlib_text
import torch
import zoo
from arguments import UsageError
from sparse24_kernels import transposable_mask

from hf_sparse24 import Sparse24Config, Sparse24Controller, patch_model, sparse_weights

NAMES = [f"model.layers.{i}.mlp.{name}_proj.weight" for i in range(2) for name in ("gate", "up", "down")]


def probed(method, **settings):
    """A tiny Llama under a method, its probe, and a batch."""
    torch.manual_seed(0)
    model = zoo.build("llama", initializer_range=0.2)
    twin = copy.deepcopy(model)
    if method != "dense":
        patch_model(model, Sparse24Config(method=method, target_modules="mlp", **settings))
    ids = torch.randint(3, 60, (2, 12))
    return model, analysis.Probe(model, twin, method, NAMES), {"input_ids": ids, "labels": ids}


def step(model, probe, batch, rate, method="dense"):
    """One step of SGD, and what the probe says of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    if method != "dense":
        Sparse24Controller(model, optimizer, 1)
    loss = model(**batch).loss
    loss.backward()
    probe.before()
    optimizer.step()
    assert probe.loss(probe._pruned, batch) == pytest.approx(loss.item(), abs=1e-5)  # what the model itself computes
    return probe.after(batch, loss.item())


@pytest.mark.parametrize("method", ["ste", "s-ste", "t-sr-ste"])
def test_the_linear_piece_is_the_pruning_function_until_something_flips(method):
    model, _, _ = probed(method)
    for weight in sparse_weights(model).values():
        matrix = weight.master.detach().clone()
        piece = analysis.linear_piece(method, matrix, weight.mask(), weight.state.get("scale"))
        assert torch.allclose(piece(matrix), weight.pruned(), atol=1e-6)
        with torch.no_grad():
            weight.master.mul_(1 + 1e-5 * torch.randn_like(matrix))
        assert torch.allclose(piece(weight.master.detach()), weight.pruned(), atol=1e-6)
        shuffled = matrix.flip(-1)  # the largest weights stand elsewhere
        with torch.no_grad():
            weight.master.copy_(shuffled)
        if method != "t-sr-ste":  # keeps its mask until a refresh
            assert not torch.allclose(piece(shuffled), weight.pruned(), atol=1e-2)
        linear = piece(matrix) + 2 * piece(shuffled)
        assert torch.allclose(piece(matrix + 2 * shuffled), linear, atol=1e-5)


@pytest.mark.parametrize("method", ["dense", "ste", "s-ste"])
def test_a_short_step_descends_as_the_gradient_by_pruned_weights_predicts(method):
    settings = {"weight_grad": "dense"} if method == "s-ste" else {}
    model, probe, batch = probed(method, **settings)
    found = step(model, probe, batch, 1e-4, method)
    assert found["flip_rate"] == 0
    assert found["actual"] == pytest.approx(found["predicted_pruned"], rel=0.05) and found["actual"] > 0
    assert found["held"] == pytest.approx(found["actual"], rel=1e-3, abs=1e-6)
    if method == "dense":
        assert found["predicted"] == found["predicted_pruned"]
    if method == "ste":  # the straight-through gradient also counts what the mask drops
        assert found["predicted"] > found["predicted_pruned"]


def test_the_gap_lies_between_the_best_two_of_all_transposable_masks():
    assert analysis.PATTERNS.shape == (90, 16) and len(analysis.PATTERNS.unique(dim=0)) == 90
    matrix = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    kept = (analysis.tiles(matrix).abs() * analysis.tiles(transposable_mask(matrix))).sum(1)
    for tile, best, gap in zip(analysis.tiles(matrix).abs(), kept, analysis.l1_gaps(matrix)):
        sums = set()
        for rows in itertools.product(itertools.combinations(range(4), 2), repeat=4):
            chosen = [4 * i + j for i, row in enumerate(rows) for j in row]
            if all(sum(index % 4 == j for index in chosen) == 2 for j in range(4)):
                sums.add(round(float(tile[chosen].sum()), 4))
        first, second = sorted(sums, reverse=True)[:2]
        assert first == pytest.approx(float(best), abs=1e-3) and first - second == pytest.approx(float(gap), abs=1e-3)
    assert analysis.l1_gaps(torch.ones(4, 4)).tolist() == [0]


@pytest.mark.parametrize("method", ["dense", "t-sr-ste"])
def test_flips_of_tiles_are_counted(method):
    model, probe, _ = probed(method)
    counted = analysis.Tiles(probe)
    counted.refresh(40)
    assert counted.rates == [(40, 0)] and not counted.flips.any()
    weight = probe.matrices()[NAMES[0]]
    weight[:4, :4] = torch.eye(4) + torch.eye(4).roll(1, 0)  # one pattern, and then its opposite
    for weight_of in sparse_weights(model).values():
        weight_of.init_state()
    counted.refresh(80)
    weight[:4, :4] = 1 - weight[:4, :4]
    for weight_of in sparse_weights(model).values():
        weight_of.init_state()
    counted.refresh(120)
    entries = sum(matrix.numel() for matrix in probe.matrices().values())
    assert counted.rates[2] == (120, pytest.approx(16 / entries)) and counted.flips[1:].sum() == 0
    found = counted.result(shown=5)
    assert found["tiles"] == entries // 16 and len(found["tenths"]) == 10 and len(found["some"]) >= 5
    assert found["never"] == pytest.approx(1 - 16 / entries, abs=1e-3)


def test_the_recipe_measures_what_is_missing_and_repeats_nothing(tmp_path, monkeypatch, own_cache):
    stdlib_text.prepare(tmp_path / "data", vocab_size=300, max_files=60)
    monkeypatch.setattr(stdlib_text, "prepare", lambda directory: directory)
    monkeypatch.setattr(analysis, "SETTINGS", analysis.SETTINGS | {"every": 2, "refresh": 2})
    path = tmp_path / "analysis.json"
    flags = ["--steps", "4", "--results", str(path), "--data", str(tmp_path / "data"), "--seeds", "0"]
    analysis.main([*flags, "--only", "ste", "t-sr-ste"])
    found = json.loads(path.read_text())["runs"]
    assert [run["variant"] for run in found] == ["ste", "t-sr-ste"]
    for run in found:
        assert run["points"]["step"] == [2, 4] and 4 < run["eval_loss"] < 7
        assert (run["tiles"] is None) == (run["variant"] == "ste")
    assert [at for at, _ in found[1]["tiles"]["flip_rates"]] == [2, 4]
    assert found[0]["points"]["loss"][0] == pytest.approx(found[1]["points"]["loss"][0], abs=0.2)
    before = path.read_text()
    analysis.main([*flags, "--only", "ste"])
    assert path.read_text() == before
    with pytest.raises(UsageError, match="name another with --results"):
        analysis.main([*flags, "--only", "ste", "--steps", "6"])
