"""`make gpu`: everything checked on the GPU, then timed, within a given time. Needs PyTorch and Triton, no install.

    python3 kernels/benchmarks/gpu.py [--minutes 8.5] [--sections NAMES] [--output DIR] [--only TEXT] [--list]

Sections come in groups, and `--sections` takes names of groups:

    kernels      a gate (`gate.py`), the bandwidth of a copy, every workload of `workloads.py`, then its competitors
    products     sparse products and whole layers against dense ones (`products.py`); on a Hopper where TileLang is
                 installed, its product against cuSPARSELt's (`tilelang_product.py`)
    mlps         MLP blocks against dense and others (`mlps.py`)
    trainer      tokens per second of training runs (`trainer.py`); needs Transformers, as the next
    inference    prefill and decode (`inference.py`)
    models       the last three

Where a check of a gate fails, no speed behind it is reported and the exit code is 1; what uses sparse products stands
behind a gate of its own (`product_gate.py`). Each group has a share of the time, and what one leaves is the next one's;
what was not reached is listed as such. Results are in DIR/gpu_<device>.json and .md and complete after every step. To
add something to this run, add a section.
"""

import argparse
import datetime
import faulthandler
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# ruff: noqa: E402 (imports come after the path that they need)
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # set for tests in many a shell; its processes inherit what is left

try:
    import torch
    import triton
except ImportError as error:
    sys.exit(f"{sys.executable} has no {error.name}, which make gpu needs: choose one with GPU_PYTHON=...")

import inference
import kernel_sections
import mlps
import product_gate
import products
import report
import trainer
from ahead_of_time import CHIPS, predicted_seconds
from report import ROOT, clean
from shapes import BLOCKS, DENSE_RATE, cells
from timing import describe
from workloads import Workload, workloads


class Run:
    """What the sections share: the machine, the workloads, the time left, and the result that they fill."""

    def __init__(self, machine, options: argparse.Namespace, found: list[Workload], gate: Callable[..., dict]):
        self.machine, self.options, self.workloads, self.gate = machine, options, found, gate
        self.cells, self.blocks = cells(), BLOCKS
        self.product_checks = lambda: product_gate.checks(machine.device)
        # `end` is that of the section that runs, `finish` that of all.
        self.end = self.finish = time.monotonic() + 60 * options.minutes
        self.path = options.output / ("gpu_" + re.sub(r"\W+", "_", machine.name).strip("_").lower())
        self.predictions = read_predictions()
        self.result: dict = {
            "command": " ".join(["kernels/benchmarks/gpu.py", *map(clean, options.command)]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "environment": machine.facts()
            | {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
            | {"commit": commit()},
            "groups": options.sections,
            "clocks": {"clocks before (SM, memory, power, temperature)": machine.clocks()},
            "errors": {},
            "operations": {},
            "competitors": {},
        }

    def left(self, reserve: float = 0.0) -> float:
        """Seconds left to this section, of which `reserve` are for what must still come."""
        return self.end - time.monotonic() - reserve

    def write(self) -> None:
        report.write(self.result, self.path)


SHARES = {"kernels": 40, "gate": 17, "products": 20, "mlps": 8, "trainer": 12, "inference": 6}
"""Of the time, by group, in proportion: a group that is not chosen leaves its share to the others. The gate is chosen
with any that follow it."""

MODELS = ["mlps", "trainer", "inference"]
CHOICES = {name: [name] for name in ("kernels", "products", *MODELS)} | {"models": MODELS}
"""What `--sections` may name."""


class Section(NamedTuple):
    """`function` returns False where what comes after must not be believed."""

    name: str
    group: str
    function: Callable[[Run], bool | None]


SECTIONS = [
    Section("gate", "kernels", kernel_sections.gate),
    Section("copy", "kernels", kernel_sections.copy_before),
    Section("operations", "kernels", kernel_sections.operations),
    Section("competitors", "kernels", kernel_sections.rivals),
    Section("copy again", "kernels", kernel_sections.copy_after),
    Section("gate of the products", "gate", product_gate.gate),
    Section("products", "products", products.section),
    Section("mlps", "mlps", mlps.section),
    Section("trainer", "trainer", trainer.section),
    Section("inference", "inference", inference.section),
]
"""In order, by groups. An exception ends the section, and of those in `NEEDED` the run, as False does."""

NEEDED = ("gate", "copy", "gate of the products")


def execute(run: Run) -> int:
    """All sections that were chosen; the exit code.

    A check that fails ends the run: what is wrong in a kernel is wrong in the products too. If the gate of the kernels
    only ran out of time, their group ends, and the others have a gate of their own.
    """
    chosen = [name for name in SHARES if name in run.options.sections or name == "gate"]
    if run.options.sections == ["kernels"]:
        chosen.remove("gate")
    red = False
    for i, group in enumerate(chosen):
        now = time.monotonic()
        run.end = now + (run.finish - now) * SHARES[group] / sum(SHARES[name] for name in chosen[i:])
        for section in (section for section in SECTIONS if section.group == group):
            run.result["unfinished"] = section.name
            run.write()
            print(f"{section.name}: {run.left():.0f} s", flush=True)
            try:
                ends = section.function(run) is False
            except Exception as error:
                run.result["errors"][section.name] = clean(describe(error))
                ends = section.name in NEEDED
            if ends:
                red = True
                break
        else:
            continue
        if group != "kernels" or not only_out_of_time(run):
            break
    else:
        del run.result["unfinished"]
    run.write()
    return int(red or bool(run.result["errors"]))


def only_out_of_time(run: Run) -> bool:
    """Whether no check of the kernels' gate has failed, but some (or all) were not reached."""
    found = run.result.get("gate")
    return found is not None and all(why.startswith("not run: out of time") for why in found["failed"].values())


def commit() -> str | None:
    """Of the checkout, if it is one and git is there."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def read_predictions() -> dict:
    path = HERE / "results/ahead_of_time_sm90.json"
    return json.loads(path.read_text()) if path.exists() else {}


def listing(found: list[Workload], groups: list[str], only: str = "") -> str:
    """Everything that would run, without a GPU: what each must move or compute, and how fast that could be."""
    lines = kernel_listing(found) if "kernels" in groups else []
    dense: dict[str, dict[str, int]] = {
        "products": {str(cell): cell.flops for cell in cells()},
        "mlps": {str(block): block.flops for block in BLOCKS},
        "trainer": {str(configuration): configuration.flops for configuration in trainer.configurations()},
        "inference": {name: inference.flops(*sizes) for name, sizes in inference.WORKLOADS.items()},
    }
    units = {"products": "one of three", "mlps": "forward, backward", "trainer": "step", "inference": "four layers"}
    for group in (group for group in dense if group in groups):
        at = f"dense us at {DENSE_RATE / 1e12:.0f} TFLOP/s"
        lines += ["", f"{group + ' (' + units[group] + ')':64s} {'GFLOP':>12s} {at:>25s}"]
        for name, flops in dense[group].items():
            if only in name:
                lines.append(f"{name:64s} {flops / 1e9:12.1f} {flops / DENSE_RATE * 1e6:25.1f}")
    return "\n".join(lines)


def kernel_listing(found: list[Workload]) -> list[str]:
    predictions = read_predictions()
    lines = [f"{'workload':64s} {'MB':>9s} {'copy us':>9s} {'predicted us':>12s} {'at most':>7s} {'target':>6s}"]
    for workload in found:
        copy, seconds = workload.bytes() / CHIPS[90].bandwidth, predicted_seconds(workload, predictions)
        predicted = f"{'no kernel':>12s} {'':7s}" if seconds is None else f"{seconds * 1e6:12.1f} {copy / seconds:7.0%}"
        lines.append(
            f"{workload!s:64s} {workload.bytes() / 1e6:9.1f} {copy * 1e6:9.1f} {predicted} "
            f"{workload.operation.target:6.0%}"
        )
    return lines


def groups_of(names: str) -> list[str]:
    """The groups that `--sections` names, in the order they run."""
    unknown = [name for name in names.split(",") if name not in CHOICES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: sections are {', '.join(CHOICES)}")
    wanted = [group for name in names.split(",") for group in CHOICES[name]]
    return [group for group in SHARES if group in wanted]


def main(arguments: list[str], machine=None, gate: Callable[..., dict] | None = None, found=None, prepare=None) -> int:
    """The tests give a machine, a gate and workloads of their own, and change the run by `prepare(run)`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.5, help="time for everything")
    parser.add_argument("--sections", type=groups_of, default=",".join(CHOICES), help="any of " + ",".join(CHOICES))
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument("--only", default="", help="only kernels' checks and what is timed with this text in its name")
    parser.add_argument("--processes", type=int, default=max(1, min(12, (os.cpu_count() or 1) - 2)), help="of the gate")
    parser.add_argument("--list", action="store_true", help="print the workloads and stop; needs no GPU")
    options = parser.parse_args(arguments)
    options.command = ["DIR" if x == str(options.output) else x for x in arguments]
    found = [workload for workload in found or workloads() if options.only in str(workload)]
    if options.list:
        print(listing(found, options.sections, options.only))
        return 0
    if machine is None:
        if not torch.cuda.is_available():
            print(
                f"make gpu needs a CUDA device, and torch {torch.__version__} of {sys.executable} sees none. Another "
                f"interpreter: make gpu GPU_PYTHON=...; what would run, without a GPU: make gpu GPU_ARGS=--list",
                file=sys.stderr,
            )
            return 2
        from timing import Cuda

        machine = Cuda()
        # A kernel that hangs takes the main thread with it, signals or not. What was measured is on disk.
        faulthandler.dump_traceback_later(60 * options.minutes + 60, exit=True)
    if gate is None:
        from gate import run_all as gate
    run = Run(machine, options, found, gate)
    if prepare is not None:
        prepare(run)
    code = execute(run)
    print(report.page(run.result))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
