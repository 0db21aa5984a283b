"""A benchmark run: sections, executed in order within a given time, and the JSON that they fill.

Every result file of the benchmarks has `command`, `date` and `environment` (the device and versions), and then what was
measured. A section has entries, which are measured one after the other. Each becomes a row: the `times` of several ways
to do the same work, some `facts`, among them how many times as fast as another a way was in the same turn ("X over Y"),
and `goals` for these ratios.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from sparse24_kernels.gemm import GemmProblem, autotune, cusparselt

from .machines import answer
from .timing import Call, Maker, Sampler, describe, over, spread, take_turns
from .variants import ROOT

NOT_RUN = "not run: out of time"
NEEDED = 20.0  # seconds without which an entry is not begun
Row = dict[str, Any]


def about(command: str, facts: Mapping[str, Any]) -> Row:
    """The beginning of a result: command, date, and as environment the facts of a machine and versions."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    commit = answer("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")
    versions = {"torch": torch.__version__, "python": platform.python_version(), "commit": str(commit)}
    return {"command": command, "date": now, "environment": {**facts, **versions}}


def write(path: Path, result: Row) -> None:
    """Write a result. A run that is killed leaves the last complete version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(clean(json.dumps(result, indent=1)) + "\n")
    os.replace(unfinished, path)


class Run:
    """What the sections share: the machine, the options, the time left, and the result."""

    def __init__(self, machine: Any, options: argparse.Namespace, command: str, file: str | None = None):
        self.machine, self.options = machine, options
        self.end = time.monotonic() + 60 * options.minutes
        self.result = about(command, machine.facts) | {"sections": {}}
        device = re.sub(r"\W+", "_", machine.name).strip("_").lower()
        day = re.sub(r"\W", "", self.result["date"])[:14].replace("T", "_")
        self.path: Path = options.output / (file or f"gpu_{device}_{day}.json")

    def left(self) -> float:
        """Seconds left."""
        return self.end - time.monotonic()

    def note(self, error: BaseException, where: str) -> str:
        """An error as one line for the result; its traceback goes into a log next to it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_suffix(".log"), "a") as log:
            log.write(clean(f"{where}\n{''.join(traceback.format_exception(error))}\n"))
        return describe(error)

    def made(self, makers: Mapping[str, Callable[[], Any]], where: str, times: dict[str, Row]) -> dict[str, Any]:
        """What the makers return; the error of one that fails goes into `times`, and does not stop the others."""
        found = {}
        for name, make in makers.items():
            try:
                found[name] = make()
            except Exception as error:
                times[name] = {"error": self.note(error, f"{where}: {name}")}
        return found

    def compare(
        self,
        makers: Mapping[str, Maker],
        prepare: Callable[[Sequence[Call]], Sampler] | None = None,
        rounds: int = 9,
    ) -> Row:
        """The row of several ways to do the same work: the time or the error of each, and its ratio to the first."""
        prepare = prepare or self.machine.prepare
        times: dict[str, Row] = {}
        prepared = {name: lambda make=make: prepare(make()) for name, make in makers.items()}
        found = take_turns(self.made(prepared, "compare", times), rounds)
        times |= {name: spread(seconds) for name, seconds in found.items()}
        base = next(iter(makers))
        ratios = {f"{name} over {base}": over(found[base], found[name]) for name in found if name != base in found}
        return {"times": {name: times[name] for name in makers}, "facts": ratios}


class Section:
    """A list of entries that are measured alike. `group` is its name in `--sections`."""

    name: str
    group = ""
    note = ""  # what a reader of the rows must know

    def entries(self) -> Sequence[Any]:
        """What is measured, in order of importance, for time may run out. Their strings are the rows' names."""
        raise NotImplementedError

    def problems(self, entry: Any) -> list[GemmProblem]:
        """GEMMs whose algorithms are tuned before this entry is measured, where they have not been."""
        return []

    def goals(self, entry: Any) -> dict[str, float]:
        """How many times as fast as the first way another should be."""
        return {}

    def measure(self, run: Run, entry: Any) -> Row:
        """The row of an entry: `times` by way and `facts` by name, as `Run.compare` returns them."""
        raise NotImplementedError

    def execute(self, run: Run) -> None:
        """Measure all entries as far as the time goes. One that fails leaves its error."""
        entries = [entry for entry in self.entries() if run.options.only in str(entry)]
        rows: dict[str, Row] = {str(entry): {"error": NOT_RUN} for entry in entries}
        run.result["sections"][self.name] = {"note": self.note, "rows": rows}
        write(run.path, run.result)
        for entry in entries:
            if run.left() >= NEEDED:
                try:
                    tune(run, self.problems(entry))
                    rows[str(entry)] = self.measure(run, entry) | {"goals": self.goals(entry)}
                except Exception as error:  # no memory for the operands, say
                    rows[str(entry)] = {"error": run.note(error, f"{self.name}: {entry}")}
                write(run.path, run.result)
                run.machine.forget()
            print(line(str(entry), rows[str(entry)]), flush=True)


def tune(run: Run, problems: list[GemmProblem]) -> None:
    """Tune the GEMMs that have no verdict, quickly: a table for users takes its time, here every second is shared."""
    device = run.machine.device
    possible = [p for p in problems if cusparselt.unsupported_matrix(p.m, p.k, p.dtype) is None]
    todo = [problem for problem in possible if not autotune.verdict_of(problem, device).measured]
    if todo:
        autotune.tune(todo, device)


def line(entry: str, row: Row) -> str:
    """A row as text: the time of each way, in brackets its ratio, with the goal."""
    if "error" in row:
        return f"{entry}: {row['error']}"
    cells = []
    for way, found in row["times"].items():
        cell = f"{way} {round(found['us'], 1):.9g} us" if "us" in found else f"{way} {found['error']}"
        ratios = [value[1] for fact, value in row["facts"].items() if fact.startswith(f"{way} over ")]
        if ratios and "us" in found:
            wanted = row.get("goals", {}).get(way)
            verdict = "" if wanted is None else f", {'meets' if ratios[0] >= wanted else 'MISSES'} {wanted:g}"
            cell += f" ({ratios[0]:.2f}{verdict})"
        if f"{way}: sparse GEMMs" in row["facts"]:
            cell += f" {row['facts'][f'{way}: sparse GEMMs']} sparse GEMMs"
        if f"{way}: peak GB" in row["facts"]:
            cell += f" {row['facts'][f'{way}: peak GB']:.1f} GB"
        cells.append(cell)
    return f"{entry}: {' | '.join(cells)}"


def clean(text: str) -> str:
    """The text without the folders of this machine."""
    for folder, name in ((str(ROOT), "."), (sys.prefix, "python"), (str(Path.home()), "~")):
        text = text.replace(folder, name)
    return text
