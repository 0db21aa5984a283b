"""Engines that know nothing of this library: ONNX Runtime, and Transformers in a process that cannot import us."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zoo
from checkpoints import patched
from paths import ROOT
from transformers.pytorch_utils import Conv1D

from hf_sparse24 import export_model, sparse_weights

PAGE = ROOT / "docs/engines.md"
_, SNIPPET = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)  # after the one that exports
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


# torch's exporter: of its own parts, and of packages that are absent.
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ONE_LAYER)
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


WITHOUT_US = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hf_sparse24", "sparse24_kernels"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
import torch, transformers
torch.set_num_threads(1)
for name, directory in zip(sys.argv[1::2], sys.argv[2::2]):
    tokens, expected = torch.load(directory + "/expected.pt")
    model = getattr(transformers, name).from_pretrained(directory).eval()
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected), name
assert not any(name.startswith(("hf_sparse24", "sparse24")) for name in sys.modules)
"""


def test_a_process_that_cannot_import_us_loads_an_export_and_says_nothing(tmp_path):
    arguments = []
    for name in ("llama", "gpt2", "bert"):
        _, tokens, expected = exported(name, tmp_path / name)
        torch.save((tokens, expected), tmp_path / name / "expected.pt")
        arguments += [zoo.auto_class(name).__name__, str(tmp_path / name)]
    command = [sys.executable, "-W", "error", "-c", WITHOUT_US, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "quantization" not in done.stderr  # as of a training checkpoint


def test_links_of_the_page_exist():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target
