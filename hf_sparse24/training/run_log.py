"""RunLog: one file with all that a sparse run logs, flip rates by layer included.

`<output_dir>/sparse24_log.jsonl` holds one JSON object per line, written as it comes. It has "step" and "time", where
the run starts or resumes "config" and "versions", and for each log of the Trainer the numbers that trackers get.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from ..files import written_whole
from ..methods.settings import is_number
from ..progress import get_logger
from ..version import __version__

logger = get_logger(__name__)

RUN_LOG = "sparse24_log.jsonl"
OF_LAYER = "flip_rate/"


class RunLog:
    """Writes the log of a run. A fresh run replaces the file; a resumed one keeps the lines up to its first step. A
    full disk costs one warning and the rest of the log, never the run."""

    def __init__(self, args: TrainingArguments, step: int, config: Mapping[str, object]):
        self.path = Path(str(args.output_dir)) / RUN_LOG
        self._is_writable = True
        versions = {name: version(name) for name in ("torch", "transformers", "accelerate")}
        start = {"config": config, "versions": {"hf_sparse24": __version__} | versions}
        with self._one_warning():
            lines = [*(_lines_until(self.path, step) if step else ()), _line(step, start)]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(self.path) as part:  # an earlier run's lines are not lost where the process is killed
                part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def write(self, step: int, logs: Mapping[str, object]) -> None:
        """Add a line with the numbers of a log."""
        if self._is_writable:
            with self._one_warning(), open(self.path, "a", encoding="utf-8") as file:
                file.write(_line(step, {name: x for name, x in logs.items() if is_number(x)}) + "\n")

    @contextmanager
    def _one_warning(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._is_writable = False  # a line after one that was cut would not be read
            logger.warning(f"{self.path} cannot be written ({error}): it will lack what is logged from here on")


def _line(step: int, entry: Mapping[str, object]) -> str:
    return json.dumps({"step": step, "time": round(time.time(), 1), **entry})


def _lines_until(path: Path, step: int) -> list[str]:
    """The lines of a log up to a step. A process that was killed may have left half a line, which goes."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, LookupError, TypeError):
            logged = json.loads(line)["step"]
            if logged <= step:
                kept.append(line)
    return kept


class ConsoleFilter(TrainerCallback):
    """Stands between the trackers and the console, which would print a number for each layer."""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs=None, **kwargs):
        for name in [name for name in logs if name.startswith(OF_LAYER)]:
            del logs[name]
