"""A plan as text: what `hf-sparse24 plan` and `recipes/plan_table.py` write."""

import torch
from transformers import PreTrainedModel

from ..weights.sparse_weight import sparse_weights
from . import costs, speed
from .plan import Plan
from .sizes import leaves
from .tables import print_table


def print_plan(name: str, model: PreTrainedModel, plan: Plan, memory: float) -> None:
    """Print all of it; `memory` is that of a GPU in bytes."""
    print(*header(name, model, plan), sep="\n")
    for rows in (memory_rows(plan, memory), collective_rows(plan), layer_rows(plan)):
        print()
        print_table(rows)
    print("", *summary(plan), "assumed:", *(f"- {text}" for text in assumptions(plan)), sep="\n")


def header(name: str, model: PreTrainedModel, plan: Plan) -> list[str]:
    """What was planned, in two lines."""
    setting, sizes = plan.setting, leaves(model)
    patched = {key: weight for key, weight in sparse_weights(model).items() if key in sizes}
    method = next(iter(patched.values())).method.name
    total = sum(leaf.numel for leaf in sizes.values())
    share = sum(sizes[key].numel for key in patched) / total
    again = ", gradient checkpointing" if setting.checkpointing else ""
    return [
        f"{name}, {method}: {total / 1e9:.3g} billion parameters, {share:.0%} of them in 2:4 layers",
        f"{setting.gpus} GPU{'s' if setting.gpus > 1 else ''}, {setting.parallel}, "
        f"{setting.tokens} tokens per GPU and step in sequences of "
        f"{setting.sequence}, {_name(setting.dtype)}{again}: computed, not measured",
    ]


def memory_rows(plan: Plan, memory: float) -> list[list[str]]:
    rows = [[name, _gb(nbytes)] for name, nbytes in plan.memory.items()]
    fits = "fits" if plan.total_memory <= memory else "does NOT fit"
    return [["held by the first GPU", "GB"], *rows, ["total", _gb(plan.total_memory), f"{fits} in {_gb(memory)} GB"]]


def collective_rows(plan: Plan) -> list[list[str]]:
    ranks = plan.setting.gpus
    rows = [[f"{c.kind}: {c.what}", _gb(c.nbytes), _gb(c.sent(ranks))] for c in plan.collectives]
    return [["moved in a step", "GB", "GB sent per GPU"], *rows, ["total", "", _gb(plan.sent)]]


def layer_rows(plan: Plan) -> list[list[str]]:
    head = [
        "layers",
        "out x in",
        "sparse GEMMs",
        "dense ms",
        "sparse ms",
        "pruning ms",
        "gain",
        "dense and sparse ms are",
    ]
    rows = []
    for layer in plan.layers:
        matrix, after = layer.matrix, layer.sparse_us + layer.pruning_us
        cells = [_ms(layer.dense_us), _ms(layer.sparse_us), _ms(layer.pruning_us)] if matrix.weight else None
        rows.append(
            [
                str(matrix.matrices),
                f"{matrix.out} x {matrix.inputs}",
                ", ".join(layer.sparse) or "none",
                *(cells or [_ms(layer.dense_us), _ms(layer.dense_us), "-"]),
                f"{layer.dense_us / after:.2f}x",
                " / ".join(layer.sources),
            ]
        )
    dense, sparse, pruning, others, attention = plan.step
    rows.append(["", "attention", "none", _ms(attention), _ms(attention), "-", "1.00x", speed.PUBLISHED.name])
    before, after = dense + others + attention, sparse + others + attention
    gain = f"{before / (after + pruning):.2f}x"
    return [head, *rows, ["", "total", "", _ms(before), _ms(after), _ms(pruning), gain, " / ".join(plan.sources)]]


def summary(plan: Plan) -> list[str]:
    low, high = plan.speedups
    marked = " / ".join(plan.sources)
    found = [
        f"a sparse step is expected {low:.2f} to {high:.2f} times as fast as a dense one ({marked}); "
        f"{plan.sparse_share:.0%} of the steps are sparse"
    ]
    if plan.break_even is None:
        return [*found, f"no number of tokens up to 2^20 makes the sparse step as fast as the dense one ({marked})"]
    return [*found, f"from {plan.break_even} tokens per GPU and step a sparse step is no slower ({marked})"]


def assumptions(plan: Plan) -> list[str]:
    """What the numbers rest on besides formulas that are exact."""
    published, setting, dtype = speed.PUBLISHED, plan.setting, _name(plan.setting.dtype)
    found = [
        "AdamW on fp32 parameters, one micro-batch per step, every Parameter trained, no flip rates logged; memory in "
        "use, no fragmentation",
        f"activations: inputs and outputs of linear layers, times {costs.KEPT_AUTOCAST} under autocast (ddp, tp) and "
        f"{costs.KEPT_CAST} with fsdp2 (measured on a small Llama, eager mode); logits, in fp32 too, and their gradient"
        + ("; checkpointing keeps those of one layer, and what goes into the others" if setting.checkpointing else ""),
        f"pruning, random gradients and masked decay: the bytes they move, at {speed.BANDWIDTH / 1e12:.1f} TB/s",
        f"everything else than GEMMs and attention takes {speed.REST[0]:.0%} to {speed.REST[1]:.0%} of a dense step, "
        "communication that is not hidden included",
    ]
    if setting.parallel == "fsdp2":
        found.append(
            f"FSDP2 wraps each transformer layer, gathers in {dtype} and reduces in fp32; weights are pruned anew in "
            "each pass; two layers and one gradient are whole at a time"
        )
    if setting.parallel == "tp":
        found.append("all GPUs work on the same tokens; gradients of layers' inputs are fp32, as autocast has them")
    if published.name in plan.sources:
        steps = ", ".join(f"{speedup} from {start}" for start, speedup in published.speedups)
        found.append(
            f"{published.name}: {published.source}. Dense GEMMs at {published.dense_flops / 1e12:.0f} TFLOPS, its "
            f"median from 2048 tokens; speed-up by tokens: {steps} (geometric means; single shapes from 2048 tokens: "
            "0.94 to 1.89). Sparse where it wins. fp16 and grad_weight are not in it: taken as bf16 and as output"
        )
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.0f}" if nbytes >= 1e11 else f"{nbytes / 1e9:.3g}" if nbytes >= 1e6 else "<0.001"


def _ms(us: float) -> str:
    return f"{us / 1e3:.3g}" if us < 1e6 else f"{us / 1e3:.0f}"
