"""What `hf-sparse24 plan` says of Llama-shaped models from 1B to 405B on 8 to 4096 GPUs: `results/plan.md`.

    python recipes/plan_table.py

Computed, not measured: the models are built without weights. The shapes are those that Meta published for Llama 3.1 and
3.2.
"""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_sparse24 import Sparse24Config, __version__, patch_model
from hf_sparse24.tools.plan import Plan, plan_training
from hf_sparse24.tools.plan_text import assumptions
from hf_sparse24.tools.sizes import Setting

PAGE = Path(__file__).resolve().parent / "results" / "plan.md"
MEMORY = 80e9
METHODS = ("s-ste", "t-sr-ste")
GPUS = (8, 64, 512, 4096)
SEQUENCE = 4096

# hidden size, size of the MLP, layers, heads, heads of keys and values, head size, whether lm_head is the embedding;
# tokens per GPU and step
SHAPES = {
    "1B": (2048, 8192, 16, 32, 8, 64, True, 16384),
    "3B": (3072, 8192, 28, 24, 8, 128, True, 16384),
    "8B": (4096, 14336, 32, 32, 8, 128, False, 16384),
    "70B": (8192, 28672, 80, 64, 8, 128, False, 8192),
    "405B": (16384, 53248, 126, 128, 8, 128, False, 4096),
}
COLUMNS = (
    "model",
    "method",
    "GPUs",
    "tokens",
    "parallel",
    "memory, GB",
    "sent per GPU, GB",
    "dense ms",
    "sparse ms",
    "pruning ms",
    "step",
    "break-even, tokens",
)


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


def row(name: str, method: str, plan: Plan) -> list[str]:
    setting, step, (low, high) = plan.setting, plan.step, plan.speedups
    memory = f"{plan.total_memory / 1e9:.0f}" + ("" if plan.total_memory <= MEMORY else ", too much")
    same = step.others + step.attention
    times = [f"{us / 1e3:.0f}" for us in (step.dense + same, step.sparse + same, step.pruning)]
    sent, tokens = f"{plan.sent / 1e9:.0f}", str(plan.break_even or "none")
    return [
        name,
        method,
        str(setting.gpus),
        str(setting.tokens),
        setting.parallel,
        memory,
        sent,
        *times,
        f"{low:.2f}x to {high:.2f}x",
        tokens,
    ]


def main(page: Path = PAGE) -> None:
    rows = []
    for name, (*_, tokens) in SHAPES.items():
        setting = Setting(1, tokens, SEQUENCE, checkpointing=True)
        for method in METHODS:
            model = build(name, method)
            plans = [plan_training(model, replace(setting, gpus=gpus), None, MEMORY) for gpus in GPUS]
            rows += [row(name, method, plan) for plan in plans]
    (source,) = plans[-1].sources
    lines = [
        "# Plans: 1B to 405B on 8 to 4096 GPUs",
        "",
        f"**Computed, not measured**, by `python recipes/plan_table.py` (hf_sparse24 {__version__}). Every time, "
        f"speed-up and break-even number is derived from a measurement of others: *{source}*.",
        "",
        f"Llama-shaped models, MLPs sparse, sequences of {SEQUENCE} tokens, bf16, gradient checkpointing; tokens are "
        f"per GPU and step. DDP where it fits in {MEMORY / 1e9:.0f} GB, otherwise FSDP2. Times are those of all GEMMs "
        f"and attention in a step; the step's speed-up is that of a sparse step, and {plans[-1].sparse_share:.0%} of "
        f"the steps of a run by `{METHODS[-1]}` are sparse.",
        "",
        *(f"| {' | '.join(cells)} |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows)),
        "",
        "Assumed:",
        "",
        *(f"- {text}" for text in assumptions(plans[-1])),
    ]
    page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
