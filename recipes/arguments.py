"""What the flags of every training script have in common: YAML files below the command line, and the sparse flags.

A script names its dataclasses of flags, with TrainingArguments or a subclass of it last, and calls `parse_arguments`.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path

import yaml
from dense_flips import DenseFlipRateCallback
from transformers import HfArgumentParser, TrainerCallback

from hf_sparse24 import DistillationConfig, Sparse24Config
from hf_sparse24.methods import METHODS


class UsageError(ValueError):
    """Flags or data that a script cannot work with. The text says what to do; `running.run` shows nothing else."""


@dataclass
class SparseArguments:
    method: str = field(default="s-ste", metadata={"help": f"{', '.join(sorted(METHODS))}; or dense, the control run."})
    target_modules: list[str] = field(
        default_factory=lambda: ["mlp"],
        metadata={"help": "mlp, attention, all-linear, a regular expression, or several name endings."},
    )
    sparse24: dict | str | None = field(default=None, metadata={"help": "JSON of further Sparse24Config fields."})
    method_module: str | None = field(
        default=None, metadata={"help": "A module to import first, which registers the method, as methods.ast."}
    )
    flips_of: str | None = field(
        default=None,
        metadata={"help": "With method dense: log the flip rate that masks of this method would have."},
    )

    def __post_init__(self):
        if self.method_module is not None:
            try:
                import_module(self.method_module)
            except ModuleNotFoundError as error:
                raise UsageError(f"method_module={self.method_module!r}: {error}") from error
        check_choice("method", self.method, ("dense", *sorted(METHODS)))
        if self.flips_of is not None:
            check_choice("flips_of", self.flips_of, sorted(name for name in METHODS if not METHODS[name].keeps_zeros))
            if self.method != "dense":
                raise UsageError(f"flips_of is for method='dense'; {self.method!r} logs its own flip_rate")
        self.sparse24 = json_object("sparse24", self.sparse24)
        self.make_config()  # a wrong value shows before anything is loaded

    def make_config(self) -> Sparse24Config | None:
        """None for the dense control run."""
        return None if self.method == "dense" else self._config_of(self.method)

    def make_callbacks(self) -> list[TrainerCallback]:
        """Of the dense control run."""
        return [] if self.flips_of is None else [DenseFlipRateCallback(self._config_of(self.flips_of))]

    def _config_of(self, method: str) -> Sparse24Config:
        targets = self.target_modules
        if isinstance(targets, list) and len(targets) == 1:  # argparse cannot tell one word from a list of one
            targets = targets[0]
        return Sparse24Config.from_dict({"method": method, "target_modules": targets, **self.sparse24})


@dataclass
class TeacherArguments:
    teacher: str | None = field(
        default=None, metadata={"help": "A model to learn from as well, as the dense original of a pruned one."}
    )
    distillation: dict | str | None = field(
        default=None, metadata={"help": "With teacher: JSON of DistillationConfig, as '{\"temperature\": 1}'."}
    )

    def __post_init__(self):
        self.distillation = json_object("distillation", self.distillation)
        self.make_distillation()

    def make_distillation(self) -> DistillationConfig | None:
        """None without a teacher."""
        if self.teacher is None:
            if self.distillation:
                raise UsageError("distillation is for a teacher; give --teacher, a name on the Hub or a directory")
            return None
        unknown = sorted(self.distillation.keys() - {f.name for f in fields(DistillationConfig)})
        if unknown:
            raise UsageError(f"distillation: {unknown} are no fields of DistillationConfig")
        return DistillationConfig(**self.distillation)


def parse_arguments(classes: tuple[type, ...], argv: list[str] | None = None) -> tuple:
    """The dataclasses from command-line flags, after any number of YAML files that give their defaults; the last wins.

    Args:
        classes: of flags; the last is TrainingArguments or a subclass of it, whose flags `--help` leaves out.
        argv: without the name of the program; None for those of this process.

    Raises:
        UsageError: no such YAML file, a key of it that no class has, a flag that none has, and what the classes raise.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    usage = "%(prog)s [FILE.yaml ...] [--flag value ...]"
    parser = HfArgumentParser(classes, allow_abbrev=False, add_help=False, usage=usage)
    own = HfArgumentParser(classes[:-1], usage=usage, epilog=_MORE)
    parser.add_argument("-h", "--help", action=_HelpOf, parser=own, help="list the flags of this script")
    parser.add_argument("--help-all", action="help", help="list those of TrainingArguments as well")
    while argv and argv[0].endswith((".yaml", ".yml")):
        settings = read_yaml(argv.pop(0), classes)
        parser.set_defaults(**_instead_of(settings, classes) | settings)
    given = {flag.partition("=")[0][2:].replace("-", "_") for flag in argv if flag.startswith("--")}
    parser.set_defaults(**_instead_of(given, classes))
    try:
        return parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    except (TypeError, ValueError) as error:  # of Transformers' own classes, and of Sparse24Config
        raise UsageError(error) from error


_ALTERNATIVES = {"validation_file": "validation_split", "validation_split": "validation_file"}


def _instead_of(given: Iterable[str], classes: tuple[type, ...]) -> dict[str, None]:
    """No values for the alternatives of flags that are given: the last of two YAML files wins, and the command line."""
    known = {f.name for cls in classes for f in fields(cls)}
    return {other: None for name, other in _ALTERNATIVES.items() if name in given and other in known}


# What the toy settings read, and the command that makes it.
TOY_DATA = {
    "runs/stdlib_text": "python recipes/stdlib_text.py",
    "runs/tiny_tasks": "python recipes/tiny_tasks.py",
    "runs/tiny_chats": "python recipes/tiny_chats.py",
    "runs/tiny_images": "python recipes/tiny_images.py",
    "runs/quickstart": "make demo",
    "runs/quickstart-dense": "python recipes/train.py recipes/quickstart.yaml --method dense "
    "--output_dir runs/quickstart-dense",
}
_READ = (
    "dataset",
    "validation_file",
    "tokenizer_name",
    "image_processor_name",
    "model_name_or_path",
    "teacher",
    "chat_template_path",
)


def check_toy_data(arguments: tuple) -> None:
    """Raises a UsageError that names the command, where toy data or a toy model is not there.

    Without it, `from_pretrained` and `load_dataset` take the path for a name on the Hub.

    Args:
        arguments: what `parse_arguments` returns.
    """
    for name in _READ:
        for path in (Path(value) for part in arguments if (value := getattr(part, name, None))):
            command = TOY_DATA.get("/".join(path.parts[:2]))
            if command is not None and not path.exists():
                raise UsageError(f"{name}={str(path)!r}: not there; `{command}` makes it")


_MORE = (
    "--help-all lists every flag of transformers.TrainingArguments as well: --output_dir, --max_steps, "
    "--learning_rate, --per_device_train_batch_size, --bf16, ..."
)


class _HelpOf(argparse.Action):
    """`--help` without the flags of TrainingArguments, among which one would not find ours."""

    def __init__(self, option_strings, dest, parser, help):
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)
        self.parser = parser

    def __call__(self, parser, *args):
        self.parser.print_help()
        parser.exit()


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as a number, as YAML 1.2 and JSON do; PyYAML's YAML 1.1 asks for 1.0e-4 and makes it a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def read_yaml(path: str, classes: tuple[type, ...]) -> dict:
    """Flags of `classes` from a YAML file, numbers as text: argparse then checks them as on the command line."""
    if not Path(path).is_file():
        raise UsageError(f"{path}: no such file")
    try:
        settings = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(settings, dict):
        raise UsageError(f"{path}: must be a mapping of flags to values")
    known = {f.name for cls in classes for f in fields(cls) if f.init}
    unknown = sorted(str(key) for key in settings.keys() - known)
    if unknown:
        raise UsageError(f"{path}: unknown keys {unknown}; the script's --help-all lists the flags")
    return {key: str(value) if isinstance(value, int | float) else value for key, value in settings.items()}


def check_choice(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raises a UsageError that lists what is allowed."""
    if value not in allowed:
        raise UsageError(f"{name}={value!r}: must be one of {', '.join(allowed)}")


def check_splits(dataset: str, splits: Iterable[str], *wanted: str) -> None:
    """Raises a UsageError of the first split that a data set lacks."""
    for split in wanted:
        if split not in splits:
            raise UsageError(f"{dataset} has no split {split!r}, only {sorted(splits)}")


def json_object(name: str, value: dict | str | None) -> dict:
    """A flag that holds a JSON object: a text on the command line, a mapping in YAML; absent, an empty one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{name}={value!r}: not JSON ({error})") from error
    if not isinstance(value, dict | None):
        raise UsageError(f"{name}={value!r}: must be a JSON object, as '{{\"key\": 1}}'")
    return value or {}
