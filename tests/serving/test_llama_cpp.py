"""llama.cpp: its own converter makes a GGUF file of a dense export, and its server writes the same tokens."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import serving
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

COMPLETE = """
import json, sys
import xllamacpp

settings = xllamacpp.CommonParams()
settings.model.path = sys.argv[1]
settings.n_ctx, settings.n_parallel, settings.verbosity, settings.cache_ram_mib = 512, 1, 0, 0
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(settings)
found = []
for tokens in json.loads(sys.argv[2]):
    request = {"prompt": tokens, "n_predict": int(sys.argv[3]), "ignore_eos": True, "temperature": 0, "logprobs": 1}
    answer = server.handle_completions(request)
    answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
    found.append([token["id"] for token in answer["choices"][0]["logprobs"]["content"]])
print("tokens:", json.dumps(found))
"""


@pytest.fixture(scope="module")
def converter(tmp_path_factory) -> list[str]:
    """The command of llama.cpp's convert_hf_to_gguf.py: the source distribution of xllamacpp has that of its engine."""
    folder = tmp_path_factory.mktemp("source")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary=xllamacpp", "-d", folder]
    subprocess.run([*command, serving.requirement("xllamacpp")], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as source:
        wanted = [each for each in source.getmembers() if "/thirdparty/llama.cpp/" in each.name]
        source.extractall(folder, wanted, filter="data")
    return [str(next(folder.glob("*/thirdparty/llama.cpp/convert_hf_to_gguf.py"))), "--outtype", "f16"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    return serving.install(tmp_path_factory.mktemp("packages"), "xllamacpp", "sentencepiece")


def converted(checkpoint: Path, file: Path, converter, environment) -> Path:
    serving.run([*converter, "--outfile", file, checkpoint], environment)
    return file


def test_the_same_tokens_and_as_many_bytes_as_a_dense_model(smollm2, smollm2_24, converter, environment, tmp_path):
    # Files hold the name of their model and what its card says, so both are named alike and have no card.
    for name, source in {"dense": smollm2, "sparse": smollm2_24}.items():
        (tmp_path / name / "model").mkdir(parents=True)
        for file in {*source.iterdir()} - {source / "README.md"}:
            (tmp_path / name / "model" / file.name).symlink_to(file)
    files = [
        converted(tmp_path / x / "model", tmp_path / f"{x}.gguf", converter, environment) for x in ("dense", "sparse")
    ]
    dense, sparse = (file.stat().st_size for file in files)
    assert dense == sparse
    prompts = serving.prompts(smollm2_24)
    arguments = [files[1], json.dumps([tokens[0].tolist() for tokens in prompts]), serving.NEW_TOKENS]
    found = serving.run(["-c", COMPLETE, *arguments], environment).rpartition("tokens:")[2]
    model = AutoModelForCausalLM.from_pretrained(smollm2_24, dtype="float16")
    assert json.loads(found) == [serving.greedy(model, tokens)[0].tolist() for tokens in prompts]
