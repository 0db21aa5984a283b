"""The library works without the packages of its extras; what needs one names the command that installs it."""

import os
import re
import subprocess
import sys
from configparser import ConfigParser

import pytest
from packaging.requirements import Requirement
from paths import ROOT, SUPPORT

SETUP = ConfigParser()
SETUP.read(ROOT / "setup.cfg")
EXTRAS = {
    extra: {Requirement(line).name for line in text.splitlines() if line and not line.startswith("#")}
    for extra, text in SETUP["options.extras_require"].items()
}

HIDE = """
import sys; sys.path.insert(0, {here!r})
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
WITHOUT = (
    HIDE
    + """
import pathlib, torch, zoo
import sparse24_kernels as kernels
from transformers import AutoModelForCausalLM, TrainingArguments
from hf_sparse24 import Sparse24Config, Sparse24Trainer, export_model, make_model_card, patch_model
from hf_sparse24.hub.picture import write_picture
import hf_sparse24_command as cli

torch.set_num_threads(1)
data = [{{key: value[0] for key, value in zoo.batch().items()}}] * 8
settings = {{"max_steps": 2, "logging_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True}}
config = Sparse24Config(method="t-sr-ste", dense_tail=0)
trainer = Sparse24Trainer(zoo.build("llama"), TrainingArguments("run", **settings), train_dataset=data,
                          sparse24_config=config)
trainer.train()
make_model_card(trainer.model, log_history=trainer.state.log_history)
assert write_picture(pathlib.Path(), trainer.state.log_history) is None  # no Matplotlib
export_model(trainer.model, "export", "packed")
with torch.no_grad():
    logits = trainer.model.eval()(**zoo.batch()).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained("export")(**zoo.batch()).logits, logits)

model = zoo.build("llama")
before = [*model.state_dict()]
for needs_or_tools in (
    lambda: kernels.transposable_mask(torch.randn(8, 8), solver="min-cost-flow"),
    lambda: patch_model(model, Sparse24Config(method="t-sr-ste", pattern="4:8")),
):
    try:
        needs_or_tools()
    except ImportError as error:
        assert str(error) == "the min-cost-flow solver needs OR-tools: pip install ortools"
    else:
        sys.exit("no error")
assert [*model.state_dict()] == before
assert cli.main(["doctor"]) == 0
imported = {{name.partition(".")[0] for name in sys.modules}}
assert not imported & {absent!r}, imported & {absent!r}
"""
)


@pytest.mark.slow
def test_a_process_without_the_packages_of_the_extras(tmp_path):
    absent = {"deepspeed", "triton"}.union(
        *(EXTRAS[extra] for extra in ("recipes", "report", "peft", "onnx", "solvers", "trl"))
    )
    absent -= {"tokenizers", "pyyaml"}  # Transformers needs them
    absent |= {"PIL", "sklearn"}  # as pillow and scikit-learn are imported
    code = WITHOUT.format(here=str(SUPPORT), absent=absent)
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_tests_on_a_gpu_need_six_packages():
    absent = {name.removeprefix("pytest-") for needed in EXTRAS.values() for name in needed} | {"PIL", "sklearn"}
    absent -= {"triton", "peft", "pytest", "tokenizers", "pyyaml", "setuptools", "hf_sparse24"}
    assert {"datasets", "hypothesis", "trl", "xdist"} <= absent
    code = HIDE.format(here=str(SUPPORT), absent=absent) + "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "-q", "-m", "gpu", "--tb=line"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins are found by their metadata
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (failed|passed|error)", run.stdout)}
    assert sum(counts.values()) > 500 and "error" not in counts, run.stdout + run.stderr  # they fail without a GPU
    assert "ModuleNotFoundError" not in run.stdout and "ImportError" not in run.stdout, run.stdout


def test_every_extra_that_a_message_names_exists():
    files = [path for folder in ("hf_sparse24", "kernels", "recipes") for path in (ROOT / folder).rglob("*.py")]
    named = r"\brequire\(\"\w+\", \"([\w-]+)\"\)|'(?:hf_sparse24|\.)\[([\w-]+)\]'"
    extras = {extra for path in files for found in re.findall(named, path.read_text()) for extra in found} - {""}
    assert "recipes" in extras and extras <= EXTRAS.keys()
