"""What autotuning records, as tuples and as JSON: environments, measurements, failures, and buckets of n."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from .. import cusparselt
from ..cusparselt import DTYPES, MULTIPLE
from ..problem import Algorithm, GemmProblem

FORMAT = 2
"""Of the files. Of another format, no entry is used: its numbers may mean something else. Failures are: at worst an
algorithm is left out that would work."""

SEGMENT_K = -1
"""The `split_k` that asks for segment-k."""
SEGMENT_K_FROM = 400
"""Segment-k was seen to hang for smaller n."""

BUCKETS = tuple(edge for power in range(4, 32) for edge in (2**power, 3 * 2 ** (power - 1)) if edge % MULTIPLE == 0)

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def bucket(n: int) -> int:
    """The largest n that shares a verdict with `n`: the next power of two or midpoint of two (16, 32, 48, 64, 96, ...).

    Rounded up, because full batches are usually powers of two and the last batch is smaller. Only comparisons, so
    torch.compile turns a dynamic n into a guard on this range.
    """
    for edge in BUCKETS:
        if n <= edge:
            return edge
    return BUCKETS[-1]


def bucket_start(n: int) -> int:
    """The smallest n that shares a verdict with `n`."""
    index = BUCKETS.index(bucket(n))
    return BUCKETS[index - 1] + 1 if index else 1


class Environment(NamedTuple):
    """What a measurement is valid for besides its problem. Versions as torch gives them: cuSPARSELt 0.8.1 is "801"."""

    device: str
    capability: str
    torch: str
    cusparselt: str

    def file_name(self) -> str:
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", "_".join(self)).strip("-")
        return f"{readable}-{hashlib.sha256(json.dumps(self).encode()).hexdigest()[:8]}.json"


def current_environment(device: torch.device) -> Environment:
    name, capability = device.type, ""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
    return Environment(name, capability, str(torch.__version__), str(cusparselt.version()))


class Measured(NamedTuple):
    """An algorithm that passed its checks, with its time and that of dense math, measured in turns."""

    algorithm: Algorithm
    sparse_us: float
    dense_us: float

    @property
    def speedup(self) -> float:
        return self.dense_us / self.sparse_us


Entries = dict[GemmProblem, tuple[Measured, ...]]
"""What was measured: for each problem the algorithms of its final round, the fastest first."""


class Failure(NamedTuple):
    """An algorithm that hung, crashed or gave wrong numbers, and the problem where it did.

    It excludes the algorithm from that problem's bucket, and from no other size: all of them are checked by themselves,
    and a time-out on a busy machine, or a wrong result of one odd size, would else cost every other size its best.
    """

    problem: GemmProblem
    algorithm: Algorithm
    reason: str

    @property
    def key(self) -> tuple[Hashable, ...]:
        return self.problem._replace(n=bucket(self.problem.n)), self.algorithm


def problem_record(problem: GemmProblem) -> dict[str, Any]:
    """For JSON; `parse_problem` reads it back."""
    return problem._asdict() | {"dtype": str(problem.dtype).removeprefix("torch.")}


def parse_problem(record: Any) -> GemmProblem:
    kinds = {"m": int, "n": int, "k": int, "dtype": str, "dense_is_column_major": bool, "transposed": bool}
    m, n, k, dtype, column_major, transposed = _fields(record, kinds)
    if dtype not in _DTYPES or not all(0 < size < 2**31 for size in (m, n, k)):
        raise ValueError(f"not a GEMM problem: {record}")
    return GemmProblem(m, n, k, _DTYPES[dtype], column_major, transposed)


def _parse_algorithm(record: Any) -> Algorithm:
    algorithm = Algorithm(*_fields(record, {"id": int, "split_k": int, "split_k_mode": int}))
    if not (0 <= algorithm.id < 1024 and -1 <= algorithm.split_k < 1024 and -1 <= algorithm.split_k_mode < 16):
        raise ValueError(f"not an algorithm: {record}")
    return algorithm


def _parse_measured(record: Any) -> Measured:
    return Measured(_parse_algorithm(record), *_fields(record, {"sparse_us": float, "dense_us": float}))


class Contents(NamedTuple):
    """What a file holds: what this version can read, and the JSON that a save keeps.

    `unread`: why records could not be read; they are in `data` all the same. `lost`: why `data` is not all of the file,
    so that the file has to be kept aside before another replaces it.
    """

    entries: Entries
    failures: list[Failure]
    data: dict[str, Any]
    unread: list[str]
    lost: str = ""


NOTHING = Contents({}, [], {"entries": [], "failures": []}, [])


def parse_table(data: Any, environment: Environment) -> Contents:
    """Read a file's JSON, record by record.

    Raises:
        ValueError: it is no table.
    """
    (where,) = _fields(data, {"environment": dict})
    if where != environment._asdict():
        return NOTHING._replace(lost=f"it is of another environment: {where}")
    lost, unread = "", list[str]()
    if type(data.get("format")) is not int or data["format"] != FORMAT:
        lost = f"it has format {data.get('format')!r}, this version reads {FORMAT}"
        data = {"entries": [], "failures": data.get("failures")}
    entries, failures = _fields(data, {"entries": list, "failures": list})
    found = dict(_parse_each(entries, _parse_entry, unread))
    return Contents(found, _parse_each(failures, _parse_failure, unread), data, unread, lost)


def salvage_table(text: str, lost: str) -> Contents:
    """The failures in the text of a file that is no table, a truncated one for example: nothing else is used of it."""
    decoder, failures, position = json.JSONDecoder(), list[Failure](), text.find("{")
    while position >= 0:
        try:
            record, end = decoder.raw_decode(text, position)
            failures.append(_parse_failure(record))
        except (ValueError, RecursionError):
            end = position + 1  # there may be one in it
        position = text.find("{", end)
    data = NOTHING.data | {"failures": list(map(_failure_record, failures))}
    return NOTHING._replace(failures=failures, data=data, lost=lost)


def dump_table(
    environment: Environment,
    contents: Contents,
    entries: Mapping[GemmProblem, tuple[Measured, ...]],
    failures: list[Failure],
) -> str:
    """The JSON of a file with records added: an entry replaces that of its problem, a failure stays for good."""

    def is_replaced(record: Any) -> bool:
        return any(problem in entries for problem in _parse_each([record], parse_problem, []))

    def measured(candidate: Measured) -> dict[str, Any]:
        return candidate.algorithm._asdict() | {"sparse_us": candidate.sparse_us, "dense_us": candidate.dense_us}

    new_entries = [problem_record(p) | {"candidates": [measured(c) for c in entries[p]]} for p in entries]
    known = {failure.key for failure in contents.failures}
    new_failures = {failure.key: failure for failure in failures if failure.key not in known}.values()
    data = contents.data | {
        "format": FORMAT,
        "environment": environment._asdict(),
        "entries": [record for record in contents.data["entries"] if not is_replaced(record)] + new_entries,
        "failures": contents.data["failures"] + list(map(_failure_record, new_failures)),
    }
    return json.dumps(data, indent=1) + "\n"


Parsed = TypeVar("Parsed")


def _parse_each(records: list[Any], parse: Callable[[Any], Parsed], unread: list[str]) -> list[Parsed]:
    """The records that can be read; of the others, the reasons go into `unread`."""
    parsed = []
    for record in records:
        try:
            parsed.append(parse(record))
        except (ValueError, OverflowError, RecursionError) as error:  # numbers beyond floats, lists within lists
            unread.append(str(error))
    return parsed


def _parse_entry(record: Any) -> tuple[GemmProblem, tuple[Measured, ...]]:
    (candidates,) = _fields(record, {"candidates": list})
    return parse_problem(record), tuple(map(_parse_measured, candidates))


def _failure_record(failure: Failure) -> dict[str, Any]:
    return problem_record(failure.problem) | failure.algorithm._asdict() | {"reason": failure.reason}


def _parse_failure(record: Any) -> Failure:
    return Failure(parse_problem(record), _parse_algorithm(record), *_fields(record, {"reason": str}))


def _fields(record: Any, kinds: dict[str, Any]) -> list[Any]:
    """The named values of a JSON object.

    Raises:
        ValueError: a value is missing or of another type (a bool is not an int), or a time is not finite and positive.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{str(record)[:60]!r} is not an object")
    values = []
    for name, kind in kinds.items():
        value: Any = record.get(name)
        if kind is float and type(value) is int:
            value = float(value)
        fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        if not fits or (kind is float and not 0 < value < math.inf):
            raise ValueError(f"{name} is {str(value)[:60]!r}")
        values.append(value)
    return values
