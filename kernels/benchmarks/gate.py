"""Gates: no speed is reported of what gives wrong results, on this device and at the sizes that are timed.

A check is a name and a function that raises. Compiling a few hundred kernels takes minutes, so processes share the
checks. `checks` here are those of the kernels: the cases, the workloads, and what only a GPU can show.
"""

import importlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from kernel_cases import assert_same_bits, check
from kernel_cases.cases import all_cases
from sparse24_kernels import choose_kernels
from sparse24_kernels.dispatch import KERNEL_DTYPES
from sparse24_kernels.gemm.autotune.child import Child, Died
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm.auto import tqdm

from .operations import Workload, tensors, workloads
from .run import NOT_RUN, Row, Run, Section
from .timing import captured, describe

Check = tuple[str, Callable[[], None]]
WORKER = [sys.executable, "-P", "-m", "benchmarks.gate"]
"""The command of a process that answers `call`; to be used with the autotuner's `Child`."""


class Gate(Section):
    """Runs `module.checks(device)`. Sections withhold what a check that failed is for (`Run.unverified`).

    A check that was not reached has not failed; `operations.py` withholds the rows whose own check that is.
    """

    def __init__(self, name: str, groups: tuple[str, ...], module: str, share: int):
        self.name, self.groups, self.module, self.share = name, groups, module, share

    def execute(self, run: Run) -> None:
        if earlier := self.earlier(run):
            run.result["gates"][self.name] = earlier
            print(f"  taken from {run.options.gate.name}", flush=True)
            return
        start, options = time.monotonic(), run.options
        limit = run.left(reserve=5)
        results = run_all(self.module, run.machine.device, limit, options.processes, options.only, run.log)
        not_reached = [name for name, error in results.items() if error.startswith(NOT_RUN)]
        failed = {name: error for name, error in results.items() if error and name not in not_reached}
        passed = len(results) - len(failed) - len(not_reached)
        found = {"passed": passed, "failed": failed, "not_reached": not_reached, "seconds": time.monotonic() - start}
        run.result["gates"][self.name] = found
        print(f"  {passed} passed, {len(not_reached)} not reached, {len(failed)} failed: {failed}", flush=True)
        if failed or not passed:
            run.result["errors"][self.name] = f"{len(failed)} checks failed, {passed} passed"

    def earlier(self, run: Run) -> Row | None:
        """What this gate found in the run of `--gate`, where that was on the same device and with the same code.

        Raises:
            ValueError: it was not.
        """
        if run.options.gate is None:
            return None
        theirs, ours = json.loads(run.options.gate.read_text()), run.result["environment"]
        for key in ("device", "commit", "torch", "triton", "cusparselt"):
            if theirs["environment"].get(key) != ours.get(key):
                raise ValueError(f"--gate: {key} was {theirs['environment'].get(key)}, and is {ours.get(key)}")
        if "dirty" in str(ours["commit"]):
            raise ValueError(f"--gate: the commit is {ours['commit']}: nobody knows whether the code is the same")
        return theirs["gates"].get(self.name)


def run_all(
    module: str,
    device: torch.device,
    seconds: float,
    processes: int,
    text: str,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, str]:
    """The error of each check, or "", within `seconds`, in so many processes (0: in this one); tracebacks to `log`."""
    checks_of.cache_clear()
    names = [name for name in checks_of(module, str(device)) if text in name]
    end, results = time.monotonic() + seconds, dict.fromkeys(names, NOT_RUN)

    def run_some(queue: Iterator[str], child: Child | None = None) -> None:
        for name in queue:  # of a list, which threads can share
            if (left := end - time.monotonic()) <= 0:
                return
            _, error = call(child, "benchmarks.gate:run_one", module, str(device), name, seconds=left, log=log)
            results[name] = error if time.monotonic() < end else f"{NOT_RUN}: {error}"
            bar.update()

    def run_in_a_child(queue: Iterator[str]) -> None:
        with Child(WORKER) as child:
            run_some(queue, child)

    queue = iter(names)
    with tqdm(total=len(names), desc="checks", unit="check", disable=None, leave=False) as bar:  # in terminals alone
        with ThreadPoolExecutor(max(1, processes)) as pool:
            list(pool.map(run_in_a_child, [queue] * processes))
        # Processes share the device's memory. A check that found none left now gets all of it.
        again = [name for name, error in results.items() if re.search("out ?of ?memory", error, re.I)]
        bar.total += len(again)
        run_some(iter(again) if processes else queue)
    return results


@cache
def checks_of(module: str, device: str) -> dict[str, Callable[[], None]]:
    return dict(importlib.import_module(module).checks(torch.device(device)))


def run_one(module: str, device: str, name: str) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # read by the first compilation: there are many processes
    try:
        checks_of(module, device)[name]()
    finally:
        if torch.cuda.is_initialized():
            with suppress(RuntimeError):  # where the device is lost, what follows fails too, and says so
                torch.cuda.empty_cache()


def call(
    child: Child | None,
    function: str,
    *arguments: Any,
    seconds: float,
    log: Callable[[str], None] = lambda text: None,
) -> tuple[Any, str]:
    """What `function` ("module:name") returns in a process of its own, of JSON; and its error, or how that ended."""
    request = {"function": function, "arguments": arguments}
    where = f"{function}{arguments}"
    try:
        reply = child.ask(request, seconds) if child else answer(request)
    except Died as died:
        log(f"{where}\n{died}\n{child.last_output() if child else ''}")
        return None, str(died)
    if reply["error"]:
        log(f"{where}\n{reply['traceback']}")
    return reply["found"], reply["error"]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    module, name = request["function"].split(":")
    found, error, trace = None, "", ""
    try:
        found = getattr(importlib.import_module(module), name)(*request["arguments"])
    except Exception as raised:
        error, trace = describe(raised), "".join(traceback.format_exception(raised))
    return {"number": request.get("number"), "ok": not error, "found": found, "error": error, "traceback": trace}


def checks(device: torch.device) -> list[Check]:
    """Those of the kernels, the cheap ones first; no two have one name."""
    found: list[Check] = [(str(case), partial(check, case, device)) for case in all_cases()]
    if device.type == "cuda":
        chosen = {dtype: choose_kernels(device, dtype) for dtype in KERNEL_DTYPES}
        assert {backend for backend, _ in chosen.values()} == {"triton"}, chosen
        for name, workload in {w.name: w.at((128, 256)) for w in workloads()}.items():
            for kind, function in (("graph", graph), ("fullgraph", full_graph), ("opcheck", opcheck)):
                found.append((f"{kind}: {name}", partial(function, workload, device)))
        found += [(str(workload), partial(check, workload, device)) for workload in workloads()]
    return found


def graph(workload: Workload, device: torch.device) -> None:
    """Captured once, replayed twice: the same bits as eager."""
    fresh, arguments = workload.arguments(device), workload.arguments(device)
    expected = [x.clone() for x in tensors(workload.call(arguments))]

    def start_anew() -> None:  # some operations work in place; and at other addresses they upload other tables
        for x, original in zip(tensors(arguments), tensors(fresh)):
            x.copy_(original)

    for ours, theirs in zip(replayed(lambda: tensors(workload.call(arguments)), start_anew), expected, strict=True):
        assert_same_bits(ours, theirs, "replay")


def replayed(call: Callable[[], list[Tensor]], before_each: Callable[[], None] = lambda: None) -> list[Tensor]:
    """What the second replay of a CUDA graph leaves behind, in memory that was made useless before it."""
    replay, (results,) = captured([call])
    for _ in range(2):
        for result in results:
            result.detach().zero_()
        before_each()
        replay()
    torch.cuda.synchronize()
    return results


def full_graph(workload: Workload, device: torch.device, backend: str = "inductor") -> None:
    """Under torch.compile without graph breaks: the same bits as eager."""
    torch._dynamo.reset()  # it counts how often one piece of code was compiled, and stops at eight
    compiled = torch.compile(workload.public, fullgraph=True, backend=backend)
    both = [tensors(workload.call(workload.arguments(device), function)) for function in (compiled, None)]
    for ours, theirs in zip(*both, strict=True):
        assert_same_bits(ours, theirs, "compiled")


def opcheck(workload: Workload, device: torch.device) -> None:
    """torch's own checks of the operators that the public function calls: schema, fakes, autograd, tracing."""
    calls: list[tuple[Any, tuple]] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "sparse24":
                calls.append((function, args))
            return function(*args, **(kwargs or {}))

    with Recorder():
        workload.call(workload.arguments(device))
    assert calls, "no operator was called"
    for function, arguments in calls:
        torch.library.opcheck(function, arguments)


if __name__ == "__main__":
    for line in sys.stdin:
        print("\n" + json.dumps(answer(json.loads(line))), flush=True)
