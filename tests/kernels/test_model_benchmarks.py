"""`make gpu` on products and models without a GPU: a stand-in for the library, tiny sizes, fake times."""

# ruff: noqa: F811 (tests take the fixtures that are imported)
import json
from types import SimpleNamespace

import gpu
import inference
import product_gate
import products
import pytest
import side_by_side
import torch
import trainer
from cslt import StandIn, stand_in  # noqa: F401 (a fixture)
from gpu_run import CELLS, CPU, SHAPES, TINY_BLOCKS, FakeMachine, run, times, tuned  # noqa: F401 (fixtures)
from shapes import BLOCKS, cells
from sparse24_kernels import cusparselt, tuner


def test_the_gate_passes_what_is_right_and_catches_what_is_not(stand_in, monkeypatch):
    found = product_gate.checks(CPU, SHAPES, "aot_eager")
    assert len({name for name, _ in found}) == len(found) == 2 * 2 * (1 + 2 * 3) + 2
    kinds = ("products: ", "Conv1D t-sr-ste: ", "Linear s-ste: 34 tokens", "no bias", "float16", "torch.compile")
    for kind in kinds:
        assert any(kind in name for name, _ in found)
    for _, check in found:
        check()
    wrong = StandIn(wrong_ids=(3,))
    monkeypatch.setattr(torch, "_cslt_sparse_mm", wrong.matmul)
    for _, check in found:
        with pytest.raises(AssertionError, match="is allowed"):
            check()


def test_a_red_gate_reports_no_speed(tuned, times, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "_cslt_sparse_mm", StandIn(wrong_ids=(0,)).matmul)
    code, result, page = run(tmp_path, "products,mlps")
    assert code == 1 and result["unfinished"] == "gate of the products"
    assert result["product_gate"]["failed"] and "products" not in result and "mlps" not in result
    assert "no speed is reported" in page and "## Products" not in page and "is allowed" in page


def test_what_is_wrong_in_fp16_alone_keeps_no_bf16_speed_back(tuned, times, tmp_path, monkeypatch):
    def bad():
        raise AssertionError("error 3 is allowed 1")

    found = [("Linear: 16 tokens, bfloat16", lambda: None), ("Linear: 16 tokens, float16", bad)]
    monkeypatch.setattr(product_gate, "checks", lambda *_: found)
    code, result, page = run(tmp_path, "products")
    assert code == 1 and result["product_gate"]["failed"] == {} and "## Products" in page
    assert "section gate of fp16 products failed: 1 checks failed: Linear: 16 tokens, float16: Assertion" in page


def test_three_ways():
    truth = torch.randn(64, 64)
    dense = truth.bfloat16()
    side_by_side.assert_three_way(dense, dense, truth, "equal")
    one_wrong = dense.clone()
    one_wrong[3, 5] += 1
    for bad in (one_wrong, dense + 0.05, dense * float("nan")):
        with pytest.raises(AssertionError, match="bad: error"):
            side_by_side.assert_three_way(bad, dense, truth, "bad")
    with pytest.raises(AssertionError, match=r"float32, not torch\.bfloat16"):
        side_by_side.assert_three_way(truth, dense, truth, "bad")
    with pytest.raises(AssertionError, match="not"):
        side_by_side.assert_three_way(dense[:3], dense, truth, "bad")


def test_products_land_in_the_report_and_goals_are_judged(tuned, times, tmp_path):
    times.of = {"output sparse": 500.0, "output sparse, packing": 800.0, "output default algorithm": 1250.0}
    times.of |= {"layer t-sr-ste, made": 1000 / 1.5, "layer s-ste, auto": 1100.0, "grad_input sparse": 1100.0}
    code, result, page = run(tmp_path, "products")
    assert code == 0 and "unfinished" not in result and result["groups"] == ["products"]
    assert len(tuned) == 6 and all(row["backend"] == "cusparselt" for row in result["tuning"].values())
    row = result["products"][str(CELLS[1])]
    output = row["products"]["output"]
    assert output == {
        "algorithm": [3, 1, -1],
        "is_default": False,
        "auto": "sparse",
        "sparse": 2.0,
        "packed_too": 1.25,
        "default_algorithm": 0.8,
        "auto_ratio": 2.0,
    }
    met = {goal["what"]: goal["met"] for goal in row["goals"]}
    assert met == {
        "forward": False,
        "layer s-ste": False,
        "layer t-sr-ste": True,
        "output, auto": True,
        "grad_input, auto": False,
        "grad_weight, auto": True,
        "layer s-ste, auto": False,
        "layer t-sr-ste, auto": True,
    }
    assert "forward" not in {goal["what"] for goal in result["products"][str(CELLS[0])]["goals"]}  # too few tokens
    assert row["clocks"] == "1980 MHz" and f"| {CELLS[1]} | output | 1000.0 | 0 | 2.00 | 1.25 | 0.80 |" in page
    assert "forward 1.5 **missed**" in page and f"| {CELLS[1]} | forward | 1.250 | 1.5 |" in page
    assert "part: mvue, compressed" in row["times"] and "| 3/1/-1 |" in page


def test_what_is_not_tuned_is_dense_under_auto(tuned, times, tmp_path, monkeypatch):
    monkeypatch.setattr(products, "TUNING", 0)
    times.of = {"output sparse": 5000.0}
    code, result, page = run(tmp_path, "products")
    assert code == 0 and not tuned and "not tuned" in page
    found = result["products"][str(CELLS[0])]["products"]["output"]
    assert found["auto"] == "dense" and found["auto_ratio"] == 1.0 and found["sparse"] == 0.2
    assert found["is_default"] and found["default_algorithm"] == 0.2


def test_a_wrong_algorithm_is_not_timed_and_the_others_are(tuned, times, tmp_path, monkeypatch):
    wrong = StandIn()
    monkeypatch.setattr(torch, "_cslt_sparse_mm", wrong.matmul)
    real = products.measure

    def measure(run, cell):  # after the gate, which would have seen it
        wrong.wrong_ids = (3,)
        return real(run, cell)

    monkeypatch.setattr(products, "measure", measure)
    monkeypatch.setattr(product_gate, "gate", lambda run: run.result.update(product_gate=GREEN))
    monkeypatch.setattr(gpu, "SECTIONS", [s._replace(function=green) if s.group == "gate" else s for s in gpu.SECTIONS])
    code, result, page = run(tmp_path, "products")
    row = result["products"][str(CELLS[0])]
    assert code == 0 and "is allowed" in row["times"]["output sparse"]["error"]
    assert row["products"]["output"]["sparse"] is None and row["products"]["output"]["default_algorithm"] == 1.0
    assert f"- {CELLS[0]}, output sparse: AssertionError" in page


GREEN = {"passed": 1, "failed": {}, "seconds": 0.0}


def green(run):
    run.result["product_gate"] = GREEN


def test_one_cell_that_fails_does_not_stop_the_next(tuned, times, tmp_path, monkeypatch):
    real = products.measure
    monkeypatch.setattr(products, "measure", lambda run, cell: 1 / 0 if cell is CELLS[0] else real(run, cell))
    code, result, page = run(tmp_path, "products")
    assert code == 0 and "ZeroDivisionError" in result["products"][str(CELLS[0])]["error"]
    assert "error" not in result["products"][str(CELLS[1])] and "ZeroDivisionError" in page


def test_a_tuner_that_fails_is_reported_and_the_run_goes_on(tuned, times, tmp_path, monkeypatch):
    monkeypatch.setattr(tuner, "tune", lambda *_, **__: 1 / 0)
    code, result, page = run(tmp_path, "products")
    assert code == 1 and "ZeroDivisionError" in result["errors"]["tuning"]
    assert all("times" in row for row in result["products"].values()) and "section tuning failed" in page


def test_blocks(tuned, times, tmp_path):
    times.of = {"t-sr-ste": 600.0, "s-ste, auto": 1000.0, "dense, fused activation": 900.0}
    code, result, page = run(tmp_path, "mlps")
    assert code == 0
    gated, plain = (result["mlps"][str(block)] for block in TINY_BLOCKS)
    rows = gated["training"]["rows"]
    assert rows["t-sr-ste"]["speed_up"] == pytest.approx(1 / 0.6) and 0.05 < rows["t-sr-ste"]["distance_to_dense"] < 1
    assert rows["dense"]["distance_to_dense"] == 0 and "error" in rows["torchao SemiSparseLinear"]  # not installed
    assert "error" in gated["forward"]["rows"]["torch to_sparse_semi_structured"]  # a CPU has none
    assert "dense, fused activation" in rows and "dense, fused activation" not in plain["training"]["rows"]
    met = {goal["what"]: goal["met"] for goal in gated["goals"]}
    assert (
        met["training, t-sr-ste: ahead of dense"] and met["training, s-ste, auto: vs. dense, fused activation"] is False
    )
    assert (
        "torchao SemiSparseLinear | ModuleNotFoundError" in page
        and "vs. dense, fused activation 0.98 **missed**" in page
    )


TINY_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}


def test_inference(tuned, times, tmp_path, monkeypatch):
    monkeypatch.setattr(inference, "SIZES", TINY_LLAMA)
    monkeypatch.setattr(inference, "CONTEXT", 8)
    monkeypatch.setattr(inference, "WORKLOADS", {"prefill 32": (1, 32), "decode 3": (3, 1)})
    times.of = {"sparse": 500.0}
    code, result, page = run(tmp_path, "inference")
    assert code == 0, result["errors"]
    rows = result["inference"]["rows"]
    assert {row["rows"]["sparse"]["speed_up"] for row in rows.values()} == {2.0}
    assert rows["prefill 32"]["goals"][0]["met"] and "| decode 3 | sparse | 500.0 | 2.00 |" in page
    model = inference.build(CPU, "cusparselt")
    step = inference.call(model, 3, 1, CPU)
    first, second = step(), step()
    assert torch.equal(first, second) and first.shape == (3, 1, 32)  # the cache is as it was
    assert inference.held(model) < inference.held(inference.build(CPU, None))  # without the masters
    monkeypatch.setattr(inference, "build", lambda device, backend: 1 / 0)
    code, result, page = run(tmp_path, "inference")
    assert "ZeroDivisionError" in result["inference"]["memory"]["dense"]["error"] and "- dense: ZeroDivision" in page


@pytest.fixture
def tiny_models(monkeypatch):
    from transformers import GPT2Config, LlamaConfig

    llama = SimpleNamespace(
        config=lambda: LlamaConfig(**TINY_LLAMA), length=16, sequences=2, parameters=1000, hidden=32, intermediate=64
    )
    gpt2 = SimpleNamespace(
        config=lambda: GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, vocab_size=64),
        length=16,
        sequences=2,
        parameters=1000,
        hidden=32,
        intermediate=128,
    )
    monkeypatch.setattr(trainer, "MODELS", {"Llama 1B": llama, "GPT-2 774M": gpt2})


@pytest.mark.parametrize("model", ["Llama 1B", "GPT-2 774M"])
@pytest.mark.parametrize("method", ["dense", "s-ste", "t-sr-ste"])
def test_a_training_run(tiny_models, stand_in, model, method, tmp_path):
    configuration = trainer.Configuration(model, method, False, warm_up=1, steps=2)
    result = trainer.measure(configuration, CPU, str(tmp_path))
    assert result["tokens_per_s"] == pytest.approx(32 / (result["step_s"] + result["search_s"] / 40))
    assert result["loss"] > 0 and result["peak_bytes"] is None
    assert (result["search_s"] > 0) == (method == "t-sr-ste") and bool(stand_in.products) == (method != "dense")


def test_training_runs_in_the_report(tuned, times, tiny_models, tmp_path, monkeypatch):
    def spawn(configuration, seconds):
        assert seconds <= trainer.SECONDS[configuration.compile]
        if configuration.model == "GPT-2 774M" and configuration.method == "dense":
            return {"error": "its process ended with -9: "}
        speed = {"dense": 100.0, "s-ste": 120.0, "t-sr-ste": 130.0}[configuration.method]
        return {"tokens_per_s": speed, "step_s": 0.1, "search_s": 0.0, "loss": 10.0, "peak_bytes": 2 * 10**9}

    monkeypatch.setattr(trainer, "spawn", spawn)
    code, result, page = run(tmp_path, "trainer")
    assert code == 0 and len(result["trainer"]) == 12
    assert result["trainer"]["Llama 1B t-sr-ste"]["goals"][0]["met"]
    assert result["trainer"]["Llama 1B s-ste, torch.compile"]["goals"][0]["met"] is False
    assert "speed_up" not in result["trainer"]["GPT-2 774M s-ste"]  # nothing to compare with
    assert "| Llama 1B t-sr-ste | 130 | 1.30 | end to end 1.25 met | 2.00 |" in page and "ended with -9" in page


def test_processes_end_in_time(tmp_path, monkeypatch):
    configuration = trainer.Configuration("Llama 1B", "dense", False)
    monkeypatch.setattr(trainer, "HERE", tmp_path)
    for code, expected in (
        ("import time; time.sleep(60)", {"error": "not done after 2 s: "}),
        ("raise SystemExit('lost')", {"error": "its process ended with 1: lost"}),
        ("import os; os.kill(os.getpid(), 9)", {"error": "its process ended with -9: "}),
        ("import sys; print('result: {\"x\": 1}'); print('late', file=sys.stderr)", {"x": 1}),
    ):
        (tmp_path / "trainer.py").write_text(code)
        assert trainer.spawn(configuration, 2) == expected


def test_time_runs_out(tuned, times, tmp_path, monkeypatch):
    now = 0.0

    class Slow(FakeMachine):
        def prepare(self, calls):
            nonlocal now
            now += 5
            return super().prepare(calls)

    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now))
    code, result, page = run(tmp_path, "products,mlps,trainer", "--minutes", "2", machine=Slow())
    assert code == 0 and "times" in result["products"][str(CELLS[0])]
    assert result["mlps"][str(TINY_BLOCKS[1])] == {"flops": TINY_BLOCKS[1].flops, "error": side_by_side.NOT_RUN}
    assert set(result["trainer"]) == {str(c) for c in trainer.configurations()}
    assert "Not reached in the time" in page and str(TINY_BLOCKS[1]) in page.split("Not reached")[1]


def test_kernels_that_ran_out_of_time_leave_the_products_their_turn(tuned, times, tmp_path):
    def prepare(run):
        run.cells = CELLS[:1]
        run.product_checks = lambda: product_gate.checks(CPU, SHAPES[:1])[:1]

    for why, ends in (("not run: out of time: ", False), ("AssertionError: 3 of 4 differ", True)):
        arguments = ["--output", str(tmp_path), "--sections", "products,kernels"]
        assert gpu.main(arguments, FakeMachine(), lambda *_, why=why: {"a": None, "b": why}, [], prepare) == 1
        result = json.loads((tmp_path / "gpu_fake_9000.json").read_text())
        page = (tmp_path / "gpu_fake_9000.md").read_text()
        assert "copy" not in result and ("products" in result) == (not ends)
        assert "**Red: no speed is reported.**" in page and ("## Products" in page) == (not ends)


def test_sections_and_listing(capsys):
    assert gpu.groups_of("models,kernels") == ["kernels", "mlps", "trainer", "inference"]
    with pytest.raises(SystemExit):
        gpu.main(["--sections", "nothing"])
    assert gpu.main(["--list", "--sections", "products,models"]) == 0
    printed = capsys.readouterr().out
    for name in (*cells(), *BLOCKS, *trainer.configurations(), *inference.WORKLOADS):
        assert str(name) in printed
    assert len(set(map(str, cells()))) == len(cells()) == 4 * 15
    cell = cells()[0]
    assert cell.flops == 2 * 8192 * 4096 * 14336 and f"{cell.flops / 790e12 * 1e6:.1f}" in printed
    for problem in (p for cell in cells() for p in cell.problems().values()):
        assert cusparselt.why_not_matrix(problem.m, problem.k, problem.dtype) is None
