"""README and docs are true: their code runs, their tables and the tree equal the registries and the files."""

import json
import re
import shlex
from pathlib import Path

import pages
import pytest
import zoo
from safetensors import safe_open

from hf_sparse24 import METHODS, export_model, patch_model
from hf_sparse24.packed import PackedFormat
from hf_sparse24.tools.cli import make_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture
def unregistered():
    """Methods that a page registers are gone after it."""
    before = dict(METHODS)
    yield
    for name in METHODS.keys() - before.keys():
        METHODS.pop(name)


# Pages show the shortest code, so trainers pick a device and trackers themselves; TRL and PEFT still use names of
# Transformers 4 that Transformers 5 is renaming.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*pin_memory.*:UserWarning")
@pytest.mark.parametrize("page", [page for page in pages.PAGES if pages.blocks(page, "python")], ids=pages.name_of)
def test_code_blocks(page, tmp_path, monkeypatch, unregistered):
    """Every block of Python on a page runs, in order, as printed; see pages.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "1")
    pages.run(page, tmp_path)


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name_of)
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


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name_of)
def test_links_of_the_repository(page):
    """Relative links point to files, and their anchors to headings; pages of the site link within the site."""
    for target in re.findall(r"\]\((?!https?:|#)([^)\s]+)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        path = (page.parent / target.split("#")[0]).resolve()
        generated = path.is_relative_to(pages.DOCS) and str(path.relative_to(pages.DOCS)) in pages.GENERATED
        assert path.exists() or generated, target
        if page.is_relative_to(pages.DOCS):
            assert path.is_relative_to(pages.DOCS), f"{target}: not on the site"


def test_the_reader_of_packed_checkpoints(tmp_path, monkeypatch):
    """What the page says is enough to write a reader."""
    page = (ROOT / "docs/packed_format.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    model = zoo.build("llama")
    patch_model(model)
    export_model(model, tmp_path, "packed")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code, names)
    expected = model.model.layers[0].mlp.up_proj.sparse_weight().detach().numpy()
    assert (names["dense"] == expected).all() and names["dense"].any()
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    shown = json.loads("{" + re.search(r"```json\n(.*?)```", page, re.DOTALL)[1] + "}")["quantization_config"]
    assert shown.keys() <= config.keys() and shown["packed"].keys() == config["packed"].keys()
    assert shown["packed"]["version"] == config["packed"]["version"] == PackedFormat.LATEST
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "hf_sparse24_export" in file.metadata()


def test_method_table():
    shipped = {name for name, method in METHODS.items() if method.__module__.startswith("hf_sparse24.")}
    assert set(re.findall(r"^\| `([\w-]+)`", README, re.MULTILINE)) == shipped


def test_architectures_are_the_tested_ones():
    paragraph = README[README.index("The tests cover") :].split("\n\n")[0]
    names = re.split(r",\s+|\s+and\s+", paragraph.removeprefix("The tests cover ").rstrip("."))
    assert names == zoo.NAMES


def test_tree():
    tree = README.split("## The tree")[1].split("```")[1]
    listed, folder = set(), ""
    for line in tree.strip().splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name
        listed.add(name if name == folder else folder + name)
    assert all((ROOT / name).exists() for name in listed)
    here = {f"hf_sparse24/{p.name}" for p in (ROOT / "hf_sparse24").glob("*.py") if p.name != "__init__.py"}
    assert here == {name for name in listed if name.startswith("hf_sparse24/") and name.endswith(".py")}


def test_step_times_are_the_measured_ones():
    result = json.loads((ROOT / "recipes" / "results" / "cpu_step_time.json").read_text())
    for row in result["rows"]:
        figure = "{seconds:.2f} s" if row["method"] == "dense" else "{ratio:.2f} [{ratio_min:.2f}, {ratio_max:.2f}]"
        assert figure.format(**row) in README
