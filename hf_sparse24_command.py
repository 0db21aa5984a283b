"""The command `hf-sparse24`: its arguments, and where each of its commands is.

It lies outside the package, whose import takes seconds (torch, Transformers): so `--help` and a wrong argument are
answered at once, and Ctrl-C ends a command without a traceback even while it imports. The commands themselves are in
`hf_sparse24/tools`.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version

_MODEL = "a name on the Hub or a directory with a config.json; no weights are loaded"
_STOPPED = "hf-sparse24: stopped; what is finished is kept for the same command, and no export is half written"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status is 0 where all is well, 1 where a check failed, 2 for a wrong argument."""
    interrupts: list[bool] = []

    def interrupt(*_: object) -> None:
        interrupts.append(True)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        imports, others = _import_option().parse_known_args(arguments)  # before the command or after it
        options = make_parser().parse_args(others)
        module, function = options.run.split(":")
        with _ending_at_once():
            _import_modules(imports.modules)
            commands = importlib.import_module(f"hf_sparse24.tools.{module}")
        return getattr(commands, function)(options)
    except (ImportError, OSError, ValueError, KeyboardInterrupt) as error:
        if interrupts or isinstance(error, KeyboardInterrupt):  # torch's C++ may turn it into another error
            print(_STOPPED, file=sys.stderr)
            return 130
        print("hf-sparse24:", *str(error).split(), file=sys.stderr)  # on one line
        return 2
    finally:
        signal.signal(signal.SIGINT, before)


def _import_modules(modules: list[str]) -> None:
    """Import modules that are installed or in the working directory, where a console script does not look."""
    if modules:
        sys.path.append(os.getcwd())  # behind all that is installed
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # a module can raise anything
            text = f"--import {name}: {type(error).__name__}: {error} (looked in {os.getcwd()} too)"
            raise ImportError(text) from error


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process without an exception, which torch, while it is imported, answers by an abort."""

    def stop(*_: object) -> None:
        os.write(2, f"{_STOPPED}\n".encode())
        os._exit(130)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _import_option() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-sparse24", add_help=False, allow_abbrev=False)
    text = "a Python module to import first, which registers methods; may be repeated, and may follow COMMAND"
    parser.add_argument("--import", dest="modules", metavar="MODULE", action="append", default=[], help=text)
    return parser


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command and all its subcommands."""
    text = "2:4 sparse training for Transformers"
    parser = argparse.ArgumentParser(prog="hf-sparse24", description=text, parents=[_import_option()])
    parser.add_argument("--version", action="version", version=f"hf-sparse24 {version('hf_sparse24')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    text = "make a pretrained model sparse with some text: prune it, train it with the dense one as teacher, export it"
    prune = command("prune", "prune:prune", text)
    prune.add_argument("model", metavar="MODEL", help="a pretrained text model: a directory, or a name on the Hub")
    text = 'a text file, a .jsonl file of {"text": ...}, or a directory of .txt and .jsonl files; one or several'
    prune.add_argument("--text", metavar="PATH", nargs="+", action="extend", required=True, help=text)
    text = "directory of the export; OUT-work keeps what is finished until then, and the same command goes on from it"
    prune.add_argument("-o", "--output", metavar="OUT", required=True, help=text)
    text = (
        "of the text, to train on after pruning; 0: no training (default: by the text, the model's size and the device)"
    )
    prune.add_argument("--tokens", type=whole_number, metavar="N", help=text)
    text = "of the text, to prune by (default 24576, or half of a short text)"
    prune.add_argument("--calibration-tokens", type=positive_number, metavar="N", help=text)
    text = "that the model writes by itself, to prune by too (default: three times --calibration-tokens)"
    prune.add_argument("--own-tokens", type=whole_number, metavar="N", help=text)
    text = "of the weights (default 2:4, for GPUs; 16:32 loses less in the same bytes, for CPUs)"
    prune.add_argument("--pattern", metavar="N:M", default="2:4", help=text)
    text = "of the order of documents, of what the model writes, and of the training (default 0)"
    prune.add_argument("--seed", type=whole_number, default=0, metavar="N", help=text)
    prune.add_argument("--overwrite", action="store_true", help="replace an export in OUT")
    text = "run Python code that lies with MODEL: read it first"
    prune.add_argument("--trust-remote-code", action="store_true", help=text)

    text = "versions, devices, what runs where and why, checks of the kernels; with MODEL, its predicted gain"
    doctor = command("doctor", "gemm_commands:doctor", text)
    text = "check all kernels again, and write sparse24-doctor.json, to paste into an issue"
    doctor.add_argument("--check", action="store_true", help=text)
    doctor.add_argument("model", metavar="MODEL", nargs="?", help=_MODEL)
    text = "measure sparse GEMMs of training MODEL (on a GPU, or fp32 on a CPU), or packed layers (on a CPU)"
    tune = command("tune", "gemm_commands:tune", text)
    tune.add_argument("model", metavar="MODEL", help=_MODEL)
    for each in (doctor, tune):
        each.add_argument("--method", help="such as s-ste; without it the model's own, or the default")
        each.add_argument("--target-modules", help="mlp, attention or all-linear; without it the model's own, or mlp")
        dtypes = ("bf16", "fp16", "fp32")
        text = "of the GEMMs (default bf16; fp32 for training on a CPU, which multiplies sparse in no other)"
        each.add_argument("--dtype", choices=dtypes, help=text)
        text = "that a layer multiplies at a time: micro-batch x length, patches of images too (default 8192)"
        each.add_argument("--tokens", type=positive_number, default=8192, help=text)

    text = "save what a training checkpoint computes with, for others to use, and its tokenizer"
    export = command("export", "checkpoint_commands:export", text)
    text = "which weights of an export are sparse, and how large it is"
    inspect = command("inspect", "checkpoint_commands:inspect", text)
    text = "read an export, and prove that what is said to be sparse is; exit status 1 if not"
    verify = command("verify", "checkpoint_commands:verify_checkpoint", text)
    for each in (export, inspect, verify):
        each.add_argument("checkpoint", metavar="CHECKPOINT", help="a directory, or a name on the Hub")
    size = "of one file, in bytes or as 500MB (default 5GB)"
    export.add_argument("directory", metavar="DIRECTORY", help="where to; an export that it holds is replaced")
    export.add_argument("--max-shard-size", metavar="SIZE", default="5GB", type=_size, help=size)
    text = "dense (default): any engine reads it; packed: 9/16 of the bytes, read with hf_sparse24"
    for each in (export, prune):
        each.add_argument("--format", choices=("dense", "packed"), default="dense", help=text)
    text = "of a packed export: float (default), as they are; int8: rounded, with scales, 5/16 of the bytes"
    for each in (export, prune):
        each.add_argument("--values", choices=("float", "int8"), default="float", help=text)
    return parser


def _size(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def whole_number(text: str, least: int = 0) -> int:
    """The whole number, at least `least`, that `text` says."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    return int(text)


positive_number = partial(whole_number, least=1)


if __name__ == "__main__":
    sys.exit(main())
