"""The oldest versions that `setup.cfg` allows: installs them into a venv of their own, and runs a few test files there.

    make lower-bounds                                         # after a change of a bound; then commit the record
    make lower-bounds LOWER_BOUNDS_ARGS='torch==2.13.0+cpu'   # another version where a bound cannot be installed

`lower_bounds.txt` next to this file records what was run: a line per bound, and the version that the tests ran with. A
test compares it with `setup.cfg`, so a bound does not change without such a run.
"""

import argparse
import os
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

from packaging.requirements import Requirement
from paths import ROOT

RECORD = Path(__file__).with_suffix(".txt")
VENV = ROOT / "runs" / "lower-bounds"
TESTS = [
    "patching/test_patching.py",
    "training/test_trainer.py",
    "training/test_callback.py",
    "training/test_hyperparameter_search.py",
    "training/test_decay_search.py",
    "checkpoints/test_checkpoint.py",
    "layers/test_packed.py",
    "recipes/test_recipes.py",
    "recipes/test_recipe_flags.py",
    "recipes/test_quickstart.py",
]


def requirements() -> list[Requirement]:
    """What the library and the extras for its users need; not what its developers do."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    texts = "\n".join(
        [config["options"]["install_requires"], *(extras[name] for name in ("recipes", "peft", "solvers"))]
    )
    return [Requirement(line) for line in texts.splitlines() if line and not line.startswith("#")]


def bounds() -> dict[str, str]:
    """By package, the oldest version allowed, for those that have one."""
    return {r.name: str(r.specifier).removeprefix(">=") for r in requirements() if r.specifier}


def recorded() -> dict[str, tuple[str, str]]:
    """By package, the bound that was last run, and the version that stood for it."""
    lines = [line.split() for line in RECORD.read_text().splitlines() if not line.startswith("#")]
    return {name: (bound, version) for name, bound, version in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("instead", nargs="*", metavar="NAME==VERSION", help="take these instead of the bounds")
    instead = {Requirement(text).name: text for text in parser.parse_args().instead}
    pins = {name: f"{name}=={bound}" for name, bound in bounds().items()} | instead
    wanted = [pins.get(requirement.name, str(requirement)) for requirement in requirements()]
    subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    python = VENV / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", *wanted, "pytest", "hypothesis"], check=True)
    tests = [ROOT / "tests" / name for name in TESTS]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    # Old versions warn of what later ones have changed.
    command = [python, "-m", "pytest", "-q", "-o", "filterwarnings=default", "-p", "no:cacheprovider", *tests]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **paths}, check=True)
    names = list(bounds())
    code = f"from importlib.metadata import version\nprint(*map(version, {names}))"
    versions = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    lines = [f"{name} {bounds()[name]} {version}" for name, version in zip(names, versions)]
    header = "# package, its lower bound in setup.cfg, the version that `make lower-bounds` last passed with"
    RECORD.write_text("\n".join([header, *lines]) + "\n")
    print(f"{RECORD.relative_to(ROOT)}:", *lines, sep="\n")


if __name__ == "__main__":
    main()
