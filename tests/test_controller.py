"""Sparse24Controller in a plain loop: decay, masks, phases, random streams."""

import copy

import pytest
import sparse24_kernels as kernels
import torch
import zoo
from torch import nn

from hf_sparse24 import Sparse24Config, Sparse24Controller, patch_model, unpatch_model
from hf_sparse24.metrics import flip_rate, is_nm_sparse, kept_magnitude
from hf_sparse24.patching import set_phase, sparse_layers
from hf_sparse24.step_adamw import StepAdamW, step_param_groups


def patched(method: str = "s-ste", name: str = "llama", lr: float = 1e-2, **arguments):
    model = zoo.build(name)
    patch_model(model, Sparse24Config(method=method, **arguments))
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def run_step(model, optimizer, controller, seed, micro_batches=1):
    for i in range(micro_batches):
        model(**zoo.batch(100 * seed + i)).loss.backward()
        if i + 1 < micro_batches:
            controller.after_micro_step()
    controller.before_step()
    optimizer.step()
    optimizer.zero_grad()
    controller.after_step()


@pytest.mark.parametrize("method", ["sr-ste", "t-sr-ste"])
def test_masked_decay_is_added_once_to_the_gradient(method):
    model, optimizer = patched(method, masked_decay=0.5)
    controller = Sparse24Controller(model, optimizer, total_steps=12)
    for i in range(3):  # three micro-batches, one decay
        model(**zoo.batch(i)).loss.backward()
        controller.after_micro_step()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    controller.before_step()
    layers = sparse_layers(model)
    for name, parameter in model.named_parameters():
        added = parameter.grad - before[name]
        layer = layers.get(name.removesuffix(".weight"))
        expected = 0.5 * parameter * ~layer.mask() if layer is not None else torch.zeros_like(added)
        torch.testing.assert_close(added, expected.detach())


def test_decay_on_the_weight_passes_the_optimizer_by():
    model, optimizer = patched("sr-ste", masked_decay=0.5, decay_on="weight", lr=0.1)
    controller = Sparse24Controller(model, optimizer, total_steps=12)
    model(**zoo.batch()).loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    before = {name: (layer.weight.detach().clone(), layer.mask()) for name, layer in sparse_layers(model).items()}
    controller.before_step()
    assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters())
    for name, (weight, mask) in before.items():
        expected = torch.where(mask, weight, weight * (1 - 0.1 * 0.5))
        torch.testing.assert_close(sparse_layers(model)[name].weight.detach(), expected)


def test_an_unfrozen_scale_follows_the_weights():
    model, optimizer = patched("s-ste", scale_frozen=False, scale_rule="l1", lr=0.1)
    controller = Sparse24Controller(model, optimizer, total_steps=4)
    layer = next(iter(sparse_layers(model).values()))
    for step in range(2):
        run_step(model, optimizer, controller, step)
        assert torch.equal(layer.scale, kernels.s_ste_scale(layer.weight, rule="l1"))


def test_48_transposable_masks_train():
    model, optimizer = patched("t-sr-ste", pattern="4:8", mask_interval=2, lr=0.05)
    controller = Sparse24Controller(model, optimizer, total_steps=12)
    for step in range(4):
        run_step(model, optimizer, controller, step)
    for layer in sparse_layers(model).values():
        weight = layer.sparse_weight()
        assert is_nm_sparse(weight, 4, 8) and is_nm_sparse(weight, 4, 8, dim=0)
        assert torch.equal(layer.mask(), kernels.transposable_mask(layer.weight, 4, 8))
    assert controller.metrics()["flip_rate"] > 0


def test_step_turns_sparse_when_its_optimizer_switches():
    model, _ = patched("step")
    groups = step_param_groups(model, 0.01)
    optimizer = StepAdamW(groups, lr=1e-3, betas=(0.9, 0.5), total_steps=10, switch_after=2, switch_by=5)
    controller = Sparse24Controller(model, optimizer, total_steps=10)
    phases = []
    for step in range(8):
        phases.append(next(iter(sparse_layers(model).values())).phase)
        assert controller.phase == phases[-1] == model.config.quantization_config.phase
        run_step(model, optimizer, controller, step)
    assert phases == ["dense"] * optimizer.switch_step + ["sparse"] * (8 - optimizer.switch_step)
    assert 2 <= optimizer.switch_step <= 5
    with pytest.raises(ValueError, match="method 'step' is an optimizer as much as a mask, and AdamW is not it"):
        Sparse24Controller(*patched("step"), total_steps=10)


def test_layer_flip_rates_add_up():
    model, optimizer = patched("ste", lr=0.05)
    controller = Sparse24Controller(model, optimizer, total_steps=4)
    run_step(model, optimizer, controller, 0)
    rates, layers = controller.layer_flip_rates(), sparse_layers(model)
    assert rates.keys() == layers.keys()
    sizes = {name: layer.weight.numel() for name, layer in layers.items()}
    total = sum(rates[name] * sizes[name] for name in rates) / sum(sizes.values())
    assert controller.metrics()["flip_rate"] == pytest.approx(total) and total > 0


def test_no_decay_in_dense_phases_and_for_methods_without():
    for method, arguments in [("sr-ste", {"masked_decay": 0.5, "dense_start": 2}), ("s-ste", {}), ("ste", {})]:
        model, optimizer = patched(method, **arguments)
        controller = Sparse24Controller(model, optimizer, total_steps=12)
        model(**zoo.batch()).loss.backward()
        before = {name: p.grad.clone() for name, p in model.named_parameters()}
        controller.before_step()
        assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())


def test_a_shared_weight_is_decayed_once():
    model = nn.Module()
    model.mlp = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
    model.mlp[1].weight = model.mlp[0].weight
    patch_model(model, Sparse24Config(method="sr-ste", masked_decay=0.5))
    controller = Sparse24Controller(model, torch.optim.SGD(model.parameters()), total_steps=2)
    weight = model.mlp[0].weight
    weight.grad = torch.zeros(8, 8)
    controller.before_step()
    torch.testing.assert_close(weight.grad, (0.5 * weight * ~model.mlp[0].mask()).detach())


def test_phases_and_mask_searches_follow_the_schedule():
    model, optimizer = patched("t-sr-ste", mask_interval=3, dense_start=2, dense_tail=2, lr=0.1)
    controller = Sparse24Controller(model, optimizer, total_steps=12)
    layer = next(iter(sparse_layers(model).values()))
    seen, changes = [], []
    for step in range(12):
        seen.append(layer.phase)
        assert model.config.quantization_config.phase == layer.phase == controller.phase
        mask = layer.mask()
        run_step(model, optimizer, controller, step)
        if not torch.equal(mask, layer.mask()):
            changes.append(step + 1)
        if step + 1 in (2, 5, 8):
            assert torch.equal(layer.mask(), kernels.transposable_mask(layer.weight))
    assert seen == ["dense"] * 2 + ["sparse"] * 8 + ["dense"] * 2
    assert layer.phase == "dense"
    assert changes == [2, 5, 8]  # with this learning rate every search finds other masks; nothing else changes them


def test_the_s_ste_scale_is_frozen():
    model, optimizer = patched("s-ste", lr=0.1)
    layers = sparse_layers(model)
    scales = {name: layer.scale.clone() for name, layer in layers.items()}
    controller = Sparse24Controller(model, optimizer, total_steps=4)
    for step in range(4):
        run_step(model, optimizer, controller, step)
    assert all(torch.equal(layers[name].scale, scale) for name, scale in scales.items())
    layer = next(iter(layers.values()))
    assert not torch.equal(kernels.s_ste_scale(layer.weight), layer.scale)
    assert layer.phase == "sparse"  # no tail: the trained model is sparse


def test_the_scale_starts_from_the_weights_that_sparsity_starts_with():
    model, optimizer = patched("s-ste", lr=0.1, dense_start=2)
    controller = Sparse24Controller(model, optimizer, total_steps=4)
    for step in range(2):
        run_step(model, optimizer, controller, step)
    layer = next(iter(sparse_layers(model).values()))
    assert torch.equal(layer.scale, kernels.s_ste_scale(layer.weight))


@pytest.mark.parametrize("method", ["ste", "sr-ste", "s-ste"])
def test_flip_rate_is_per_step(method):
    model, optimizer = patched(method, lr=0.05)
    layers = sparse_layers(model)
    controller = Sparse24Controller(model, optimizer, total_steps=10, metrics_interval=2)
    assert "flip_rate" not in controller.metrics()
    measured = []
    for step in range(4):
        before = torch.cat([kernels.nm_mask(layer.weight).flatten() for layer in layers.values()])
        run_step(model, optimizer, controller, step)
        after = torch.cat([kernels.nm_mask(layer.weight).flatten() for layer in layers.values()])
        if step in (0, 1, 3):  # the first, and every second
            measured.append(flip_rate(before, after))
        assert controller.metrics()["flip_rate"] == pytest.approx(measured[-1])
    assert measured[-1] > 0
    assert controller.metrics()["sparse_phase"] == 1.0
    weights = torch.cat([layer.weight.detach().flatten() for layer in layers.values()])
    assert controller.metrics()["kept_magnitude"] == pytest.approx(kept_magnitude(weights, after))


def test_flip_rate_of_searched_masks_is_per_search():
    model, optimizer = patched("t-sr-ste", mask_interval=2, lr=0.05)
    layers = sparse_layers(model)
    controller = Sparse24Controller(model, optimizer, total_steps=12)
    old = torch.cat([layer.mask().flatten() for layer in layers.values()])
    run_step(model, optimizer, controller, 0)
    assert "flip_rate" not in controller.metrics()
    run_step(model, optimizer, controller, 1)
    new = torch.cat([layer.mask().flatten() for layer in layers.values()])
    assert controller.metrics()["flip_rate"] == pytest.approx(flip_rate(old, new)) and not torch.equal(old, new)


def test_random_streams_differ_by_layer_step_micro_step_and_seed_and_by_nothing_else():
    def keys(seed, steps, micro_steps):
        model, optimizer = patched()
        controller = Sparse24Controller(model, optimizer, total_steps=9, seed=seed, step=steps)
        for _ in range(micro_steps):
            controller.after_micro_step()
        torch.rand(3)
        return [int(layer.rng_key) for layer in sparse_layers(model).values()]

    drawn = [key for seed in (0, 1) for step in (0, 1) for micro in (0, 1) for key in keys(seed, step, micro)]
    assert len(set(drawn)) == len(drawn) == 48
    assert min(drawn) >= 0
    assert keys(1, 2, 1) == keys(1, 2, 1)


@pytest.mark.parametrize("method", ["s-ste", "t-sr-ste"])
def test_a_resumed_loop_equals_an_uninterrupted_one(method):
    def new():
        model, optimizer = patched(method, **({"mask_interval": 2} if method == "t-sr-ste" else {}))
        return model, optimizer, Sparse24Controller(model, optimizer, total_steps=8, seed=3)

    model, optimizer, controller = new()
    for step in range(3):
        run_step(model, optimizer, controller, step, micro_batches=2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), controller.state_dict()))
    for step in range(3, 8):
        run_step(model, optimizer, controller, step, micro_batches=2)

    other, other_optimizer, _ = new()
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    other_controller = Sparse24Controller(other, other_optimizer, total_steps=8)
    other_controller.load_state_dict(saved[2])
    for step in range(3, 8):
        run_step(other, other_optimizer, other_controller, step, micro_batches=2)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))
    assert next(iter(sparse_layers(other).values())).phase == controller.phase


def test_training_again_after_the_tail_starts_from_fresh_masks():
    model, optimizer = patched("t-sr-ste")
    set_phase(model, "dense")
    with torch.no_grad():
        for layer in sparse_layers(model).values():
            layer.weight.copy_(layer.weight.flip(0))
    Sparse24Controller(model, optimizer, total_steps=12)
    for layer in sparse_layers(model).values():
        assert layer.phase == "sparse" and torch.equal(layer.mask(), kernels.transposable_mask(layer.weight))


def test_wrong_use():
    model, optimizer = patched()
    with pytest.raises(ValueError, match="not patched; call patch_model"):
        Sparse24Controller(zoo.build("llama"), optimizer, total_steps=3)
    with pytest.raises(ValueError, match=r"optimizer does not hold model.layers.0.mlp.gate_proj.weight"):
        Sparse24Controller(model, torch.optim.SGD(zoo.build("llama").parameters()), total_steps=3)
    with pytest.raises(ValueError, match="total_steps=1 leaves no sparse step"):
        Sparse24Controller(*patched("t-sr-ste"), total_steps=1)
    with pytest.raises(ValueError, match="masked_decay='auto': only Sparse24Trainer determines it"):
        Sparse24Controller(*patched("sr-ste", masked_decay="auto"), total_steps=3)
    for layer in sparse_layers(model).values():
        layer.weight.requires_grad_(False)
    head = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    run_step(model, head, Sparse24Controller(model, head, total_steps=3), 0)  # frozen layers need no optimizer


def test_sharded_weights_are_refused():
    class Sharded(torch.Tensor):
        pass

    model, optimizer = patched()
    layer = next(iter(sparse_layers(model).values()))
    layer.weight = nn.Parameter(layer.weight.data.as_subclass(Sharded))
    with pytest.raises(ValueError, match=r"gate_proj.weight is a Sharded: this version trains plain tensors"):
        Sparse24Controller(model, optimizer, total_steps=3)


def test_deepcopied_models_train_on():
    model, _ = patched("t-sr-ste")
    clone = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(clone.parameters())
    controller = Sparse24Controller(clone, optimizer, total_steps=12)
    run_step(clone, optimizer, controller, 0)
    unpatch_model(clone)
    assert sparse_layers(model)
