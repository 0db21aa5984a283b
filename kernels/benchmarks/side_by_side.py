"""What the sections on products and models share: timing in turn, tuning within a share of the time, judging errors."""

import threading
from collections.abc import Callable, Iterable

import torch
from report import clean
from shapes import possible
from sparse24_kernels import tuner
from sparse24_kernels.cusparselt import Problem
from timing import OutOfTime, describe, interleave, time_limit
from torch import Tensor

SECONDS_PER_PROBLEM = 5.0
"""What the tuner may spend on trying algorithms for one product. A table for users takes its time; here every second is
shared."""

START, OVERHEAD = 12.0, 3.0
"""Expected seconds: until the tuner's process is ready, and for preparing a product and its final round."""

NOT_RUN = "not run: out of time"

Maker = Callable[[], list[Callable[[], object]]]
"""Gives calls that do the same work on several sets of arguments."""


def side_by_side(run, makers: dict[str, Maker], limit: float) -> tuple[dict[str, dict], str | None]:
    """Several ways to do something, sampled in turn: each with its times or its error; and the clocks meanwhile."""
    rows: dict[str, dict] = {name: {} for name in makers}
    samplers, clocks = {}, None
    try:
        with time_limit(min(limit, run.left(reserve=5))):
            for name, make in makers.items():
                try:
                    samplers[name], rows[name]["method"] = run.machine.prepare(make())
                except Exception as error:  # one that fails must not stop the others
                    rows[name] = {"error": clean(describe(error))}
            with clocks_during(run.machine) as noted:
                for name, times in interleave(samplers).items():
                    rows[name] |= times
            clocks = noted()
    except (Exception, OutOfTime) as error:
        rows = {name: row if "error" in row else {"error": clean(describe(error))} for name, row in rows.items()}
    samplers.clear()  # graphs hold the memory of their results
    return rows, clocks


class clocks_during:
    """Reads the clocks while the block runs, which is when they say something."""

    def __init__(self, machine):
        self.machine, self.found = machine, []

    def __enter__(self) -> Callable[[], str | None]:
        self.thread = threading.Thread(target=lambda: self.found.append(self.machine.clocks()), daemon=True)
        self.thread.start()
        return self._read

    def _read(self) -> str | None:
        self.thread.join(timeout=20)
        return self.found[0] if self.found else None

    def __exit__(self, *_):
        self._read()


def forget(run, name: str) -> None:
    """Give memory back after an entry; where not even that works, say so and go on."""
    try:
        run.machine.forget()
    except Exception as error:
        run.result["errors"][name] = clean(describe(error))


def tune_first(run, problems: Iterable[Problem], seconds: float) -> None:
    """Tune what has not been measured yet, in order, as far as `seconds` go; every verdict goes into the result.

    What was not reached is dense under `auto`, and under `cusparselt` runs by the library's own choice. What an earlier
    run on this machine has measured, or a table that is shipped, is taken as it is.
    """
    device, rows = run.machine.device, run.result.setdefault("tuning", {})
    wanted = possible(list(problems))
    todo = [problem for problem in wanted if name_of(problem) not in rows or not rows[name_of(problem)]["tried"]]
    todo = [problem for problem in todo if tuner.choose(problem, device).sparse_us is None]
    seconds = min(seconds, run.left(reserve=10))
    fits = todo[: max(0, int((seconds - START) / (SECONDS_PER_PROBLEM + OVERHEAD)))]
    try:
        if fits:
            with time_limit(seconds):
                tuner.tune(fits, device, seconds_per_problem=SECONDS_PER_PROBLEM)
    except OutOfTime:
        pass  # what was measured until then counts, and the table of verdicts shows the rest
    except Exception as error:
        run.result["errors"]["tuning"] = clean(describe(error))
    for problem in wanted:
        name, verdict = name_of(problem), tuner.choose(problem, device)
        rows[name] = {
            "backend": verdict.backend,
            "algorithm": None if verdict.algorithm is None else list(verdict.algorithm),
            "sparse_us": verdict.sparse_us,
            "dense_us": verdict.dense_us,
            "reason": clean(verdict.reason),
            "tried": problem in fits or rows.get(name, {}).get("tried", False),
        }
    measured = sum(rows[name_of(problem)]["sparse_us"] is not None for problem in wanted)
    print(f"tuner: {measured} of {len(wanted)} products measured", flush=True)
    run.write()


def name_of(problem: Problem) -> str:
    layout = "column-major" if problem.dense_is_column_major else "row-major"
    order = ", transposed" if problem.transposed else ""
    return f"{problem.m}x{problem.k} @ {problem.k}x{problem.n} {layout}{order} {str(problem.dtype)[6:]}"


def assert_three_way(ours: Tensor, dense: Tensor, truth: Tensor, what: str) -> None:
    """No further from the truth than twice the dense product of the same dtype is, plus one rounding.

    Both in the whole (2-norm) and at the worst element. NaN fails.
    """
    assert ours.shape == truth.shape, f"{what}: {tuple(ours.shape)}, not {tuple(truth.shape)}"
    assert ours.dtype == dense.dtype, f"{what}: {ours.dtype}, not {dense.dtype}"
    truth, eps = truth.to(torch.promote_types(truth.dtype, torch.float32)), torch.finfo(ours.dtype).eps
    if not truth.numel():
        return
    for name, size in (("norm", torch.linalg.vector_norm), ("largest", lambda x: x.abs().max())):
        error, allowed = size(ours - truth).item(), 2 * size(dense - truth).item() + eps * size(truth).item()
        assert error <= allowed, f"{what}: error {error:.3g} ({name}), at most {allowed:.3g} is allowed"


def sets_that_fill(run, bytes_of_one: int, most: int = 8) -> int:
    """How many sets of arguments no call finds in the cache, at most `most`."""
    return max(1, min(most, -(-4 * run.machine.l2_bytes // max(1, bytes_of_one))))


def randn(device: torch.device, *shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Gaussian values, the same ones each time; made in `dtype`, for there may be a billion of them."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


def judged(what: str, ratio: float | None, target: float) -> dict:
    """A target and whether it is met; None where there is no number to judge."""
    return {"what": what, "ratio": ratio, "target": target, "met": None if ratio is None else ratio >= target}


def ratio(rows: dict[str, dict], base: str, name: str) -> float | None:
    """How many times faster `name` is than `base`, where both were timed."""
    times = [rows.get(key, {}).get("median_us") for key in (base, name)]
    return None if None in times else times[0] / times[1]
