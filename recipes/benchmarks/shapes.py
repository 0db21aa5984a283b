"""The one table of models whose shapes are timed: the sizes of their matrices, and their configurations."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

Size = tuple[int, int]


@dataclass(frozen=True)
class Shape:
    """A decoder: Llama's kind, whose MLPs have a gate, or GPT-2's, with biases and four times as wide MLPs."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 32000
    kind: str = "Llama"
    tied: bool = False

    def mlp(self) -> dict[str, Size]:
        """Out and in of the two kinds of matrices in an MLP."""
        return {"MLP up": (self.inner, self.hidden), "MLP down": (self.hidden, self.inner)}

    def attention(self) -> dict[str, Size]:
        """Out and in of the different matrices in attention; a name stands for all of its size."""
        if self.kind == "GPT-2":
            return {"qkv": (3 * self.hidden, self.hidden), "projection": (self.hidden, self.hidden)}
        narrow = self.hidden * self.kv_heads // self.heads
        keys = {"key": (narrow, self.hidden)} if narrow < self.hidden else {}
        return {"query": (self.hidden, self.hidden)} | keys

    def config(self) -> Any:
        """The configuration in Transformers."""
        from transformers import GPT2Config, LlamaConfig

        if self.kind == "GPT-2":
            sizes = {"n_embd": self.hidden, "n_layer": self.layers, "n_head": self.heads}
            return GPT2Config(**sizes, vocab_size=self.vocabulary)
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            tie_word_embeddings=self.tied,
        )

    def build(self) -> nn.Module:
        """A model with random weights."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(self.config())


def gpt2(hidden: int, layers: int, heads: int) -> Shape:
    return Shape(hidden, 4 * hidden, layers, heads, heads, 50257, "GPT-2")


MODELS = {
    "Llama 8B": Shape(4096, 14336, 32, 32, 8),
    "Llama 1B": Shape(2048, 8192, 16, 32, 8),
    "GPT-2 774M": gpt2(1280, 36, 20),
    "Llama 13B": Shape(5120, 13824, 40, 40, 40),
    "GPT-2 124M": gpt2(768, 12, 12),
    "GPT-2 355M": gpt2(1024, 24, 16),
    "GPT-2 1.5B": gpt2(1600, 48, 25),
    "SmolLM2-135M": Shape(576, 1536, 30, 9, 3, 49152, tied=True),
    "Llama, d = 1024": Shape(1024, 2816, 4, 16, 16, 8192),
    "small Llama": Shape(256, 768, 4, 4, 4, 4096),
    "tiny Llama": Shape(128, 256, 2, 2, 1, 512, tied=True),
}
"""Llamas of 1B, 8B and 13B have a vocabulary of 32000."""

MODELS["Llama-1B"] = replace(MODELS["Llama 1B"], tied=True)
MODELS["four layers of Llama 8B"] = replace(MODELS["Llama 8B"], layers=4)
