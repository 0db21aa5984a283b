"""The comparison of methods: how its learning rates are searched for, and its page, from made-up runs."""

import json
import math
import shutil
import types

import compare_methods as methods
import make
import methods_page
import pytest
import results
import style
import torch
import zoo
from arguments import UsageError
from methods_runs import EMBEDDING_RATE, RATE_OF, best_rate, best_runs, next_rate, read_runs, training_gaps

from hf_sparse24 import Sparse24Config, patch_model
from hf_sparse24.methods import StepAdamW, step_param_groups

GONE = {"cast", "cast-decay-1e-3"}
"""Variants that have results alone."""
GRID = (1e-3, 1.5e-3, 2.2e-3, 3.3e-3, 5e-3, 7.5e-3, 1.1e-2)


@pytest.fixture(autouse=True)
def a_grid_of_its_own(monkeypatch):
    monkeypatch.setattr(methods, "LEARNING_RATES", GRID)
    monkeypatch.setattr(methods, "START", GRID[2:5])
    monkeypatch.setattr(methods, "RATE_OF", {"s-ste-greedy": "s-ste"})


def run(variant="dense", rate=GRID[3], seed=0, loss=3.0, flips=None):
    """What `methods.run` returns."""
    return {
        "variant": variant,
        "learning_rate": rate,
        "seed": seed,
        "eval_loss": loss,
        "steps": [50, 100],
        "loss": [loss + 1, loss],
        "flip_rate": flips or [None, None],
        "model": "llama",
        "parameters": 1000,
        "tokens": 4000,
        "arguments": {"max_steps": 100},
        "sparse24": {"dense_tail": 1 / 6} if variant == "t-sr-ste" else {},
        "versions": {"hf_sparse24": "0.2", "torch": "2.13"},
        "device": "cpu, 1 thread(s)",
    }


def seeds(variant, losses, rate=GRID[3]):
    return [run(variant, rate, seed, loss) for seed, loss in enumerate(losses)]


def valley(*rates, best):
    """Losses that grow with the distance from the grid's `best` place."""
    return {rate: 3 + 0.1 * abs(GRID.index(rate) - best) for rate in rates}


@pytest.mark.parametrize("best", range(len(GRID)))
def test_a_search_ends_between_worse_rates(best):
    """It tries the rates to start with, goes on to where the loss falls, and stops inside or at the grid's ends."""
    losses: dict[float, float] = {}
    while (rate := next_rate(losses, GRID, GRID[2:5])) is not None:
        assert rate not in losses
        losses |= valley(rate, best=best)
    assert best_rate(losses) == GRID[best]
    assert set(losses) == {*methods.START, *GRID[max(best - 1, 0) : best + 2]}
    assert best_rate(losses | {GRID[best]: math.nan}) != GRID[best], "a run that diverged is the worst"


def searched(variant, best=3):
    return [run(variant, rate, loss=loss) for rate, loss in valley(*methods.START, best=best).items()]


def test_missing_runs():
    assert list(methods.missing("ste", [])) == [(GRID[2], 0)]
    assert list(methods.missing("ste", searched("dense"))) == [(GRID[2], 0)]
    found = searched("ste")
    assert list(methods.missing("ste", found)) == [(GRID[3], 1), (GRID[3], 2)]
    found.append(run("ste", GRID[3], seed=2))
    assert list(methods.missing("ste", found)) == [(GRID[3], 1)]
    found.append(run("ste", GRID[3], seed=1))
    assert not list(methods.missing("ste", found))


@pytest.mark.parametrize("method", ["ste", "step"])
def test_embeddings_and_head_learn_at_a_rate_of_their_own(method):
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method=method))
    groups, names = step_param_groups(model), {id(p): name for name, p in model.named_parameters()}
    make_optimizer = StepAdamW if method == "step" else torch.optim.AdamW
    arguments = {"total_steps": 10} if method == "step" else {}
    trainer = types.SimpleNamespace(model=model)
    optimizer = methods._create_optimizer(trainer, lambda: make_optimizer(groups, lr=1e-3, **arguments))
    rates = {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates.keys() == set(names.values())
    assert {name for name, rate in rates.items() if rate != 1e-3} == {"model.embed_tokens.weight", "lm_head.weight"}
    assert set(rates.values()) == {1e-3, EMBEDDING_RATE}
    assert sum("auto_switch" in group for group in optimizer.param_groups) == (method == "step")


def test_the_page_describes_every_variant():
    assert methods_page.WHAT.keys() - methods.VARIANTS.keys() == GONE
    assert {*RATE_OF, *RATE_OF.values()} <= methods_page.WHAT.keys()


def test_tables():
    """Each variant at its best rate, over dense at dense's; seeds may be missing, and variants."""
    runs = [
        *[run("dense", GRID[2], loss=3.2), *seeds("dense", [3.0, 3.1, 3.2]), run("dense", GRID[4], loss=3.5)],
        *[run("ste", GRID[3], loss=3.4), run("ste", GRID[3], seed=1, loss=2.0)],
        *seeds("ste", [3.3, 3.2], GRID[4]),
        run("step", GRID[2], loss=3.3),
        run("step", GRID[3], loss=3.4),
        run("sr-ste", loss=3.6, flips=[0.1, 2e-3]),
        run("fixed-mask", loss=3.5),
        run("fixed-mask-late", loss=3.7),
        *[run("t-sr-ste", GRID[2], loss=3.9), run("t-sr-ste", GRID[3], loss=3.8)],
    ]
    text = methods_page.page(runs)
    assert f"from {len(runs)} runs" in text and "llama of 1,000 parameters on 4,000 tokens" in text
    assert "(cpu, 1 thread; hf_sparse24 0.2, torch 2.13)" in text
    assert "| `dense` | 3.000 |  |  | 3 | 0.0033 |  | the control |" in text
    assert "| `ste` | 3.300 | +0.300 | +0.200 [+0.100, +0.300] | 2 | 0.005 |  | magnitude masks" in text
    assert "| `sr-ste` | 3.600 | +0.600 |  | 1 | 0.0033 | 0.002 | magnitude masks" in text, "one seed has no mean"
    methods, variants = text.split("## Variants")
    assert "`fixed-mask-late`" not in methods
    assert "| `fixed-mask-late` | 3.700 | +0.200 |  | 1 | 0.0033 | dense for" in variants
    assert "| `step-" not in text and "| `s-ste" not in text, "without runs"
    assert "| variant | 0.0022 | 0.0033 | 0.005 |\n|---|---|---|---|\n| `dense` | 3.200 | **3.000** | 3.500 |" in text
    assert "| `ste` |  | 3.400 | **3.300** |" in text and "| `step` | **3.300** | 3.400 |  |" in text
    assert (
        "- The best rate is the lowest tried; a lower one may be better still: `fixed-mask`, `sr-ste`, `step`\n" in text
    )
    assert "- The best rate is the highest tried; a higher one may be better still: `t-sr-ste`\n" in text


def test_runs_of_another_model_are_refused(tmp_path):
    for name, parameters in (("a", 1000), ("b", 2000)):
        (tmp_path / f"{name}.json").write_text(json.dumps(run() | {"parameters": parameters}))
    with pytest.raises(UsageError, match=r"b.json: a run with 2,000 parameters, a.json has 1,000; delete one of them"):
        read_runs(tmp_path)


def test_what_cannot_be_done_is_said(tmp_path, capsys, monkeypatch):
    with pytest.raises(UsageError, match="--steps: short runs would count as done"):
        methods.main(["--steps", "5"])
    with pytest.raises(UsageError, match="no runs; `make methods` makes them"):
        methods.main(["--report", "--results", str(tmp_path)])
    (tmp_path / "a.json").write_text(json.dumps(run("s-ste")))
    monkeypatch.setattr(methods.stdlib_text, "prepare", lambda directory: directory)
    methods.main(["--only", "s-ste-greedy", "--results", str(tmp_path)])
    assert "s-ste-greedy: waits for the search of s-ste; run the same again" in capsys.readouterr().out


def test_training_loss_over_dense_is_of_the_same_seed():
    dense = best_runs(seeds("dense", [3.0, 2.0]), "dense")
    found = best_runs(seeds("ste", [3.1, 2.3, 9.0]), "ste")
    assert training_gaps(found, dense) == [(step, (pytest.approx(0.1), pytest.approx(0.3))) for step in (50, 100)]
    assert training_gaps({}, dense) == []


@pytest.mark.parametrize("name", ["methods", "rates", "curves", "flip-rate", "method-t-sr-ste"])
def test_figures_of_the_runs_that_there_are(name, tmp_path, monkeypatch):
    """The site's, too, are drawn from none, from some variants with some seeds, and from all."""
    shutil.copy(make.ROOT / "recipes/results/cpu_step_time.json", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    some = [*seeds("dense", [3.0, 3.1]), *seeds("t-sr-ste", [3.1, 3.2, 3.3]), run("ste", flips=[0.1, 0.2])]
    drawn = []
    for found in ([], some, [*some, *(run(variant, flips=[0.1, 0.1]) for variant in methods.VARIANTS)]):
        monkeypatch.setattr(results, "every_run", lambda found=found: found)
        monkeypatch.setattr("concepts_runs.every_run", lambda found=found: found)
        drawn.append(style.render(name))
    assert drawn[0] != drawn[2] and "nan" not in "".join(drawn)
