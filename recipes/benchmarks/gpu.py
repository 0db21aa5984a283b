"""`make gpu`: kernels, GEMMs, layers and models timed on a GPU within a given time. Needs PyTorch and Triton.

    python recipes/benchmarks/gpu.py [--minutes 8.5] [--sections NAMES] [--output DIR] [--only TEXT] [--list]

Check first that results are right: `make gpu-test`. `--sections` takes any of kernels, gemms, layers, mlps, papers,
trainer, inference, and models for the last five, which need Transformers. `papers` has the sizes of published speed
tables, with their figures beside ours. Sections share the time evenly; what one leaves is for the next. The result is
DIR/gpu_<device>_<date>.json, complete after every row, and a .log with tracebacks. To go on in another run on a fresh
machine, keep the folders of $SPARSE24_CACHE (tuned GEMMs) and $TRITON_CACHE_DIR (compiled kernels).
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

# ruff: noqa: E402 (imports come after the path that they need)
ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # set for tests in many a shell; child processes inherit what is left
    sys.path[:1] = paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests/kernels")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    if missing := [name for name in ("torch", "triton") if not find_spec(name)]:
        sys.exit(f"{sys.executable} has no {missing[0]}, which make gpu needs: choose one with GPU_PYTHON=...")

from benchmarks import gemms, operations, run

from recipes.benchmarks import models, modules

SECTIONS = [
    operations.Operations(),
    gemms.Gemms(),
    modules.Layers(),
    modules.Mlps(),
    modules.Papers(),
    models.Training(),
    models.Inference(),
    models.Generation(),
]


def main(arguments: list[str], machine: object = None) -> int:
    return run.main(SECTIONS, ROOT / "recipes/results/gpu", arguments, machine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
