"""Kernels are compared with the reference on first use, operator by operator, and the verdicts are kept.

Whether a kernel is right depends on the machine: its GPU, driver, compiler, torch. One that differs or raises is not
used. Verdicts lie in the cache folder, one JSON file for all that they depend on.

The comparison runs in this process, so a kernel that crashes ends it, and one that hangs hangs it. `check_in_child`,
which is `hf-sparse24 doctor --check`, survives both; the kernel is not used from then on.
"""

import hashlib
import json
import logging
import multiprocessing
import pickle
import platform
import re
import signal
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

from .cache_folder import cache_folder, write_json

SECONDS = 120.0
"""That a child process may take for one operator. On GPUs it is compiled first."""

_PASSING = re.compile(r"out ?of ?memory|alloc|memoryerror|ended its process: (Killed|Terminated)", re.IGNORECASE)
"""Reasons that say nothing of the kernel: such a verdict holds for this process alone."""

_log = logging.getLogger(__name__)
_known: dict[tuple[str, str], str] = {}
_lock = threading.RLock()
_thread = threading.local()


class Subject(NamedTuple):
    """The operators of one implementation, for a dtype on a device.

    Attributes:
        check: from an operator to the first difference from the reference in words, or "". `check_in_child` pickles it.
        made_of: what results depend on besides the device, torch and this package, such as a compiler's version.
    """

    name: str
    operators: Sequence[str]
    device: torch.device
    dtype: torch.dtype
    check: Callable[[str], str]
    made_of: str = ""


def verdict(subject: Subject, operator: str) -> str:
    """ "" where an operator may be used, or why not. Compares it on the first call on a machine, and logs one warning
    where it fails. RuntimeError: that is while a CUDA graph is captured, or the GPU has failed before."""
    facts, digest = _environment(subject)
    running = getattr(_thread, "operators", ())  # a kernel that is compared may use others, and its own
    if operator in running or (digest, operator) in _known:
        return _known.get((digest, operator), "")
    with nullcontext() if running else _lock:
        if (digest, operator) not in _known:
            reason = _read(digest).get(operator)
            if reason is None:
                reason = _compared(subject, operator)
                _keep(digest, facts, operator, reason)
            _known[digest, operator] = reason
            if reason:
                what = f"{operator} of {subject.name} on {facts['device']} ({facts['dtype']})"
                again = "`hf-sparse24 doctor --check` checks it again"
                _log.warning(f"{what} failed its check on first use and is not used: {reason}. {again}")
    return _known[digest, operator]


def check_in_child(subjects: Sequence[Subject]) -> list[tuple[Subject, str, str]]:
    """Compare all operators again, in a child process: each subject and operator with the new verdict."""
    todo = [(subject, operator) for subject in subjects for operator in subject.operators]
    found: list[str] = []
    while rest := todo[len(found) :]:
        found += _answers(rest) or [_compared(*each) for each in rest]
    for (subject, operator), reason in zip(todo, found):
        facts, digest = _environment(subject)
        _known[digest, operator] = reason
        _keep(digest, facts, operator, reason)
    return [(*each, reason) for each, reason in zip(todo, found)]


def _answers(todo: Sequence[tuple[Subject, str]]) -> list[str]:
    """The verdicts of a new process, up to the first failure, after which a GPU may fail too; none where the process
    cannot use the device, because its memory is full or another process owns it."""
    found: list[str] = []
    context = multiprocessing.get_context("spawn")  # CUDA survives no fork
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(theirs, todo), daemon=True)
    try:
        child.start()
    except (pickle.PicklingError, AttributeError, TypeError):  # what loads the kernels is no function of a module
        return [_compared(*todo[0])]
    theirs.close()
    is_ready, reason = False, ""
    try:
        if not ours.poll(300):
            return [f"a process that uses {todo[0][0].device} did not begin within 300 seconds"]
        is_ready = ours.recv()
        while is_ready and not reason and len(found) < len(todo):
            reason = ours.recv() if ours.poll(SECONDS) else f"it did not end within {SECONDS:.0f} seconds"
            found.append(reason)
    except EOFError:
        child.join()
        code = child.exitcode or 0
        if is_ready:
            found.append(f"it ended its process: {signal.strsignal(-code) if code < 0 else f'status {code}'}")
    finally:
        child.kill()
        child.join()
    return found


def _answer(pipe: Connection, todo: Sequence[tuple[Subject, str]]) -> None:
    """Send True when the device is ready, then the verdict on each operator."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C says nothing of a kernel
    torch.zeros(1, device=todo[0][0].device)
    pipe.send(True)
    for subject, operator in todo:
        pipe.send(_compared(subject, operator))


def _compared(subject: Subject, operator: str) -> str:
    """The first difference, or the error that the kernel raised; "" for neither."""
    running, device = getattr(_thread, "operators", ()), subject.device
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{operator} is checked on first use, which no CUDA graph captures: call it once before")
        torch.cuda.synchronize(device)  # an earlier fault is not this kernel's

    def compare() -> str:
        _thread.operators = (*running, operator)
        try:
            with warnings.catch_warnings(action="ignore"):
                different = subject.check(operator)[:500]
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            return different
        except Exception as error:  # a kernel, and what compiles it, can raise anything
            return f"{type(error).__name__}: {str(error).strip()[:500]}"
        finally:
            _thread.operators = running

    if running:
        return compare()
    with ThreadPoolExecutor(1) as pool:  # a new thread has no autocast, no dispatch mode, no default device
        return pool.submit(compare).result()


def _environment(subject: Subject) -> tuple[dict[str, str], str]:
    """All that verdicts depend on, and its hash."""
    device, dtype = subject.device, str(subject.dtype).removeprefix("torch.")
    facts = {"subject": subject.name, "made of": subject.made_of, "device": device_name(device), "dtype": dtype}
    facts |= {"torch": torch.__version__, "sources": _sources()}
    if device.type == "cuda":
        driver = Path("/proc/driver/nvidia/version")
        facts["driver"] = driver.read_text().splitlines()[0] if driver.exists() else ""
        facts["cuda"] = f"{torch.version.cuda}, capability {torch.cuda.get_device_capability(device)}"
    return facts, hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def device_name(device: torch.device) -> str:
    """The model of a GPU or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


@cache  # every operator is chosen by it, and of many cores the file is long
def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^(?:model name|CPU part)\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


@cache
def _sources() -> str:
    files = sorted(path for path in Path(__file__).parent.rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()[:16]


def _file(digest: str) -> Path:
    return cache_folder() / f"checked-{digest}.json"


def _read(digest: str) -> dict[str, str]:
    """The verdicts that were kept, by operator; none where the file is not there or damaged."""
    try:
        verdicts = json.loads(_file(digest).read_text())["verdicts"]
        return {str(operator): str(reason) for operator, reason in verdicts.items()}
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _keep(digest: str, facts: dict[str, str], operator: str, reason: str) -> None:
    """Add a verdict to the file. Two processes at once may lose one, which is found again."""
    with suppress(OSError, RuntimeError):  # no folder to write to: each process compares
        if not _PASSING.search(reason):
            write_json(_file(digest), {"environment": facts, "verdicts": _read(digest) | {operator: reason}})
