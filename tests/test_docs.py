"""README and docs are true: their code runs, their tables and the tree equal the registries and the files."""

import json
import re
from pathlib import Path

import pytest
import zoo
from datasets import Dataset
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_sparse24 import METHODS, Sparse24Config, export_model, patch_model
from hf_sparse24.packed import PackedFormat
from hf_sparse24.weight import sparse_weights

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_ten_line_example(tmp_path, monkeypatch):
    """As printed, with "gpt2" standing for a tiny local model and three steps of training."""
    monkeypatch.chdir(tmp_path)
    zoo.build("gpt2").save_pretrained("gpt2")
    code = CODE[0].replace('TrainingArguments("out")', 'TrainingArguments("out", **settings)')
    settings = {"max_steps": 3, "report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    data = Dataset.from_dict({k: v.tolist() for k, v in zoo.batch(rows=8).items()})
    exec(code, {"data": data, "settings": settings})
    assert sparse_weights(AutoModelForCausalLM.from_pretrained("my-sparse-gpt2"))


def test_the_callback_example(tmp_path):
    model = zoo.build("llama")
    patch_model(model)
    data = Dataset.from_dict({k: v.tolist() for k, v in zoo.batch(rows=8).items()})
    args = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
    )
    trainer = Trainer(model, args, train_dataset=data)
    exec(CODE[1], {"trainer": trainer})
    trainer.train()
    assert "flip_rate" in trainer.state.log_history[0]


def test_the_controller_example():
    model = zoo.build("llama")
    patch_model(model)
    scope = {"model": model, "batches": [zoo.batch(seed) for seed in range(3)]}
    exec(CODE[2], scope)
    assert scope["controller"].step == 3


def test_the_method_in_contributing():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    model = zoo.build("gpt2")
    try:
        exec(code, {"__name__": "contributed"})
        patch_model(model, Sparse24Config(method="balanced-mask", power=0.2))
        model(**zoo.batch()).loss.backward()
        assert model.config.quantization_config.power == 0.2
    finally:
        METHODS.pop("balanced-mask", None)


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


def test_there_are_no_other_code_blocks():
    assert len(CODE) == 3


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


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "recipes/README.md", "docs/packed_format.md"])
def test_links_and_make_targets_exist(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert ((ROOT / page).parent / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_step_times_are_the_measured_ones():
    result = json.loads((ROOT / "recipes" / "results" / "cpu_step_time.json").read_text())
    for row in result["rows"]:
        figure = "{seconds:.2f} s" if row["method"] == "dense" else "{ratio:.2f} [{ratio_min:.2f}, {ratio_max:.2f}]"
        assert figure.format(**row) in README
