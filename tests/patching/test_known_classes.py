"""The tables of classes know what the installed Transformers has."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from torch import nn

from hf_sparse24.patching.unsupported import PLAIN, READ_BY
from hf_sparse24.weights.input_dim import STACKS

NOT_STACKS = {"DbrxExpertGLU"}  # whose weights are 2-D
ONLY_INITIALIZED = {  # by weights that they read in their constructors
    "BridgeTowerMLMHead", "EsmFoldSelfAttention", "FlavaMaskedPredictionHead", "Gemma4AssistantForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM", "MiniCPMOcrViTWindowAttentionMerger", "MiniCPMV4_6ViTWindowAttentionMerger",
    "MiniCPMV4_7ViTWindowAttentionMerger",
}  # fmt: skip


def classes() -> Iterator[tuple[ast.ClassDef, str]]:
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for found in ast.parse(text).body:
            if isinstance(found, ast.ClassDef):
                yield found, "\n".join(lines[found.lineno - 1 : found.end_lineno])


@pytest.fixture(scope="module")
def sources() -> dict[str, tuple[ast.ClassDef, str]]:
    return {found.name: (found, source) for found, source in classes()}


def test_layers_whose_weight_is_read(sources):
    """What a class makes as a linear layer and computes with as `self.layer.weight`; a weight's dtype is harmless, and
    slices of one are Bloom's emulation of tensor parallelism, off by default."""
    found = {}
    for name, (_, source) in sources.items():
        layers = set(re.findall(r"self\.(\w+) = nn\.Linear\(", source))
        uses = re.findall(r"(?<!isinstance\()self\.(\w+)\.weight\b(?!\.dtype|\.device|\.shape|\[)", source)
        if name not in ONLY_INITIALIZED and layers & {*uses}:
            found[name] = layers & {*uses}
    assert found and all(layers <= {*READ_BY.get(name, ())} for name, layers in found.items()), found


def test_stacks_of_experts(sources):
    unknown = {
        name
        for name, (found, source) in sources.items()
        if "Expert" in name
        and re.search(r"self\.\w+ = nn\.Parameter\(", source)
        and not any("use_experts_implementation" in ast.unparse(each) for each in found.decorator_list)
    }
    assert unknown and unknown <= {*STACKS, *NOT_STACKS}


def test_subclasses_of_linear_with_another_forward(sources):
    found = {
        name
        for name, (each, source) in sources.items()
        if "nn.Linear" in map(ast.unparse, each.bases) and "def forward" in source
    }
    assert {*PLAIN} <= found
    assert nn.modules.linear.NonDynamicallyQuantizableLinear.forward is nn.Linear.forward
