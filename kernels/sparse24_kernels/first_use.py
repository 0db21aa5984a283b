"""Kernels are checked on first use: a child process compares them with the reference, and its verdicts are kept.

Whether a kernel is right depends on the machine: its GPU, driver, compiler, torch. One that differs, raises, hangs or
ends its process is not used. Verdicts lie in the cache folder, one JSON file for all that they depend on.

The child is a fork where kernels run on CPUs, which takes milliseconds, and a new Python for other devices: CUDA
survives no fork. An alarm ends it, so a kernel that hangs is waited for no longer than `SECONDS`.
"""

import faulthandler
import hashlib
import importlib
import json
import logging
import os
import platform
import re
import signal
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from .cache_folder import cache_folder, locked, write_json

SECONDS = defaultdict(lambda: 120, cpu=10)
"""That the check of one operator may take, by the type of the device. On GPUs it is compiled first."""

_PASSING = re.compile(r"out ?of ?memory|alloc|memoryerror|ended its process: (Killed|Terminated)", re.IGNORECASE)
"""In what ends a check and says nothing of the kernel: such a verdict holds for this process alone."""

_SPAWNED = """
import importlib.util, json, sys
package, file, sys.path[:], arguments = json.loads(sys.argv[1])
spec = importlib.util.spec_from_file_location(package, file)
sys.modules[package] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
importlib.import_module(package + ".first_use").answer(*arguments)
"""  # by its file: PyPI's `kernels` loads this package under another name

_log = logging.getLogger(__name__)
_known: dict[str, dict[str, str]] = {}
_thread = threading.local()


class Subject(NamedTuple):
    """What is checked on first use: all operators of what is called `name`, for a dtype on a device.

    Attributes:
        check: from the name, an operator, the device and the dtype to the first difference in words, or "". A function
            of a module, because a new process imports it.
        made_of: what results depend on besides the device, torch and this package, such as a compiler's version.
        modules: what a new process imports before, which registers what is checked.
    """

    name: str
    operators: Sequence[str]
    device: torch.device
    dtype: torch.dtype
    check: Callable[[str, str, torch.device, torch.dtype], str]
    made_of: str = ""
    modules: Sequence[str] = ()


def verdicts(subject: Subject, again: bool = False) -> dict[str, str]:
    """For each operator "" where it may be used, or why not. `again` forgets what was found before.

    The first call on a machine checks all operators of the subject. Failures are warned of once.
    """
    if getattr(_thread, "checks", False):  # a kernel that is being checked may use others
        return dict.fromkeys(subject.operators, "")
    device, dtype = subject.device, str(subject.dtype).removeprefix("torch.")
    facts = {"subject": subject.name, "made of": subject.made_of, "device": device_name(device), "dtype": dtype}
    facts |= {"torch": torch.__version__, "sources": _sources()}
    if device.type == "cuda":
        driver = Path("/proc/driver/nvidia/version")
        facts["driver"] = driver.read_text().splitlines()[0] if driver.exists() else ""
        facts["cuda"] = f"{torch.version.cuda}, capability {torch.cuda.get_device_capability(device)}"
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    if again or digest not in _known:
        _known[digest] = _look_up(digest, facts, subject, again)
        if wrong := [f"{operator}: {reason}" for operator, reason in _known[digest].items() if reason]:
            _log.warning(
                f"{subject.name} on {facts['device']} ({dtype}) failed its check on first use, and PyTorch runs in its "
                f"place: {'; '.join(wrong)}. `hf-sparse24 doctor --check` checks it again"
            )
    return _known[digest]


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


def _look_up(digest: str, facts: dict[str, str], subject: Subject, again: bool) -> dict[str, str]:
    """The verdicts of the cache folder; where it has none they are made, by one process while others wait."""
    kept: dict[str, str] = {}
    try:
        path = cache_folder() / f"checked-{digest}.json"
        if not again and (kept := _read(path, subject)):
            return kept
        with locked(path.with_name("checks")):
            if again or not (kept := _read(path, subject)):
                if subject.device.type != "cpu":
                    _log.warning(f"checking {subject.name} on {facts['device']} ({facts['dtype']}), once: some seconds")
                kept = _checked(subject)
                if not any(map(_PASSING.search, kept.values())):
                    write_json(path, {"environment": facts, "verdicts": kept})
    except (OSError, RuntimeError, ImportError):  # no folder to write to, no locks: each process checks
        pass
    return kept or _checked(subject)


def _read(path: Path, subject: Subject) -> dict[str, str]:
    """The verdicts of a file; none where it is not there, damaged, or of other operators."""
    try:
        found = json.loads(path.read_text())["verdicts"]
        return {operator: str(found[operator]) for operator in subject.operators}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}


def _checked(subject: Subject) -> dict[str, str]:
    """The verdict on each operator. A child stops at the first failure, and another one checks the rest."""
    found: dict[str, str] = {}
    while todo := [operator for operator in subject.operators if operator not in found]:
        lines, ended = _in_child(subject, todo)
        if not lines:  # no child runs here, or none can use the device: its memory is full, or one process owns it
            return found | {operator: _verdict(subject, operator) for operator in todo}
        found |= zip(todo, lines[1:])
        missing = todo[len(lines) - 1 :]
        if missing and not lines[-1]:  # it has not stopped at a failure: the next operator ended it
            found[missing[0]] = ended
    return found


def _in_child(subject: Subject, operators: list[str]) -> tuple[list[str], str]:
    """The lines that a child wrote, see `_answer`, and how it ended, in words."""
    start = _fork if subject.device.type == "cpu" else _spawn
    is_alone = "__main__" in subject.modules or getattr(sys, "frozen", False)  # a new Python could not import it
    if not hasattr(os, "fork") or (start is _spawn and is_alone):
        return [], ""
    read, write = os.pipe()
    with open(read) as pipe:
        try:
            child = start(write, subject, operators)
        except (OSError, TypeError):  # such as too many processes, or no `sys.executable`
            return [], ""
        finally:
            os.close(write)
        try:
            lines = [json.loads(line) for line in pipe]
        except BaseException:  # Ctrl-C: the child has the lock too, and others would wait for its end
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            raise
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ChildProcessError:  # a process that ignores SIGCHLD is not told
        code = 0
    if code == -signal.SIGALRM:
        return lines, f"it did not end within {SECONDS[subject.device.type]} seconds"
    return lines, f"it ended its process: {signal.strsignal(-code) if code < 0 else f'status {code}'}"


def _fork(write: int, subject: Subject, operators: list[str]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: the child takes no lock of other threads
        child = os.fork()
    if child:
        return child
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C says nothing of a kernel
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        torch.set_num_threads(1)  # the parent's threads are not in the child
        _answer(write, subject._replace(operators=operators))
    finally:
        os._exit(0)


def _spawn(write: int, subject: Subject, operators: list[str]) -> int:
    names = [*subject.modules, subject.check.__module__, subject.check.__name__]
    arguments = [write, subject.name, operators, str(subject.device), str(subject.dtype).removeprefix("torch."), names]
    os.set_inheritable(write, True)
    told = json.dumps([__package__, sys.modules[__package__].__file__, list(map(str, sys.path)), arguments])
    command = [sys.executable, "-c", _SPAWNED, told]
    quiet = [(os.POSIX_SPAWN_OPEN, output, os.devnull, os.O_WRONLY, 0) for output in (1, 2)]
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=quiet, setpgroup=0)  # without Ctrl-C


def answer(write: int, name: str, operators: list[str], device: str, dtype: str, names: list[str]) -> None:
    """What the new process does."""
    signal.alarm(SECONDS["cuda"])
    check = getattr([importlib.import_module(module) for module in names[:-1]][-1], names[-1])
    _answer(write, Subject(name, operators, torch.device(device), getattr(torch, dtype), check))


def _answer(write: int, subject: Subject) -> None:
    """Write JSON lines: "" when the device is ready, then the verdict on each operator, up to the first failure."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    torch.zeros(1, device=subject.device)
    os.write(write, b'""\n')
    for operator in subject.operators:
        signal.alarm(SECONDS[subject.device.type])
        verdict = _verdict(subject, operator)
        os.write(write, json.dumps(verdict).encode() + b"\n")
        if verdict:  # and perhaps a device that fails from now on
            return


def _verdict(subject: Subject, operator: str) -> str:
    def check() -> str:
        _thread.checks = True
        different = subject.check(subject.name, operator, subject.device, subject.dtype)
        if subject.device.type == "cuda":
            torch.cuda.synchronize(subject.device)
        return different[:500]

    try:
        with ThreadPoolExecutor(1) as pool:  # a new thread has no autocast, no dispatch mode, no default device
            return pool.submit(check).result()
    except Exception as error:  # a kernel, and what compiles it, can raise anything
        return f"{type(error).__name__}: {str(error).strip()[:500]}"
