"""A plan as text: what `hf-sparse24 plan` and `recipes/plan_table.py` write."""

from transformers import PreTrainedModel

from ..progress import count
from ..tables import print_table
from ..weights.sparse_weight import first_of_each, sparse_weights
from .plan import KEPT_AUTOCAST, KEPT_CAST, Plan
from .pruning_costs import break_even


def print_plan(name: str, model: PreTrainedModel, plan: Plan, memory: float, flops_per_byte: int) -> None:
    """Print the plan for GPUs with so many bytes of memory that compute so many FLOPs while they move a byte."""
    setting, weights = plan.setting, first_of_each(sparse_weights(model)).values()
    method = next(iter(weights)).method.name
    total = sum(parameter.numel() for parameter in model.parameters())
    share = sum(weight.parameter.numel() for weight in weights) / total
    dtype = str(setting.dtype).removeprefix("torch.")
    again = ", gradient checkpointing" if setting.checkpointing else ""
    print(f"{name}, {method}: {total / 1e9:.3g} billion parameters, {share:.0%} of them in 2:4 layers")
    print(f"{count(setting.gpus, 'GPU')}, {setting.parallel}, {setting.tokens} tokens per GPU and step, ", end="")
    print(f"{dtype}{again}: computed, not measured\n")
    fits = "fits" if plan.total_memory <= memory else "does NOT fit"
    held = [[what, _gb(nbytes)] for what, nbytes in plan.memory.items()]
    sums = ["total", _gb(plan.total_memory), f"{fits} in {_gb(memory)} GB"]
    print_table([["held by the first GPU", "GB"], *held, sums])
    print()
    moved = [[f"{c.kind}: {c.what}", _gb(c.nbytes), _gb(c.sent(setting.gpus))] for c in plan.collectives]
    print_table([["moved in a step", "GB", "GB sent per GPU"], *moved, ["total", "", _gb(plan.sent)]])
    print("", *summary(plan, flops_per_byte), "assumed:", *(f"- {text}" for text in assumptions(plan)), sep="\n")


def speedup_text(speedup: float | None) -> str:
    """The speed-up that `break_even` returns; "never" for None."""
    return "never" if speedup is None else f"{speedup:.2f}x"


def summary(plan: Plan, flops_per_byte: int) -> list[str]:
    """What the numbers mean for a GPU that computes so many FLOPs while it moves a byte."""
    speedup = break_even(plan.flops, plan.pruning, flops_per_byte)
    if speedup is None:
        found = "pruning takes longer than sparse GEMMs can save, which is half of their time; try more tokens per step"
    else:
        found = f"sparse GEMMs {speedup:.2f} times as fast as dense ones pay for pruning; 2 is the most they can be"
    return [
        f"{plan.flops / 1e12:.3g} TFLOP in GEMMs that can be sparse; pruning moves {_gb(plan.pruning)} GB",
        f"{found} (on a GPU that computes {flops_per_byte} FLOP while it moves a byte)",
        f"{plan.sparse_share:.0%} of the steps are sparse; `hf-sparse24 tune` and `doctor` measure speed-ups",
    ]


def assumptions(plan: Plan) -> list[str]:
    """What the numbers rest on besides formulas that are exact."""
    setting = plan.setting
    found = [
        "AdamW on fp32 parameters, one micro-batch per step, every Parameter trained, no flip rates logged; memory in "
        "use, no fragmentation",
        f"activations: inputs and outputs of linear layers, times {KEPT_AUTOCAST} with ddp, under autocast, and "
        f"{KEPT_CAST} with fsdp2 (measured on a small Llama, eager mode); logits, in fp32 too, and their gradient"
        + ("; checkpointing keeps those of one layer, and what goes into the others" if setting.checkpointing else ""),
        "pruning, random gradients and masked decay take as long as the bytes that they move; every GEMM that can be "
        "sparse is; both reach the same share of what the data sheet of the GPU promises",
    ]
    if setting.parallel == "fsdp2":
        found.append(
            "FSDP2 wraps each transformer layer, gathers in the dtype of the GEMMs and reduces in fp32; weights are "
            "pruned anew in each pass; two layers and one gradient are whole at a time"
        )
    return found


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.0f}" if nbytes >= 1e11 else f"{nbytes / 1e9:.3g}" if nbytes >= 1e6 else "<0.001"
