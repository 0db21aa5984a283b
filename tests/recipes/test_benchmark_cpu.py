"""`recipes/benchmark_cpu.py` on a tiny model."""

import pytest
import torch
from transformers import LlamaConfig

from hf_sparse24.methods import METHODS
from recipes.benchmark_cpu import build, training_step

TINY = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, attention_dropout=0
)


@pytest.mark.parametrize("method", ["dense", *sorted(METHODS)])
def test_a_training_step_of_each_method(method):
    model = build(TINY)
    before = [(weight, weight.detach().clone()) for weight in model.parameters()]  # without adapters, which train late
    step = training_step(model, (2, 8), method)
    for _ in range(3):  # STEP is sparse from its second on
        step()
    assert not any(torch.equal(weight, old) for weight, old in before)
