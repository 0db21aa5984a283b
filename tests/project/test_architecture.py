"""What the library promises about itself: it names no method outside methods/, and importing it changes nothing."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from paths import ROOT

from hf_sparse24.methods import METHODS

PACKAGE = ROOT / "hf_sparse24"
BUILT_IN = [name for name, method in METHODS.items() if method.__module__.startswith("hf_sparse24.")]
OUTSIDE = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "methods")


def mentions(text: str) -> bool:
    """Whether a string is a method's name, or says one in a sentence: quoted, or with a hyphen, as no other word is."""
    names = "|".join(map(re.escape, BUILT_IN))
    quoted = rf"""['"`]({names})['"`]"""
    hyphenated = rf"(?<![\w-])({'|'.join(re.escape(name) for name in BUILT_IN if '-' in name)})(?![\w-])"
    return text in BUILT_IN or bool(re.search(f"{quoted}|{hyphenated}", text))


def parts_not_meant(tree: ast.Module) -> set[int]:
    """Docstrings, and names of something else: keys of dicts, and what is read by `[...]`, such as `state["step"]`."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.add(id(node.value))
        elif isinstance(node, ast.Dict):
            found |= {id(key) for key in node.keys}
        elif isinstance(node, ast.Subscript):
            found.add(id(node.slice))
    return found


def method_names_in(source: str) -> Iterator[int]:
    """Lines of a file on which a string names a method."""
    tree = ast.parse(source)
    compared = {
        id(leaf) for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.match_case) for leaf in ast.walk(node)
    }
    skipped = parts_not_meant(tree) - compared
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in skipped and mentions(node.value):
            yield node.lineno


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_method_is_named_outside_methods(path):
    """A method owns all that it does; what depends on the method is asked of it."""
    assert [path.read_text().splitlines()[number - 1].strip() for number in method_names_in(path.read_text())] == []


def test_no_method_is_imported_outside_methods():
    modules = {METHODS[name].__module__.rpartition(".")[2] for name in BUILT_IN}
    for path in OUTSIDE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module != "typing":  # whose cast is no method
                imported = {(node.module or "").rpartition(".")[2], *(alias.name for alias in node.names)}
                assert not imported & modules, f"{path.name} imports {imported & modules}"


IMPORT = """
import logging, os, random, signal, sys, threading, warnings
import accelerate, numpy, peft, torch, transformers, transformers.quantizers.auto, transformers.trainer
import torch.nn.modules.module as modules, torch.optim.optimizer as optimizers

CLASSES = (
    torch.nn.Module, torch.nn.Linear, torch.optim.Optimizer, torch.optim.AdamW, torch.Tensor, torch.nn.Parameter,
    transformers.Trainer, transformers.PreTrainedModel, transformers.pytorch_utils.Conv1D,
    peft.PeftModel, peft.LoraConfig, peft.LoraModel, peft.tuners.tuners_utils.BaseTuner, peft.tuners.lora.layer.Linear,
)
TUNERS = peft.PEFT_TYPE_TO_TUNER_MAPPING, peft.PEFT_TYPE_TO_MIXED_MODEL_MAPPING

def settings():
    loggers = [logging.getLogger(name) for name in (None, "transformers", "torch", "accelerate")]
    return {
        "process": (dict(os.environ), list(sys.path), list(sys.meta_path), sys.excepthook, threading.active_count(),
                    [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]),
        "logging": ([(logger.level, list(logger.handlers)) for logger in loggers], list(warnings.filters)),
        "random states": (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()),
        "torch": (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
                  torch.cuda.is_initialized(), torch.are_deterministic_algorithms_enabled()),
        "hooks": [{name: dict(value) for name, value in vars(module).items()
                   if name.startswith("_global_") and isinstance(value, dict)} for module in (modules, optimizers)],
        "classes": [{name: id(value) for name, value in vars(cls).items()} for cls in CLASSES],
    }

before, tuners_before = settings(), [dict(registry) for registry in TUNERS]
import hf_sparse24
after = settings()
changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
assert not changed, changed
for registry, known in zip(TUNERS, tuners_before):
    assert registry.keys() == known.keys()
    for kind, tuner in registry.items():
        assert issubclass(tuner, known[kind]) and tuner.__name__ == known[kind].__name__
"""


@pytest.mark.slow
def test_importing_changes_nothing_but_the_registries_of_transformers_and_peft(tmp_path):
    run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
