"""`hf-sparse24 doctor | tune`: the GEMMs of a model, whose weights are not loaded."""

import argparse
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from sparse24_kernels import first_use
from sparse24_kernels.cache_folder import write_json
from sparse24_kernels.cpu import limits
from sparse24_kernels.gemm import autotune
from sparse24_kernels.gemm.planning import in_words
from transformers import PreTrainedModel

from ..config import Sparse24Config
from ..methods.settings import SHARED
from ..patching.masters import check_dense_master
from ..patching.surgery import patch_model
from ..progress import Progress, count
from ..tables import shown_patterns
from ..weights.packed_weight import not_packable
from ..weights.sparse_weight import sparse_weights
from . import doctor as checks
from . import print_table
from .models import read_model

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

REPORT = Path("sparse24-doctor.json")  # of `doctor --check`, in the working directory


def doctor(options: argparse.Namespace) -> int:
    """Print what runs here and why, and whether it is right; the exit status is 1 where it is not."""
    model = _patched(options) if options.model else None  # a wrong argument is told before kernels are checked
    versions = checks.versions()
    print_table(versions)
    devices, failed = [], False
    for device in checks.devices():
        checked = checks.checks(device, again=options.check)
        name, runs = first_use.device_name(device), checks.choices(device)
        print(f"\n{device}: {name}")
        print_table(runs)
        print("\n  kernels against PyTorch:")
        print_table(checks.check_rows(checked))
        devices.append({"device": str(device), "name": name, "runs": runs, "checks": [c._asdict() for c in checked]})
        failed |= any(check.failure for check in checked)
    if options.check:
        write_json(REPORT, {"versions": dict(versions), "devices": devices})
        print(f"\n{REPORT} has all of this: paste it into an issue")
    if model is not None:
        header = ["layers", "out x in", "output", "grad_input", "grad_weight", "gain"]
        weights, device = sparse_weights(model).values(), checks.devices()[0]
        dtype = _DTYPES[options.dtype] if options.dtype else _gemm_dtype(device)
        how = options.tokens, dtype, device
        what = shown_patterns(weight.pattern for weight in weights)
        print(f"\n{options.model}, {options.tokens} tokens, {dtype}: forward + backward of {what}")
        print_table([header, *checks.gains(model, *how)])
        plans = [checks.gemm_plans(weight, *how).values() for weight in weights if not weight.is_stack]
        print(f"  GEMMs: {in_words(chain.from_iterable(plans))}")
    return int(failed)


def tune(options: argparse.Namespace) -> int:
    """Measure the sparse GEMMs of a model on this device, and on a CPU its packed layers."""
    device, dtype = checks.devices()[0], _DTYPES[options.dtype or "bf16"]
    if reason := autotune.unsupported_device(device):
        raise ValueError(f"nothing to tune here: {reason}")
    model = _patched(options)
    if device.type == "cpu":
        _tune_packed(model, dtype)
        dtype = _gemm_dtype(device)
    found = checks.problems(model, options.tokens, dtype, device)
    print(f"{count(len(found), 'GEMM')} of training; Ctrl-C keeps what is done", flush=True)
    sizes = "{0.m} x {0.n} x {0.k}".format
    with Progress("tuning", len(found), "GEMM", partial(print, flush=True)) as progress:
        verdicts = autotune.tune(found, device, lambda problem, n: progress.update(n - progress.done, sizes(problem)))
        progress.update(len(found) - progress.done, "")
    rows = [["m x n x k", "runs", "dense us", "sparse us"]]
    for problem, verdict in verdicts.items():
        times = [f"{us:.1f}" if us else "-" for us in (verdict.dense_us, verdict.sparse_us)]
        rows.append([sizes(problem), f"{verdict.backend}: {verdict.reason}", *times])
    print_table(rows)
    return 0


def _gemm_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if autotune.uses_cpu_kernels(device) else torch.bfloat16


def _tune_packed(model: PreTrainedModel, dtype: torch.dtype) -> None:
    weights = sparse_weights(model).values()
    packable = [weight for weight in weights if not weight.is_stack and not not_packable(weight)]
    sizes = list(dict.fromkeys((*weight.sizes, weight.pattern) for weight in packable))
    with Progress("tuning", len(sizes), "layer", partial(print, flush=True)) as progress:
        found = limits.tune(sizes, dtype, lambda done: progress.update(done - progress.done, ""))
    rows = [["out x in", "pattern", "values", "packed up to", *(f"{tokens} tokens" for tokens in limits.TOKENS)]]
    for layer, times in found.items():
        most = limits.limit(times)
        speedups = [f"{dense / ours:.2f}x" for _, ours, dense in times]
        text = "any number" if most is None else f"{most} tokens"
        _, values, pattern, size = layer.split(maxsplit=3)
        rows.append([size, pattern, values, text, *speedups])
    print("packed layers, and their speed over that of unpacking and dense math:")
    print_table(rows)


def _patched(options: argparse.Namespace) -> PreTrainedModel:
    """The model's architecture without weights, patched as it would be trained."""
    model, own = read_model(options.model)
    if own.get("quant_method", "sparse24") != "sparse24":
        raise ValueError(f"{options.model} is quantized with {own['quant_method']}: training needs plain weights")
    sparse = Sparse24Config.from_dict(own)
    what = f"{options.model} is not trained; give the dense model, with --method {sparse.method}"
    check_dense_master(sparse, what)
    if options.method and options.method != sparse.method:
        sparse = Sparse24Config(**{name: getattr(sparse, name) for name in SHARED} | {"method": options.method})
    if options.target_modules:
        sparse = sparse.replace(target_modules=options.target_modules)
    patch_model(model, sparse)
    return model
