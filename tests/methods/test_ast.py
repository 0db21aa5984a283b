"""AST, the example outside the package, against its formula, written out number by number in Python's floats."""

import math

import pytest
import sparse24_kernels as kernels
import torch
import zoo
from methods.ast import AdamS
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_sparse24 import Sparse24Config, Sparse24Controller, patch_model, sparse_weights
from hf_sparse24.methods import step_param_groups

LR, BETAS, EPS, STEPS, DECAY = 0.05, (0.9, 0.99), 1e-3, 8, 0.5
WEIGHT = [[4.0, -3.0, 2.0, -1.0, 0.5, 0.6, -0.7, 0.8], [0.1, 0.2, -0.3, 0.4, -5.0, 6.0, 7.0, -8.0]]
MASK = [[1, 1, 0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0, 1, 1]]
INPUTS = [[0.3, -0.2, 0.5, 0.1, -0.4, 0.7, 0.2, -0.6], [-0.1, 0.8, 0.2, -0.5, 0.6, 0.1, -0.3, 0.4]]


class Stack(nn.Module):
    """A linear layer among repeated blocks, as `target_modules` finds it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 2, bias=False, dtype=torch.float64)])
        self.layers[0].weight.data = torch.tensor(WEIGHT, dtype=torch.float64)


def patched(lr: float = LR, **settings) -> tuple[Stack, AdamS, Sparse24Controller]:
    model = Stack()
    patch_model(model, Sparse24Config(method="ast", target_modules="all-linear", masked_decay=DECAY, **settings))
    optimizer = AdamS(step_param_groups(model, 0.0), lr=lr, betas=BETAS, eps=EPS)
    return model, optimizer, Sparse24Controller(model, optimizer, STEPS)


def train(model: nn.Module, optimizer: AdamS, steps: int) -> None:
    x = torch.tensor(INPUTS, dtype=torch.float64)
    for step in range(steps):
        factors = torch.tensor([math.sin(step), math.sin(step + 1)], dtype=torch.float64)
        (model.layers[0](x) * factors).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_it_takes_the_step_of_the_paper():
    """u = mu + lambda_t (1 - M) W, v = EMA(u^2), w -= lr u^ / (sqrt(v^) + eps)."""
    model, optimizer, _ = patched(decay_ramp=4, mask_interval=STEPS)
    train(model, optimizer, STEPS)
    (beta1, beta2), weight = BETAS, [list(row) for row in WEIGHT]
    mu, v = ([[0.0] * 8 for _ in range(2)] for _ in range(2))
    for t in range(STEPS):
        for r in range(2):
            for c in range(8):
                gradient = sum(x[c] for x in INPUTS) * math.sin(t + r)
                mu[r][c] = beta1 * mu[r][c] + (1 - beta1) * gradient
                u = mu[r][c] + (0 if MASK[r][c] else DECAY * min(1.0, t / 4) * weight[r][c])
                v[r][c] = beta2 * v[r][c] + (1 - beta2) * u * u
                root = math.sqrt(v[r][c] / (1 - beta2 ** (t + 1)))
                weight[r][c] -= LR * (u / (1 - beta1 ** (t + 1))) / (root + EPS)
    expected = torch.tensor(weight, dtype=torch.float64)
    assert torch.allclose(model.layers[0].weight, expected, rtol=0, atol=1e-12)


def test_masks_change_every_interval_alone():
    model, optimizer, controller = patched(mask_interval=3, lr=0.5)
    (weight,), before = sparse_weights(model).values(), torch.tensor(MASK).bool()
    for step in range(1, STEPS):
        train(model, optimizer, 1)
        fresh = kernels.nm_mask(model.layers[0].weight)
        assert torch.equal(weight.mask(), fresh if step % 3 == 0 else before), step
        before = weight.mask()
    assert "flip_rate" in controller.metrics() and not torch.equal(before, torch.tensor(MASK).bool())


def test_the_optimizer_says_what_it_lacks():
    model = Stack()
    patch_model(model, Sparse24Config(method="ast", target_modules="all-linear"))
    optimizer = AdamS(step_param_groups(model))
    model.layers[0](torch.ones(1, 8, dtype=torch.float64)).sum().backward()
    with pytest.raises(RuntimeError, match="AdamS has no mask"):
        optimizer.step()
    with pytest.raises(ValueError, match="AdamS, not AdamW"):
        Sparse24Controller(model, torch.optim.AdamW(model.parameters()), total_steps=2)
    optimizer = AdamS([{"params": [torch.zeros(1)], "masked": True}, {"params": model.parameters()}])
    Sparse24Controller(model, optimizer, total_steps=2)
    with pytest.raises(ValueError, match="without 'masked': True"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT
def test_adapters_train_on_it_by_any_optimizer():
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="ast", target_modules="all-linear"))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    optimizer = torch.optim.AdamW(p for p in adapted.parameters() if p.requires_grad)
    controller = Sparse24Controller(adapted, optimizer, total_steps=2)
    adapted(**zoo.batch(0)).loss.backward()
    optimizer.step()
    assert controller.step == 1
