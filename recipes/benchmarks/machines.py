"""The machine that is timed, a GPU or a CPU: its facts, and how a call is sampled on it."""

import gc
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from sparse24_kernels.gemm import cusparselt
from sparse24_kernels.gemm.measure import capture, elapsed
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .timing import Call, Sampler

NVIDIA_SMI = ("nvidia-smi", "--format=csv,noheader", "--id=0")


class Cuda:
    """The current GPU. Tests have a stand-in with made-up times."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self.name, self.l2_bytes = properties.name, properties.L2_cache_size
        self.facts = {"device": self.name, "memory_bytes": properties.total_memory, "l2_bytes": self.l2_bytes}
        self.facts |= {"cuda": torch.version.cuda, "driver": answer(*NVIDIA_SMI, "--query-gpu=driver_version")}
        self.facts |= {"triton": version("triton"), "cusparselt": str(cusparselt.version())}
        self.facts["calls of cusparselt"] = cusparselt.way(self.device)

    def clocks(self) -> str | None:
        """Clocks, power and temperature now; None where nvidia-smi does not tell."""
        return answer(*NVIDIA_SMI, "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu")

    def prepare(self, calls: Sequence[Call]) -> Sampler:
        """A sampler of these calls, captured in one CUDA graph: its time contains neither Python nor launches.

        Their arguments are together several times the size of the L2 cache, and all results are alive during the
        capture. So every call finds its inputs in device memory, and what it writes is written back during later ones.
        """
        replay, _ = capture(lambda: [call() for call in calls])
        elapsed(replay)  # the first replay also loads the graph
        repeats = max(1, min(100, round(1e3 / elapsed(replay))))  # about a millisecond per sample
        return lambda: elapsed(lambda: [replay() for _ in range(repeats)]) / 1e6 / repeats / len(calls)

    def eager(self, calls: Sequence[Call]) -> Sampler:
        """A sampler of calls as users make them, Python and launches included."""
        return lambda: elapsed(lambda: [call() for call in calls]) / 1e6 / len(calls)

    def kernels(self, call: Call) -> dict[str, tuple[int, float]]:
        """By name, how often a call starts a kernel, and its microseconds together; the longest first, 40 of them."""
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        found = [event for event in profiler.key_averages() if event.device_type == DeviceType.CUDA]
        found.sort(key=lambda event: -event.self_device_time_total)
        return {event.key: (event.count, round(event.self_device_time_total)) for event in found[:40]}

    def peak(self, call: Call) -> int:
        """The most bytes that were allocated during a call."""
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated()

    def forget(self) -> None:
        """Give freed memory back, that of dead graphs included."""
        gc.collect()
        with suppress(RuntimeError):  # where the device is lost, what follows fails too, and says so
            torch.cuda.empty_cache()


class Cpu:
    """This machine's CPU."""

    device, name = torch.device("cpu"), "CPU"

    def __init__(self) -> None:
        text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        model = re.search(r"model name\s*: (.*)", text)
        flags = re.search(r"flags\s*: (.*)", text)
        wanted = r"avx2|fma|f16c|avx_vnni|avx512\w*|amx_\w+"
        self.facts: dict[str, Any] = {
            "cpu": model[1] if model else platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "flags": " ".join(sorted(re.findall(rf"\b(?:{wanted})\b", flags[1]))) if flags else "",
            "compiler": (answer(compiler(), "--version") or "none").splitlines()[0],
            "load before": [round(x, 2) for x in os.getloadavg()],
        }

    def forget(self) -> None:
        """Nothing: memory is given back when it is freed."""


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def answer(*command: str) -> str | None:
    """What a command prints; None where it fails or is absent."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
