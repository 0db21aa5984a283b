"""A benchmark run: sections that are executed in order within a given time, and the result that they fill.

A section is a table of the report. Its entries are measured one after the other, and each becomes a row: the times of
several ways to do the same work, some facts, and goals. To measure something new, write a section.
"""

import argparse
import datetime
import faulthandler
import json
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from sparse24_kernels import GemmProblem
from sparse24_kernels.gemm import cusparselt
from tqdm.auto import tqdm

from . import timing
from .timing import Cuda, Maker, OutOfTime, Sampler, describe, ratio, time_limit

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN = "not run: out of time"
NEEDED = 20.0  # seconds without which an entry is not begun
Row = dict[str, Any]


class Run:
    """What the sections share: the machine, the options, the time left, and the result."""

    def __init__(self, machine: Cuda, options: argparse.Namespace, command: list[str]):
        self.machine, self.options = machine, options
        # `end` is that of the section that runs, `finish` that of all.
        self.end = self.finish = time.monotonic() + 60 * options.minutes
        now = datetime.datetime.now(datetime.UTC)
        device = re.sub(r"\W+", "_", machine.name).strip("_").lower()
        options.output.mkdir(parents=True, exist_ok=True)
        self.path: Path = options.output / f"gpu_{device}_{now:%Y%m%d_%H%M%S}"
        versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
        commit = timing.answer("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")
        versions |= {"cusparselt": str(cusparselt.version()), "commit": str(commit)}
        self.result: Row = {"command": " ".join(["recipes/benchmarks/gpu.py", *command])}
        self.result |= {"date": now.isoformat(timespec="seconds"), "environment": machine.facts | versions}
        self.result |= {"sections": {}, "errors": {}}

    def left(self, reserve: float = 0.0) -> float:
        """Seconds left to this section, without `reserve` for what must still come."""
        return self.end - time.monotonic() - reserve

    def note(self, error: BaseException, where: str) -> str:
        """An error as one line for the report; its traceback goes into a log beside it."""
        self.log(f"{where}\n{''.join(traceback.format_exception(error))}")
        return describe(error)

    def log(self, text: str) -> None:
        """Append to the log beside the report."""
        with open(f"{self.path}.log", "a") as log:
            log.write(f"{clean(text)}\n")

    def compare(self, makers: Mapping[str, Maker], limit: float = 40) -> Row:
        """The row of several ways to do the same work, sampled in turn: the time or the error of each."""
        times: dict[str, Row] = {}
        samplers: dict[str, Sampler] = {}
        try:
            with time_limit(min(limit, self.left(reserve=5))):
                for name, make in makers.items():
                    try:
                        samplers[name] = self.machine.prepare(make())
                    except Exception as error:  # one that fails must not stop the others
                        times[name] = {"error": self.note(error, name)}
        except OutOfTime as error:  # a torch.compile, say, and the last one
            times |= {name: {"error": self.note(error, name)} for name in makers if name not in samplers | times}
        try:
            with time_limit(20):
                times |= timing.in_turn(samplers)
        except (Exception, OutOfTime) as error:
            times |= {name: {"error": self.note(error, "sampling")} for name in samplers}
        return {"times": {name: times[name] for name in makers}, "facts": {}}


class Section:
    """One table of the report.

    Attributes:
        groups: the names in `--sections` that choose it.
        share: of the time, in proportion to the sections still to come.
        base: the way that others are compared with, or None.
        note: what a reader of the table must know.
    """

    name: str
    groups: tuple[str, ...]
    share = 10
    base: str | None = None
    note = ""

    def entries(self) -> Sequence[Any]:
        """What is measured, in order of importance, for time may run out. Their strings are the rows' names."""
        return []

    def problems(self, entry: Any) -> list[GemmProblem]:
        """GEMMs whose algorithms should be autotuned before this entry is measured."""
        return []

    def goals(self, entry: Any) -> dict[str, float]:
        """How many times faster than `base` a way should be."""
        return {}

    def measure(self, run: Run, entry: Any) -> Row:
        """The row of an entry: `times` by way and `facts` by head of a column, as `Run.compare` returns them."""
        raise NotImplementedError

    def execute(self, run: Run) -> None:
        """Measure all entries as far as the time goes. One that fails leaves its error."""
        entries = [entry for entry in self.entries() if run.options.only in str(entry)]
        rows: dict[str, Row] = {str(entry): {"error": NOT_RUN} for entry in entries}
        run.result["sections"][self.name] = {"note": self.note, "base": self.base, "rows": rows}
        # disable=None: no bar where stderr is no terminal.
        with tqdm(total=len(entries), desc=self.name, unit="entry", disable=None, leave=False) as bar:
            for entry in entries:
                if run.left() < NEEDED:
                    return
                bar.set_postfix_str(str(entry))
                try:
                    rows[str(entry)] = self.measure(run, entry) | {"goals": self.goals(entry)}
                except (Exception, OutOfTime) as error:  # no memory for the operands, say
                    rows[str(entry)] = {"error": run.note(error, f"{self.name}: {entry}")}
                run.machine.forget()
                write(run.result, run.path)
                bar.update()


def execute(run: Run, sections: list[Section]) -> int:
    """Execute the sections; the exit code. An exception ends its section alone: time on a GPU is scarce."""
    start = time.monotonic()
    for i, section in enumerate(sections):
        now = time.monotonic()
        run.end = now + (run.finish - now) * section.share / sum(other.share for other in sections[i:])
        run.result["unfinished"] = section.name
        write(run.result, run.path)
        print(f"{section.name}: {run.left():.0f} s", flush=True)
        try:
            section.execute(run)
        except Exception as error:
            run.result["errors"][section.name] = run.note(error, section.name)
        run.result["environment"][f"clocks after {section.name}"] = run.machine.clocks()
    del run.result["unfinished"]
    write(run.result, run.path)
    print(f"{i + 1} of {len(sections)} sections in {time.monotonic() - start:.0f} s", flush=True)
    return int(bool(run.result["errors"]))


def clean(text: str) -> str:
    """The text without the folders of this machine."""
    for folder, name in ((str(ROOT), "."), (sys.prefix, "python"), (str(Path.home()), "~")):
        text = text.replace(folder, name)
    return text


def write(result: dict[str, Any], path: Path) -> None:
    """Write `path` with .json and with .md. A run that is killed leaves the last complete version."""
    for suffix, text in ((".json", json.dumps(result, indent=1) + "\n"), (".md", page(result))):
        unfinished = path.with_name(path.name + suffix + ".tmp")
        unfinished.write_text(clean(text))
        os.replace(unfinished, path.with_name(path.name + suffix))


def page(result: dict[str, Any]) -> str:
    """The Markdown page: everything that is in the JSON, except the spread of the samples."""
    environment = result["environment"]
    lines = [f"# 2:4 benchmarks on {environment['device']}", "", f"`{result['command']}`, {result['date']}", ""]
    lines += [f"- {name}: {value}" for name, value in environment.items() if value is not None]
    lines += [f"- not finished: {result['unfinished']}"] if "unfinished" in result else []
    lines += [f"- section {name} failed: {error}" for name, error in result["errors"].items()]
    for name, section in result["sections"].items():
        lines += ["", f"## {name}", "", section["note"], ""]
        lines += table([line(entry, row, section["base"]) for entry, row in section["rows"].items()])
    return "\n".join(text.rstrip() for text in lines) + "\n"


def line(entry: str, row: dict[str, Any], base: str | None) -> dict[str, Any]:
    """A line of the table: the time of each way, in brackets how many times faster than `base`, with the goal."""
    cells: dict[str, Any] = {"": f"{entry}: {row['error']}" if "error" in row else entry}
    for way, found in row.get("times", {}).items():
        text = found["error"] if "error" in found else number(found["us"])
        faster, wanted = base and base != way and ratio(row["times"], base, way), row.get("goals", {}).get(way)
        if faster and wanted:
            text += f" ({faster:.2f}, {'meets' if faster >= wanted else '**misses**'} {wanted:g})"
        elif faster:
            text += f" ({faster:.2f})"
        cells[f"{way}, us"] = text + (" loop" if found.get("how", "").startswith("loop") else "")
    return cells | row.get("facts", {})


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown from rows whose keys are heads of columns; what a row lacks is empty."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    lines = [heads, ["---"] * len(heads), *([number(row.get(head)) for head in heads] for row in rows)]
    return ["".join(f"| {cell} " if cell else "| " for cell in cells) + "|" for cells in lines]


def number(x: Any) -> str:
    """Text of a cell: three or four digits of a float, anything else as it is."""
    if isinstance(x, float):
        return f"{x:.0f}" if abs(x) >= 1000 else f"{x:.1f}" if abs(x) >= 100 else f"{x:.2f}"
    return "" if x is None else str(x).replace("|", "/")


def main(sections: list[Section], output: Path, arguments: list[str], machine: Any = None) -> int:
    """The command line of `make gpu`; the exit code. Tests pass a machine of their own."""
    groups = list(dict.fromkeys(group for section in sections for group in section.groups))

    def chosen(names: str) -> list[Section]:
        if unknown := [name for name in names.split(",") if name not in groups]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: sections are {', '.join(groups)}")
        return [section for section in sections if set(section.groups) & set(names.split(","))]

    parser = argparse.ArgumentParser(description="Time kernels, GEMMs, layers and models on a GPU.")
    parser.add_argument("--minutes", type=float, default=8.5, help="time for everything")
    parser.add_argument("--sections", type=chosen, default=",".join(groups), help="any of " + ",".join(groups))
    parser.add_argument("--output", type=Path, default=output, help="folder of the results")
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
        # A kernel that hangs takes the main thread with it, signals or not. What was measured is on disk.
        faulthandler.dump_traceback_later(60 * options.minutes + 60, exit=True)
    run = Run(machine, options, ["DIR" if word == str(options.output) else word for word in arguments])
    code = execute(run, options.sections)
    print(clean(page(run.result)), f"\n{run.path}.json", sep="")
    return code
