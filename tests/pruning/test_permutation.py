"""Channel permutation: the order found is the best one where that is known, and the model stays the same function."""

import itertools
from contextlib import ExitStack

import pytest
import torch
import zoo
from oneshot_models import assert_untouched, batches, fixed_mask
from sparse_models import logits, snapshot
from torch import nn

from hf_sparse24 import oneshot, patch_model, sparse_weights, unpatch_model
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.patching.surgery import set_phase
from hf_sparse24.pruning import layerwise, permutation
from hf_sparse24.pruning.layerwise import wanda_mask
from hf_sparse24.pruning.permutation import best_order, kept_share, permute_channels


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8)])
def test_the_order_is_the_best_one_where_it_is_known(n, m):
    """Each row has large scores in n columns of every group of a hidden order: masks can keep them all."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randperm(8 * m, generator=generator)
    score = 0.01 * torch.rand(24, 8 * m, generator=generator)
    score[:, hidden.view(8, m)[:, :n].flatten()] += 1
    assert kept_share(score, n, m) < 0.97
    order = best_order(score, n, m)
    assert torch.equal(order.sort().values, torch.arange(8 * m))
    every_large_one = score.topk(8 * n, 1).values.sum() / score.sum()
    assert kept_share(score[:, order], n, m) == pytest.approx(every_large_one.item(), rel=1e-6)


def test_the_order_is_close_to_the_best_of_all():
    """Of 8 columns there are 35 pairs of groups: in all, at least three fifths of what the best gain."""
    generator = torch.Generator().manual_seed(1)
    orders = [[0, *rest] for rest in itertools.combinations(range(1, 8), 3)]
    gained, possible = 0.0, 0.0
    for _ in range(50):
        score = torch.randn(24, 8, generator=generator).square()
        shares = [kept_share(score[:, order + [i for i in range(8) if i not in order]], 2, 4) for order in orders]
        given, found = kept_share(score, 2, 4), kept_share(score[:, best_order(score, 2, 4)], 2, 4)
        assert given <= found <= max(shares) + 1e-7
        gained, possible = gained + found - given, possible + max(shares) - given
    assert gained > 0.6 * possible > 0


def test_the_given_order_stays_where_none_is_better():
    assert torch.equal(best_order(torch.ones(3, 16), 2, 4), torch.arange(16))
    assert torch.equal(best_order(torch.zeros(3, 16), 2, 4), torch.arange(16))


CHANGED = {
    "llama": ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.o_proj", "self_attn.v_proj"],
    "gpt2": ["mlp.c_fc", "mlp.c_proj"],
    "opt": ["fc1", "fc2", "self_attn.out_proj", "self_attn.v_proj"],
    "bert": ["attention.output.dense", "attention.self.value", "intermediate.dense", "output.dense"],
}
"""The layers of a block whose weights are exchanged. GPT-2 has queries, keys and values in one layer, left alone."""


def patched(name: str, **overrides) -> nn.Module:
    model = zoo.build(name, **overrides).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)  # biases are zero otherwise
    patch_model(model, fixed_mask())
    set_phase(model, "dense")
    return model


@pytest.mark.parametrize("name", CHANGED)
def test_the_model_stays_the_same_function(name):
    model = patched(name)
    before, weights = logits(model), sparse_weights(model)
    parameters = snapshot(model)
    with ExitStack() as undo:
        kept, better = permute_channels(model, weights, batches(), undo)
        assert better > kept + 0.002
        torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
        changed = {key for key, value in snapshot(model).items() if not torch.equal(value, parameters[key])}
        found = {key.partition(".0.")[2].rpartition(".")[0] for key in changed if ".0." in key}
        assert sorted(found) == CHANGED[name]
    for key, value in snapshot(model).items():
        assert torch.equal(value, parameters[key]), key


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("autocast", [True, False])
def test_rounding_to_bf16_is_no_reason_to_refuse(name, autocast, caplog):
    model = patched(name) if autocast else patched(name).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        kept, better = permute_channels(model, sparse_weights(model), batches(), ExitStack())
    assert better > kept + 0.002 and "unchanged" not in caplog.text


def test_gated_heads_of_llama_share_an_order():
    """Query heads of one group of values have the order of their values' head: 4 heads, 2 of values, of 8 channels."""
    model = patched("llama")
    layer = model.model.layers[0].self_attn
    values, outputs = layer.v_proj.weight.clone(), layer.o_proj.weight.clone()
    permute_channels(model, sparse_weights(model), batches(), ExitStack())
    order = (layer.v_proj.weight[:, None] == values).all(2).float().argmax(1)
    assert sorted(order[:8].tolist()) == list(range(8)) and sorted(order[8:].tolist()) == list(range(8, 16))
    columns = torch.cat([order[:8], order[:8] + 8, order[8:] + 8, order[8:] + 16])
    assert torch.equal(layer.o_proj.weight, outputs[:, columns])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_that_something_else_reads_go_back(dtype, caplog):
    """Here a scale for each hidden channel; the heads' order changes nothing there, and stays."""
    model = patched("llama").to(dtype)
    scale = torch.randn(64, dtype=dtype)
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda module, args: (args[0] * scale,))
    parameters = snapshot(model)
    with ExitStack() as undo:
        permute_channels(model, sparse_weights(model), batches(), undo)
        changed = {key for key, value in snapshot(model).items() if not torch.equal(value, parameters[key])}
        assert changed and all("self_attn" in key for key in changed)
    assert "the order of MLP channels is unchanged, because the model's output depends on it" in caplog.text


def test_unknown_structures_are_left_alone(caplog, monkeypatch):
    model = patched("llama")
    monkeypatch.setattr(permutation, "FREE", {"MLP": {"down_proj": ("no_such_layer",)}})
    parameters = snapshot(model)
    assert permute_channels(model, sparse_weights(model), batches(), ExitStack()) is None
    assert "no channels are known to be free" in caplog.text
    assert all(torch.equal(value, parameters[key]) for key, value in snapshot(model).items())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_oneshot_prunes_less_away_in_a_better_order(name):
    plain, model = zoo.build(name), zoo.build(name)
    without = oneshot(plain, batches(), fixed_mask(), criterion="wanda", reconstruct=None)
    report = oneshot(model, batches(), fixed_mask(), criterion="wanda", reconstruct=None, permute=True)
    first = {layer.name: layer.masked_error for layer in report.layers if ".0." in layer.name}
    errors = {layer.name: layer.masked_error for layer in without.layers if ".0." in layer.name}
    ordered = [key for key in errors if key.endswith(("down_proj", "mlp.c_proj"))]
    assert ordered and all(first[key] < errors[key] for key in ordered)
    unpatch_model(model)
    assert all(
        is_nm_sparse(
            model.get_submodule(layer.name).weight.T if name == "gpt2" else model.get_submodule(layer.name).weight
        )
        for layer in report.layers
    )


def test_a_failure_afterwards_restores_the_order(monkeypatch):
    """In the second block, when the first one is pruned and its channels are in another order."""
    model = zoo.build("llama")
    before, seen = snapshot(model), []

    def fail(*args):
        seen.append(model.model.layers[1].self_attn.v_proj.weight.clone())
        return wanda_mask(*args) if len(seen) < 10 else 1 / 0

    monkeypatch.setattr(layerwise, "wanda_mask", fail)
    with pytest.raises(ZeroDivisionError):
        oneshot(model, batches(), fixed_mask(), criterion="wanda", reconstruct=None, permute=True)
    assert not torch.equal(seen[0], before["model.layers.1.self_attn.v_proj.weight"])
    assert_untouched(model, before)


def test_groups_that_are_sparse_already_are_not_broken():
    model = zoo.build("llama")
    oneshot(model, batches(), fixed_mask(), criterion="wanda", reconstruct=None)
    unpatch_model(model)
    before = snapshot(model)
    oneshot(model, batches(), fixed_mask(), criterion="existing", reconstruct=None, permute=True)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
