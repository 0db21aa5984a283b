"""Load a saved model in a fresh process: are its logits those that were recorded before, and what does it write?

    python recipes/reload.py runs/quickstart runs/quickstart/logits.safetensors

Fails if any logit differs in any bit. The recorded file has input_ids and the logits they gave.
"""

import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import hf_sparse24  # noqa: F401  teaches from_pretrained to load 2:4 models


@torch.no_grad()
def main(directory: str, file: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    recorded = load_file(file)
    logits = model(input_ids=recorded["input_ids"]).logits
    if not torch.equal(logits, recorded["logits"]):
        difference = (logits - recorded["logits"]).abs().max().item()
        raise SystemExit(f"reload check FAILED: the logits of {directory} differ by up to {difference:.3g}")
    set_seed(0)
    prompt = tokenizer("def ", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=120, do_sample=True, temperature=0.7, top_k=50)
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
