"""Sparse24Controller in a plain loop: decay, masks, phases, random streams."""

import copy

import pytest
import sparse24_kernels as kernels
import sparse_models
import torch
import zoo
from sparse24_kernels.masks import count_flips
from torch import nn
from transformers.optimization import Adafactor

from hf_sparse24 import Sparse24Config, Sparse24Controller, patch_model, sparse_weights, unpatch_model
from hf_sparse24.methods import StepAdamW, step_param_groups
from hf_sparse24.metrics import is_nm_sparse, kept_magnitude
from hf_sparse24.training import step_masks
from hf_sparse24.weights.sparse_weight import SparseWeight
from hf_sparse24.weights.storage import layer_name


def patched(method: str = "s-ste", name: str = "llama", lr: float = 1e-2, **arguments):
    model = sparse_models.patched(name, method=method, **arguments)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def first_weight(model) -> SparseWeight:
    return next(iter(sparse_weights(model).values()))


def run_step(model, optimizer, controller, seed, micro_batches=1):
    for i in range(micro_batches):
        model(**zoo.batch(100 * seed + i)).loss.backward()
        if i + 1 < micro_batches:
            controller.after_micro_step()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("method", ["sr-ste", "t-sr-ste"])
def test_masked_decay_is_added_once_to_the_gradient(method):
    model, optimizer = patched(method, masked_decay=0.5, lr=0.0)
    controller = Sparse24Controller(model, optimizer, total_steps=12)
    for i in range(3):  # three micro-batches, one decay
        model(**zoo.batch(i)).loss.backward()
        controller.after_micro_step()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    weights = sparse_weights(model)
    for name, parameter in model.named_parameters():
        added = parameter.grad - before[name]
        expected = 0.5 * parameter * ~weights[name].mask() if name in weights else torch.zeros_like(added)
        torch.testing.assert_close(added, expected.detach())


@pytest.mark.parametrize("dense_start", [0, 2])
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_a_fixed_mask_keeps_zeros(name, dense_start):
    """After moments of dense steps too, and under an optimizer that moves what has no gradient."""
    model, optimizer = patched("fixed-mask", name, dense_start=dense_start)
    optimizer.register_step_post_hook(lambda *_: [p.data.add_(1e-3) for p in model.parameters()])
    controller = Sparse24Controller(model, optimizer, total_steps=5)
    weights = sparse_weights(model)
    assert weights and all(weight.parameter[~weight.mask()].all() for weight in weights.values())  # a dense model
    for step in range(5):
        model(**zoo.batch(step)).loss.backward()
        if step >= dense_start:
            for weight in weights.values():
                assert weight.parameter.grad[weight.mask()].any() and not weight.parameter.grad[~weight.mask()].any()
        else:
            assert all(weight.parameter.grad[~weight.mask()].any() for weight in weights.values())
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 >= max(dense_start, 1):
            assert all(torch.equal(weight.parameter, weight.pruned()) for weight in weights.values())
            assert controller.metrics()["kept_magnitude"] == 1
    unpatch_model(model, sparse=False)
    assert is_nm_sparse(weights.popitem()[1].parameter, dim=-2 if name == "gpt2" else -1)


def test_decay_on_the_weight_needs_a_learning_rate():
    model, _ = patched("sr-ste", decay_on="weight")
    optimizer = Adafactor(model.parameters())  # by default it finds its own
    with pytest.raises(ValueError, match=r"decay_on='weight' .*Adafactor"):
        Sparse24Controller(model, optimizer, total_steps=4)
    Sparse24Controller(model, Adafactor(model.parameters(), lr=1e-3, relative_step=False), total_steps=4)


def test_decay_on_the_weight_passes_the_optimizer_by():
    model, _ = patched("sr-ste", masked_decay=0.5, decay_on="weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Sparse24Controller(model, optimizer, total_steps=12)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weights = sparse_weights(model)
    before = {name: (weight.parameter.detach().clone(), weight.mask()) for name, weight in weights.items()}
    optimizer.step()
    assert not any(parameter.grad.any() for parameter in model.parameters())
    for name, (values, mask) in before.items():
        expected = torch.where(mask, values, values * (1 - 0.1 * 0.5))
        torch.testing.assert_close(weights[name].parameter.detach(), expected)


def test_step_turns_sparse_when_its_optimizer_switches():
    model, _ = patched("step", switch_after=2, switch_by=5)
    groups = step_param_groups(model, 0.01)
    optimizer = StepAdamW(groups, lr=1e-3, betas=(0.9, 0.5), total_steps=10, switch_after=2, switch_by=5)
    controller = Sparse24Controller(model, optimizer, total_steps=10)
    phases = []
    for step in range(8):
        phases.append(first_weight(model).run.phase)
        assert controller.phase == phases[-1] == model.config.quantization_config.facts.phase
        run_step(model, optimizer, controller, step)
    assert phases == ["dense"] * optimizer.switch_step + ["sparse"] * (8 - optimizer.switch_step)
    assert 2 <= optimizer.switch_step <= 5
    with pytest.raises(ValueError, match=r"method 'step' .*AdamW"):
        Sparse24Controller(*patched("step"), total_steps=10)


def test_no_decay_in_dense_phases_and_for_methods_without():
    for method, arguments in [("sr-ste", {"masked_decay": 0.5, "dense_start": 2}), ("s-ste", {}), ("ste", {})]:
        model, optimizer = patched(method, **arguments)
        Sparse24Controller(model, optimizer, total_steps=12)
        model(**zoo.batch()).loss.backward()
        before = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())


def test_a_shared_weight_is_decayed_once():
    model = nn.Module()
    model.mlp = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
    model.mlp[1].weight = model.mlp[0].weight
    patch_model(model, Sparse24Config(method="sr-ste", masked_decay=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    Sparse24Controller(model, optimizer, total_steps=2)
    weight = model.mlp[0].weight
    weight.grad = torch.zeros(8, 8)
    optimizer.step()
    torch.testing.assert_close(weight.grad, (0.5 * weight * ~first_weight(model).mask()).detach())


def test_phases_and_mask_refreshes_follow_the_schedule():
    model, optimizer = patched("t-sr-ste", mask_interval=3, dense_start=2, dense_tail=2, lr=0.1)
    controller = Sparse24Controller(model, optimizer, total_steps=12)
    weight = first_weight(model)
    seen, changes = [], []
    for step in range(12):
        seen.append(weight.run.phase)
        assert model.config.quantization_config.facts.phase == controller.phase == seen[-1]
        mask = weight.mask()
        run_step(model, optimizer, controller, step)
        if not torch.equal(mask, weight.mask()):
            changes.append(step + 1)
        if step + 1 in (2, 5, 8):
            assert torch.equal(weight.mask(), kernels.transposable_mask(weight.parameter))
    assert seen == ["dense"] * 2 + ["sparse"] * 8 + ["dense"] * 2
    assert weight.run.phase == "dense"
    assert changes == [2, 5, 8]  # with this learning rate every refresh finds other masks; nothing else changes them


@pytest.mark.parametrize("dense_start", [0, 2])
def test_the_s_ste_scale_is_that_of_the_weights_that_sparsity_starts_with(dense_start):
    model, optimizer = patched("s-ste", lr=0.1, dense_start=dense_start)
    controller = Sparse24Controller(model, optimizer, total_steps=4)
    weight = first_weight(model)
    for step in range(4):
        if step == dense_start:
            scale = kernels.s_ste_scale(weight.parameter)
        run_step(model, optimizer, controller, step)
    assert torch.equal(weight.state["scale"], scale)
    assert not torch.equal(kernels.s_ste_scale(weight.parameter), scale)
    assert weight.run.phase == "sparse"  # no tail: the trained model is sparse


@pytest.mark.parametrize("method", ["ste", "sr-ste", "s-ste"])
def test_flip_rate_is_per_step(method):
    model, optimizer = patched(method, lr=0.05)
    weights = sparse_weights(model)
    controller = Sparse24Controller(model, optimizer, total_steps=10, metrics_interval=2)
    assert "flip_rate" not in controller.metrics()
    measured = []
    for step in range(4):
        before = torch.cat([kernels.nm_mask(weight.parameter).flatten() for weight in weights.values()])
        run_step(model, optimizer, controller, step)
        after = torch.cat([kernels.nm_mask(weight.parameter).flatten() for weight in weights.values()])
        if step in (0, 1, 3):  # the first, and every second
            measured.append((before ^ after).float().mean().item())
        assert controller.metrics()["flip_rate"] == pytest.approx(measured[-1])
    assert measured[-1] > 0
    sizes = {layer_name(name): weight.parameter.numel() for name, weight in weights.items()}
    flips = sum(rate * sizes[name] for name, rate in controller.layer_flip_rates().items())
    assert measured[-1] == pytest.approx(flips / sum(sizes.values()))
    assert controller.metrics()["sparse_phase"] == 1.0
    values = torch.cat([weight.parameter.detach().flatten() for weight in weights.values()])
    assert controller.metrics()["kept_magnitude"] == pytest.approx(kept_magnitude(values, after))


def test_flips_are_counted_when_they_are_read_or_before_weights_change_again(monkeypatch):
    counts: list[int] = []
    monkeypatch.setattr(step_masks, "count_flips", lambda *masks: counts.append(1) or count_flips(*masks))
    for interval in (1, 3):
        model, optimizer = patched("ste", lr=0.05)
        controller = Sparse24Controller(model, optimizer, total_steps=10, metrics_interval=interval)
        for step in range(5):
            run_step(model, optimizer, controller, step)
        assert len(counts) == (0 if interval == 1 else 2)  # of steps 1 and 3, which others follow that do not measure
        assert controller.metrics()["flip_rate"] > 0 and len(counts) == (1 if interval == 1 else 2)
        counts.clear()


def test_flip_rate_of_refreshed_masks_is_per_refresh():
    model, optimizer = patched("t-sr-ste", mask_interval=2, lr=0.05)
    weights = sparse_weights(model)
    controller = Sparse24Controller(model, optimizer, total_steps=12)
    old = torch.cat([weight.mask().flatten() for weight in weights.values()])
    run_step(model, optimizer, controller, 0)
    assert "flip_rate" not in controller.metrics()
    run_step(model, optimizer, controller, 1)
    new = torch.cat([weight.mask().flatten() for weight in weights.values()])
    flips = (old ^ new).float().mean().item()
    assert controller.metrics()["flip_rate"] == pytest.approx(flips) and flips > 0


def test_random_streams_differ_by_layer_step_micro_step_and_seed_and_by_nothing_else():
    def keys(seed, steps, micro_steps):
        model, optimizer = patched()
        controller = Sparse24Controller(model, optimizer, total_steps=9, seed=seed, step=steps)
        for _ in range(micro_steps):
            controller.after_micro_step()
        torch.rand(3)
        return [int(weight.rng_key) for weight in sparse_weights(model).values()]

    drawn = [key for seed in (0, 1) for step in (0, 1) for micro in (0, 1) for key in keys(seed, step, micro)]
    assert len(set(drawn)) == len(drawn) == 48
    assert min(drawn) >= 0
    assert keys(1, 2, 1) == keys(1, 2, 1)


def saved_parts(*parts) -> list[dict]:
    return copy.deepcopy([part.state_dict() for part in parts])


def load_parts(states: list[dict], *parts) -> None:
    for part, state in zip(parts, states):
        part.load_state_dict(state)


@pytest.mark.parametrize("method", ["s-ste", "fixed-mask"])
def test_resuming_a_model_that_has_been_through_its_dense_tail(method):
    """State of the checkpoint is kept, though the model in memory was dense."""
    model, optimizer = patched(method, dense_tail=2)
    controller = Sparse24Controller(model, optimizer, total_steps=8)
    for step in range(8):
        if step == 4:
            saved = saved_parts(model, optimizer, controller)
        run_step(model, optimizer, controller, step)
    end = copy.deepcopy(model.state_dict())
    assert controller.phase == "dense"
    controller = Sparse24Controller(model, optimizer, total_steps=8)
    load_parts(saved, model, optimizer, controller)
    for step in range(4, 8):
        run_step(model, optimizer, controller, step)
    assert all(torch.equal(tensor, end[name]) for name, tensor in model.state_dict().items())


def test_layers_that_are_unfrozen_later_follow_the_method():
    model, optimizer = patched("fixed-mask")
    weights = sparse_weights(model)
    for weight in weights.values():
        weight.master.requires_grad_(False)
    controller = Sparse24Controller(model, optimizer, total_steps=4)
    run_step(model, optimizer, controller, 0)
    assert all(weight.master.count_nonzero() > 0.9 * weight.master.numel() for weight in weights.values())
    for weight in weights.values():
        weight.master.requires_grad_(True)
    run_step(model, optimizer, controller, 1)
    assert all(is_nm_sparse(weight.master, 2, 4, weight.input_dim) for weight in weights.values())


def test_wrong_use():
    model, optimizer = patched()
    with pytest.raises(ValueError, match="not patched; call patch_model"):
        Sparse24Controller(zoo.build("llama"), optimizer, total_steps=3)
    with pytest.raises(ValueError, match=r"optimizer does not hold model.layers.0.mlp.gate_proj.weight"):
        Sparse24Controller(model, torch.optim.SGD(zoo.build("llama").parameters()), total_steps=3)
    with pytest.raises(ValueError, match="total_steps=1 leaves no sparse step"):
        Sparse24Controller(*patched("t-sr-ste"), total_steps=1)
    with pytest.raises(ValueError, match="only Sparse24Trainer determines it; set a number here"):
        Sparse24Controller(*patched("sr-ste", masked_decay="auto"), total_steps=3)
    for weight in sparse_weights(model).values():
        weight.parameter.requires_grad_(False)
    head = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    run_step(model, head, Sparse24Controller(model, head, total_steps=3), 0)  # frozen weights need no optimizer


def test_a_controller_for_a_later_step_needs_the_state_of_the_methods_optimizer():
    model, _ = patched("step", switch_after=1, switch_by=2)
    optimizer = StepAdamW(step_param_groups(model), total_steps=9, switch_after=1, switch_by=2)
    controller = Sparse24Controller(model, optimizer, total_steps=9)
    for seed in range(3):
        run_step(model, optimizer, controller, seed)
    states = controller.state_dict(), optimizer.state_dict()
    fresh = StepAdamW(step_param_groups(model), total_steps=9, switch_after=1, switch_by=2)
    controller = Sparse24Controller(model, fresh, total_steps=9)
    with pytest.raises(ValueError, match=r"step 3: method 'step'"):
        controller.load_state_dict(states[0])
    assert controller.step == 0
    fresh.load_state_dict(states[1])
    controller = Sparse24Controller(model, fresh, total_steps=9)
    controller.load_state_dict(states[0])
    assert controller.phase == "sparse"


def test_a_grad_scaler_skips_a_step_whose_gradients_overflow_in_fp8():
    model, optimizer = patched(fp8=True)
    controller = Sparse24Controller(model, optimizer, total_steps=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    before = copy.deepcopy(model.state_dict())
    for taken in (False, True):
        with torch.autocast("cpu", torch.float16):
            loss = model(**zoo.batch(0)).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(2.0**8)
        optimizer.zero_grad()
        assert controller.step == taken
        is_same = all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert is_same is not taken
    assert all(tensor.isfinite().all() for tensor in model.parameters())
