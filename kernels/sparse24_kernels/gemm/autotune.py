"""Which GEMMs run sparse, on a GPU by cuSPARSELt and on a CPU by our kernels: verdicts from measurements, and dense
math where nothing was measured.

Measurements are kept in `gemms.json` in the user's cache folder, by environment and problem. Each holds for a *bucket*
of n (`problem.bucket`), measured at its largest n. So varying batch shapes need no measurement each, and a graph that
torch.compile makes for a dynamic n holds for the whole bucket. A verdict stays the same until the process ends or
`tune` measures.
"""

import json
import logging
import operator
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from .. import first_use
from ..cache_folder import ON_CHANGE, cache_folder, file_lock, write_json
from ..cpu.library import loaded
from . import cpu_kernels, cusparselt
from .measure import prepare, try_algorithm
from .problem import GemmProblem, bucket, bucket_start

FORMAT = 9

MARGIN = 1.02
"""Speedup from which sparse is chosen. Medians of interleaved timings vary by one to two per cent between runs; above
this margin, that variation does not make sparse slower than dense."""

NOT_TUNED = "not tuned: run `hf-sparse24 tune`"

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*cusparselt.DTYPES, torch.float32)}


class Measured(NamedTuple):
    """An algorithm of the library that passed its checks, its time and that of dense math, measured in turns, and the
    time that the host takes to start it."""

    algorithm: int
    sparse_us: float
    dense_us: float
    host_us: float = 0.0

    @property
    def speedup(self) -> float:
        return self.dense_us / self.sparse_us


Table = dict[tuple[str, GemmProblem], Measured | str]
"""The fastest algorithm that passed its checks, or why none did; by environment and problem, whose n is that of its
bucket."""


class Verdict(NamedTuple):
    """The decision for a GEMM: `backend` is "cusparselt", "cpu" or "dense".

    `algorithm` is the fastest that passed its checks, with its times, even where dense is faster; None where none
    passed. `measured` is False where no measurement exists, so nothing is known of the sparse algorithms.
    """

    backend: str
    algorithm: int | None = None
    sparse_us: float | None = None
    dense_us: float | None = None
    reason: str = ""
    measured: bool = True


_log = logging.getLogger(__name__)


def current_environment(device: torch.device) -> str:
    """All that measurements depend on besides the problem: the GPU and its capability, or the CPU, its threads and the
    path of our kernels; the versions of cuSPARSELt (0.8.1 is "801") and torch, and who calls it, or the file of our
    kernels."""
    library = str(cusparselt.version())
    facts = [device.type, library]
    if device.type == "cuda":
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
        facts = [torch.cuda.get_device_name(device), capability, library, cusparselt.way(device)]
    elif uses_cpu_kernels(device) and cpu_kernels.unsupported_device(device) is None:
        threads = f"threads: {torch.get_num_threads()}"
        facts = [first_use.device_name(device), threads, loaded().path, loaded().file.name]
    return ", ".join([*facts, f"torch {torch.__version__}"])


def uses_cpu_kernels(device: torch.device) -> bool:
    """Whether our kernels for CPUs would run the sparse GEMMs, and not cuSPARSELt."""
    return device.type == "cpu" and cusparselt.unsupported_device(device) is not None


def unsupported_device(device: torch.device) -> str | None:
    """Why nothing runs a sparse GEMM on `device`, or None where something does."""
    return (cpu_kernels if uses_cpu_kernels(device) else cusparselt).unsupported_device(device)


def unsupported_matrix(problem: GemmProblem, device: torch.device) -> str | None:
    """Why no sparse algorithm of such a device takes the operand of a problem, or None where one does."""
    if uses_cpu_kernels(device):
        return cpu_kernels.unsupported_matrix(problem.k, problem.dtype)
    return cusparselt.unsupported_matrix(problem.m, problem.k, problem.dtype)


def table_path() -> Path:
    return cache_folder() / "gemms.json"


def verdict_of(problem: GemmProblem, device: torch.device) -> Verdict:
    """The verdict for `problem` on `device`; n may be symbolic while torch.compile traces. ValueError as `read`."""
    # While tracing, comparisons in `bucket` guard n, `index` specialises m and k, and `_verdict` gets constants.
    m, n, k = operator.index(problem.m), bucket(problem.n), operator.index(problem.k)
    return _verdict(m, n, k, problem.dtype, problem.transposed, device)


@torch.compiler.assume_constant_result
def _verdict(m: int, n: int, k: int, dtype: torch.dtype, transposed: bool, device: torch.device) -> Verdict:
    return _decide(GemmProblem(m, n, k, dtype, transposed), device)


@cache  # every layer asks in every step
def _decide(problem: GemmProblem, device: torch.device) -> Verdict:
    if reason := unsupported_device(device) or unsupported_matrix(problem, device):
        return Verdict("dense", reason=reason, measured=False)
    found = _table().get((current_environment(device), problem))
    if found is None:
        return untuned(problem, device)
    where = f"measured at {problem.m} x {problem.n} x {problem.k}"
    if isinstance(found, str):
        return Verdict("dense", reason=f"{where}: no algorithm passes the checks: {found}")
    algorithm, sparse_us, dense_us, host_us = found
    reason = f"{where}: sparse {sparse_us:.1f} us, dense {dense_us:.1f} us, {found.speedup:.2f} times as fast"
    backend = "cpu" if uses_cpu_kernels(device) else "cusparselt"
    if found.speedup < MARGIN:
        backend, reason = "dense", f"{reason} where {MARGIN} is required"
    elif dense_us < MARGIN * host_us:  # a step of many such calls would wait for the host
        backend, reason = "dense", f"{reason}, but the host takes {host_us:.1f} us to start it"
    return Verdict(backend, algorithm, sparse_us, dense_us, reason)


def untuned(problem: GemmProblem, device: torch.device) -> Verdict:
    """The verdict without a measurement. Of a symbolic size only comparisons, so that one graph holds for many."""
    least = cpu_kernels.faster_from() if uses_cpu_kernels(device) else None
    if least is None:
        return Verdict("dense", reason=NOT_TUNED, measured=False)
    if problem.m < least or problem.k < least or problem.n < bucket_start(least):  # all tokens of a bucket run alike
        reason = f"below {least} tokens or features: `hf-sparse24 tune` measures it"
        return Verdict("dense", reason=reason, measured=False)
    refused = unsupported_matrix(problem, device)
    reason = refused or f"from {least} tokens and features on, faster on such CPUs"
    return Verdict("dense" if refused else "cpu", 0, reason=reason, measured=False)


def is_measured(problem: GemmProblem, device: torch.device) -> bool:
    """Whether a problem was measured. Of a symbolic size only comparisons, so that a graph holds for all others."""
    m, n, k, _, transposed = problem[:5]
    return any(
        [m, transposed] == known and first <= n <= last and k == contracted
        for *known, first, last, contracted in _measured(device)
    )


@torch.compiler.assume_constant_result
def _measured(device: torch.device) -> list[tuple[int, bool, int, int, int]]:
    environment = current_environment(device) if _table() else None  # a device may have none
    problems = [problem for where, problem in _table() if where == environment]
    return sorted({(p.m, p.transposed, bucket_start(p.n), p.n, p.k) for p in problems})


@cache
def _table() -> Table:
    try:
        return read()
    except (OSError, RuntimeError) as error:  # such as a folder of another user
        warnings.warn(f"{error}: no GEMM is tuned", stacklevel=2)
        return {}


def tune(
    problems: Iterable[GemmProblem],
    device: torch.device,
    on_progress: Callable[[GemmProblem, int], None] = lambda problem, done: None,
) -> dict[GemmProblem, Verdict]:
    """Measure the buckets of problems, save after each, and return the verdicts on them.

    Ctrl-C keeps the buckets that are measured. `on_progress` gets each bucket's problem, and how many are done.
    ValueError: no sparse GEMM runs here, or the table is damaged. RuntimeError: the device fails.
    """
    if reason := unsupported_device(device):
        raise ValueError(f"nothing to tune: {reason}")
    problems = list(problems)
    for done, problem in enumerate(dict.fromkeys(problem._replace(n=bucket(problem.n)) for problem in problems)):
        on_progress(problem, done)
        if unsupported_matrix(problem, device) is None:
            _remember(problem, device, search(problem, device))
    return {problem: verdict_of(problem, device) for problem in problems}


@torch.no_grad()
def search(problem: GemmProblem, device: torch.device) -> Measured | str:
    """The faster of the library's default algorithm and the one that its own search finds, each checked and timed, or
    why both failed. A CPU has one algorithm. RuntimeError: a fault of the device, with which every call fails."""
    if uses_cpu_kernels(device):
        return Measured(0, *cpu_kernels.times(problem))
    passed: list[Measured] = []
    failures: list[str] = []
    with torch.cuda.device(device if device.type == "cuda" else -1):
        try:
            cases = prepare(problem, device)
        except torch.OutOfMemoryError as error:
            return _first_line(error)
        for name in ("default", "search"):
            try:
                found = 0
                if name == "search":
                    found = cusparselt.search(cases[0].compressed, cases[0].dense, problem.transposed)
                if found not in [each.algorithm for each in passed]:
                    passed.append(Measured(found, *try_algorithm(cases, found)))
            except RuntimeError as error:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                failures.append(f"the library's {name}: {_first_line(error)}")
    for failure in failures:
        _log.warning(f"{problem.m} x {problem.n} x {problem.k}: {failure}")
    return max(passed, key=lambda found: found.speedup) if passed else "; ".join(failures)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]


def _remember(problem: GemmProblem, device: torch.device, found: Measured | str) -> None:
    with file_lock(table_path()):  # others may have saved theirs meanwhile
        write(read() | {(current_environment(device), problem): found})
    for forget in (_table.cache_clear, _decide.cache_clear, *ON_CHANGE):
        forget()


def read() -> Table:
    """All measurements of the file, none where there is no file. ValueError: it is damaged, or another version's.
    OSError: it may not be read. RuntimeError: there is no home directory for it."""
    path = table_path()
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']}, not {FORMAT}")
        return dict(map(_parsed, data["entries"]))
    except FileNotFoundError:
        return {}
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(f"{path} cannot be read ({what}): delete it and run `hf-sparse24 tune` again") from error


def write(table: Table) -> None:
    entries = []
    for (environment, problem), found in table.items():
        m, n, k, dtype, transposed = problem[:5]
        entries.append([environment, [m, n, k, str(dtype).removeprefix("torch."), transposed], found])
    write_json(table_path(), {"format": FORMAT, "entries": entries})


def _parsed(record: list) -> tuple[tuple[str, GemmProblem], Measured | str]:
    environment, (m, n, k, dtype, transposed), found = record
    if not all(type(size) is int and size > 0 for size in (m, n, k)):
        raise ValueError(f"{m} x {n} x {k} has a size that is no whole number above 0")
    if not isinstance(found, str):
        found = Measured(int(found[0]), *map(float, found[1:]))
        if not (found.sparse_us > 0 and found.dense_us > 0):
            raise ValueError("a time is not above 0")
    return (str(environment), GemmProblem(m, n, k, _DTYPES[dtype], transposed)), found
