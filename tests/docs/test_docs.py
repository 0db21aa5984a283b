"""README and docs are true: code runs, commands and links exist, tables and the tree equal registries and files."""

import json
import re
import shlex
import sys

import build_site
import pages
import pytest
import zoo
from backends import unregister_backend
from paths import ROOT
from safetensors import safe_open
from sparse24_kernels.gemm.backend import backend_names
from transformers import AutoModelForCausalLM

from hf_sparse24 import Sparse24Config, export_model, patch_model
from hf_sparse24.methods import METHODS
from hf_sparse24.packed_format import PackedFormat
from hf_sparse24_command import make_parser

README = (ROOT / "README.md").read_text()
FORMAT = "docs/packed_format.md"
ELSEWHERE = ("docs/engines.md",)  # its blocks run in serving/test_onnx.py
WITH_CODE = [page for page in pages.PAGES if pages.blocks(page, "python") and page not in ELSEWHERE]
APART = [page for page in WITH_CODE if any("init_process_group" in code for code in pages.blocks(page, "python"))]


@pytest.fixture
def unregistered():
    """Methods and backends that a page registers are gone after it."""
    before = dict(METHODS)
    backends = backend_names()
    yield
    for name in METHODS.keys() - before.keys():
        METHODS.pop(name)
    for name in set(backend_names()) - set(backends):
        unregister_backend(name)


# Pages show the shortest code, so trainers pick a device and trackers themselves; TRL and PEFT still use names of
# Transformers 4 that Transformers 5 is renaming.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*pin_memory.*:UserWarning")
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow) if page in APART else page for page in WITH_CODE]
)
def test_code_blocks(page, tmp_path, monkeypatch, unregistered):
    """Every block of Python on a page runs, in order, as printed; see pages.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "1")
    (pages.run_apart if page in APART else pages.run)(page, tmp_path)


def test_generated_pages_are_those_of_now(monkeypatch):
    """After a change of a card, a setting, a command or a result: `make docs`."""
    for name in METHODS.keys() - set(build_site.shipped_methods()):
        monkeypatch.delitem(METHODS, name)
    assert build_site.readme() == README, "README.md is out of date: run make docs"
    for name, text in build_site.pages().items():
        if name != "reference/cli.md" or sys.version_info[:2] == (3, 11):  # argparse's layout differs between versions
            assert (pages.DOCS / name).read_text() == text, f"docs/{name} is out of date: run make docs"


@pytest.mark.parametrize("page", pages.PAGES)
def test_commands(page):
    """Commands that a page shows exist, and take the arguments that it shows."""
    makefile = (ROOT / "Makefile").read_text()
    for block in pages.blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and "=" in words[0]:  # variables of the environment
                words.pop(0)
            if words[:1] == ["make"]:
                for target in (word for word in words[1:] if "=" not in word):
                    assert re.search(rf"^{target}:", makefile, re.MULTILINE), line
            if words[:1] == ["hf-sparse24"] and "--help" not in words:
                make_parser().parse_args(words[1:])
            for word in words:
                if re.fullmatch(r"(recipes|notebooks|tests|docs)/\S+\.(py|yaml|ipynb)", word):
                    assert (ROOT / word).exists(), line


@pytest.mark.parametrize("page", pages.PAGES)
def test_links_of_the_repository(page):
    """Relative links point to files, and those of the site's pages to the site; test_site.py knows their anchors."""
    text = re.sub(r"```.*?```", "", pages.PAGES[page], flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
        path = ((ROOT / page).parent / target).resolve().relative_to(ROOT)
        assert (ROOT / path).exists() or str(path) in pages.PAGES, target
        assert not page.startswith("docs/") or str(path).startswith("docs/"), f"{target}: not on the site"


@pytest.mark.parametrize(("values", "pattern"), [("float", "2:4"), ("float", "16:32"), ("int8", "6:8")])
def test_the_reader_of_packed_checkpoints(values, pattern, tmp_path, monkeypatch):
    """What the page says is enough to write a reader."""
    code = pages.blocks(FORMAT, "python")[-1]  # after the export that it reads
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(pattern=pattern))
    export_model(model, tmp_path, "packed", values=values)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    with safe_open(tmp_path / "packed.safetensors", "pt") as file:
        assert "hf_sparse24_export" in file.metadata()
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code, names)
    expected = model.model.layers[0].mlp.up_proj.sparse_weight().detach().numpy()
    if values == "int8":
        assert abs(names["dense"] - expected).max() <= abs(expected).max() / 250
        expected = AutoModelForCausalLM.from_pretrained(tmp_path).model.layers[0].mlp.up_proj.weight.numpy()
    assert (names["dense"] == expected).all() and names["dense"].any()
    shown = json.loads("{" + pages.blocks(FORMAT, "json")[0] + "}")["quantization_config"]
    assert shown.keys() <= config.keys() and shown["packed"].keys() == config["packed"].keys()
    assert shown["packed"]["version"] == config["packed"]["version"] == PackedFormat.VERSION


def test_method_table():
    shipped = {name for name, method in METHODS.items() if method.__module__.startswith("hf_sparse24.")}
    section = README.partition("\n## Methods\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([\w-]+)`", section)) - {"oneshot"} == shipped


def test_tree():
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("## The tree")[1].split("```")[1]
    listed, folder = set(), ""
    for line in tree.strip().splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name
        listed.add(name if name == folder else folder + name)
    assert all((ROOT / name).exists() for name in listed)
    here = {f"hf_sparse24/{p.name}" for p in (ROOT / "hf_sparse24").glob("*.py") if p.name != "__init__.py"}
    assert here == {name for name in listed if name.startswith("hf_sparse24/") and name.endswith(".py")}
