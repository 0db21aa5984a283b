"""AST and CAST against their formulas, written out number by number in Python's floats."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import sparse24_kernels as kernels
import torch
import zoo
from method_runs import dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from training_runs import arguments
from transformers import AutoModelForCausalLM

from hf_sparse24 import (
    Sparse24Config,
    Sparse24Controller,
    Sparse24Trainer,
    distill,
    export_model,
    patch_model,
    sparse_weights,
    unpatch_model,
)
from hf_sparse24.methods import AdamS, step_param_groups
from hf_sparse24.run import sparse_run

LR, BETAS, EPS, STEPS = 0.05, (0.9, 0.99), 1e-3, 8
WEIGHT = [[4.0, -3.0, 2.0, -1.0, 0.5, 0.6, -0.7, 0.8], [0.1, 0.2, -0.3, 0.4, -5.0, 6.0, 7.0, -8.0]]
MASK = [[1, 1, 0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0, 1, 1]]
INPUTS = [[0.3, -0.2, 0.5, 0.1, -0.4, 0.7, 0.2, -0.6], [-0.1, 0.8, 0.2, -0.5, 0.6, 0.1, -0.3, 0.4]]
DECAY = 0.5

Decayed = Callable[[float, float, float], float]
"""The update of a dropped weight: of its momentum, the weight, and the share of the run that is done."""


class Stack(nn.Module):
    """A linear layer among repeated blocks, as `target_modules` finds it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 2, bias=False, dtype=torch.float64)])
        self.layers[0].weight.data = torch.tensor(WEIGHT, dtype=torch.float64)


def first_weight(model: nn.Module) -> Any:
    return next(iter(sparse_weights(model).values()))


def patched(method: str, total_steps: int = STEPS, lr: float = LR, **settings: Any) -> tuple[Any, AdamS, Any]:
    model = Stack()
    config = Sparse24Config(method=method, target_modules="all-linear", masked_decay=DECAY, **settings)
    patch_model(model, config)
    groups = step_param_groups(model, 0.0)
    optimizer = sparse_run(model).method.make_optimizer(groups, total_steps, lr=lr, betas=BETAS, eps=EPS)
    return model, optimizer, Sparse24Controller(model, optimizer, total_steps)


def gradient(step: int) -> list[list[float]]:
    """That of sum(X W^T sin(step + row)) with respect to what the layer multiplies by."""
    return [[sum(x[c] for x in INPUTS) * math.sin(step + r) for c in range(8)] for r in range(2)]


def train(model: nn.Module, optimizer: AdamS, steps: int) -> None:
    x = torch.tensor(INPUTS, dtype=torch.float64)
    for step in range(steps):
        factors = torch.tensor([math.sin(step), math.sin(step + 1)], dtype=torch.float64)
        (model.layers[0](x) * factors).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def oracle(decayed: Decayed, masks: Callable[[int], list[list[int]]], steps: int) -> Tensor:
    """AdamS as newer.md writes it: u = mu where kept, v = EMA(u^2), w -= lr u^ / (sqrt(v^) + eps)."""
    (beta1, beta2), weight = BETAS, [list(row) for row in WEIGHT]
    mu, v = ([[0.0] * 8 for _ in range(2)] for _ in range(2))
    for t in range(steps):
        g, mask = gradient(t), masks(t)
        for r in range(2):
            for c in range(8):
                mu[r][c] = beta1 * mu[r][c] + (1 - beta1) * g[r][c]
                u = mu[r][c] if mask[r][c] else decayed(mu[r][c], weight[r][c], t)
                v[r][c] = beta2 * v[r][c] + (1 - beta2) * u * u
                root = math.sqrt(v[r][c] / (1 - beta2 ** (t + 1)))
                weight[r][c] -= LR * (u / (1 - beta1 ** (t + 1))) / (root + EPS)
    return torch.tensor(weight, dtype=torch.float64)


def test_ast_takes_the_step_of_the_paper():
    model, optimizer, _ = patched("ast", decay_ramp=4, mask_interval=STEPS)
    train(model, optimizer, STEPS)

    def decayed(mu: float, weight: float, t: int) -> float:
        return mu + DECAY * min(1.0, t / 4) * weight

    expected = oracle(decayed, lambda t: MASK, STEPS)
    assert torch.allclose(model.layers[0].weight, expected, rtol=0, atol=1e-12)


def test_cast_takes_the_step_of_the_paper():
    model, optimizer, _ = patched("cast", scale_blocks=0, mask_interval=STEPS)
    train(model, optimizer, STEPS)

    def decayed(mu: float, weight: float, t: int) -> float:
        a = t / STEPS
        return (1 - a) * mu + a * DECAY * ((weight > 0) - (weight < 0))

    expected = oracle(decayed, lambda t: MASK, STEPS)
    assert torch.allclose(model.layers[0].weight, expected, rtol=0, atol=1e-12)


def test_the_first_step_on_literal_numbers():
    """t = 0: mu^ = g, v^ = u^2 with the bias correction, so a step is lr g / (|g| + eps) where a = 0."""
    model, optimizer, _ = patched("cast", scale_blocks=0)
    optimizer.param_groups[0].update(betas=(0.0, 0.0), eps=1.0, lr=1.0)
    layer = model.layers[0]
    layer.weight.grad = torch.tensor([[1.0, -1, 3, 0, 0, 0, 0, 0], [0.0] * 8], dtype=torch.float64)
    optimizer.step()
    moved = torch.tensor([[3.5, -2.5, 1.25, -1, 0.5, 0.6, -0.7, 0.8], WEIGHT[1]], dtype=torch.float64)
    assert torch.allclose(layer.weight, moved, rtol=0, atol=1e-12)
    # t = 1 of 8, a = 1/8, g = 0: what is dropped (2 before, now 1.25) moves by u = 1/8 * 0.5, 0.0625 / 1.0625.
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    assert math.isclose(layer.weight[0, 2].item(), 1.25 - 0.0625 / 1.0625, rel_tol=0, abs_tol=1e-12)
    assert layer.weight[0, 0].item() == 3.5
    assert math.isclose(layer.weight[0, 3].item(), -1 + 0.0625 / 1.0625, rel_tol=0, abs_tol=1e-12)


@pytest.mark.parametrize("method", ["ast", "cast"])
def test_masks_change_every_interval_alone(method):
    model, optimizer, controller = patched(method, mask_interval=3, lr=0.5)
    weight, before = first_weight(model), torch.tensor(MASK).bool()
    for step in range(1, STEPS):
        train(model, optimizer, 1)
        fresh = kernels.nm_mask(model.layers[0].weight)
        assert torch.equal(weight.mask(), fresh if step % 3 == 0 else before), step
        before = weight.mask()
    assert "flip_rate" in controller.metrics() and not torch.equal(before, torch.tensor(MASK).bool())


def test_ast_computes_with_the_mask_and_cast_without():
    x, weight = torch.tensor(INPUTS, dtype=torch.float64), torch.tensor(WEIGHT, dtype=torch.float64)
    assert torch.equal(patched("ast")[0].layers[0](x), x @ (weight * torch.tensor(MASK)).T)
    assert torch.allclose(patched("cast")[0].layers[0](x), x @ weight.T, rtol=0, atol=1e-12)


def scales(model: nn.Module) -> Tensor:
    return first_weight(model).parameters["scales"]


def test_scales_are_trained_by_the_chain_rule():
    model, _, _ = patched("cast")
    layer, a = model.layers[0], scales(model)
    a.data = torch.tensor([[2.0, 3.0], [5.0, 7.0]], dtype=torch.float64)
    x, g = torch.tensor(INPUTS, dtype=torch.float64), torch.tensor([[1.0, -2.0], [0.5, 4.0]], dtype=torch.float64)
    spread = torch.tensor([[2.0] * 4 + [3.0] * 4, [5.0] * 4 + [7.0] * 4], dtype=torch.float64)
    y = layer(x)
    assert torch.allclose(y, x @ (spread * layer.weight).T, rtol=0, atol=1e-12)
    (y * g).sum().backward()
    through = g.T @ x
    assert torch.allclose(layer.weight.grad, through * spread, rtol=0, atol=1e-12)
    by_block = torch.stack([(through * layer.weight)[:, :4].sum(1), (through * layer.weight)[:, 4:].sum(1)], 1)
    assert torch.allclose(a.grad, by_block, rtol=0, atol=1e-12)


@pytest.mark.parametrize("to_sparse", [True, False])
def test_scales_are_folded_into_an_exact_pattern(to_sparse):
    model, optimizer, _ = patched("cast", total_steps=4, mask_interval=1)
    train(model, optimizer, 3)
    assert sparse_run(model).phase == "dense"
    train(model, optimizer, 1)
    assert sparse_run(model).phase == "sparse" and not sparse_run(model).config.finished
    layer, a = model.layers[0], scales(model).detach()
    assert not torch.equal(a, torch.ones_like(a))
    spread = torch.cat([a[:, :1].expand(2, 4), a[:, 1:].expand(2, 4)], 1)
    kept = layer.weight.detach() * (kernels.nm_mask(layer.weight.detach()) if to_sparse else 1)
    x = torch.tensor(INPUTS, dtype=torch.float64)
    before = layer(x)
    unpatch_model(model, sparse=to_sparse)
    assert type(layer) is nn.Linear and torch.allclose(layer.weight, kept * spread, rtol=0, atol=1e-12)
    if to_sparse:
        assert int((layer.weight != 0).sum()) == 8
        assert torch.allclose(before, layer(x), rtol=0, atol=1e-12)


def test_a_model_in_training_is_exported_with_its_scales(tmp_path):
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="cast"))
    sparse_run(model).set_phase("dense")
    for weight in sparse_weights(model).values():
        weight.parameters["scales"].data.uniform_(0.5, 2)
    model.eval()
    export_model(model, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    batch = zoo.batch(0)
    assert torch.allclose(again(**batch).logits, model(**batch).logits, rtol=0, atol=1e-5)


def test_the_optimizer_says_what_it_lacks():
    model = Stack()
    patch_model(model, Sparse24Config(method="ast", target_modules="all-linear"))
    optimizer = AdamS(step_param_groups(model))
    model.layers[0](torch.ones(1, 8, dtype=torch.float64)).sum().backward()
    with pytest.raises(RuntimeError, match="AdamS has no mask for a masked parameter"):
        optimizer.step()
    with pytest.raises(ValueError, match="method 'ast' needs its own optimizer, AdamS, not AdamW"):
        Sparse24Controller(model, torch.optim.AdamW(model.parameters()), total_steps=2)


def test_a_weight_outside_of_the_masked_groups_is_refused():
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="ast"))
    weights = [weight.master for weight in sparse_weights(model).values()]
    others = [p for p in model.parameters() if all(p is not weight for weight in weights)]
    optimizer = AdamS([{"params": weights[:1], "masked": True}, {"params": weights[1:] + others}])
    controller = Sparse24Controller(model, optimizer, total_steps=2)
    model(**zoo.batch(0)).loss.backward()
    with pytest.raises(ValueError, match="a sparse weight is in a group without 'masked': True"):
        optimizer.step()
    controller.end()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT
@pytest.mark.parametrize("method", ["ast", "cast"])
def test_adapters_train_on_it_by_any_optimizer(method):
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method=method, target_modules="all-linear"))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained and all("lora" in name for name in trained)
    optimizer = torch.optim.AdamW(trained.values())
    controller = Sparse24Controller(adapted, optimizer, total_steps=2)
    adapted(**zoo.batch(0)).loss.backward()
    optimizer.step()
    assert controller.step == 1


def test_what_is_beside_a_frozen_weight_is_frozen():
    model = zoo.build("llama").requires_grad_(False)
    for method, settings in (("cast", {}), ("slope", {"adapter_rank": 2})):
        patch_model(model, Sparse24Config(method=method, **settings))
        assert not any(parameter.requires_grad for parameter in model.parameters())
        unpatch_model(model, sparse=False)


def test_another_number_of_scales_is_refused_by_name(tmp_path):
    cast_run(tmp_path, save_strategy="steps", save_steps=2).train()
    trainer = cast_run(tmp_path, scale_blocks=4)
    with pytest.raises(ValueError, match="scale_blocks=2, now 4"):
        trainer.train(resume_from_checkpoint=True)


def cast_run(tmp_path, scale_blocks: int = 2, **overrides: Any) -> Sparse24Trainer:
    settings = {"max_steps": 4, "learning_rate": 1e-2, "lr_scheduler_type": "linear"}
    args = arguments(tmp_path, **settings | overrides)
    config = Sparse24Config("cast", scale_blocks=scale_blocks)
    return Sparse24Trainer(zoo.build("llama"), args, train_dataset=dataset(), sparse24_config=config)


def test_a_run_that_cannot_reach_zero_is_warned_of(tmp_path, caplog):
    # Linear to zero in 20 steps, the sum of 0.0022 (1 - t / 20) (t / 20): 0.0022 (190 / 20 - 2470 / 400)
    cast_run(tmp_path, max_steps=20, learning_rate=2.2e-3).train()
    assert "are larger than 0.0073" in caplog.text and "ends at" not in caplog.text
    assert "of the weights' L1 norm, which had not faded; raise masked_decay=4e-07" in caplog.text
    caplog.clear()
    trainer = cast_run(tmp_path, learning_rate=1e-2, lr_scheduler_type="constant")
    trainer.train()
    assert "the learning rate ends at 0.01" in caplog.text
    caplog.clear()
    patched("cast", total_steps=1000, lr=1.0)
    assert "larger" not in caplog.text


def test_a_run_that_fades_is_not_warned_of(caplog):
    model, optimizer, _ = patched("cast", total_steps=400, lr=0.1, scale_blocks=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 400)
    for _ in range(400):
        model.layers[0].weight.grad = torch.zeros_like(model.layers[0].weight)
        optimizer.step()
        schedule.step()
    assert "cuts off" not in caplog.text
    dropped = model.layers[0].weight[~torch.tensor(MASK).bool()]
    assert dropped.abs().max() < 1e-2


def test_a_teacher_counts_as_the_paper_has_it(tmp_path, caplog):
    for method, weight, temperature in (("ast", 2 / 3, 2.0), ("cast", 1 / 3, 1.0), ("s-ste", 2 / 3, 2.0)):
        model = zoo.build("llama")
        patch_model(model, Sparse24Config(method=method))
        config = distill(model, zoo.build("llama", seed=1)).config
        assert (config.weight, config.temperature) == (weight, temperature)
    cast_run(tmp_path).train()
    assert "method 'cast' is published with the dense model as its teacher, and this run has none" in caplog.text
