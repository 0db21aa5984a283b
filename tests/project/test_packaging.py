"""The shape of the project: what a wheel holds, and who imports whom."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path

import grimp
import lower_bounds
import pytest
from paths import ROOT
from sparse24_kernels.cpu.build import SOURCES, fingerprint

import hf_sparse24


def foreign(package: str) -> set[str]:
    """The packages that modules of a package import, inside functions too, the standard library left out."""
    graph = grimp.build_graph(package, include_external_packages=True, cache_dir=None)
    return {name for name in graph.modules if graph.is_module_squashed(name)} - set(sys.stdlib_module_names)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A directory with an sdist of the project, and the wheel that is built from it."""
    directory = tmp_path_factory.mktemp("built")
    source = directory / "source"  # a copy: building leaves files behind, and a wheel picks stale ones up
    for name in ("hf_sparse24", "kernels", "tests", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (
        "hf_sparse24_command.py",
        "setup.py",
        "setup.cfg",
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
    ):
        shutil.copy(ROOT / name, source)
    sdist = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    subprocess.run([sys.executable, "-c", sdist], cwd=source, check=True, capture_output=True)
    (archive,) = directory.glob("*.tar.gz")
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", directory]
    subprocess.run([*wheel, archive], check=True, capture_output=True)
    return directory


def modules() -> set[str]:
    """The files of our two packages and of the command, as they are named in a wheel."""
    ours = {"hf_sparse24_command.py"}
    ours |= {str(path.relative_to(ROOT)) for path in (ROOT / "hf_sparse24").rglob("*.py")}
    return ours | {
        str(path.relative_to(ROOT / "kernels")) for path in (ROOT / "kernels/sparse24_kernels").rglob("*.py")
    }


@pytest.mark.slow
def test_wheel(built):
    """Exactly our two packages and the command, every module of them, and no tests."""
    (wheel,) = built.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == {"hf_sparse24", "hf_sparse24_command.py", "sparse24_kernels"}
    assert {name for name in names if name.endswith(".py")} == modules()
    assert {"hf_sparse24/py.typed", "sparse24_kernels/py.typed"} <= set(names)
    native = "sparse24_kernels/cpu/native"
    assert {f"{native}/{path.name}" for path in SOURCES.iterdir()} == {name for name in names if native in name}


@pytest.mark.slow
def test_a_wheel_with_kernels(built, tmp_path):
    """The library that a user's process looks for, for one platform and any Python; the compiler is a script here."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho compiled > "$2"\n')
    compiler.chmod(0o755)
    (archive,) = built.glob("*.tar.gz")
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, archive]
    environment = os.environ | {"SPARSE24_BUILD_KERNELS": "1", "CXX": str(compiler)}
    subprocess.run(wheel, check=True, capture_output=True, env=environment)
    (path,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"hf_sparse24-[\w.]+-py3-none-(linux|macosx)_\w+", path.stem)
    assert f"sparse24_kernels/cpu/native-{fingerprint()}.so" in zipfile.ZipFile(path).namelist()


@pytest.mark.slow
def test_sdist_has_the_packages_and_no_half_of_the_tests(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {name.removeprefix("kernels/") for name in names if name.endswith(".py")} - {"setup.py"} == modules()
    assert {"pyproject.toml", "setup.cfg", "README.md", "LICENSE"} <= names


def test_the_lower_bounds_of_setup_cfg_were_run():
    """After a change of one, `make lower-bounds` runs them and writes the record that this compares."""
    assert {name: bound for name, (bound, _) in lower_bounds.recorded().items()} == lower_bounds.bounds()


def test_every_package_is_listed():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    inits = [*ROOT.glob("hf_sparse24/**/__init__.py"), *ROOT.glob("kernels/sparse24_kernels/**/__init__.py")]
    assert listed == {str(p.parent.relative_to(ROOT)).removeprefix("kernels/").replace("/", ".") for p in inits}


def test_packages_import_neither_more_than_they_need_nor_what_uses_them():
    """Their own layers stand in pyproject.toml; `make lint-check` compares them with the imports."""
    assert foreign("sparse24_kernels") == {"torch", "triton", "ortools"}  # OR-tools inside the function that needs it
    assert not foreign("hf_sparse24") & {"recipes", "tests", "notebooks"}


def test_public_names():
    for name in hf_sparse24.__all__:
        value = getattr(hf_sparse24, name)
        assert name == "__version__" or value.__doc__, f"{name} has no docstring"
