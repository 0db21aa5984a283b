"""GitHub's files: what the workflows call exists, actions are pinned, and nothing needs a secret.

`make lint-check` compares them with GitHub's schemas, and looks for what is unsafe.
"""

import re
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from paths import ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
SETUP = ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", [*WORKFLOWS, GITHUB / "actions/setup/action.yml"], ids=lambda path: path.stem)
def test_a_workflow_calls_what_exists_and_needs_no_secret(path):
    text = path.read_text()
    targets = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(re.findall(r"run: (.*)", text))))
    assert targets <= set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
    assert all((ROOT / script).is_file() for script in re.findall(r"\b(?:tests|recipes|docs)/[\w/]+\.py", text))
    actions = re.findall(r"uses: (.*)", text)
    assert all(
        re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) or (ROOT / action).is_dir() for action in actions
    )
    assert "secrets." not in text


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_writes_only_where_a_job_says_so(path):
    workflow = read(path)
    assert workflow["permissions"] in ({}, {"contents": "read"}) and "concurrency" in workflow
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job
        if "write" in job.get("permissions", {}).values():
            assert name in ("deploy", "draft", "pypi")


def test_python_versions_are_those_of_the_package():
    listed = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
    assert SETUP["options"]["python_requires"] == f">={listed[0]}"
    assert read(GITHUB / "workflows/ci.yml")["jobs"]["tests"]["strategy"]["matrix"]["python"] == listed
    assert read(GITHUB / "workflows/release.yml")["jobs"]["try"]["strategy"]["matrix"]["python"] == listed
    assert read(GITHUB / "actions/setup/action.yml")["inputs"]["python-version"]["default"] == listed[0]


def test_the_citation_has_the_version_and_the_papers_of_the_methods():
    citation = read(ROOT / "CITATION.cff")
    released = f"## [{citation['version']}] - {citation['date-released']}\n"
    assert released in (ROOT / "CHANGELOG.md").read_text()
    cited = {paper["identifiers"][0]["value"].removeprefix("arXiv:") for paper in citation["references"]}
    folders = ROOT / "hf_sparse24" / "methods", ROOT / "recipes" / "methods"
    cards = "".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    others = {"2102.08124", "2203.10991", "2301.00774"}  # masks that are transposable, MVUE, and SparseGPT
    assert cited == set(re.findall(r"Reference .*?\(arXiv ([\d.]+)\)", cards)) | others


def test_pins_fit_the_bounds_of_setup_cfg():
    """Also those of the tools: an extra without a pin would take another version on every machine.

    Triton has none: builds of torch with CUDA ask for one version of it, and any other pin makes that torch impossible
    to install, where a CPU's builds leave it open.
    """
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {
        r.name.lower().replace("_", "-"): r for r in (Requirement(line) for line in lines if not line.startswith("#"))
    }
    assert "triton" not in pins
    no_pin = {"setuptools", "triton"}
    texts = [SETUP["options"]["install_requires"], *SETUP["options.extras_require"].values()]
    for line in (line.strip() for text in texts for line in text.splitlines()):
        if line and not line.startswith(("#", "hf_sparse24")) and (wanted := Requirement(line)).name not in no_pin:
            (pin,) = pins[wanted.name.lower().replace("_", "-")].specifier
            assert wanted.specifier.contains(pin.version), line
