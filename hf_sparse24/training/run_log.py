"""RunLog: what a Trainer does not record of a sparse run: flip rates by layer, speed, memory, and what ran.

`<output_dir>/sparse24_log.jsonl` holds one JSON object per line. A line that begins a run, or goes on with it, has

    {"step", "time", "layers": {name: weights}, "parameters", "device", "processes", "versions", "config", "arguments"}

and one follows for each training log, its flip rates in the order of the `layers` above it, with the numbers that the
Trainer logs, and the method's metrics:

    {"step", "time", "steps_per_second", "tokens_per_second", "peak_memory", "flip_rates": [...], "logs": {...},
     "metrics": {...}}

A value that is not known is null. `hf-sparse24 report` draws them.
"""

import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.trainer_callback import TrainerState
from transformers.training_args import TrainingArguments

from ..progress import get_logger
from ..version import __version__
from ..weights.place import layer_name
from ..weights.sparse_weight import first_of_each
from .controller import Sparse24Controller

try:
    import resource
except ImportError:  # Windows: the peak of a process on a CPU is not known
    resource = None  # type: ignore[assignment]  # it stands for a module

logger = get_logger(__name__)

RUN_LOG = "sparse24_log.jsonl"


class RunStart(NamedTuple):
    """A line that begins a run at `step`, or goes on with it; `facts` are the whole line."""

    step: int
    time: float
    facts: dict[str, Any]


class LogLine(NamedTuple):
    """A line of numbers, None where one is not known.

    Attributes:
        step: optimizer steps done.
        time: seconds since 1970.
        steps_per_second, tokens_per_second: since the line before, evaluations and checkpoints left out.
        peak_memory: bytes: of the device by PyTorch's allocator where that is a GPU, else of the process.
        flip_rates: by layer, those that have been measured.
        metrics: of the method, by name.
        logs: what the Trainer logged, by name: the loss, the learning rate.
    """

    step: int
    time: float | None
    steps_per_second: float | None
    tokens_per_second: float | None
    peak_memory: float | None
    flip_rates: dict[str, float]
    metrics: dict[str, float]
    logs: dict[str, float]


class RunLog:
    """Writes the log of a run. Made when training begins: a fresh run starts the file anew, and a resumed one keeps the
    lines up to the step that it goes on from.

    A file that cannot be written costs a warning, never the run.
    """

    def __init__(self, args: TrainingArguments, state: TrainerState, controller: Sparse24Controller):
        self.path = Path(str(args.output_dir)) / RUN_LOG
        self.device = args.device
        weights = first_of_each(controller.weights)
        self.layers = {layer_name(name): weight.parameter.numel() for name, weight in weights.items()}
        self._is_writable = True
        self._step, self._tokens = state.global_step, state.num_input_tokens_seen
        self._began = self._worked_until = time.perf_counter()
        self._begin(_start(args, state, controller, self.layers))

    def after_step(self) -> None:
        """Right after an optimizer step."""
        self._worked_until = time.perf_counter()

    def after_pause(self) -> None:
        """After an evaluation or a checkpoint: the time since the step before it does not count."""
        self._began += time.perf_counter() - self._worked_until
        self._worked_until = time.perf_counter()

    def write(
        self,
        state: TrainerState,
        flip_rates: Mapping[str, float],
        metrics: Mapping[str, float],
        logs: Mapping[str, Any],
    ) -> None:
        """Add a line: `flip_rates` by layer, `metrics` of the method by name, and what the Trainer logs."""
        now = time.perf_counter()
        seconds, steps = now - self._began, state.global_step - self._step
        tokens = state.num_input_tokens_seen - self._tokens  # 0 unless args.include_num_input_tokens_seen
        line = {
            "step": state.global_step,
            "time": round(time.time(), 1),
            "steps_per_second": _rounded(steps / seconds) if steps else None,
            "tokens_per_second": _rounded(tokens / seconds) if tokens else None,
            "peak_memory": peak_memory(self.device),
            "flip_rates": [_rounded(flip_rates.get(name)) for name in self.layers],
            "logs": _numbers(logs),
            **({"metrics": {name: _rounded(value) for name, value in metrics.items()}} if metrics else {}),
        }
        self._step, self._tokens = state.global_step, state.num_input_tokens_seen
        self._began = self._worked_until = now
        self._try(self._append, json.dumps(line))

    def _begin(self, start: dict[str, Any]) -> None:
        self._try(self._replace, json.dumps(start, default=str))

    def _append(self, line: str) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _replace(self, start: str) -> None:
        """Keep the lines up to the step of this start, and add it: all at once."""
        kept = [line for line, step, _ in _entries(self.path) if self._step and step <= self._step]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text("".join(f"{line}\n" for line in [*kept, start]), encoding="utf-8")
        os.replace(part, self.path)

    def _try(self, write: Callable[[str], None], line: str) -> None:
        if not self._is_writable:
            return
        try:
            write(line)
        except OSError as error:
            self._is_writable = False  # what follows a line that was cut would not be read
            logger.warning(f"{self.path} cannot be written ({error}): `hf-sparse24 report` will lack what it records")


def read_run_log(path: str | Path) -> tuple[list[RunStart], list[LogLine]]:
    """What a run log holds, in its order; nothing of a file that is not there. Lines that were cut are left out.

    Raises:
        OSError: the file is there and cannot be read.
    """
    starts: list[RunStart] = []
    lines: list[LogLine] = []
    names: list[str] = []
    for _, step, entry in _entries(path):
        layers = entry.get("layers")
        if isinstance(layers, dict) and all(type(size) is int for size in layers.values()):
            names = list(layers)
            starts.append(RunStart(step, _number(entry.get("time")) or 0.0, entry))
            continue
        rates = entry.get("flip_rates")
        measured = zip(names, map(_number, rates if isinstance(rates, list) else []))
        flip_rates = {name: rate for name, rate in measured if rate is not None}
        lines.append(
            LogLine(
                step=step,
                time=_number(entry.get("time")),
                steps_per_second=_number(entry.get("steps_per_second")),
                tokens_per_second=_number(entry.get("tokens_per_second")),
                peak_memory=_number(entry.get("peak_memory")),
                flip_rates=flip_rates,
                metrics=_numbers(entry.get("metrics")),
                logs=_numbers(entry.get("logs")),
            )
        )
    return starts, lines


def peak_memory(device: torch.device) -> int | None:
    """Bytes, since the process began: allocated by PyTorch on a CUDA device, or resident of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _start(
    args: TrainingArguments, state: TrainerState, controller: Sparse24Controller, layers: dict[str, int]
) -> dict[str, Any]:
    gpu = args.device.type == "cuda"
    return {
        "step": state.global_step,
        "time": round(time.time(), 1),
        "layers": layers,
        "parameters": sum(parameter.numel() for parameter in controller.model.parameters()),
        "device": torch.cuda.get_device_name(args.device) if gpu else f"{args.device.type} ({platform.machine()})",
        "processes": args.world_size,
        "versions": {
            "hf_sparse24": __version__,
            **{name: version(name) for name in ("torch", "transformers", "accelerate")},
            "python": platform.python_version(),
        },
        "config": controller.run.config.to_dict(),
        "arguments": _given(args),
    }


def _given(args: TrainingArguments) -> dict[str, Any]:
    """Arguments that differ from their defaults, numbers and text alone: whoever shares the output directory shares
    them, and mappings may hold secrets, as text with a slash names places on this machine."""
    defaults = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(args)
    }
    return {
        name: value
        for name, value in args.to_dict().items()
        if isinstance(value, str | int | float)
        and value != defaults.get(name)
        and not name.endswith("_token")
        and not re.search(r"[/\\]", str(value))
    }


def _entries(path: str | Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """The lines of a log that are whole, their steps, and all that they hold."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            step = entry["step"]
        except (ValueError, LookupError, TypeError):
            continue
        if type(step) is int:
            yield line, step, entry


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _numbers(values: Any) -> dict[str, float]:
    named = values.items() if isinstance(values, dict) else ()
    return {name: number for name, value in named if (number := _number(value)) is not None}


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None
