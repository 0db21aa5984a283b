"""Packed models by the kernels for CPUs: what PyTorch and its users do with them, and results close to dense math."""

import copy
from dataclasses import replace

import pytest
import torch
import zoo
from checkpoints import patched
from sparse24_kernels import dispatch
from sparse24_kernels.cpu import limits, packed
from sparse24_kernels.cpu.library import load
from sparse24_kernels.matmul import _kept_plan
from sparse_models import logits
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache

from hf_sparse24 import pack_model, sparse_weights

pytestmark = pytest.mark.skipif(isinstance(load(), str), reason=str(load()))


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The sizes of every call of a kernel, which any number of tokens takes here."""
    monkeypatch.setattr(limits, "most_tokens", lambda *layer: (None, "for this test"))
    sizes, run = [], packed.packed_linear

    def record(x, values, *others):
        sizes.append((len(x), *values.shape))
        return run(x, values, *others)

    cpu = next(each for each in dispatch.IMPLEMENTATIONS if each.name == "cpu")
    table = replace(cpu.load(), packed_linear=record)
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", [cpu._replace(load=lambda: table)])
    dispatch.choose.cache_clear()
    _kept_plan.cache_clear()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # the check on first use calls it too
        dispatch.choose("packed_linear", torch.device("cpu"), dtype)
    sizes.clear()
    yield sizes
    _kept_plan.cache_clear()
    dispatch.choose.cache_clear()


def models(name: str = "llama", values: str = "float", **sizes: int):
    """A model that is dense, with its zeros, and the same one packed."""
    model = patched(name, **sizes)
    other = copy.deepcopy(model)
    pack_model(other, values)
    return model, other


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_logits(name, calls):
    model, other = models(name)
    torch.testing.assert_close(logits(other), logits(model))
    layers = [weight for weight in sparse_weights(model).values() if not weight.is_stack]
    assert len(calls) == len(layers), "one call for each linear layer, Conv1D too; experts are unpacked"
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        expected = logits(model.to(dtype))
        torch.testing.assert_close(logits(other.to(dtype)), expected, rtol=tolerance, atol=tolerance)


def test_generating_and_exported(calls):
    model, other = models(num_hidden_layers=1)
    batch = zoo.batch()
    arguments = {"max_new_tokens": 6, "do_sample": False}
    ids = batch["input_ids"]
    assert torch.equal(other.generate(ids, **arguments), model.generate(ids, **arguments)) and calls
    expected = logits(other)
    with torch.inference_mode():
        assert torch.equal(other(**batch).logits, expected)
    with torch.no_grad():
        layer, x = other.model.layers[0].mlp, torch.randn(2, 5, 32)
        program = torch.export.export(layer, (x,))
        assert any("sparse24.packed_linear" in str(node.target) for node in program.graph.nodes)
        torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "name, values, backend",
    [
        pytest.param("llama", "float", "inductor", marks=pytest.mark.slow),
        ("llama", "int8", "aot_eager"),
        pytest.param("gpt2", "float", "aot_eager", marks=pytest.mark.slow),
        pytest.param("mixtral", "float", "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_step_decodes_every_generation(name, values, backend, calls):
    """As the guide has it: `generate` compiles the step of one token, without a graph break (an error here), and once
    for all prompts and lengths that the cache has places for. Prompts stay eager."""
    _, model = models(name, values, **({"n_layer": 1} if name == "gpt2" else {"num_hidden_layers": 1}))
    model.generation_config.eos_token_id = None
    torch._dynamo.reset()
    counters.clear()
    compiled = CompileConfig(fullgraph=True, backend=backend, mode="default")
    compiled._compile_all_devices = True
    for prompt in (5, 9, 3):
        ids = torch.randint(3, zoo.VOCAB, (1, prompt))
        arguments = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
        expected = model.generate(ids, **arguments)
        calls.clear()
        cache = StaticCache(model.config, max_cache_len=32)
        found = model.generate(ids, **arguments, past_key_values=cache, compile_config=compiled)
        assert torch.equal(found, expected)
        assert {tokens for tokens, *_ in calls} == {1, prompt}
        assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
