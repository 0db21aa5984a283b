"""The command `hf-sparse24`: `doctor` says what runs here and why, `tune` measures a model's GEMMs, `plan` predicts
what training it would cost, `report` draws a run (run_report.py), and `export`, `inspect` and `verify` handle
checkpoints (checkpoints.py)."""

import argparse
import importlib
import math
import os
import sys
from functools import partial

import torch
from sparse24_kernels import GemmProblem
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
    parser = argparse.ArgumentParser(prog="hf-sparse24", description="2:4 sparse training for Transformers")
    parser.add_argument("--version", action="version", version=f"hf-sparse24 {__version__}")
    commands = parser.add_subparsers(required=True)
    for name, run, text in (
        ("doctor", _doctor, "versions, devices, what runs where and why, a self-test; with MODEL, its predicted gain"),
        ("tune", _tune, "measure every sparse GEMM that training MODEL asks for, and remember what wins"),
        (
            "plan",
            _plan,
            "what a training step of MODEL would hold and move on many GPUs, and when sparse GEMMs pay for pruning",
        ),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("model", metavar="MODEL", nargs="?" if name == "doctor" else None, help=_MODEL_HELP)
        if name != "plan":
            command.add_argument(
                "--tokens", type=positive_number, default=8192, help="per step and device (default 8192)"
            )
        command.add_argument(
            "--method", help=f"{', '.join(sorted(METHODS))}; without it the model's own, or {DEFAULT_METHOD}"
        )
        command.add_argument(
            "--target-modules", help="mlp, attention or all-linear; without it the model's own, or mlp"
        )
        command.add_argument("--dtype", choices=_DTYPES, default="bf16", help="of the GEMMs (default bf16)")
        command.set_defaults(run=run)
    run_report.add_command(commands)
    _add_plan_arguments(commands.choices["plan"])
    checkpoints.add_commands(commands)
    for command in commands.choices.values():
        command.add_argument(
            "--import", dest="modules", metavar="MODULE", action="append", default=[], help=_IMPORT_HELP
        )
    return parser


def _add_plan_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--gpus", type=positive_number, required=True, help="one process each")
    command.add_argument(
        "--tokens-per-gpu",
        type=positive_number,
        required=True,
        help="of a step",
    )
    command.add_argument("--parallel", choices=PARALLEL, help="without it ddp if that fits in memory, else fsdp2")
    command.add_argument("--memory", type=positive_float, default=80, metavar="GB", help="of a GPU (default 80)")
    command.add_argument("--gradient-checkpointing", action="store_true", help="layers run again in the backward pass")
    command.add_argument(
        "--flops-per-byte",
        type=positive_float,
        default=FLOPS_PER_BYTE,
        metavar="N",
        help=f"what the GPU computes while it moves a byte (default {FLOPS_PER_BYTE:.0f}: an H100 SXM's data sheet)",
    )


_IMPORT_HELP = "a Python module that registers a method of your own; may be repeated"
_MODEL_HELP = "a name on the Hub or a directory with a config.json; no weights are loaded"


def positive_number(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


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
    print_table([["m x n x k", "runs", "dense us", "sparse us"], *map(_verdict_row, verdicts.items())])
    return 0


def _plan(options: argparse.Namespace) -> int:
    model = _patched(options)
    setting = Setting(
        options.gpus,
        options.tokens_per_gpu,
        dtype=_DTYPES[options.dtype],
        checkpointing=options.gradient_checkpointing,
    )
    plan = plan_training(model, setting, options.parallel, options.memory * 1e9)
    print_plan(options.model, model, plan, options.memory * 1e9, options.flops_per_byte)
    return 0


def _verdict_row(item: tuple[GemmProblem, autotune.Verdict]) -> list[str]:
    problem, verdict = item
    times = [f"{us:.1f}" if us else "-" for us in (verdict.dense_us, verdict.sparse_us)]
    return [f"{problem.m} x {problem.n} x {problem.k}", f"{verdict.backend}: {verdict.reason}", *times]


def _patched(options: argparse.Namespace) -> PreTrainedModel:
    """The model's architecture without weights, patched as it would be trained."""
    config = AutoConfig.from_pretrained(options.model)
    own = getattr(config, "quantization_config", None)
    if own is not None:
        del config.quantization_config
    if own is None:
        own = Sparse24Config()
    if not isinstance(own, dict):
        own = own.to_dict()
    if own.get("quant_method", "sparse24") != "sparse24":
        raise ValueError(
            f"{options.model} is quantized with {own['quant_method']}: 2:4 training starts from plain weights"
        )
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
