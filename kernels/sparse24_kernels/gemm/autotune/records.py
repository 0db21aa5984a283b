"""What autotuning records, and for which sizes and environments it holds: problems, buckets of n, measurements."""

import hashlib
import json
import re
from typing import Any, NamedTuple

import torch

from .. import cusparselt
from ..cusparselt import DTYPES, MULTIPLE
from ..problem import Algorithm, GemmProblem

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


def problem_record(problem: GemmProblem) -> list[Any]:
    """A problem of one dtype as JSON; `parse_problem` reads it back."""
    m, n, k, dtype, column_major, transposed, *_ = problem
    return [m, n, k, str(dtype).removeprefix("torch."), column_major, transposed]


def parse_problem(record: list[Any]) -> GemmProblem:
    m, n, k, dtype, column_major, transposed = record
    return GemmProblem(m, n, k, _DTYPES[dtype], column_major, transposed)
