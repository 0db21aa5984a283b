"""oneshot(budget=...): a pattern for each layer, within a share of the dense bytes."""

import json

import pytest
import torch
import zoo
from oneshot_models import assert_untouched, batches, fixed_mask
from sparse_models import logits, snapshot
from transformers import AutoModelForCausalLM

from hf_sparse24 import Sparse24Config, export_model, oneshot, sparse_weights
from hf_sparse24.pruning import budget as budgets
from hf_sparse24.run import patched_config
from hf_sparse24.weights.storage import PACKED

WIDE = {"hidden_size": 64, "intermediate_size": 128}


def llama():
    return zoo.build("llama", **WIDE).eval()


def share(model) -> float:
    """The bytes that the packed weights take, of those of dense bf16 ones."""
    sizes = {name: weight.parameter.numel() for name, weight in sparse_weights(model).items()}
    taken = sum(sizes[name] * (weight.pattern.n / 32 + 1 / 16) for name, weight in sparse_weights(model).items())
    return taken / sum(sizes.values())


@pytest.mark.parametrize("budget", [0.5, 0.6875, 0.9])
def test_the_budget_is_met_within_one_step(budget):
    model = llama()
    report = oneshot(model, batches(), fixed_mask(), reconstruct=None, budget=budget)
    sizes = [weight.parameter.numel() for weight in sparse_weights(model).values()]
    assert budget - 4 / 32 * min(sizes) / sum(sizes) < share(model) <= budget
    assert {layer.name: layer.pattern for layer in report.layers} == {
        name.removesuffix(".weight"): str(weight.pattern) for name, weight in sparse_weights(model).items()
    }
    assert len({layer.pattern for layer in report.layers}) > 1 and " layers, " in str(report).partition("\n")[0]


def test_a_layer_that_matters_little_gets_the_lowest_n_and_others_more():
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e-4)
    layers = oneshot(model, batches(), fixed_mask(), reconstruct=None, budget=0.7).layers
    patterns = {layer.name: layer.pattern for layer in layers}
    assert patterns["model.layers.0.mlp.down_proj"] == "12:32" != patterns["model.layers.1.mlp.down_proj"]


def test_an_export_packs_and_loads_with_its_patterns(tmp_path):
    model = llama()
    oneshot(model, batches(), fixed_mask(), reconstruct=None, budget=0.6)
    export_model(model, tmp_path, "packed")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    packed = sparse_weights(loaded, PACKED)
    for name, weight in sparse_weights(model).items():
        assert packed[name].pattern == weight.pattern
    torch.testing.assert_close(logits(loaded), logits(model))


def test_a_shared_weight_is_measured_once():
    model = zoo.build("albert", hidden_size=64, intermediate_size=128)
    oneshot(model, batches(1), fixed_mask(), reconstruct=None, budget=0.7)
    assert share(model) <= 0.7


def test_the_choice_is_kept_and_is_the_same_without(tmp_path, monkeypatch):
    def pruned(folder=None, **options):
        model = llama()
        oneshot(model, batches(), fixed_mask(), **{"reconstruct": None, "budget": 0.6, "resume_dir": folder, **options})
        return model

    expected = pruned()
    pruned(tmp_path)
    assert json.loads((tmp_path / "budget.json").read_text())["chosen"]
    monkeypatch.setattr(budgets, "_errors", None)
    found = pruned(tmp_path)
    assert patched_config(found) == patched_config(expected) and torch.equal(logits(found), logits(expected))
    with pytest.raises(ValueError, match=r"budget\.json"):
        pruned(tmp_path, budget=0.7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 0.4375}, "budget=0.4375: must be between 0.4375 and 1"),
        ({"budget": 1}, "budget=1: must be between"),
        ({"budget": "0.7"}, "budget='0.7': must be between"),
        ({"criterion": "wanda"}, "criterion='wanda', .*: budget=0.7 chooses patterns"),
        ({"config": fixed_mask(pattern="16:32")}, "pattern='16:32', .*: budget=0.7 chooses patterns"),
        ({"config": fixed_mask(layer_patterns={"up_proj": "1:4"})}, "layer_patterns={'up_proj': '1:4'}: budget=0.7"),
        ({"config": Sparse24Config(method="slope")}, "method='slope': its masks are transposable"),
        ({"config": Sparse24Config()}, "method='s-ste'"),
    ],
)
def test_refused_and_untouched(arguments, message):
    model = zoo.build("llama")
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        oneshot(model, batches(1), **{"config": fixed_mask(), "budget": 0.7, **arguments})
    assert_untouched(model, before)


def test_an_interrupt_while_measuring_leaves_the_model(monkeypatch):
    model = llama()
    before = snapshot(model)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_sparse24.pruning.block.BlockExample.error", interrupt)
    with pytest.raises(KeyboardInterrupt):
        oneshot(model, batches(1), fixed_mask(), budget=0.7)
    assert_untouched(model, before, mode=False)
