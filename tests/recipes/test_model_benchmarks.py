"""`make gpu` on layers, blocks, training and inference without a GPU: tiny sizes, made-up times."""

# ruff: noqa: F811 (tests take the fixtures that are imported)
import subprocess
from dataclasses import replace
from functools import partial

import pytest
import torch
from cslt import stand_in  # noqa: F401 (a fixture)
from gpu_run import CPU, LAYERS, FakeMachine, run, times, tiny, tuned  # noqa: F401 (fixtures)

from hf_sparse24.weights.sparse_weight import SparseWeight
from recipes.benchmarks import models, modules

TINY_LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
TINY_LLAMA |= {"num_hidden_layers": 2, "vocab_size": 64}
TINY_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 64}


def test_layers(tiny, tuned, times, tmp_path):
    times |= {"t-sr-ste, made": 600.0, "s-ste, auto": 1100.0}
    code, result, text = run(tmp_path, "layers")
    assert code == 0
    row = result["sections"]["layers"]["rows"][str(LAYERS[1])]
    assert list(row["times"]) == ["dense", *(f"{m}, {w}" for m in modules.METHODS for w in ("kept", "made", "auto"))]
    assert "600 us (1.67, meets 1.45)" in text and "1100 us (0.91, MISSES 0.98)" in text
    assert "t-sr-ste, made" not in result["sections"]["layers"]["rows"][str(LAYERS[0])]["goals"]  # too few tokens


def test_kept_operands_are_made_once_though_the_library_keeps_nothing(stand_in, monkeypatch):
    """As while a CUDA graph is captured, when no encoding is valid. MVUE's are made in every call."""
    encode, encoded = SparseWeight._encode, []
    monkeypatch.setattr(SparseWeight, "_encode", lambda self, *args: encoded.append(args) or encode(self, *args))
    monkeypatch.setattr("hf_sparse24.weights.encodings._may_be_kept", lambda *_: False)
    build = partial(modules.linear, 32, 48, True, CPU)
    x, grad = (torch.randn(16, n, dtype=torch.bfloat16) for n in (32, 48))
    results = {}
    for operands, each_time in (("kept", 0), ("made", 2)):
        module = modules.patched(build, "t-sr-ste", "cusparselt", operands)
        modules.train(module, x.requires_grad_(), grad)  # the warm-up
        encoded.clear()
        stand_in.compressed = 0
        for _ in range(3):
            results[operands] = modules.train(module, x, grad)
        assert bool(encoded) == (operands == "made") and stand_in.compressed == 3 * (each_time + 1)
    for kept, made in zip(results["kept"], results["made"], strict=True):
        assert torch.equal(kept, made)


def test_blocks(tiny, tuned, times, tmp_path):
    times |= {"t-sr-ste": 600.0, "s-ste, auto": 1000.0, "dense, fused activation": 900.0}
    code, result, text = run(tmp_path, "mlps")
    assert code == 0
    gated, plain, forward = result["sections"]["MLP blocks"]["rows"].values()
    assert "No module named 'torchao'" in gated["times"]["torchao SemiSparseLinear"]["error"]
    assert "error" in forward["times"]["torch to_sparse_semi_structured"] and "us" in forward["times"]["packed"]
    assert "dense, fused activation" in gated["times"] and "dense, fused activation" not in plain["times"]
    assert "600 us (1.67)" in text and "1000 us (1.00, meets 0.98)" in text


def test_the_papers_sizes(tiny, tuned, times, tmp_path):
    """The FFN and the block with a sparse FFN, in both dtypes, next to what was published."""
    times |= {"t-sr-ste, kept": 500.0}
    code, result, text = run(tmp_path, "papers")
    rows = result["sections"]["the papers' sizes"]["rows"]
    names = [f"GPT-2 {part} 128x32, 32 tokens{dtype}" for dtype in (", fp16", "") for part in ("FFN", "block")]
    assert code == 0 and list(rows) == names
    for name, row in rows.items():
        assert all("us" in found for found in row["times"].values()), row
        assert row["facts"]["published, t-sr-ste, RTX 3090, fp16"] == (1.25 if "block" in name else 1.5)
        assert f"{name}: dense 1000 us | t-sr-ste, kept 500 us (2.00)" in text


def test_a_block_is_gpt2s_and_its_ffn_alone_is_sparse(tiny):
    (entry, size), *_ = ((entry, size) for entry, size in modules.published("block").items())
    build = partial(modules.Block, replace(entry, dtype=torch.float32), size.heads, CPU)
    dense, sparse = build(), modules.patched(build, "t-sr-ste", "dense", target_modules="mlp")
    x = torch.randn(entry.tokens, entry.inputs)
    later = x.clone()
    later[10:16] += 1
    assert dense(x).shape == (2, 16, 32) and torch.equal(dense(later)[:, :10], dense(x)[:, :10])  # causal
    kinds = {name.rpartition("h.0.")[2]: type(module).__name__ for name, module in sparse.named_modules()}
    assert {name for name, kind in kinds.items() if "Sparse24" in kind} == {"mlp.c_fc", "mlp.c_proj"}


def test_inference(tiny, tuned, times, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "SIZES", TINY_LLAMA)
    monkeypatch.setattr(models, "CONTEXT", 8)
    workloads = [models.Layer(name, 32, 32, n, training=False) for name, n in (("prefill", 32), ("decode", 3))]
    monkeypatch.setattr(models.Inference, "entries", lambda self: workloads)
    monkeypatch.setattr(models.Generation, "entries", lambda self: [])
    times |= {"packed": 500.0}
    code, _, text = run(tmp_path, "inference")
    assert code == 0
    cells = "dense 1000 us | packed 500 us (2.00) | auto 1000 us (1.00, meets 0.98)"
    assert all(f"{entry}: {cells}\n" in text for entry in workloads)
    step = models.Decoder(workloads[1], CPU)
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        first, second = step(x), step(x)
    assert torch.equal(first, second) and first.shape == (3, 1, 32)  # the cache is as it was


@pytest.mark.parametrize("entry", ["2 sequences", "1 sequence, static"])
def test_generation(tiny_models, monkeypatch, entry):
    monkeypatch.setattr(models, "PROMPT", 5)
    monkeypatch.setattr(models, "NEW", 4)
    found = {way: models.generate(entry, way) for way in models.Generation.ways}
    for row in found.values():
        assert row["decode, tokens per s"] == pytest.approx(int(entry[0]) * 1e6 / row["step_us"])
        assert row["prefill, tokens per s"] > 0 and row["peak GB"] is None
    sizes = {way: row["weights GB"] for way, row in found.items()}
    assert sizes["packed"] < sizes["dense"] <= sizes["patched"]


def test_a_process_ends_in_time_and_says_what_went_wrong():
    with pytest.raises(subprocess.CalledProcessError) as caught:
        models.in_process("nothing", "1 sequence", "dense", 120)
    assert "KeyError: 'nothing'" in caught.value.stderr
    with pytest.raises(subprocess.TimeoutExpired):
        models.in_process("generate", "1 sequence", "dense", 0.01)


@pytest.fixture
def tiny_models(monkeypatch):
    runs = {"Llama 1B": (2, 16, "LlamaConfig", TINY_LLAMA), "GPT-2 774M": (2, 16, "GPT2Config", TINY_GPT2)}
    monkeypatch.setattr(models, "RUNS", runs)
    monkeypatch.setattr(models, "WARM_UP", 1)
    monkeypatch.setattr(models, "STEPS", 2)


@pytest.mark.parametrize("entry", ["Llama 1B", "GPT-2 774M"])
@pytest.mark.parametrize("method", ["dense", "s-ste", "t-sr-ste"])
def test_a_training_run(tiny_models, stand_in, entry, method):
    found = models.train(entry, method)
    assert found["tokens per s"] == pytest.approx(32e6 / found["step_us"]) and found["loss"] > 0
    assert (found["mask refresh, ms"] > 0) == (method == "t-sr-ste") and bool(stand_in.gemms) == (method != "dense")


def test_training_runs_in_the_report(tiny, tuned, times, tmp_path, monkeypatch):
    def in_process(call, entry, method, seconds):
        assert call == "train" and seconds <= 180
        if method == "s-ste" and "compile" in entry:
            raise subprocess.CalledProcessError(-9, "train", stderr="killed")
        return {"step_us": {"dense": 1e6, "s-ste": 9e5, "t-sr-ste": 5e5}[method], "loss": 10.0}

    monkeypatch.setattr(models, "in_process", in_process)
    code, result, text = run(tmp_path, "trainer", "--minutes", "60")
    assert "t-sr-ste 500000 us (2.00, meets 1.25) | s-ste 900000 us (1.11, MISSES 1.25)" in text
    assert code == 0 and "SIGKILL" in text
    rows = result["sections"]["training runs"]["rows"]
    assert "us" in rows["Llama 1B, torch.compile"]["times"]["t-sr-ste"]
