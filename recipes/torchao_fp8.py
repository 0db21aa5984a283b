"""A dense export in FP8 and 2:4 at once, by torchao, and what it writes. **This has not run on a GPU.**

    pip install --no-deps torchao==0.18.0
    python recipes/torchao_fp8.py my-export --prompt "Water boils at"

It needs compute capability 9.0 (H100, H200) and refuses other devices. hf_sparse24 is not needed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig


def refusal() -> str | None:
    """Why torchao's kernel does not run here, or None where it should."""
    if not torch.cuda.is_available():
        return "torchao's FP8 kernel for 2:4 needs a GPU of compute capability 9.0, and torch finds no GPU"
    capability, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    if capability != (9, 0):
        return f"torchao's FP8 kernel for 2:4 needs compute capability 9.0; {name} has {capability[0]}.{capability[1]}"
    return None


def quantization(export: Path) -> Any:
    """FP8 for the weights that `sparse24.json` lists alone: torchao does not check that a weight is 2:4."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, FqnToConfig, PerRow

    fp8 = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), packing_format="sparse_2d_data_2d_metadata")
    return FqnToConfig(dict.fromkeys(json.loads((export / "sparse24.json").read_text())["weights"], fp8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path, help="what export_model(model, directory) wrote")
    parser.add_argument("--prompt", default="Water boils at")
    args = parser.parse_args()
    if reason := refusal():
        raise SystemExit(f"torchao_fp8.py: error: {reason}")
    config = TorchAoConfig(quantization(args.export))
    settings = {"dtype": torch.bfloat16, "device_map": "cuda", "quantization_config": config}
    model = AutoModelForCausalLM.from_pretrained(args.export, **settings)
    tokenizer = AutoTokenizer.from_pretrained(args.export)
    prompt = tokenizer(args.prompt, return_tensors="pt").to("cuda")
    tokens = model.generate(**prompt, max_new_tokens=64, do_sample=False)
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
