"""The tables of classes know what the installed Transformers has."""

import re
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


CLASS = re.compile(r"^((?:@.*\n(?:[ \t)].*\n)*)*)class (\w+)(?:\(([^)]*)\))?:.*\n((?:(?:[ \t].*)?\n)*)", re.M)


@pytest.fixture(scope="module")
def sources() -> dict[str, tuple[str, str, str]]:
    """Decorators, bases and body of each class; to parse all files takes a hundred times as long."""
    paths = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    found = [match.groups("") for path in sorted(paths) for match in CLASS.finditer(path.read_text(encoding="utf-8"))]
    return {name: (decorators, bases, body) for decorators, name, bases, body in found}


def test_layers_whose_weight_is_read(sources):
    """What a class makes as a linear layer and computes with as `self.layer.weight`; a weight's dtype is harmless, and
    slices of one are Bloom's emulation of tensor parallelism, off by default."""
    found = {}
    for name, (_, _, source) in sources.items():
        layers = set(re.findall(r"self\.(\w+) = nn\.Linear\(", source))
        uses = re.findall(r"(?<!isinstance\()self\.(\w+)\.weight\b(?!\.dtype|\.device|\.shape|\[)", source)
        if name not in ONLY_INITIALIZED and layers & {*uses}:
            found[name] = layers & {*uses}
    assert found and all(layers <= {*READ_BY.get(name, ())} for name, layers in found.items()), found


def test_stacks_of_experts(sources):
    unknown = {
        name
        for name, (decorators, _, source) in sources.items()
        if "Expert" in name
        and re.search(r"self\.\w+ = nn\.Parameter\(", source)
        and "use_experts_implementation" not in decorators
    }
    assert unknown and unknown <= {*STACKS, *NOT_STACKS}


def test_subclasses_of_linear_with_another_forward(sources):
    found = {
        name
        for name, (_, bases, source) in sources.items()
        if "nn.Linear" in bases.split(", ") and "def forward" in source
    }
    assert {*PLAIN} <= found
    assert nn.modules.linear.NonDynamicallyQuantizableLinear.forward is nn.Linear.forward
