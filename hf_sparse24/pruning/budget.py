"""fit_budget: the N:32 of each layer, by the error of its block, so that all layers keep to a share of the dense bytes.

Each layer alone is pruned to every N from dense inputs, and its block runs on some batches. Then all start at the
lowest N, and the step that saves the most error per byte is taken until nothing fits.
"""

import math
from contextlib import closing
from dataclasses import asdict
from os import PathLike
from pathlib import Path

import torch
from sparse24_kernels import Pattern
from sparse24_kernels.cache_folder import write_json
from torch import Tensor, nn

from ..config import Sparse24Config
from ..files import read_json
from ..methods import method_class
from ..patching.surgery import patch_model, unpatch_model
from ..progress import Progress, get_logger
from ..run import set_phase
from ..weights.sparse_weight import SparseWeight, sparse_weights
from ..weights.storage import layer_name
from .calibration import calibrate, uncached
from .finished_blocks import fingerprint
from .options import CRITERIA, Options, check_weights
from .replay import ModelInputs
from .statistics import Gram, matrix

LEVELS, M, BATCHES = (12, 16, 20, 24, 28), 32, 8  # BATCHES that blocks run on, at most
LEAST = LEVELS[0] / M + 1 / 16  # share of dense bf16 bytes at the lowest level: values, and one bit of mask a weight


def lowest(config: Sparse24Config, criterion: str, budget: float) -> Sparse24Config:
    """Return the config with the lowest level for all layers. ValueError: the budget is wrong, or does not fit it."""
    if not (isinstance(budget, int | float) and LEAST < budget < 1):
        raise ValueError(f"budget={budget!r}: must be between {LEAST} and 1, a share of the dense bytes")
    if method_class(config.method).transposable:
        raise ValueError(f"method={config.method!r}: its masks are transposable, which budget={budget!r} does not fit")
    if criterion != "sparsegpt" or config.replace(pattern="2:4", layer_patterns=None) != config:
        given = f"criterion={criterion!r}, pattern={config.pattern!r}, layer_patterns={config.layer_patterns!r}"
        raise ValueError(f"{given}: budget={budget!r} chooses patterns by SparseGPT; leave these at their defaults")
    return config.replace(pattern=f"{LEVELS[0]}:{M}")


def fit_budget(
    model: nn.Module,
    batches: list[ModelInputs],
    config: Sparse24Config,
    options: Options,
    budget: float,
    folder: str | PathLike | None,
) -> Sparse24Config:
    """Return a config of `lowest` with a pattern for each layer. The folder, or None, keeps the choice."""
    patch_model(model, config)
    try:
        check_weights(weights := sparse_weights(model))
        set_phase(model, "dense")
        file = Path(folder or "") / "budget.json"
        run = folder and fingerprint(model, batches, asdict(options) | config.to_dict() | {"budget": budget})
        saved = read_json(file) if folder and file.exists() else {}
        if saved.get("run", run) != run:
            raise ValueError(f"{file} is of another model, or of other data or arguments: delete its folder")
        chosen = saved.get("chosen") or _spend(weights, _errors(model, weights, batches, options), budget)
        if folder and not saved:
            write_json(file, {"run": run, "chosen": chosen})
    finally:
        unpatch_model(model, sparse=False)
    most = max(LEVELS, key=[*chosen.values()].count)
    others = {layer_name(name): f"{n}:{M}" for name, n in chosen.items() if n != most}
    return config.replace(pattern=f"{most}:{M}", layer_patterns=others or None)


def _errors(
    model: nn.Module, weights: dict[str, SparseWeight], batches: list[ModelInputs], options: Options
) -> dict[Tensor, dict[int, float]]:
    """Return the error of the block's output by weight and N: relative to its square, a mean over tokens."""
    errors: dict[Tensor, dict[int, float]] = {}
    progress = Progress("choosing patterns", len(weights), "layer", get_logger(__name__).info)
    with progress, uncached(weights), closing(calibrate(model, weights, batches, Gram, True)) as blocks:
        for block in blocks:
            examples = block.examples[:: math.ceil(len(block.examples) / BATCHES)]
            for name, inputs in block.statistics.items():  # of a weight that layers share, the last counts
                weight, found = matrix(weights[name]), errors.setdefault(weights[name].parameter, {})
                dense, wide = weight.clone(), weight.to(inputs.squares.dtype, copy=True)
                try:
                    for n in LEVELS:
                        with torch.autocast(weight.device.type, enabled=False):
                            weight.copy_(CRITERIA["sparsegpt"](wide, inputs, Pattern(n, M), options.damping)[0])
                        found[n] = torch.cat([example.error() for example in examples]).mean().item()
                finally:
                    weight.copy_(dense)
                progress.update()
                if not all(map(math.isfinite, found.values())):
                    raise ValueError(f"{block.name} gives NaN or inf, so no pattern can be chosen: take bf16, not fp16")
    return errors


def _spend(weights: dict[str, SparseWeight], errors: dict[Tensor, dict[int, float]], budget: float) -> dict[str, int]:
    """Return each weight's N. A step may go up several levels, as one level alone may save nothing."""
    chosen = dict.fromkeys(errors, LEVELS[0])
    left = (budget - LEAST) * M * (1 + 1e-9) * sum(parameter.numel() for parameter in errors)
    while True:
        best, cost = 0.0, 0
        for (parameter, found), at in zip(errors.items(), chosen.values()):
            for n in LEVELS[LEVELS.index(at) + 1 :]:
                needed = (n - at) * parameter.numel()
                if needed <= left and (found[at] - found[n]) / needed > best:
                    best, cost, step = (found[at] - found[n]) / needed, needed, (parameter, n)
        if not cost:
            return {name: chosen[weight.parameter] for name, weight in weights.items()}
        chosen |= [step]
        left -= cost
