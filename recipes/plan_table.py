"""What `hf-sparse24 plan` says of Llama-shaped models from 1B to 70B: `results/plan.md`.

    python recipes/plan_table.py

Computed, not measured: the models are built without weights. The shapes are those that Meta published for Llama 3.1 and
3.2.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_sparse24 import Sparse24Config, __version__, patch_model
from hf_sparse24.tools.plan import plan_step, plan_training
from hf_sparse24.tools.plan_text import assumptions, speedup_text
from hf_sparse24.tools.pruning_costs import FLOPS_PER_BYTE, break_even
from hf_sparse24.tools.sizes import Setting

PAGE = Path(__file__).resolve().parent / "results" / "plan.md"
MEMORY = 80e9
METHODS = ("s-ste", "t-sr-ste")
GPUS = (8, 64)
TOKENS = (1024, 2048, 8192, 32768)

# hidden size, size of the MLP, layers, heads, heads of keys and values, head size, whether lm_head is the embedding;
# tokens per GPU and step
SHAPES = {
    "1B": (2048, 8192, 16, 32, 8, 64, True, 16384),
    "3B": (3072, 8192, 28, 24, 8, 128, True, 16384),
    "8B": (4096, 14336, 32, 32, 8, 128, False, 16384),
    "70B": (8192, 28672, 80, 64, 8, 128, False, 8192),
}


def build(name: str, method: str) -> LlamaForCausalLM:
    """A patched model of one of `SHAPES`, without weights."""
    hidden, mlp, layers, heads, kv_heads, head_dim, tied, _ = SHAPES[name]
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


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def main(page: Path = PAGE) -> None:
    sizes, speedups = [], []
    for name, (*_, tokens) in SHAPES.items():
        for method in METHODS:
            model, setting = build(name, method), Setting(1, tokens, checkpointing=True)
            for gpus in GPUS:
                plan = plan_training(model, replace(setting, gpus=gpus), None, MEMORY)
                memory = f"{plan.total_memory / 1e9:.0f}" + ("" if plan.total_memory <= MEMORY else ", too much")
                sizes.append(
                    [name, method, str(gpus), str(tokens), plan.setting.parallel, memory, f"{plan.sent / 1e9:.0f}"]
                )
            one_gpu = [plan_step(model, replace(setting, tokens=tokens)) for tokens in TOKENS]
            cells = [speedup_text(break_even(one.flops, one.pruning, FLOPS_PER_BYTE)) for one in one_gpu]
            speedups.append([name, method, *cells])
    lines = [
        "# Plans: 1B to 70B",
        "",
        f"**Computed, not measured**, by `python recipes/plan_table.py` (hf_sparse24 {__version__}): Llama-shaped "
        "models, MLPs sparse, bf16, gradient checkpointing. Tokens are per GPU and step.",
        "",
        "## Memory and traffic",
        "",
        f"GB that the first GPU holds, and that each GPU sends in a step. DDP where it fits in {MEMORY / 1e9:.0f} GB, "
        "otherwise FSDP2.",
        "",
        *table(["model", "method", "GPUs", "tokens", "parallel", "memory, GB", "sent per GPU, GB"], sizes),
        "",
        "## Break-even",
        "",
        "How many times as fast as dense GEMMs the sparse ones must be to pay for pruning and packing, on one GPU "
        f"that computes {FLOPS_PER_BYTE} FLOP while it moves a byte (an H100 SXM, by its data sheet). 2 is the "
        'most that sparse tensor cores can reach; where 2 is too little, the table says "never".',
        "",
        *table(["model", "method", *(f"{tokens} tokens" for tokens in TOKENS)], speedups),
        "",
        "## Assumed",
        "",
        *(f"- {text}" for text in assumptions(plan)),
    ]
    page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
