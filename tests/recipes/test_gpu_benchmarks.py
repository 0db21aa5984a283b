"""`make gpu` without a GPU: time, errors and the report, with tiny sizes, a machine and times that are made up."""

# ruff: noqa: F811 (tests take the fixtures that are imported)
import json
from types import SimpleNamespace

import pytest
import torch
from cslt import StandIn, stand_in  # noqa: F401 (a fixture)
from sparse24_kernels.gemm import autotune

from recipes.benchmarks import eight_bit, gemms, gpu, operations, sections, shapes, step_budget, training

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN that are put in on purpose

CPU = torch.device("cpu")
LAYERS = [gemms.Layer("GPT-2 tiny", 48, 32, 32), gemms.Layer("Tiny", 32, 48, 8192)]
KERNELS = ("nm_mask bits, rows", "prune mask: dense", "prune soft-threshold: dense", "swiglu backward, row-major")


class FakeMachine:
    """Runs every call once; then each takes a millisecond, by its own clock."""

    device, name, l2_bytes, facts = CPU, "Fake: 9000", 1, {"device": "Fake: 9000"}

    def clocks(self):
        return "1980 MHz"

    def prepare(self, calls):
        for call in calls:
            call()
        return lambda: 1e-3

    eager = prepare

    def kernels(self, call):
        call()
        return {"sm90_xmma_sparse_gemm_bf16": (36, 500.0), "copy": (2, 250.0)}

    def peak(self, call):
        call()
        return 3_000_000_000

    def forget(self):
        pass


@pytest.fixture
def tiny(monkeypatch):
    """Few and small entries."""
    small = list({w.name: w.at((8, 64)) for w in operations.workloads() if w.name in KERNELS}.values())
    monkeypatch.setattr(operations, "workloads", lambda: iter(small))
    monkeypatch.setattr(gemms, "layers", lambda: LAYERS)
    monkeypatch.setitem(shapes.MODELS, "four layers of Llama 8B", shapes.Shape(32, 48, 1, 2, 1, 64))
    monkeypatch.setattr(training, "BATCHES", {"Llama": (2, 16)})
    return small


@pytest.fixture
def times(monkeypatch):
    """Microseconds by way; what is not in it takes 1000."""
    found: dict[str, float] = {}

    def take_turns(samplers, least):
        return {way: [found.get(way, 1000.0) / 1e6] * least for way in samplers}

    monkeypatch.setattr(sections, "take_turns", take_turns)
    return found


@pytest.fixture
def tuned(stand_in, monkeypatch):
    """Problems that were given to the autotuner; what was not given is not tuned, which stays dense."""
    found, verdict = [], autotune.verdict_of(None, CPU)
    nothing = autotune.Verdict("dense", None, None, None, "not tuned", measured=False)
    monkeypatch.setattr(autotune, "tune", lambda problems, device: found.extend(problems))
    monkeypatch.setattr(autotune, "verdict_of", lambda problem, device: verdict if problem in found else nothing)
    return found


def run(folder, sections_, *arguments, machine=None):
    """Exit code, JSON, and its rows as text."""
    code = gpu.main(["--output", str(folder), "--sections", sections_, *arguments], machine or FakeMachine())
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".log"}
    result = json.loads(max(folder.glob("gpu_fake_9000_*.json")).read_text())
    rows = [sections.line(entry, row) for found in result["sections"].values() for entry, row in found["rows"].items()]
    return code, result, "\n".join(rows) + "\n"


def test_a_green_run_reports_every_workload(tiny, tmp_path):
    code, result, text = run(tmp_path, "kernels")
    assert code == 0 and set(result["sections"]) == {"kernels"}
    for workload in tiny:
        row = result["sections"]["kernels"]["rows"][str(workload)]
        assert row["times"]["ours"] == {"p10_us": 1000, "us": 1000, "p90_us": 1000}
        assert row["facts"]["GB/s"] == pytest.approx(workload.bytes() / 1e6)
        assert row["facts"]["ours over copy of as many bytes"] == [1, 1, 1]
        ours = f"ours 1000 us (1.00, meets {workload.target:g})"
        assert f"{workload}: copy of as many bytes 1000 us | {ours}" in text
    assert "eager PyTorch 1000 us (1.00)" in text and result["environment"]["clocks after kernels"] == "1980 MHz"
    assert result["environment"]["torch"] == torch.__version__ and "DIR" in result["command"]


def test_an_operation_that_raises_is_recorded_and_the_run_goes_on(tiny, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError(f"out of luck in {sections.ROOT}/file\nand more")

    sizes = {str(workload): workload.bytes() for workload in tiny}
    monkeypatch.setattr(operations.Workload, "bytes", lambda workload: sizes[str(workload)])
    monkeypatch.setitem(operations.PUBLIC, "nm_mask", broken)
    code, result, text = run(tmp_path, "kernels")
    rows = result["sections"]["kernels"]["rows"]
    assert code == 0
    for name, row in rows.items():
        error = "RuntimeError: out of luck in ./file" if name.startswith("nm_mask") else None
        assert row["times"]["ours"].get("error") == error and (error is None or error in text)
        assert "us" in row["times"]["copy of as many bytes"]


def test_the_time_is_kept(tiny, tmp_path, monkeypatch):
    now = 0.0

    class Slow(FakeMachine):
        def prepare(self, calls):
            nonlocal now
            now += 5
            return super().prepare(calls)

    monkeypatch.setattr(sections, "time", SimpleNamespace(monotonic=lambda: now))
    code, result, text = run(tmp_path, "kernels", "--minutes", "0.8", machine=Slow())
    rows = result["sections"]["kernels"]["rows"]
    assert code == 0 and now <= 48 and 0 < sum("times" in row for row in rows.values()) < len(rows)
    assert text.count(sections.NOT_RUN) >= 1


def test_every_operation_is_timed_and_one_shape_of_each_has_baselines():
    found = list(operations.workloads())
    assert len({str(workload) for workload in found}) == len(found) > 250
    mask = next(w for w in found if str(w) == "nm_mask bits, rows 768x3072 bfloat16")
    assert mask.bytes() == 768 * 3072 * 2 + 768 * 3072 // 8
    entries = operations.Operations().entries()
    kinds = {(w.name, w.dtype) for w in found}
    assert len(entries) == len(found) and {(w.name, w.dtype) for w in entries[: len(kinds)]} == kinds
    assert {w.operator for w in found} >= set(operations.PUBLIC)


def test_baselines_run(tiny, compiler):
    for workload in tiny:
        for name, make in operations.baselines(workload):
            if "tile" not in name and "cuSPARSELt" not in name:  # a CPU has neither
                make(workload.arguments(CPU))()
        arguments = workload.arguments(CPU)
        expected = getattr(operations.reference.OPERATORS, workload.operator)(*arguments)
        for ours, theirs in zip(operations.tensors(workload.call(arguments)), operations.tensors(expected)):
            assert torch.equal(ours, theirs)


def test_three_ways():
    truth = torch.randn(64, 64)
    dense = truth.bfloat16()
    gemms.assert_three_way(dense, dense, truth, "equal")
    one_wrong = dense.clone()
    one_wrong[3, 5] += 1
    for bad in (one_wrong, dense + 0.05, dense * float("nan")):
        with pytest.raises(AssertionError, match="bad: error"):
            gemms.assert_three_way(bad, dense, truth, "bad")
    for bad in (truth, dense[:3]):
        with pytest.raises(AssertionError, match=r"bad: torch\.Size"):
            gemms.assert_three_way(bad, dense, truth, "bad")


def test_gemms(tiny, tuned, times, tmp_path):
    times |= {"sparse": 500.0, "sparse, packing": 800.0, "default": 1250.0}
    code, result, text = run(tmp_path, "gemms")
    # Of two layers that are each other's transpose, the output GEMM of one is the grad_input GEMM of the other.
    assert code == 0 and len(tuned) == len(set(tuned)) == 3 * len(LAYERS)
    rows = result["sections"]["GEMMs"]["rows"]
    assert all("us" in row["times"]["sparse"] for row in rows.values())
    row = rows[f"{LAYERS[1]}: output"]
    assert row["facts"]["algorithm"] == 3
    assert row["goals"] == {"auto": gemms.AUTO, "sparse, packing": 1.5}
    assert rows[f"{LAYERS[0]}: output"]["goals"] == {"auto": gemms.AUTO}  # too few tokens
    cells = ("dense 1000 us", "sparse 500 us (2.00)", "sparse, packing 800 us (1.25, MISSES 1.5)")
    cells += ("default 1250 us (0.80)", "auto 500 us (2.00, meets 0.98)")
    assert f"{LAYERS[1]}: output: {' | '.join(cells)}\n" in text


def test_a_wrong_algorithm_is_not_timed_and_the_others_are(tiny, tuned, times, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "_cslt_sparse_mm", StandIn(wrong_ids=(3,)).matmul)
    code, result, text = run(tmp_path, "gemms")
    row = result["sections"]["GEMMs"]["rows"][f"{LAYERS[0]}: output"]
    assert code == 0 and "is allowed" in row["times"]["sparse"]["error"] and "us" in row["times"]["default"]
    assert f"{LAYERS[0]}: output: dense 1000 us | sparse AssertionError" in text


def test_training_steps(tiny, tuned, times, tmp_path, monkeypatch):
    """On the CPU it is in fp32, where `auto` takes no library: that each method trains, and the report."""
    times |= {"t-sr-ste": 500.0}
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    code, result, text = run(tmp_path, "training", "--only", "Llama 8B, all")
    rows = result["sections"]["training step"]["rows"]
    assert code == 0 and len(tuned) == 12 and len(rows) == 4 and len(compiled) == 2 * 3
    row = rows["four layers of Llama 8B, all-linear, 8 x, compiled"]
    assert list(row["times"]) == ["dense", "t-sr-ste", "s-ste"] and row["facts"]["s-ste: GPU busy, ms"] == 0.75
    assert row["facts"]["dense: kernels"] == {"sm90_xmma_sparse_gemm_bf16": [36, 500.0], "copy": [2, 250.0]}
    cells = "dense 1000 us 36 sparse GEMMs | t-sr-ste 500 us (2.00, meets 1.2) 36 sparse GEMMs"
    assert f"8 x, compiled: {cells} | s-ste 1000 us (1.00, MISSES 1.1) 36 sparse GEMMs\n" in text


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
def test_one_layer_and_memory(tiny, tuned, times, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "mlp", lambda *_: LAYERS[:1])
    monkeypatch.setitem(shapes.MODELS, "Llama 1B", shapes.MODELS["four layers of Llama 8B"])
    result, text = run(tmp_path, "layer,memory")[1:]
    (layer,) = result["sections"]["one layer"]["rows"].values()
    assert list(layer["times"]) == ["dense", "t-sr-ste", "s-ste"] and "error" not in str(layer)
    ways = "dense 1000 us 3.0 GB | LoRA 1000 us 3.0 GB | fixed-mask 1000 us 3.0 GB | fixed-mask, packed 1000 us 3.0 GB"
    assert f"Llama 1B: {ways}\n" in text


def test_gemms_of_eight_bits(tmp_path, monkeypatch):
    def matmul(weight, x, transpose_result, alg_id, out_dtype=torch.bfloat16):
        return (weight.float() @ x.float()).t().to(out_dtype) * (1 + (alg_id == 5))

    monkeypatch.setattr(torch, "_cslt_compress", lambda weight: weight)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", matmul)
    monkeypatch.setattr(eight_bit, "SHAPES", ((32, 64),))
    monkeypatch.setattr(eight_bit, "TOKENS", (32,))
    rows = run(tmp_path, "8-bit")[1]["sections"]["8-bit GEMMs"]["rows"]
    assert [len(row["times"]) for row in rows.values()] == [11, 11, 6]
    assert "from fp32" in rows["int8 32x64, 32 tokens"]["times"]["sparse, id 5"]["error"]
    assert rows["int8 32x64, 32 tokens"]["facts"]["sparse, id 17 over dense"] == [1, 1, 1]


def test_a_run_that_is_killed_leaves_what_it_has_measured(tiny, tmp_path):
    class Killed(FakeMachine):
        def forget(self):
            raise SystemExit  # after the first row was measured

    with pytest.raises(SystemExit):
        run(tmp_path, "kernels", machine=Killed())
    (file,) = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())["sections"]["kernels"]["rows"].values()
    assert ["times" in row for row in rows] == [True] + [False] * (len(rows) - 1)


def test_a_step_is_calculated_from_measured_kernels():
    dense, sparse = step_budget.work("dense"), step_budget.work("t-sr-ste")
    up, down = 1282.14 + 1237.25 + 1244.67, 1250.81 + 1282.01 + 1259.33  # us, in h100_gemms.json
    assert dense["MLP GEMMs"] == pytest.approx((8 * up + 4 * down) / 1e3, rel=1e-3)
    assert sparse["casts and prunes"] - dense["casts and prunes"] == pytest.approx(12 * (210.6 - 120.4) / 1e3)
    assert sparse["MVUE"] == pytest.approx(177.4 * (8 + 4 * 4096 / 14336) / 1e3)
    gains = [step_budget.gain("t-sr-ste", micro, "compiled", True) for micro in (1, 2, 8)]
    assert 1 < gains[0] < gains[1] < gains[2] < 1.5


def test_the_table_of_shapes():
    for name, shape in shapes.MODELS.items():
        config = shape.config()
        assert config.vocab_size == shape.vocabulary and shape.mlp()["MLP down"] == (shape.hidden, shape.inner), name
    rows = {str(layer).split(",")[0] for layer in gemms.layers()}
    assert rows >= {"Llama 8B key 1024x4096", "GPT-2 774M qkv 3840x1280", "Llama 13B query 5120x5120"}
