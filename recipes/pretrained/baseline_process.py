"""Another library makes a model 2:4; `baselines.py` runs this in that library's own environment, and nothing else here.

It writes an ordinary checkpoint whose dropped weights are zero, and `cost.json`: what pruning cost, and the versions.
"""

import argparse
import json
import platform
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

DAMPING = 0.01
"""SparseGPT's, as in its paper, and `oneshot`'s default."""


def llm_compressor(model: Any, batches: list[Tensor], method: str) -> str:
    """Prune by llm-compressor; the name of its package."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
    from torch.utils.data import DataLoader

    what: dict[str, Any] = {"sparsity": 0.5, "mask_structure": "2:4", "targets": ["Linear"], "ignore": ["re:.*lm_head"]}
    modifiers = {
        "sparsegpt": lambda: SparseGPTModifier(**what, dampening_frac=DAMPING),
        "wanda": lambda: WandaPruningModifier(**what),
    }
    oneshot(
        model=model,
        dataset=DataLoader([{"input_ids": batch} for batch in batches], batch_size=None),
        recipe=modifiers[method](),
    )
    return "llmcompressor"


def modelopt(model: Any, batches: list[Tensor], method: str) -> str:
    """Prune by NVIDIA ModelOpt; the name of its package."""
    import modelopt.torch.sparsity.weight_sparsity as mts

    def forward_loop(model: Any) -> None:
        for batch in batches:
            model(input_ids=batch, use_cache=False)

    config = {"forward_loop": forward_loop, "hessian_damp": DAMPING} if method == "sparsegpt" else {}
    mts.export(mts.sparsify(model, method, config))
    return "nvidia-modelopt"


LIBRARIES = {"llm-compressor": llm_compressor, "modelopt": modelopt}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("method", help="as the library calls it")
    parser.add_argument("model", help="checkpoint to prune")
    parser.add_argument("calibration", type=Path, help="JSON with lists of token ids, all of the same length")
    parser.add_argument("output", help="directory for the pruned checkpoint")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    batches = list(torch.tensor(json.loads(args.calibration.read_text())).split(2))
    wall, cpu = time.monotonic(), time.process_time()
    package = LIBRARIES[args.library](model, batches, args.method)
    spent = {"wall_s": time.monotonic() - wall, "cpu_s": time.process_time() - cpu}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, on macOS bytes
    spent["peak_gb"] = peak * (1 if sys.platform == "darwin" else 1024) / 1e9
    # A fresh model is saved: the pruned one may have the library's own ways to save.
    plain = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(args.output)
    versions = {name: version(name) for name in (package, "torch", "transformers")}
    about = {
        "cost": {name: round(value, 2) for name, value in spent.items()},
        "pruned_by": {
            "versions": versions | {"python": platform.python_version()},
            "device": f"cpu, threads: {torch.get_num_threads()}, fp32",
        },
    }
    Path(args.output, "cost.json").write_text(json.dumps(about))


if __name__ == "__main__":
    main()
