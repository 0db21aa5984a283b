"""SmolLM2-135M made 2:4 by other libraries on the calibration text of `measure.py`, each in its own environment.

    python recipes/pretrained/baselines.py                      # the environments, then all that have no JSON yet
    python recipes/pretrained/baselines.py --only "modelopt, sparsegpt" "ours, sparsegpt alone"

Every linear layer of the blocks becomes 2:4 with the damping of `oneshot`; the embedding, which is the head, stays
dense. The checkpoint is checked and evaluated here, as those of `measure.py`. "ours, ... alone" is `oneshot` without
reconstruction. pip installs about 3 GB in `MATERIAL/baselines/venvs`; what is there already is used.
"""

import argparse
import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from measure import (
    MATERIAL,
    RESULTS,
    Material,
    made_by,
    read_runs,
    replace_file,
    run_script,
    save,
)
from torch import nn

REQUIREMENTS = {
    "llm-compressor": ["torch==2.13.0", "llmcompressor==0.14.0.1", "transformers==5.17.0"],
    "modelopt": ["torch==2.13.0", "nvidia-modelopt==0.47.0", "transformers==5.14.1", "requests==2.34.2"],
}
"""The newest transformers that each takes, and `requests`, which ModelOpt imports without asking for it."""

VARIANTS = (
    "modelopt, sparse_magnitude",
    "modelopt, sparsegpt",
    "llm-compressor, wanda",
    "llm-compressor, sparsegpt",
    "llm-compressor, sparsegpt, own text",
    "ours, wanda alone",
    "ours, sparsegpt alone",
)
"""Library and method, and whether the dense model's own text calibrates too, as it does for `oneshot`."""


def environment(folder: Path, requirements: list[str]) -> Path:
    """The Python of a virtual environment; made unless one of the same requirements is there.

    Raises:
        RuntimeError: pip cannot install them.
    """
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(requirements):
        print(f"installing {' '.join(requirements)} in {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        done = subprocess.run([python, "-m", "pip", "install", "-q", *requirements], text=True, stderr=subprocess.PIPE)
        if done.returncode:
            raise RuntimeError(
                f"pip could not install {' '.join(requirements)} (exit {done.returncode}):\n"
                f"{done.stderr.strip()[-2000:]}\nIt needs a package index; `--only` leaves out a library."
            )
        replace_file(stamp, "\n".join(requirements))
    return python


def calibration_file(material: Material, folder: Path, with_own: bool) -> Path:
    """The JSON with the token ids of `Material.calibration`, so that no library tokenizes again."""
    path = folder / f"calibration{'-own' * with_own}.json"
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(material.calibration(with_own)))
    return path


def pruned_by(material: Material, library: str, method: str, with_own: bool) -> Path:
    """The folder of the checkpoint that a library prunes; made unless it is there, and what that cost is next to it.

    Raises:
        RuntimeError: its process failed; the message is in the log.
    """
    folder = material.folder / "baselines"
    path = folder / f"{library}-{method}{'-own' * with_own}"
    if not (path / "cost.json").exists():
        python = environment(folder / "venvs" / library, REQUIREMENTS[library])
        script = str(Path(__file__).with_name("baseline_process.py"))
        calibration = calibration_file(material, folder, with_own)
        arguments = [library, method, str(material.source), str(calibration), str(path)]
        path.mkdir(exist_ok=True)
        log = path / "log.txt"
        with log.open("w") as file:  # -I: nothing of this environment
            done = subprocess.run([python, "-I", script, *arguments], stdout=file, stderr=subprocess.STDOUT)
        if done.returncode:
            last = log.read_text().strip()[-2000:]
            raise RuntimeError(f"{library}, {method} failed (exit {done.returncode}); the end of {log}:\n{last}")
    return path


def check(model: Any, dense: Any) -> int:
    """The number of the model's linear layers but the head.

    Raises:
        ValueError: one of them is not 2:4, or something else differs from the dense model.
    """
    head = model.get_output_embeddings()
    linear = {
        f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head
    }
    before = dict(dense.named_parameters())
    for name, weight in model.named_parameters():
        if name in linear:
            most = weight.unflatten(-1, (-1, 4)).count_nonzero(-1).max()
            if most > 2:
                raise ValueError(f"{name} is not 2:4: a group of 4 has {most} non-zeros")
        elif not weight.equal(before[name]):
            raise ValueError(f"{name} differs from the dense model's: only the linear layers should be pruned")
    return len(linear)


def measure(material: Material, variant: str) -> dict[str, Any]:
    """What the JSON of a variant holds."""
    library, method, *rest = variant.split(", ")
    if library == "ours":
        path = material.pruned(with_own=False, criterion=method.removesuffix(" alone"), reconstruct=None)
        about = {"cost": json.loads((path / "cost.json").read_text())}
    else:
        path = pruned_by(material, library, method, with_own=bool(rest))
        about = json.loads((path / "cost.json").read_text())
    model = material.load(path)
    print(f"{variant}: {check(model, material.dense)} linear layers are 2:4", flush=True)
    found = {"variant": variant, "tokens": 0, "learning_rate": 0.0, "seed": 0, "verified": True}
    return found | about | material.evaluate(model, with_samples=False) | made_by()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=VARIANTS, choices=VARIANTS, help="only these")
    parser.add_argument("--material", type=Path, default=MATERIAL, help="what material.py made; default: %(default)s")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the JSON")
    args = parser.parse_args(argv)
    args.results.mkdir(parents=True, exist_ok=True)
    done = {run["variant"] for run in read_runs(args.results) if run["tokens"] == 0}
    waiting = [variant for variant in args.only if variant not in done]
    material = Material(args.material) if waiting else None
    failed: list[str] = []
    for variant in waiting:
        try:
            save(args.results, measure(material, variant))
        except RuntimeError as error:  # the others may work
            failed.append(f"{variant}: {error}")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    run_script(main)
