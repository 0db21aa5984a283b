"""Graphs by the snippets of docs/engines.md: ONNX Runtime computes what Transformers does, and Nvidia's checker finds
every weight 2:4."""

import re
from pathlib import Path

import numpy as np
import pages
import pytest
import serving
import torch
import zoo
from checkpoints import patched
from paths import ROOT
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from hf_sparse24 import export_model, sparse_weights

PAGE = ROOT / "docs/engines.md"
EXPORT, SNIPPET, WITH_CACHE = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
FP16 = ', dtype="float16"'
ONE_LAYER = {"gpt2": {"n_layer": 1}, "llama": {"num_hidden_layers": 1}, "bert": {"num_hidden_layers": 1}}


def exported(name: str, directory: Path, **sizes: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """An export in `directory`: its 2:4 weights as `[in, out]`, and tokens with the logits that they should have."""
    model = patched(name, **sizes)
    export_model(model, directory)
    tokens = torch.randint(3, zoo.VOCAB, (3, 5))
    weights = {}
    for path, weight in sparse_weights(model).items():
        sparse = weight.merged()
        weights[path] = sparse if isinstance(model.get_submodule(path.rpartition(".")[0]), Conv1D) else sparse.t()
    with torch.no_grad():
        return weights, tokens, model(tokens, use_cache=False).logits if name != "bert" else model(tokens).logits


def test_the_first_block_exports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(EXPORT, pages.prepare(tmp_path))
    assert (tmp_path / "my-export/config.json").exists()


# torch's exporter warns of its parts.
of_torch = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")


@of_torch
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_onnx_runtime_has_the_same_logits_from_weights_that_are_2_4_along_what_is_contracted(
    name, dtype, tmp_path, monkeypatch
):
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    weights, tokens, expected = exported(name, Path("my-export"), **ONE_LAYER[name])
    weights = {path: weight.to(dtype) for path, weight in weights.items()}
    printed = SNIPPET.replace("AutoModelForCausalLM", zoo.auto_class(name).__name__)
    assert FP16 in printed
    exec(printed if dtype == torch.float16 else printed.replace(FP16, ""), {})
    session = runtime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    inputs = {"input_ids": tokens.numpy(), "attention_mask": torch.ones_like(tokens).numpy()}
    logits = torch.from_numpy(session.run(None, inputs)[0])
    assert logits.dtype == dtype
    tolerance = {"atol": 2e-3, "rtol": 0} if dtype == torch.float16 else {}
    torch.testing.assert_close(logits.float(), expected, **tolerance)

    graph = onnx.load("model.onnx").graph
    constants = {constant.name: onnx.numpy_helper.to_array(constant) for constant in graph.initializer}
    found = []
    for node in graph.node:
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in constants:
            constant = torch.from_numpy(constants[node.input[1]].copy())
            transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
            found.append(constant.t() if transposed else constant)  # [in, out]: dimension 0 is contracted
    for path, weight in weights.items():
        (constant,) = [x for x in found if x.shape == weight.shape and torch.equal(x, weight)]
        assert (constant.unflatten(0, (-1, 4)) != 0).sum(1).max() == 2, path
    assert len(weights) >= 4


def with_cache(directory: Path, monkeypatch) -> Path:
    """The file of the page's graph with a cache, of the export `my-export` in `directory`."""
    monkeypatch.chdir(directory)
    names = {"torch": torch, "AutoModelForCausalLM": AutoModelForCausalLM, "tokens": torch.ones(2, 8, dtype=torch.long)}
    exec(WITH_CACHE, names)
    return directory / "my-onnx/model.onnx"


def greedy(file: Path, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What ONNX Runtime writes: the prompt with an empty cache, then one token at a time."""
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    caches = [each for each in session.get_inputs() if "past_key_values" in each.name]
    sizes = [[int(x) if str(x).isdigit() else 0 for x in each.shape[1:]] for each in caches]
    past = {each.name: np.zeros([len(tokens), *size], np.float16) for each, size in zip(caches, sizes)}
    outputs = [each.name.replace("output.", "input.") for each in session.get_outputs()]
    new, mask, found = tokens.numpy(), mask.numpy(), []
    for _ in range(serving.NEW_TOKENS):
        logits, *kept = session.run(None, {"input_ids": new, "attention_mask": mask, **past})
        past = dict(zip(outputs[1:], kept))
        assert {cache.shape[2] for cache in kept} == {mask.shape[1]}
        found.append(logits[:, -1:].argmax(-1))
        new, mask = found[-1], np.pad(mask, ((0, 0), (0, 1)), constant_values=1)
    return torch.from_numpy(np.concatenate(found, 1))


@pytest.mark.slow
@of_torch
def test_onnx_runtime_writes_the_tokens_of_transformers_with_a_cache_and_with_padding(tmp_path, monkeypatch):
    export_model(patched(initializer_range=0.3, num_hidden_layers=1), tmp_path / "my-export")
    tokens, mask = torch.randint(3, zoo.VOCAB, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = 0
    found = greedy(with_cache(tmp_path, monkeypatch), tokens, mask)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "my-export", dtype="float16")
    torch.testing.assert_close(found, serving.greedy(model, tokens, mask))
    assert len(found.unique()) > 9  # it does not repeat itself


def judged(file: Path, environment: dict[str, str]) -> tuple[int, int]:
    """The weights that Polygraphy finds 2:4, and those that it does not."""
    said = serving.run(["-c", "import polygraphy.tools as t; t.main()", "inspect", "sparsity", file], environment)
    return said.count("Found sparse tensor"), said.count("Found non-sparse tensor")


@pytest.mark.slow
@of_torch
def test_the_checker_of_nvidia_finds_no_weight_of_a_dense_model_2_4(tmp_path, monkeypatch):
    zoo.build("llama").save_pretrained(tmp_path / "my-export")
    environment = serving.install(tmp_path / "packages", "polygraphy")
    assert judged(with_cache(tmp_path, monkeypatch), environment) == (0, 15)


@pytest.mark.slow
@of_torch
def test_a_real_model_has_the_same_tokens_and_nvidia_finds_each_of_its_weights_2_4(smollm2_24, tmp_path, monkeypatch):
    """Six of its 30 blocks: Polygraphy takes two minutes to look at the 210 weights of all."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_24, dtype="float16", num_hidden_layers=6)
    model.save_pretrained(tmp_path / "my-export")
    file = with_cache(tmp_path, monkeypatch)
    for tokens in serving.prompts(smollm2_24):
        assert torch.equal(greedy(file, tokens, torch.ones_like(tokens)), serving.greedy(model, tokens))
    assert judged(file, serving.install(tmp_path / "packages", "polygraphy")) == (42, 1)  # and the head
