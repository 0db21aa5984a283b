"""Packed layers, training steps and the cost of pruning on a CPU, next to dense math. All sections, or those named:

    python recipes/benchmarks/cpu.py SECTION ... [--quick] [--minutes N] [--only TEXT] [--list]

The results are recipes/results/cpu/layers.json, cpu_training.json (training) and cpu_step_time.json (pruning), complete
after every row; `make docs` writes docs/measured/cpu.md and costs.md from them. frontier.py times whole packed models.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

# ruff: noqa: E402 (imports come after the path that they need)
ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "kernels")]

from recipes.benchmarks import cpu_layers, cpu_training
from recipes.benchmarks.machines import Cpu
from recipes.benchmarks.sections import Run, Section

SECTIONS: dict[str, tuple[float, str, Callable[[bool], Section]]] = {
    "layers": (8, "cpu/layers.json", cpu_layers.Layers),
    "training": (90, "cpu_training.json", cpu_training.Training),
    "pruning": (30, "cpu_step_time.json", cpu_training.Pruning),
}
"""Minutes, file of the result, and maker of each."""

RESULTS = ROOT / "recipes/results"


def main(arguments: list[str] | None = None) -> int:
    names = ", ".join(SECTIONS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {names}; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, in seconds: whether everything runs")
    parser.add_argument("--minutes", type=float, help="time for each section; default: 8 for layers, 90 for training")
    parser.add_argument("--only", default="", help="only rows with this text in their name")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    options = parser.parse_args(arguments)
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"{', '.join(sorted(unknown))}: sections are {names}")
    if (options.quick or options.only) and not options.list and options.output == RESULTS:
        parser.error("--quick and --only would replace whole results: name a folder with --output")
    words = ["--quick"] * options.quick + [f"--only={options.only}"] * bool(options.only)
    given = options.minutes
    for name in options.sections or SECTIONS:
        minutes, file, make = SECTIONS[name]
        options.minutes, section = given or minutes, make(options.quick)
        if options.list:
            print("\n".join(str(entry) for entry in section.entries() if options.only in str(entry)))
            continue
        command = shlex.join(["python", "recipes/benchmarks/cpu.py", name, *words])
        section.execute(Run(Cpu(), options, command, file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
