"""Prefill and decode of Llama 8B's decoder layers, dense against patched, in eval mode without gradients.

Four layers stand for the thirty-two: they all cost the same. Their weights are 3.5 GB in bf16, so decoding reads them
from device memory, as a whole model would. Decoding appends one token per sequence to a cache of `CONTEXT` and takes it
off again. "sparse" has its master weights dropped and holds the compressed ones alone; "auto" is a patched model as it
comes out of training, which prunes its weights in every forward.
"""

from collections.abc import Callable

import torch
from report import clean
from shapes import Cell, Layer, mlp_layers
from side_by_side import NOT_RUN, forget, judged, randn, ratio, side_by_side, tune_first
from sparse24_kernels.cusparselt import Problem
from timing import OutOfTime, describe
from torch import nn

SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
    "vocab_size": 1024,
}
CONTEXT = 128
TUNING = 0.5
AUTO = 0.98
WAYS = {"dense": None, "sparse": "cusparselt", "auto": "auto"}
WORKLOADS = {"prefill 8192": (1, 8192), "decode 64": (64, 1), "prefill 1024": (1, 1024)} | {
    f"decode {batch}": (batch, 1) for batch in (1, 16, 256)
}
"""(sequences, tokens of each), what matters most first."""


def layers() -> list[Layer]:
    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    narrow = hidden * SIZES["num_key_value_heads"] // SIZES["num_attention_heads"]
    attention = [Layer("", "query", hidden, hidden), Layer("", "key", narrow, hidden)]
    return [*mlp_layers("", hidden, inner), *attention]


def flops(sequences: int, tokens: int) -> int:
    """Of the linear layers, densely: gate and up, key and value, query and output are of one size each."""
    up, down, query, key = (2 * sequences * tokens * layer.out * layer.inputs for layer in layers())
    return SIZES["num_hidden_layers"] * (2 * up + down + 2 * query + 2 * key)


def problems() -> list[Problem]:
    return [Cell(layer, b * t).problems()["output"] for b, t in WORKLOADS.values() for layer in layers()]


def section(run) -> None:
    result = run.result.setdefault("inference", {"memory": {}, "rows": {}})
    workloads = {name: sizes for name, sizes in WORKLOADS.items() if run.options.only in name}
    for name, sizes in workloads.items():
        result["rows"][name] = {"flops": flops(*sizes), "error": NOT_RUN}
    tune_first(run, problems(), TUNING * run.left())
    models: dict[str, nn.Module] = {}
    for way, backend in WAYS.items():
        try:
            models[way] = build(run.machine.device, backend)
        except Exception as error:
            result["memory"][way] = {"error": clean(describe(error))}
    for name, (sequences, tokens) in workloads.items():
        if run.left(reserve=5) < 0:
            break
        try:
            row = measure(run, models, sequences, tokens)
        except (Exception, OutOfTime) as error:
            row = {"error": clean(describe(error))}
        result["rows"][name] = {"flops": flops(sequences, tokens)} | row
        forget(run, name)
        run.write()
    models.clear()
    forget(run, "inference")


def measure(run, models: dict[str, nn.Module], sequences: int, tokens: int) -> dict:
    device, peaks = run.machine.device, {}

    def maker(way: str) -> Callable[[], list]:
        def make() -> list:
            step = call(models[way], sequences, tokens, device)
            peaks[way] = peak_bytes(device, models, way, step)
            return [step]

        return make

    rows, clocks = side_by_side(run, {way: maker(way) for way in models}, 30)
    for way, row in rows.items():
        row |= {"speed_up": ratio(rows, "dense", way), "peak_bytes": peaks.get(way)}
    return {"rows": rows, "clocks": clocks, "goals": [judged("auto", ratio(rows, "dense", "auto"), AUTO)]}


def call(model: nn.Module, sequences: int, tokens: int, device: torch.device) -> Callable[[], object]:
    """One prefill, or one token for every sequence."""
    from transformers import DynamicCache

    hidden = SIZES["hidden_size"]
    x = randn(device, sequences, tokens, hidden, dtype=torch.bfloat16, seed=1)
    if tokens > 1:

        def prefill():
            with torch.no_grad():
                cache = DynamicCache(config=model.config)
                return model(inputs_embeds=x, past_key_values=cache, use_cache=True).last_hidden_state

        return prefill
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        start = randn(device, sequences, CONTEXT, hidden, dtype=torch.bfloat16, seed=2)
        model(inputs_embeds=start, past_key_values=cache, use_cache=True)
    position = torch.full((sequences, 1), CONTEXT, device=device)
    # Put back rather than cropped: a captured graph goes on reading these, so they must live as long as it.
    kept = [(layer.keys, layer.values) for layer in cache.layers]

    def decode():
        with torch.no_grad():
            state = model(inputs_embeds=x, past_key_values=cache, position_ids=position, use_cache=True)
        for layer, (keys, values) in zip(cache.layers, kept):
            layer.keys, layer.values = keys, values
        return state.last_hidden_state

    return decode


def build(device: torch.device, backend: str | None) -> nn.Module:
    """The stack, patched unless `backend` is None; the same weights each time."""
    from transformers import LlamaConfig, LlamaModel

    from hf_sparse24 import Sparse24Config, drop_master_weights, patch_model

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model = LlamaModel(LlamaConfig(**SIZES, max_position_embeddings=16384)).to(torch.bfloat16).eval()
    if backend is not None:
        patch_model(model, Sparse24Config(method="s-ste", target_modules="all-linear", backend=backend))
    if backend == "cusparselt":
        drop_master_weights(model)
    return model


def peak_bytes(device: torch.device, models: dict[str, nn.Module], way: str, step: Callable) -> int | None:
    """Of this model alone: what is in use at most during a step, less the others' weights and operands."""
    step()  # packs
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return held(models[way]) + torch.cuda.max_memory_allocated() - before


def held(model: nn.Module) -> int:
    """Parameters, buffers, and what is kept to multiply with."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    own = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return own + sum(module.operands.nbytes() for module in model.modules() if hasattr(module, "operands"))
