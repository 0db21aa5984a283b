"""RunLog: one file with all that a sparse run logs, and flip rates by layer, speed and memory.

`<output_dir>/sparse24_log.jsonl` holds one JSON object per line, written as it comes. A line where the run starts or
resumes, and a line for each log of the Trainer, of which those of training add speed, memory and flip rates in the
order of the layers:

    {"step", "time", "layers": {name: weights}, "parameters", "config", "arguments", "versions"}
    {"step", "time", <the Trainer's numbers>, "steps_per_second", "peak_memory_gb", "flip_rates": [...]}
"""

import json
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from ..files import written_whole
from ..methods.settings import is_number
from ..progress import get_logger
from ..version import __version__
from ..weights.sparse_weight import first_of_each
from ..weights.storage import layer_name
from .controller import Sparse24Controller

try:
    import resource
except ImportError:  # Windows: the peak of a process on a CPU is not known
    resource = None  # type: ignore[assignment]  # it stands for a module

logger = get_logger(__name__)

RUN_LOG = "sparse24_log.jsonl"
SPEED, MEMORY = "steps_per_second", "peak_memory_gb"
_LAYER = "flip_rate/"


class RunLog:
    """Writes the log of a run. A fresh run replaces the file; a resumed one keeps the lines up to its first step."""

    def __init__(self, args: TrainingArguments, state: TrainerState, controller: Sparse24Controller):
        self.path = Path(str(args.output_dir)) / RUN_LOG
        self.device = args.device
        weights = first_of_each(controller.weights)
        self.layers = {layer_name(name): weight.parameter.numel() for name, weight in weights.items()}
        self._step, self._seconds, self._last = state.global_step, 0.0, time.perf_counter()
        self._is_writable = True
        with self._one_warning():
            kept = [line for line, step, _ in read_lines(self.path) if self._step and step <= self._step]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(self.path) as part:
                part.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._append(self._start_line(args, controller))

    @contextmanager
    def _one_warning(self) -> Iterator[None]:
        """A context in which a full disk costs one warning and the rest of the log, never the run."""
        try:
            yield
        except OSError as error:
            self._is_writable = False  # a line after one that was cut would not be read
            logger.warning(f"{self.path} cannot be written ({error}): it will lack what is logged from here on")

    def after_step(self) -> None:
        now = time.perf_counter()
        self._seconds, self._last = self._seconds + now - self._last, now

    def after_pause(self) -> None:
        """Leave out the time since the last optimizer step: an evaluation or a checkpoint took it."""
        self._last = time.perf_counter()

    def measure(self, step: int, flip_rates: Mapping[str, float]) -> dict[str, float]:
        """The flip rates by layer, the speed since the last call, and the peak of memory."""
        found = {f"{_LAYER}{name}": float(f"{rate:.4g}") for name, rate in flip_rates.items()}
        if self._seconds and step > self._step:
            found[SPEED] = float(f"{(step - self._step) / self._seconds:.4g}")
        peak = peak_memory(self.device)
        if peak is not None:
            found[MEMORY] = float(f"{peak / 1e9:.4g}")
        self._step, self._seconds = step, 0.0
        return found

    def write(self, step: int, logs: Mapping[str, object]) -> None:
        line: dict[str, object] = {"step": step, "time": round(time.time(), 1)}
        line |= {name: value for name, value in logs.items() if is_number(value) and not name.startswith(_LAYER)}
        if any(name.startswith(_LAYER) for name in logs):
            line["flip_rates"] = [logs.get(f"{_LAYER}{name}") for name in self.layers]
        self._append(line)

    def _start_line(self, args: TrainingArguments, controller: Sparse24Controller) -> dict[str, object]:
        device = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else platform.machine()
        return {
            "step": self._step,
            "time": int(10 * time.time()) / 10,  # never later than the run's first checkpoint
            "layers": self.layers,
            "parameters": sum(parameter.numel() for parameter in controller.model.parameters()),
            "config": controller.run.config.to_dict(),
            "arguments": _given(args),
            "versions": {
                "hf_sparse24": __version__,
                **{name: version(name) for name in ("torch", "transformers", "accelerate")},
                "python": platform.python_version(),
                "device": f"{args.world_size} x {args.device.type} ({device})",
            },
        }

    def _append(self, entry: Mapping[str, object]) -> None:
        if self._is_writable:
            with self._one_warning(), open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{json.dumps(entry, default=str)}\n")


class ConsoleFilter(TrainerCallback):
    """Stands between the trackers and the console, which would print a number for each layer."""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs=None, **kwargs):
        for name in [name for name in logs if name.startswith(_LAYER) or name in (SPEED, MEMORY)]:
            del logs[name]

    @classmethod
    def placed(cls, callbacks: list[TrainerCallback]) -> list[TrainerCallback]:
        """The callbacks with one of this class in front of those that print."""
        others = [callback for callback in callbacks if not isinstance(callback, cls)]
        printing = [i for i, callback in enumerate(others) if isinstance(callback, ProgressCallback | PrinterCallback)]
        others.insert(min(printing, default=len(others)), cls())
        return others


def read_lines(path: str | Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """The lines of a log that are whole, their steps, and what they hold; none of a file that is not there."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            step = entry["step"]
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
        if type(step) is int:
            yield line, step, entry


def peak_memory(device: torch.device) -> int | None:
    """Bytes, since the process began: allocated by PyTorch on a CUDA device, or resident of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _given(args: TrainingArguments) -> dict[str, object]:
    """Changed arguments that can be shared: numbers, and text without a path. Mappings may hold secrets."""
    defaults = {field.name: field.default for field in fields(args)}
    given = {name: value for name, value in args.to_dict().items() if isinstance(value, str | int | float)}
    hidden = [name for name, value in given.items() if name.endswith("_token") or re.search(r"[/\\]", str(value))]
    return {name: x for name, x in given.items() if x != defaults.get(name) and name not in hidden}
