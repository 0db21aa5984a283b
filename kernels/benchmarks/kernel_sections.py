"""The kernel sections of `make gpu`: the gate, the bandwidth of a copy, every workload, and the competitors.

A section is a function of the run (`gpu.Run`): it fills `run.result`, asks `run.left()` for the time, and writes.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ahead_of_time import predicted_seconds
from competitors import LOOPED, competitors, compiled, copy_of
from report import clean
from sparse24_kernels.backends import KERNEL_DTYPES, choose_kernels
from sparse24_kernels.layout import who_compresses
from timing import OutOfTime, describe, interleave, time_limit
from workloads import Workload


def gate(run) -> bool:
    """Everything right? At most three quarters of the time go into it."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = run.gate(
            run.machine.device, run.left() * 3 / 4, Path(folder), run.options.processes, run.options.only
        )
    failed = {name: clean(error) for name, error in results.items() if error is not None}
    run.result["kernels"] = {str(dtype): list(choose_kernels(run.machine.device, dtype)) for dtype in KERNEL_DTYPES}
    run.result["kernels"]["compressed forms"] = list(who_compresses(run.machine.device))
    run.result["gate"] = {
        "passed": len(results) - len(failed),
        "failed": failed,
        "seconds": round(time.monotonic() - start, 1),
    }
    print(f"gate: {len(results) - len(failed)} passed, {len(failed)} failed", run.result["kernels"], flush=True)
    for name, error in failed.items():
        print(f"  {name}: {error}", flush=True)
    return bool(results) and not failed


def copy_before(run) -> None:
    _copy(run, "before")


def copy_after(run) -> None:
    """Once more at the end: what has drifted meanwhile."""
    _copy(run, "after")
    run.result["clocks"]["clocks after"] = run.machine.clocks()


def _copy(run, when: str) -> None:
    samples = sorted(run.machine.copy_bandwidth())
    run.machine.forget()
    low, middle, high = (samples[i] / 1e9 for i in (0, len(samples) // 2, -1))
    run.result.setdefault("copy", {})[when] = {"gb_per_s": middle, "min": low, "max": high}


def operations(run) -> None:
    """Every workload, one shape of each operation before the next shape."""
    bandwidth = run.result["copy"]["before"]["gb_per_s"] * 1e9
    for workload in run.workloads:
        seconds = predicted_seconds(workload, run.predictions)
        run.result["operations"][str(workload)] = {
            "bytes": workload.bytes(),
            "predicted_us": seconds and seconds * 1e6,
            "target": workload.operation.target,
            "error": "not run: out of time",
        }
    turn: dict[object, int] = {}
    for workload in run.workloads:
        turn[workload] = sum(other.operation is workload.operation for other in turn)
    for workload in sorted(run.workloads, key=turn.__getitem__):
        if run.left(reserve=20) < 0:
            return
        entry = run.result["operations"][str(workload)]
        rivals = {"ours": lambda arguments, w=workload: lambda: w.call(arguments), "copy": copy_of(workload.bytes())}
        timed = compare(run, workload, rivals, 60)
        if "error" in timed["ours"]:
            entry["error"] = timed["ours"]["error"]
            continue
        del entry["error"]
        ours, copy = timed["ours"], timed["copy"]
        speed = workload.bytes() / (ours["median_us"] * 1e-6)
        entry |= {
            "ours": {name: ours[name] for name in ("median_us", "min_us", "max_us", "samples")},
            "method": ours["method"],
            "host_us": ours["host_us"],
            "gb_per_s": speed / 1e9,
            "share_of_copy": speed / bandwidth,
            "share_of_equal_copy": copy["median_us"] / ours["median_us"] if "median_us" in copy else None,
            "target_met": speed / bandwidth >= workload.operation.target,
        }
        run.write()


def rivals(run) -> None:
    """The smallest and the largest shape of every operation against all others, then torch.compile, once each."""
    smallest, largest = {}, {}
    for workload in run.workloads:
        key = (workload.operation, workload.dtype)
        smallest.setdefault(key, workload)
        largest[key] = workload
    chosen = [*largest.values(), *(w for key, w in smallest.items() if w is not largest[key])]
    todo = [(workload, dict(competitors(workload)), 30) for workload in chosen]
    once = {w.operation: w for w in reversed(run.workloads) if w.shape == w.operation.compile}
    todo += [(workload, {"torch.compile": compiled(workload)}, 90) for workload in once.values()]
    for workload, others, _ in todo:
        row = run.result["competitors"].setdefault(str(workload), {})
        row |= {name: {"error": "not run: out of time"} for name in others}
    for workload, others, limit in todo:
        if run.left(reserve=15) < 0:
            return
        ours = {"ours": lambda arguments, w=workload: lambda: w.call(arguments)}
        timed = compare(run, workload, ours | others, limit)
        base = timed.pop("ours")
        for row in timed.values():
            if "error" in base:
                row |= {"error": f"ours: {base['error']}"}
            elif "error" not in row:
                row |= {
                    "ours_us": base["median_us"],
                    "ours_method": base["method"],
                    "ratio": row["median_us"] / base["median_us"],
                }
        run.result["competitors"][str(workload)] |= timed
        run.write()


def compare(run, workload: Workload, makers: dict[str, Callable], limit: float) -> dict[str, dict]:
    """Several ways to do a workload, sampled in turn; each with its times and how they were taken, or its error."""
    machine, rows, samplers = run.machine, {name: {} for name in makers}, {}
    try:
        with time_limit(min(limit, run.left(reserve=10))):
            # So many that no call finds anything of its inputs in the cache.
            count = min(64, -(-4 * machine.l2_bytes // workload.bytes()))
            sets = [workload.arguments(machine.device) for _ in range(count)]
            for name, make in makers.items():
                try:
                    start = time.monotonic()
                    calls = [make(arguments) for arguments in sets]
                    samplers[name], rows[name]["method"] = machine.prepare(
                        calls, (workload.function, name) not in LOOPED
                    )
                    rows[name]["prepare_s"] = round(time.monotonic() - start, 2)
                    if name == "ours":
                        rows[name]["host_us"] = machine.host_seconds(calls) * 1e6
                except Exception as error:  # one that fails must not stop the others
                    rows[name] = {"error": clean(describe(error))}
            for name, times in interleave(samplers).items():
                rows[name] |= times
    except (Exception, OutOfTime) as error:  # no room for the arguments, or it took too long
        rows = {name: row if "error" in row else {"error": clean(describe(error))} for name, row in rows.items()}
    samplers.clear()
    calls = sets = None  # before memory is given back
    try:
        machine.forget()
    except Exception as error:
        run.result["errors"][str(workload)] = clean(describe(error))
    return rows
