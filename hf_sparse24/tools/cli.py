"""The command `hf-sparse24`: doctor, tune, plan, report (run_report.py); export, inspect, verify (checkpoints.py)."""

import argparse
import importlib
import os
import sys
from functools import partial

import torch
from sparse24_kernels.gemm import autotune, cusparselt
from transformers import AutoConfig, PreTrainedModel

from ..config import Sparse24Config
from ..methods import DEFAULT_METHOD, METHODS
from ..patching.surgery import patch_model
from ..progress import Progress, count
from ..version import __version__
from . import checkpoints, doctor, run_report
from .models import model_class
from .plan import plan_training
from .plan_text import print_plan
from .pruning_costs import FLOPS_PER_BYTE
from .sizes import PARALLEL, Setting
from .tables import print_table

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status is 0 where all is well, 1 where a self-test failed, 2 for a wrong argument."""
    options = make_parser().parse_args(arguments)
    try:
        if options.modules:  # may lie here, where a console script does not look; behind all that is installed
            sys.path.append(os.getcwd())
        for module in options.modules:
            importlib.import_module(module)
        return options.run(options)
    except (ImportError, OSError, ValueError) as error:
        print(f"hf-sparse24: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hf-sparse24: stopped; what was measured is kept, and what an export was to replace", file=sys.stderr)
        return 130


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command and all its subcommands."""
    parser = argparse.ArgumentParser(prog="hf-sparse24", description="2:4 sparse training for Transformers")
    parser.add_argument("--version", action="version", version=f"hf-sparse24 {__version__}")
    commands = parser.add_subparsers(required=True)
    for name, run, text in (
        ("doctor", _doctor, "versions, devices, what runs where and why, a self-test; with MODEL, its predicted gain"),
        ("tune", _tune, "measure every sparse GEMM that training MODEL asks for, and remember what wins"),
        ("plan", _plan, "what a step of MODEL would hold and move on many GPUs, and when sparse GEMMs pay for pruning"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        add = command.add_argument
        model = "a name on the Hub or a directory with a config.json; no weights are loaded"
        add("model", metavar="MODEL", nargs="?" if name == "doctor" else None, help=model)
        add("--method", help=f"{', '.join(sorted(METHODS))}; without it the model's own, or {DEFAULT_METHOD}")
        add("--target-modules", help="mlp, attention or all-linear; without it the model's own, or mlp")
        add("--dtype", choices=_DTYPES, default="bf16", help="of the GEMMs (default bf16)")
        if name == "plan":
            add("--gpus", type=positive_number, required=True, help="one process each")
            add("--tokens-per-gpu", type=positive_number, required=True, help="of a step")
            add("--parallel", choices=PARALLEL, help="without it ddp if that fits in memory, else fsdp2")
            add("--memory", type=positive_number, default=80, metavar="GB", help="of a GPU (default 80)")
            add("--gradient-checkpointing", action="store_true", help="layers run again in the backward pass")
            speed = f"what the GPU computes while it moves a byte (default {FLOPS_PER_BYTE}: an H100 SXM's data sheet)"
            add("--flops-per-byte", type=positive_number, default=FLOPS_PER_BYTE, metavar="N", help=speed)
        else:
            add("--tokens", type=positive_number, default=8192, help="per step and device (default 8192)")
        command.set_defaults(run=run)
    run_report.add_command(commands)
    checkpoints.add_commands(commands)
    own = "a Python module that registers a method of your own; may be repeated"
    for command in commands.choices.values():
        command.add_argument("--import", dest="modules", metavar="MODULE", action="append", default=[], help=own)
    return parser


def positive_number(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def _doctor(options: argparse.Namespace) -> int:
    print_table(doctor.versions())
    failed = False
    for device in doctor.devices():
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        print(f"\n{device}: {name}")
        print_table(doctor.choices(device))
        results = list(doctor.self_test(device))
        print()
        print_table(results)
        failed |= any(result.startswith("FAILED") for _, result in results)
    if options.model:
        model = _patched(options)
        header = ["layers", "out x in", "output", "grad_input", "grad_weight", "gain"]
        rows = doctor.gains(model, options.tokens, _DTYPES[options.dtype], doctor.devices()[0])
        print(f"\n{options.model}, {options.tokens} tokens, {options.dtype}: forward + backward of the patched layers")
        print_table([header, *rows])
    return int(failed)


def _tune(options: argparse.Namespace) -> int:
    device = doctor.devices()[0]
    reason = cusparselt.unsupported_device(device)
    if reason:
        raise ValueError(f"nothing to tune here: {reason}")
    found = doctor.problems(_patched(options), options.tokens, _DTYPES[options.dtype])
    print(f"{count(len(found), 'GEMM')}; Ctrl-C keeps what is done", flush=True)
    with Progress("tuning", len(found), "GEMM", partial(print, flush=True)) as progress:
        verdicts = autotune.tune(
            found, device, on_progress=lambda step: progress.update(step.number - progress.done, str(step))
        )
        progress.update(len(found) - progress.done, "")
    rows = [["m x n x k", "runs", "dense us", "sparse us"]]
    for problem, verdict in verdicts.items():
        times = [f"{us:.1f}" if us else "-" for us in (verdict.dense_us, verdict.sparse_us)]
        rows.append([f"{problem.m} x {problem.n} x {problem.k}", f"{verdict.backend}: {verdict.reason}", *times])
    print_table(rows)
    return 0


def _plan(options: argparse.Namespace) -> int:
    model = _patched(options)
    dtype, memory = _DTYPES[options.dtype], options.memory * 1e9
    setting = Setting(options.gpus, options.tokens_per_gpu, dtype=dtype, checkpointing=options.gradient_checkpointing)
    plan = plan_training(model, setting, options.parallel, memory)
    print_plan(options.model, model, plan, memory, options.flops_per_byte)
    return 0


def _patched(options: argparse.Namespace) -> PreTrainedModel:
    """The model's architecture without weights, patched as it would be trained."""
    config = AutoConfig.from_pretrained(options.model)
    own = getattr(config, "quantization_config", None) or Sparse24Config()
    own = own if isinstance(own, dict) else own.to_dict()
    if own.get("quant_method", "sparse24") != "sparse24":
        raise ValueError(
            f"{options.model} is quantized with {own['quant_method']}: 2:4 training starts from plain weights"
        )
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    sparse = Sparse24Config.from_dict(own)
    if options.method and options.method != sparse.method:
        sparse = Sparse24Config(method=options.method, target_modules=sparse.target_modules)
    if options.target_modules:
        sparse = sparse.replace(target_modules=options.target_modules)
    with torch.device("meta"):
        model = model_class(config)._from_config(config)
    patch_model(model, sparse)
    return model


if __name__ == "__main__":
    sys.exit(main())
