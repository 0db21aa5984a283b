"""hf-sparse24 doctor and tune, on a machine without a GPU and on a pretended one."""

import json
import sys
from importlib.metadata import version

import bad_kernels
import pytest
import torch
import zoo
from cslt import stand_in  # noqa: F401 (a fixture)
from sparse24_kernels import dispatch, first_use
from sparse24_kernels.cpu import limits
from sparse24_kernels.cpu.library import load
from sparse24_kernels.gemm import autotune
from transformers import AutoConfig

from hf_sparse24 import Sparse24Config, patch_model
from hf_sparse24.tools import doctor
from hf_sparse24_command import main


@pytest.fixture
def directory(tmp_path):
    model = zoo.build("llama", architectures=["LlamaForCausalLM"])
    model.config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_doctor_says_what_runs_here_and_why(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for part in (f"torch          {version('torch')}", "CUDA of torch", "pruning, masks, MVUE"):
        assert part in printed
    assert "FAILED" not in printed and (isinstance(load(), str) or printed.count(" ok\n") == 8)


@pytest.mark.slow
def test_doctor_checks_again_and_writes_a_report(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARSE24_CACHE", str(tmp_path))
    monkeypatch.setattr(first_use, "_known", {})
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", [bad_kernels.implementation()])
    assert main(["doctor", "--check"]) == 1 and main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("nm_mask    FAILED, PyTorch runs: float32: nm_mask(") == 2
    assert printed.count("unpack_nm  ok\n") == 2  # the others go on
    (device,) = json.loads((tmp_path / "sparse24-doctor.json").read_text())["devices"]
    assert {check["operator"] for check in device["checks"] if check["failure"]} == {"nm_mask"}


def verdict(problem, device):
    """Dense takes 2 us everywhere; sparse wins on the output GEMM and was not measured for gradients."""
    if problem.transposed:
        return autotune.Verdict("cusparselt", 3, 1.25, 2.0, "measured", measured=True)
    return autotune.Verdict("dense", None, None, None, "not tuned: run `hf-sparse24 tune`", measured=False)


def test_predicted_gains(stand_in, monkeypatch):  # noqa: F811
    monkeypatch.setattr(autotune, "verdict_of", verdict)
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="ste"))
    rows = doctor.gains(model, 32, torch.bfloat16, torch.device("cpu"))
    # Three GEMMs of 2 us, one of them in 1.25 us.
    by_method = "dense: the method has no sparse operand in it"
    assert rows == [
        ["4", "64 x 32", "sparse 1.60x", by_method, by_method, "1.14x"],
        ["2", "32 x 64", "sparse 1.60x", by_method, by_method, "1.14x"],
    ]
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="t-sr-ste"))
    (row, _) = doctor.gains(model, 32, torch.bfloat16, torch.device("cpu"))
    assert row[2:] == ["sparse 1.60x", "sparse 1.60x", "dense: not tuned: run `hf-sparse24 tune`", "?"]


def test_doctor_on_a_model_that_is_not_loaded(directory, capsys, faster_from_32):
    for dtype, row, line in (
        ([], "64 x 32  sparse  sparse      sparse       ?", "GEMMs: 18 sparse (from 32 tokens"),
        (["--dtype", "bf16"], "64 x 32  dense: the sparse GEMMs of CPUs run in fp32", "GEMMs: 18 dense ("),
    ):
        assert main(["doctor", directory, "--tokens", "64", "--method", "t-sr-ste", *dtype]) == 0
        printed = capsys.readouterr().out
        assert row in printed and line in printed


@pytest.mark.parametrize(
    ("sparse", "expected"),
    [({"pattern": "8:16"}, "8:16"), ({"layer_patterns": {"up_proj": "8:16"}}, "2:4 in 4 layers, 8:16 in 2 layers")],
)
def test_doctor_names_the_patterns_of_a_checkpoint(sparse, expected, tmp_path, capsys):
    patch_model(model := zoo.build("llama"), Sparse24Config(method="ste", **sparse))
    model.save_pretrained(tmp_path)
    for method in ([], ["--method", "sr-ste"]):
        assert main(["doctor", str(tmp_path), "--tokens", "64", *method]) == 0
        assert f"forward + backward of {expected}\n" in capsys.readouterr().out


VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (AutoConfig.for_model("t5", d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8, vocab_size=96), 4),
        (AutoConfig.for_model("llava", text_config=zoo.build("llama").config, vision_config=VISION), 4),
        (AutoConfig.for_model("bert", **zoo.MASKED["bert"], architectures=["BertForSequenceClassification"]), 2),
        (AutoConfig.for_model("llama", **zoo.CAUSAL["llama"], architectures=["pipeline"]), 4),  # no class of a model
    ],
    ids=["t5", "llava", "classifier", "unknown class"],
)
def test_doctor_opens_every_kind_of_model(tmp_path, config, layers, capsys):
    config.save_pretrained(tmp_path)
    assert main(["doctor", str(tmp_path), "--tokens", "64"]) == 0
    assert f" {layers} 64 x 32 dense: " in " ".join(capsys.readouterr().out.split())


def test_only_a_module_that_is_asked_for_comes_from_the_working_directory(tmp_path, monkeypatch, capsys):
    """And none there stands in for an installed one, which something may import later."""
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    (tmp_path / "my_own_method.py").write_text("")
    assert main(["doctor"]) == 0 and sys.path == before
    for arguments in (["--import", "my_own_method", "doctor"], ["doctor", "--import", "my_own_method"]):
        assert main(arguments) == 0 and sys.path == [*before, str(tmp_path)]
        assert sys.modules.pop("my_own_method").__file__ == str(tmp_path / "my_own_method.py")
        sys.path[:] = before
    (tmp_path / "my_own_method.py").write_text("1 / 0")
    assert main(["--import", "my_own_method", "doctor"]) == 2
    assert "--import my_own_method: ZeroDivisionError: division by zero" in capsys.readouterr().err


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(doctor, "devices", lambda: [torch.device("cuda", 0)])


def test_tune(directory, capsys, monkeypatch, stand_in, on_gpu):  # noqa: F811
    asked = []

    def tune(problems, device, on_progress):
        asked.extend(problems)
        on_progress(asked[1], 1)
        return {problem: verdict(problem, device) for problem in problems}

    monkeypatch.setattr(autotune, "tune", tune, raising=False)
    assert main(["tune", directory, "--tokens", "64", "--dtype", "fp16"]) == 0
    printed = capsys.readouterr().out
    assert len(asked) == 4 and all(problem.dtype == torch.float16 for problem in asked)
    assert printed.startswith("4 GEMMs of training; Ctrl-C keeps what is done\ntuning: 4 GEMMs in ")
    assert "64 x 64 x 32" in printed and "cusparselt: measured" in printed and "1.2" in printed


def test_tune_stopped(directory, capsys, monkeypatch, stand_in, on_gpu):  # noqa: F811
    def tune(problems, device, on_progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(autotune, "tune", tune, raising=False)
    assert main(["tune", directory]) == 130
    assert "what is finished is kept" in capsys.readouterr().err


def test_tune_on_a_gpu_without_cusparselt(directory, capsys, on_gpu):
    assert main(["tune", directory]) == 2
    assert "nothing to tune here: " in capsys.readouterr().err


def test_tune_measures_packed_layers_where_there_is_no_gpu(directory, capsys, monkeypatch, tmp_path):
    if isinstance(reason := load(), str):
        pytest.skip(reason)
    monkeypatch.setenv("SPARSE24_CACHE", str(tmp_path / "cache"))
    limits._read.cache_clear()
    monkeypatch.setattr(limits, "TOKENS", (16, 64))
    monkeypatch.setattr(limits, "_times", lambda packed, tokens: (50.0, 100.0 / (1 + (tokens == 64) * 1.5)))
    assert main(["tune", directory, "--dtype", "fp32"]) == 0
    limits._read.cache_clear()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["64", "x", "32", "2:4", "float32", "16", "tokens", "2.00x", "0.80x"] in lines
    assert ["32", "x", "64", "2:4", "int8", "16", "tokens", "2.00x", "0.80x"] in lines


def test_tune_without_a_gpu_and_without_kernels(directory, capsys, monkeypatch):
    monkeypatch.setattr(limits, "load", lambda: "no kernels for this CPU: no compiler")
    assert main(["tune", directory]) == 2
    assert "nothing to tune: no kernels for this CPU: no compiler" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "/no/such/model"], "hf-sparse24: /no/such/model is no directory\n"),
        (["doctor", "{}", "--target-modules", "mpl"], "no linear layer's name ends in ['mpl']"),
        (["doctor", "{}/depth"], "Transformers has no model for DepthAnythingConfig with architectures=None"),
        (["doctor", "{}", "--method", "best"], "method='best': must be one of"),
        (["--import", "no_such_module", "doctor", "{}"], "--import no_such_module: ModuleNotFoundError"),
    ],
)
def test_wrong_arguments(directory, arguments, message, capsys):
    AutoConfig.for_model("depth_anything").save_pretrained(f"{directory}/depth")
    assert main([argument.format(directory) for argument in arguments]) == 2
    assert message in capsys.readouterr().err
