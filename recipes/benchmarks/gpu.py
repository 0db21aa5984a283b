"""`make gpu`: everything checked on the GPU, then timed, within a given time. Needs PyTorch, Triton, tqdm, no install.

    python recipes/benchmarks/gpu.py [--minutes 8.5] [--sections NAMES] [--output DIR] [--only TEXT] [--list]

`--sections` takes any of smoke, kernels, gemms, layers, mlps, trainer, inference, and models for the last four, which
need Transformers. What a check that fails is for is withheld, or marked with --despite-gate; --gate RESULT.json takes
the gates of an earlier run. What a section leaves of its share of the time is for the next. Results are
DIR/gpu_<device>_<date>.json and .md, complete after every row, and a .log with tracebacks. To go on in another run on a
fresh machine, keep the folders of $SPARSE24_CACHE (tuned GEMMs) and $TRITON_CACHE_DIR (compiled kernels).
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
    if missing := [name for name in ("torch", "triton", "tqdm") if not find_spec(name)]:
        sys.exit(f"{sys.executable} has no {missing[0]}, which make gpu needs: choose one with GPU_PYTHON=...")

from benchmarks import gemms, operations, packed, run, smoke, tilelang_gemm
from benchmarks.gate import Gate

from recipes.benchmarks import models, modules

MODELS = ("layers", "mlps", "trainer", "inference", "models")
SECTIONS = [  # in order: what is wrong in a kernel is wrong in the GEMMs too
    smoke.Smoke(),
    Gate("gate of the kernels", ("kernels",), "benchmarks.gate", 20),
    operations.Operations(),
    Gate("gate of the GEMMs", ("gemms", *MODELS), "benchmarks.gemms", 6),
    gemms.Autotune(),
    gemms.Gemms(),
    packed.PackedLayers(),
    Gate("gate of the layers", MODELS, "recipes.benchmarks.modules", 10),
    modules.Layers(),
    modules.Mlps(),
    models.Training(),
    models.Inference(),
    models.Generation(),
    tilelang_gemm.TileLang(),
]


def main(arguments: list[str], machine: object = None) -> int:
    return run.main(SECTIONS, ROOT / "recipes/results/gpu", arguments, machine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
