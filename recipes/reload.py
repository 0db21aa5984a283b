"""Load a saved model in a fresh process: are its logits those that were recorded before, and what does it write?

    python recipes/reload.py runs/quickstart runs/quickstart/logits.safetensors --prompt "def "

Fails if any logit differs in any bit.
"""

import argparse

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import hf_sparse24  # noqa: F401  teaches from_pretrained to load 2:4 models


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("recorded", help="safetensors file with input_ids and the logits they gave")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--max_new_tokens", type=int, default=120)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    recorded = load_file(args.recorded)
    logits = model(input_ids=recorded["input_ids"]).logits
    if not torch.equal(logits, recorded["logits"]):
        difference = (logits - recorded["logits"]).abs().max().item()
        raise SystemExit(f"reload check FAILED: the logits of {args.model} differ by up to {difference:.3g}")
    set_seed(0)
    prompt = tokenizer(args.prompt, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=args.max_new_tokens, do_sample=True, temperature=0.7, top_k=50)
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
