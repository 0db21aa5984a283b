"""Up to how many tokens the kernels for packed weights are faster than dense math on a weight that is unpacked first.

Layers that `tune` has not measured on this CPU take the limits that were measured elsewhere with its path, `SHIPPED`.
"""

import json
import re
import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from timeit import timeit
from typing import Any

import torch

from .. import reference
from ..cache_folder import ON_CHANGE, cache_folder, file_lock, write_json
from ..first_use import device_name
from ..formats import Packed, Pattern, scale_columns
from .library import DTYPES, load, loaded
from .packed import packed_linear, unpack_nm

TOKENS = (16, 64, 256, 1024)
"""How many tokens are measured. Below the first, every path reads the weight once, which dense math cannot do."""

ROUNDS = 3
FP32: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults of torch are

Limits = dict[str, int | None]
"""The most tokens that a kernel is faster for, None where it was for all that were measured; by `layer`."""

SHIPPED: dict[str, Limits] = {"amx": {}, "avx512_bf16": {}, "avx512": {}, "avx2": {}, "portable": {"float32 int8": 256}}
"""Limits by CPU path, by the dtypes of x and of the values; empty: none. Measured at 2048 x 2048, against what torch
runs on CPUs of that kind; fp32 on AMX is the code of AVX-512."""


def layer(dtype: torch.dtype, values: torch.dtype, pattern: Pattern, out: int, inputs: int) -> str:
    """The name of a kind of packed layers, such as "bfloat16 int8 2:4 4096 x 1024": x, values, pattern, size."""
    return f"{dtype} {values} {pattern} {out} x {inputs}".replace("torch.", "")


def most_tokens(layer: str) -> tuple[int | None, str]:
    """The most tokens that the kernel is faster for, None for any number; and where that is known from."""
    path, measured = loaded().path, _read(_name())
    if layer in measured:
        return measured[layer], "measured here"
    if path not in SHIPPED:
        return TOKENS[0], f"path {path!r} was not measured: run `hf-sparse24 tune`"
    dtypes = " ".join(layer.split()[:2])
    return SHIPPED[path].get(dtypes), f"measured on another machine with {path!r}"


def tune(
    layers: Iterable[tuple[int, int, Pattern]],
    dtype: torch.dtype,
    on_progress: Callable[[int], None] = lambda done: None,
) -> dict[str, list[tuple[int, float, float]]]:
    """Measure layers, with values of `dtype` and with int8 ones, and keep their limits for this process and later ones.

    `layers` are (out, inputs, pattern) of what can be packed; `on_progress` gets the number of those that are done.
    Returned are, for each layer, the measured numbers of tokens with the kernel's and dense math's microseconds.
    ValueError: no kernels run on this CPU, or not on `dtype`.
    """
    if isinstance(reason := load(), str):
        raise ValueError(f"nothing to tune: {reason}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype}: the kernels take fp32, bf16 and fp16")
    found: dict[str, list[tuple[int, float, float]]] = {}
    for done, (out, inputs, pattern) in enumerate(layers):
        values, mask = reference.packed.pack_nm(torch.randn(out, inputs, **FP32).to(dtype), *pattern)
        integers = torch.randint_like(values, -127, 128, dtype=torch.int8)
        scales = torch.rand(out, scale_columns(inputs), **FP32).to(dtype)
        for each in (Packed(values, mask, None, pattern.m), Packed(integers, mask, scales, pattern.m)):
            name = layer(dtype, each.values.dtype, pattern, out, inputs)
            found[name] = [(tokens, *_times(each, tokens)) for tokens in TOKENS]
        with file_lock(file := cache_folder() / _name()):  # others may have saved theirs meanwhile
            write_json(file, _read.__wrapped__(file.name) | {layer: limit(times) for layer, times in found.items()})
            _read.cache_clear()
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


def _name() -> str:
    """The name of the file with the limits of this CPU."""
    cpu = device_name(torch.device("cpu"))
    facts = f"cpu {cpu} {loaded().path} threads {torch.get_num_threads()} {torch.__version__} {loaded().file.stem}"
    return re.sub(r"[^A-Za-z0-9.]+", "-", facts) + ".json"


@cache
def _read(name: str) -> Limits:
    """The limits that were measured; none where the file is not there or, with a warning, damaged."""
    try:
        file = cache_folder() / name
        limits = json.loads(file.read_text()) if file.exists() else {}
        if not all(most is None or (type(most) is int and most > 0) for most in limits.values()):
            raise ValueError("a limit is no number of tokens")
        return limits
    except (OSError, RuntimeError, AttributeError, ValueError) as error:
        warnings.warn(f"{name}, the limits of packed weights, cannot be read ({error}): not tuned", stacklevel=2)
        return {}
