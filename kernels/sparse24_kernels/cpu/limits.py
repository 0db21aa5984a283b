"""Up to how many tokens the kernels for packed weights are faster than dense math on a weight that is unpacked first.

Layers that `tune` has not measured on this CPU take the limits that were measured elsewhere with its path, `SHIPPED`.
"""

import json
import math
import re
import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from timeit import timeit
from typing import Any, NamedTuple

import torch

from .. import reference
from ..cache_folder import cache_folder, file_lock, write_json
from ..first_use import device_name
from ..formats import Packed, Pattern, scale_columns
from . import build
from .library import DTYPES, load, loaded
from .packed import packed_linear, unpack_nm

TOKENS = (16, 64, 256, 1024)
"""How many tokens are measured. Below the first, every path reads the weight once, which dense math cannot do."""

ROUNDS = 3
FP32: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults of torch are


class Layer(NamedTuple):
    """A kind of packed layers that has a limit: the dtypes of x and of the values, and the pattern, as text such as
    "bfloat16", "int8" and "2:4", and a size."""

    dtype: str
    values: str
    pattern: str
    out: int
    inputs: int


Limits = dict[Layer, int | None]
"""The most tokens that a kernel is faster for; None where it was for all that were measured."""

SHIPPED: dict[str, dict[tuple[str, str], int | None]] = {
    "amx": {},
    "avx512_bf16": {},
    "avx512": {},
    "avx2": {},
    "portable": {("float32", "int8"): 256},
}
"""Limits by CPU path, by the dtypes of x and of the values; empty: none. Measured at 2048 x 2048, against what torch
runs on CPUs of that kind; fp32 on AMX is the code of AVX-512."""

_measured: Limits | None = None

ON_CHANGE: list[Callable[[], None]] = []
"""Functions to call when tuning has changed how packed weights run."""


def layer(dtype: torch.dtype, values: torch.dtype, pattern: Pattern, out: int, inputs: int) -> Layer:
    of_x, of_values = (str(each).removeprefix("torch.") for each in (dtype, values))
    return Layer(of_x, of_values, str(pattern), out, inputs)


def most_tokens(wanted: Layer) -> tuple[int | None, str]:
    """The most tokens that the kernel is faster for, None for any number; and where that is known from.

    Of layers that were not measured, the limit is that of the measured layer of the nearest size.
    """
    global _measured
    path = loaded().path
    if _measured is None:
        _measured = _read()
    alike = [layer for layer in _measured if layer[:3] == wanted[:3]]
    if alike:
        size = max(1, wanted.out * wanted.inputs)
        nearest = min(alike, key=lambda layer: abs(math.log(layer.out * layer.inputs / size)))
        return _measured[nearest], f"measured here at {nearest.out} x {nearest.inputs}"
    if path not in SHIPPED:
        return TOKENS[0], f"path {path!r} was not measured: run `hf-sparse24 tune`"
    return SHIPPED[path].get(wanted[:2]), f"measured on another machine with {path!r}"


def tune(
    layers: Iterable[tuple[int, int, Pattern]],
    dtype: torch.dtype,
    on_progress: Callable[[int], None] = lambda done: None,
) -> dict[Layer, list[tuple[int, float, float]]]:
    """Measure layers, with values of `dtype` and with int8 ones, and keep their limits for this process and later ones.

    `layers` are (out, inputs, pattern) of what can be packed; `on_progress` gets the number of those that are done.
    Returned are, for each layer, the measured numbers of tokens with the kernel's and dense math's microseconds.
    ValueError: no kernels run on this CPU, or not on `dtype`.
    """
    global _measured
    if isinstance(reason := load(), str):
        raise ValueError(f"nothing to tune: {reason}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype}: the kernels take fp32, bf16 and fp16")
    found: dict[Layer, list[tuple[int, float, float]]] = {}
    for done, (out, inputs, pattern) in enumerate(layers):
        values, mask = reference.packed.pack_nm(torch.randn(out, inputs, **FP32).to(dtype), *pattern)
        integers = torch.randint_like(values, -127, 128, dtype=torch.int8)
        scales = torch.rand(out, scale_columns(inputs), **FP32).to(dtype)
        for each in (Packed(values, mask, None, pattern.m), Packed(integers, mask, scales, pattern.m)):
            found[layer(dtype, each.values.dtype, pattern, out, inputs)] = [
                (tokens, *_times(each, tokens)) for tokens in TOKENS
            ]
        with file_lock(_path()):  # others may have saved theirs meanwhile
            _measured = _read() | {layer: limit(times) for layer, times in found.items()}
            write_json(_path(), list(_measured.items()))
        on_progress(done + 1)
    for forget in ON_CHANGE:
        forget()
    return found


def limit(times: Sequence[tuple[int, float, float]]) -> int | None:
    """The most tokens up to which the kernel was not slower, of (tokens, its time, dense math's); None for all."""
    slower = [number for number, (_, ours, dense) in enumerate(times) if ours > dense]
    return None if not slower else 8 if slower[0] == 0 else times[slower[0] - 1][0]


def _times(packed: Packed, tokens: int) -> tuple[float, float]:
    x = torch.randn(tokens, packed.columns, **FP32).to(packed.dtype)
    linear = torch.nn.functional.linear
    return in_turns(lambda: packed_linear(x, *packed, None), lambda: linear(x, unpack_nm(*packed)), ROUNDS)


def in_turns(ours: Callable[[], object], dense: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Microseconds of both, medians of calls that take turns; the first ones warm up."""
    times = [(timeit(ours, number=1), timeit(dense, number=1)) for _ in range(rounds + 1)][1:]
    return 1e6 * statistics.median(time for time, _ in times), 1e6 * statistics.median(time for _, time in times)


def _path() -> Path:
    cpu = device_name(torch.device("cpu"))
    facts = f"cpu_{cpu}_{loaded().path}_threads_{torch.get_num_threads()}_{torch.__version__}"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", facts).strip("-")
    return cache_folder() / f"{name}-{build.fingerprint()}.json"


def _read() -> Limits:
    try:
        path = _path()
        return {Layer(*layer): most for layer, most in json.loads(path.read_text())} if path.exists() else {}
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        warnings.warn(f"the limits of packed weights on this CPU cannot be read ({error}): not tuned", stacklevel=2)
        return {}
