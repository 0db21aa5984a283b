"""What was measured: one JSON file per environment in the user's cache.

The meaning of an algorithm id, and its speed, depend on the device and on the versions of torch and cuSPARSELt. A file
that cannot be read, or has another format, counts as absent with a warning, and the next tuning replaces it.
"""

import hashlib
import json
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...cache_folder import cache_folder, write_json
from .. import cusparselt
from ..cusparselt import DTYPES, MULTIPLE
from ..problem import Algorithm, GemmProblem

FORMAT = 4

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

    def path(self) -> Path:
        """The file of this environment in the user's cache folder.

        Raises:
            RuntimeError: there is no home directory to have it.
        """
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", "_".join(self)).strip("-")
        unique = hashlib.sha256(json.dumps(self).encode()).hexdigest()[:8]
        return cache_folder() / f"{readable}-{unique}.json"


def current_environment(device: torch.device) -> Environment:
    """The environment of this process on `device`."""
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


class Entry(NamedTuple):
    """The outcome of a search: the algorithms that passed every check, the fastest first, and why others failed."""

    candidates: tuple[Measured, ...] = ()
    failures: tuple[str, ...] = ()


Table = dict[GemmProblem, Entry]
"""Outcomes by problem, whose n is that of its bucket."""


def problem_record(problem: GemmProblem) -> list[Any]:
    """A problem of one dtype as JSON; `parse_problem` reads it back."""
    m, n, k, dtype, column_major, transposed, *_ = problem
    return [m, n, k, str(dtype).removeprefix("torch."), column_major, transposed]


def parse_problem(record: list[Any]) -> GemmProblem:
    m, n, k, dtype, column_major, transposed = record
    return GemmProblem(m, n, k, _DTYPES[dtype], column_major, transposed)


def read(environment: Environment) -> Table:
    """What the file of an environment holds: nothing where there is none or, with a warning, where it is damaged."""
    try:
        path = environment.path()
        data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"format": FORMAT, "entries": []}
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}")
        return {
            parse_problem(problem): Entry(
                tuple(Measured(Algorithm(*found), float(sparse), float(dense)) for found, sparse, dense in candidates),
                tuple(map(str, failures)),
            )
            for problem, (candidates, failures) in data["entries"]
        }
    except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        message = f"sparse24 autotune: earlier measurements cannot be read ({what}): all counts as not tuned"
        warnings.warn(message, stacklevel=2)
        return {}


def write(environment: Environment, table: Table) -> None:
    """Replace the file of an environment completely or not at all, so that no reader sees half of it.

    Raises:
        OSError: the folder cannot be written.
    """
    entries = [[problem_record(problem), entry] for problem, entry in table.items()]
    write_json(environment.path(), {"format": FORMAT, "environment": environment, "entries": entries})
