"""`make gpu`: kernels, GEMMs and training timed on a GPU within a given time. Needs PyTorch and Triton.

    python recipes/benchmarks/gpu.py [--minutes 40] [--sections NAMES] [--output DIR] [--only TEXT] [--list]

Check first that results are right: `make gpu-test`. `--sections` takes any of training, layer, memory, gemms,
8-bit, kernels; the first three need Transformers, memory needs PEFT. Sections share the time evenly; what one leaves is
for the next. The result is DIR/gpu_<device>_<date>.json, complete after every row, and a .log with tracebacks. To go on
in another run on a fresh machine, keep the folders of $SPARSE24_CACHE (tuned GEMMs) and $TRITON_CACHE_DIR (kernels).
"""

import argparse
import faulthandler
import os
import shlex
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# ruff: noqa: E402 (imports come after the path that they need)
ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # set for tests in many a shell; child processes inherit what is left
    sys.path[:1] = [str(ROOT), str(ROOT / "kernels")]
    if missing := [name for name in ("torch", "triton") if not find_spec(name)]:
        sys.exit(f"{sys.executable} has no {missing[0]}, which make gpu needs: choose one with GPU_PYTHON=...")

import torch
from sparse24_kernels.dispatch import KERNEL_DTYPES, choose_kernels

from recipes.benchmarks import eight_bit, gemms, operations, training
from recipes.benchmarks.machines import Cuda
from recipes.benchmarks.sections import Run, Section, clean, write

SECTIONS: dict[str, Section] = {
    section.group: section
    for section in (
        training.Steps(),
        training.OneLayer(),
        training.Memory(),
        gemms.Gemms(),
        eight_bit.EightBit(),
        operations.Operations(),
    )
}


def chosen(names: str) -> list[Section]:
    if unknown := set(names.split(",")) - SECTIONS.keys():
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: sections are {', '.join(SECTIONS)}")
    return [section for name, section in SECTIONS.items() if name in names.split(",")]


def main(arguments: list[str], machine: Any = None) -> int:
    """Run the command line and return the exit code. Tests pass a machine."""
    parser = argparse.ArgumentParser(description="Time kernels, GEMMs and training on a GPU.")
    parser.add_argument("--minutes", type=float, default=40, help="time for everything after the kernels' first check")
    parser.add_argument("--sections", type=chosen, default=",".join(SECTIONS), help="any of " + ",".join(SECTIONS))
    parser.add_argument("--output", type=Path, default=ROOT / "recipes/results/gpu", help="folder of the results")
    parser.add_argument("--only", default="", help="only what has this text in its name")
    parser.add_argument("--list", action="store_true", help="print what would be measured and stop; needs no GPU")
    options = parser.parse_args(arguments)
    if options.list:
        rows = [(section.name, str(entry)) for section in options.sections for entry in section.entries()]
        print("\n".join(f"{name:26s} {entry}" for name, entry in rows if options.only in entry))
        return 0
    if machine is None:
        if not torch.cuda.is_available():
            print(f"torch of {sys.executable} sees no CUDA device: set GPU_PYTHON=..., or GPU_ARGS=--list")
            return 2
        machine = Cuda()
        for dtype in KERNEL_DTYPES:  # a new machine checks its kernels for minutes, which no row's limit allows for
            choose_kernels(machine.device, dtype, operator="prune")
        # A kernel that hangs takes the main thread with it, signals or not. What was measured is on disk.
        faulthandler.dump_traceback_later(60 * options.minutes + 60, exit=True)
    words = ["DIR" if word == str(options.output) else word for word in arguments]
    run = Run(machine, options, shlex.join(["python", "recipes/benchmarks/gpu.py", *words]))
    for i, section in enumerate(options.sections):
        start, finish = time.monotonic(), run.end
        run.end = start + (finish - start) / (len(options.sections) - i)  # what it leaves is for the next ones
        print(f"{section.name}: {run.left():.0f} s", flush=True)
        section.execute(run)
        run.end = finish
        run.result["environment"][f"clocks after {section.name}"] = run.machine.clocks()
    write(run.path, run.result)
    print(clean(str(run.path)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
