"""A benchmark run: sections, executed in order within a given time, and the JSON that they fill.

A section has entries, which are measured one after the other. Each becomes a row: the times of several ways to do the
same work, of which the first is what the others are compared with, some facts, and goals.
"""

import argparse
import datetime
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
from sparse24_kernels.gemm import GemmProblem, autotune, cusparselt

from . import timing
from .timing import Maker, OutOfTime, Sampler, describe, time_limit
from .variants import ROOT

NOT_RUN = "not run: out of time"
NEEDED = 20.0  # seconds without which an entry is not begun
Row = dict[str, Any]


class Run:
    """What the sections share: the machine, the options, the time left, and the result."""

    def __init__(self, machine: Any, options: argparse.Namespace, command: list[str], file: str | None = None):
        self.machine, self.options = machine, options
        self.end = time.monotonic() + 60 * options.minutes
        now = datetime.datetime.now(datetime.UTC)
        device = re.sub(r"\W+", "_", machine.name).strip("_").lower()
        options.output.mkdir(parents=True, exist_ok=True)
        self.path: Path = options.output / (file or f"gpu_{device}_{now:%Y%m%d_%H%M%S}.json")
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        commit = timing.answer("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")
        versions |= {"commit": str(commit)}
        self.result: Row = {"command": " ".join(command)}
        self.result |= {"date": now.isoformat(timespec="seconds"), "environment": machine.facts | versions}
        self.result |= {"sections": {}}

    def left(self, reserve: float = 0.0) -> float:
        """Seconds left, without `reserve` for what must still come."""
        return self.end - time.monotonic() - reserve

    def note(self, error: BaseException, where: str) -> str:
        """An error as one line for the result; its traceback goes into a log next to it."""
        with open(self.path.with_suffix(".log"), "a") as log:
            log.write(clean(f"{where}\n{''.join(traceback.format_exception(error))}\n"))
        return describe(error)

    def write(self) -> None:
        """Write the JSON. A run that is killed leaves the last complete version."""
        unfinished = self.path.with_suffix(".tmp")
        unfinished.write_text(clean(json.dumps(self.result, indent=1)) + "\n")
        os.replace(unfinished, self.path)

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
    """A list of entries that are measured alike. `groups` are the names in `--sections` that choose it."""

    name: str
    groups: tuple[str, ...]
    note = ""  # what a reader of the rows must know

    def entries(self) -> Sequence[Any]:
        """What is measured, in order of importance, for time may run out. Their strings are the rows' names."""
        raise NotImplementedError

    def problems(self, entry: Any) -> list[GemmProblem]:
        """GEMMs whose algorithms are tuned before this entry is measured, where they have not been."""
        return []

    def goals(self, entry: Any) -> dict[str, float]:
        """How many times faster than the first way another should be."""
        return {}

    def measure(self, run: Run, entry: Any) -> Row:
        """The row of an entry: `times` by way and `facts` by name, as `Run.compare` returns them."""
        raise NotImplementedError

    def execute(self, run: Run) -> None:
        """Measure all entries as far as the time goes. One that fails leaves its error."""
        entries = [entry for entry in self.entries() if run.options.only in str(entry)]
        rows: dict[str, Row] = {str(entry): {"error": NOT_RUN} for entry in entries}
        run.result["sections"][self.name] = {"note": self.note, "rows": rows}
        for entry in entries:
            if run.left() >= NEEDED:
                try:
                    tune(run, self.problems(entry))
                    rows[str(entry)] = self.measure(run, entry) | {"goals": self.goals(entry)}
                except (Exception, OutOfTime) as error:  # no memory for the operands, say
                    rows[str(entry)] = {"error": run.note(error, f"{self.name}: {entry}")}
                run.machine.forget()
            run.write()
            print(line(str(entry), rows[str(entry)]), flush=True)


def tune(run: Run, problems: list[GemmProblem]) -> None:
    """Tune the GEMMs that have no verdict, quickly: a table for users takes its time, here every second is shared."""
    device = run.machine.device
    possible = [p for p in problems if cusparselt.unsupported_matrix(p.m, p.k, p.dtype) is None]
    todo = [problem for problem in possible if not autotune.choose(problem, device).measured]
    if todo:
        with time_limit(run.left(reserve=10)):
            autotune.tune(todo, device)


def line(entry: str, row: Row) -> str:
    """A row as text: the time of each way, in brackets how many times faster than the first, with the goal."""
    if "error" in row:
        return f"{entry}: {row['error']}"
    cells, base = [], next(iter(row["times"].values())).get("us")
    for way, found in row["times"].items():
        cell = f"{way} {round(found['us'], 1):.9g} us" if "us" in found else f"{way} {found['error']}"
        if base and cells and "us" in found:
            faster, wanted = base / found["us"], row.get("goals", {}).get(way)
            verdict = "" if wanted is None else f", {'meets' if faster >= wanted else 'MISSES'} {wanted:g}"
            cell += f" ({faster:.2f}{verdict})"
        cells.append(cell)
    return f"{entry}: {' | '.join(cells)}"


def clean(text: str) -> str:
    """The text without the folders of this machine."""
    for folder, name in ((str(ROOT), "."), (sys.prefix, "python"), (str(Path.home()), "~")):
        text = text.replace(folder, name)
    return text
