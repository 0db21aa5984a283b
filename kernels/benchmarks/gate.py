"""The gate: no speed is reported unless every result is right, on this device and at the sizes that are timed.

A check is a name and a function that raises. There are the cases that the tests also run, each timed workload against
the reference, and what only a GPU can show: that public functions run inside CUDA graphs and under torch.compile.
Compiling a few hundred kernels takes minutes, so the checks are shared out among processes; that also confines a crash.

    python kernels/benchmarks/gate.py DEVICE SHARE SHARES FILE [TEXT]    one process's share, a line of JSON per check
"""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

# ruff: noqa: E402 (imports come after the path that they need)
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch
from cases import assert_same_bits, check
from sparse24_kernels.backends import KERNEL_DTYPES, choose_kernels
from timing import describe
from workloads import BF16, FP32, OPERATIONS, PUBLIC, Workload, tensors, workloads

Check = tuple[str, Callable[[], None]]
SMALL = (128, 256)


def checks(device: torch.device, text: str = "") -> list[Check]:
    """All checks whose name has `text` in it, the cheap ones first; no two have one name."""
    found: list[Check] = []
    if device.type == "cuda":
        found += [(f"kernels serve {dtype}", partial(_served, device, dtype)) for dtype in KERNEL_DTYPES]
    for path in sorted(HERE.glob("cases_*.py")):
        found += [(str(case), partial(check, case, device)) for case in importlib.import_module(path.stem).cases()]
    if device.type == "cuda":
        for operation in OPERATIONS:
            small = Workload(operation, SMALL, BF16 if BF16 in operation.shapes else FP32)
            found.append((f"graph: {operation.name}", partial(_graph, small, device)))
            found.append((f"fullgraph: {operation.name}", partial(_full_graph, small, device)))
            found.append((f"opcheck: {operation.name}", partial(_opcheck, small, device)))
        found += [(str(workload), partial(check, workload, device)) for workload in workloads()]
    found = [(name, run) for name, run in found if text in name]
    names = Counter(name for name, _ in found)
    return [(name if names[name] == 1 else f"{name} ({i})", run) for i, (name, run) in enumerate(found)]


def _served(device: torch.device, dtype: torch.dtype) -> None:
    backend, reason = choose_kernels(device, dtype)
    assert backend == "triton", reason


def _graph(workload: Workload, device: torch.device) -> None:
    """Captured once, replayed twice: the same bits as eager."""
    fresh = workload.arguments(device)
    arguments = workload.arguments(device)
    expected = [x.clone() for x in tensors(workload.call(arguments))]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        workload.call(arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = tensors(workload.call(arguments))
    for replay in (1, 2):
        for x, original in zip(tensors(arguments), tensors(fresh)):
            x.copy_(original)  # what works in place starts anew
        graph.replay()
        for ours, theirs in zip(results, expected, strict=True):
            assert_same_bits(ours, theirs, f"replay {replay}")


def _full_graph(workload: Workload, device: torch.device, backend: str = "inductor") -> None:
    """Under torch.compile without graph breaks: the same bits as eager."""
    torch._dynamo.reset()  # it counts how often one piece of code was compiled, and stops at eight
    public, results = PUBLIC[workload.function], []
    for function in (torch.compile(public, fullgraph=True, backend=backend), public):
        arguments = workload.arguments(device)
        returned = function(*arguments)
        results.append(tensors(arguments[0] if returned is None else returned))
    ours, theirs = results
    for x, y in zip(ours, theirs, strict=True):
        assert_same_bits(x, y, "compiled")


def _opcheck(workload: Workload, device: torch.device) -> None:
    """torch's own checks of an operator: schema, fake tensors, autograd, tracing."""
    name = workload.function.split(".")[1]
    arguments = workload.arguments(device)
    if name == "prune":
        arguments = (*arguments[:8], ",".join(arguments[8]))  # an operator has no lists of strings
    elif name == "mvue":
        arguments = arguments[:7]  # nor is it told the layout
    torch.library.opcheck(getattr(torch.ops.sparse24, name).default, arguments)


def run(found: list[Check], each: Callable[[str, str | None], None]) -> None:
    """Run checks in this process; `each(name, error or None)` after every one."""
    for name, function in found:
        try:
            function()
            error = None
        except Exception as exception:  # recorded, and the next one runs
            error = describe(exception)
        each(name, error)
        if torch.cuda.is_initialized():
            with suppress(RuntimeError):  # where the device is lost, what follows fails too, and says so
                torch.cuda.empty_cache()


def run_all(
    device: torch.device, seconds: float, folder: Path, processes: int, text: str = ""
) -> dict[str, str | None]:
    """All checks within `seconds`, shared out among processes (0: in this one): each name with its error or None."""
    found = checks(device, text)
    results: dict[str, str | None] = {}
    if not processes:
        run(found, results.__setitem__)
        return results
    paths = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    files = [folder / f"gate_share_{i}.jsonl" for i in range(processes)]
    workers = []
    for i, file in enumerate(files):
        command = [sys.executable, str(HERE / "gate.py"), str(device), str(i), str(processes), str(file), text]
        file.write_text("")
        with open(file.with_suffix(".log"), "wb") as log:
            workers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    end = time.monotonic() + seconds
    for i, (file, worker) in enumerate(zip(files, workers)):
        try:
            why = f"its process ended with {worker.wait(max(end - time.monotonic(), 0.1))}"
        except subprocess.TimeoutExpired:
            worker.kill()
            with suppress(subprocess.TimeoutExpired):  # it may hang in the driver
                worker.wait(10)
            why = "out of time"
        log = file.with_suffix(".log")
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1][:200]
        results |= {line["check"]: line["error"] for line in map(json.loads, file.read_text().splitlines())}
        results |= {name: f"not run: {why}: {last}" for name, _ in found[i::processes] if name not in results}
        file.unlink()
        log.unlink()
    # Processes share the device's memory; whoever found none left gets all of it now.
    again = [(name, check) for name, check in found if re.search("out ?of ?memory", results[name] or "", re.I)]
    if time.monotonic() < end:
        run(again, results.__setitem__)
    return results


def main() -> None:
    device, share, shares, file, *text = sys.argv[1:]
    with open(file, "a", buffering=1) as out:
        run(
            checks(torch.device(device), *text)[int(share) :: int(shares)],
            lambda name, error: out.write(json.dumps({"check": name, "error": error}) + "\n"),
        )


if __name__ == "__main__":
    main()
