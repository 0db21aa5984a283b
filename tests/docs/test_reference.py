"""The reference is complete: every public name has its arguments, results and errors described, on one page of the
site, and the examples in docstrings run."""

import ast
import doctest
import inspect
import logging
import re
import textwrap

import griffe
import pages
import pytest
import sparse24_kernels
import sparse24_kernels.gemm
import torch

import hf_sparse24
from hf_sparse24 import methods
from hf_sparse24.methods import METHODS

PACKAGES = (hf_sparse24, sparse24_kernels, sparse24_kernels.gemm)
# mkdocstrings takes this name for the module that is called like the function.
SAME_NAME = {"sparse24_kernels.mvue": "sparse24_kernels.mvue.mvue"}
PUBLIC = [f"{package.__name__}.{name}" for package in PACKAGES for name in package.__all__]
NAMES = [SAME_NAME.get(name, name) for name in PUBLIC]
DIRECTIVE = re.compile(r"^::: (\S+)", re.MULTILINE)
PAGES = sorted((pages.DOCS / "reference").glob("*.md"))
SHOWN = [name for page in PAGES for name in DIRECTIVE.findall(page.read_text())]


@pytest.fixture(scope="module")
def tree():
    """Both packages as mkdocstrings reads them."""
    loader = griffe.GriffeLoader(
        search_paths=[pages.ROOT, pages.ROOT / "kernels"],
        extensions=griffe.load_extensions("dataclasses"),
    )
    for package in (hf_sparse24, sparse24_kernels):
        loader.load(package.__name__)
    loader.resolve_aliases(implicit=True)
    return loader.modules_collection


def find(tree, path: str):
    found = tree[path]
    return found.final_target if found.is_alias else found


def sections(documented) -> dict[str, object]:
    """The parts of a docstring. What is below Returns is one text, as the site's settings should have it as well."""
    whole = {"returns_multiple_items": False, "returns_named_value": False}
    return {section.kind.value: section for section in documented.docstring.parse("google", **whole)}


def names_in(found: dict[str, object], kind: str) -> list[str]:
    return [entry.name.lstrip("*") for entry in getattr(found.get(kind), "value", [])]


def parts(documented) -> list:
    """A class or function, and, of a class, its methods with docstrings, which the site shows too."""
    members = documented.members.values() if documented.is_class else []
    methods = [m for m in members if m.is_function and not m.name.startswith("_") and m.docstring is not None]
    return [documented, *methods]


def raises(function) -> bool:
    """Whether its own code has a `raise`; those that only say what a subclass must do are told apart by their error."""
    tree = ast.parse(textwrap.dedent("\n".join(function.lines)))
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(tree))


@pytest.mark.parametrize("path", NAMES)
def test_docstring(tree, path):
    documented = find(tree, path)
    assert documented.docstring is not None, f"{path} has no docstring"
    if documented.is_attribute:
        return
    for part in parts(documented):
        found = sections(part)
        described = names_in(found, "parameters") + (names_in(found, "attributes") if part.is_class else [])
        takes_any = part.is_class and "__init__" not in part.members and "dataclass" not in part.labels
        # Hooks of a method share their arguments, which SparseMethod itself describes.
        if not takes_any and (part.is_class or documented.name != "SparseMethod"):
            missing = {p.name.lstrip("*") for p in part.parameters} - {"self", "cls"} - set(described)
            assert not missing, f"{part.path}: Args: lacks {sorted(missing)}"
        if part.is_function and documented.name != "SparseMethod":
            returns = str(part.returns)
            assert returns == "None" or "returns" in found, f"{part.path} returns {returns}: no Returns:"
            for entry in getattr(found.get("returns"), "value", []):  # "text: more text" would be a type and its text
                assert str(entry.annotation) == returns, f"{part.path}: Returns: starts with {entry.annotation!s}:"
            assert "raises" in found or not raises(part), f"{part.path} raises: no Raises:"


def test_griffe_has_no_objections(tree, caplog):
    """What mkdocstrings would warn of while it builds the site."""
    with caplog.at_level(logging.WARNING, logger="griffe"):
        for path in SHOWN:
            for part in parts(find(tree, path)):
                if part.docstring is not None:
                    sections(part)
    assert not caplog.messages


def test_every_public_name_is_on_one_page():
    ours = [name for name in SHOWN if name in NAMES]
    assert sorted(ours) == sorted(NAMES)
    assert len(SHOWN) == len(set(SHOWN))
    index = (pages.DOCS / "reference" / "index.md").read_text()
    for name in NAMES:
        short = name.rpartition(".")[2]
        page = next(page for page in PAGES if name in DIRECTIVE.findall(page.read_text()))
        link = f"[`{short}`]({'' if page.name == 'index.md' else page.name}#{name})"
        assert link in index, f"index.md lacks {link}"


def test_every_name_for_authors_is_on_the_page_of_methods():
    page = (pages.DOCS / "reference" / "methods.md").read_text()
    assert not [name for name in methods.__all__ if not re.search(rf"[`.]{name}\b", page)]


class AnyOutput(doctest.OutputChecker):
    """What an example shows must come; where it shows nothing, anything may, such as a Trainer's log."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, got, optionflags)


def examples() -> list[doctest.DocTest]:
    found = []
    finder = doctest.DocTestFinder(recurse=False)
    for package in (*PACKAGES, methods):
        for name in package.__all__:
            value = getattr(package, name)
            if not callable(value):
                continue
            names = (
                vars(sparse24_kernels)
                | vars(sparse24_kernels.gemm)
                | vars(methods)
                | vars(hf_sparse24)
                | {"torch": torch, "__name__": "example"}
            )
            own = [m for key, m in vars(value).items() if not key.startswith("_")] if inspect.isclass(value) else []
            for part in [value, *own]:
                text = getattr(part, "__doc__", None)
                if isinstance(part, property) or not text or ">>>" not in text:
                    continue
                part = getattr(part, "__func__", part)
                shown = f"{package.__name__}.{getattr(part, '__qualname__', name)}"
                found += finder.find(part, shown, globs=names)
    return [test for test in found if test.examples]


EXAMPLES = examples()
MAIN = {
    "DistillationConfig",
    "methods.StepAdamW",
    "Sparse24Callback.add_to",
    "Sparse24Config",
    "Sparse24Controller",
    "Sparse24Trainer",
    "describe_settings",
    "export_model",
    "fuse_gated_mlps",
    "make_model_card",
    "oneshot",
    "pack_model",
    "patch_model",
    "register_method",
    "unpatch_model",
}


def test_main_functions_have_examples():
    assert {test.name.partition(".")[2] for test in EXAMPLES} >= MAIN


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.parametrize("test", EXAMPLES, ids=[test.name for test in EXAMPLES])
def test_example(test, tmp_path, monkeypatch):
    """In a directory with tiny models under the names that examples load."""
    monkeypatch.chdir(tmp_path)
    if "from_pretrained" in test.docstring:
        pages.prepare(tmp_path)
    torch.manual_seed(0)
    before = dict(METHODS)
    said: list[str] = []
    runner = doctest.DocTestRunner(AnyOutput(), verbose=False, optionflags=doctest.ELLIPSIS)
    try:
        runner.run(test, out=said.append)
    finally:
        for name in METHODS.keys() - before.keys():
            METHODS.pop(name)
    assert not said, "".join(said)
