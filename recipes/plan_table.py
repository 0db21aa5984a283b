"""What `hf-sparse24 plan` says of Llama-shaped models from 1B to 70B: `results/plan.md`.

    python recipes/plan_table.py

Computed, not measured: the models are built without weights. The shapes are those that Meta published for Llama 3.1 and
3.2.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_sparse24 import Sparse24Config, __version__, patch_model
from hf_sparse24.tables import markdown_table
from hf_sparse24.tools.plan import FLOPS_PER_BYTE, break_even, plan_step

PAGE = Path(__file__).resolve().parent / "results" / "plan.md"
TOKENS = (1024, 2048, 8192, 32768)
# hidden size, size of the MLP, layers, heads, heads of keys and values, head size, whether lm_head is the embedding
SHAPES = {
    "1B": (2048, 8192, 16, 32, 8, 64, True),
    "3B": (3072, 8192, 28, 24, 8, 128, True),
    "8B": (4096, 14336, 32, 32, 8, 128, False),
    "70B": (8192, 28672, 80, 64, 8, 128, False),
}


def build(name: str, method: str) -> LlamaForCausalLM:
    """A patched model of one of `SHAPES`, without weights."""
    hidden, mlp, layers, heads, kv_heads, head_dim, tied = SHAPES[name]
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    patch_model(model, Sparse24Config(method=method))
    return model


def main(page: Path = PAGE) -> None:
    rows = []
    for name in SHAPES:
        for method in ("s-ste", "t-sr-ste"):
            model = build(name, method)
            plans = [plan_step(model, tokens) for tokens in TOKENS]
            speedups = [break_even(plan.flops, plan.pruning, FLOPS_PER_BYTE) for plan in plans]
            held = f"{sum(plans[0].memory.values()) / 1e9:.0f}"
            rows.append([name, method, held, *("never" if x is None else f"{x:.2f}x" for x in speedups)])
    head = ["model", "method", "held, GB", *(f"{tokens} tokens" for tokens in TOKENS)]
    text = f"""# Plans: 1B to 70B

**Computed, not measured**, by `python recipes/plan_table.py` (hf_sparse24 {__version__}): Llama-shaped models, MLPs
sparse, bf16, AdamW on fp32 parameters, one micro-batch per step on one GPU.

- *held*: parameters, gradients, AdamW's moments, masks and encodings, without activations.
- The other columns: the speed-up over dense GEMMs from which sparse ones pay for pruning and packing, on a GPU that
  computes {FLOPS_PER_BYTE} FLOP per byte moved (an H100 SXM, by its data sheet). Sparse tensor cores reach 2 at most;
  "never" means more than 2.

{markdown_table(head, rows)}

Assumed: pruning takes as long as the bytes that it moves, and compresses in the same pass, as on Hopper. Every GEMM
that can be sparse is.
"""
    page.write_text(text)


if __name__ == "__main__":
    main()
