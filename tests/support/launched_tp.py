"""What `test_launch.py` starts on every rank for tensor parallelism: accelerate refuses a Trainer that on a CPU.

Makes the model that the flags of `train.py` ask for, split and patched, and compares its loss and gradients with those
of the whole model. Fails if they differ by more than rounding.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from paths import RECIPES
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

sys.path.insert(0, str(RECIPES))

import train
from arguments import parse_arguments
from models import make_model

from hf_sparse24 import sparse_weights


def main() -> None:
    model_args, _, data_args, sparse_args, _, training_args = parse_arguments(train.ARGUMENTS)
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name)
    config, length = sparse_args.make_config(), data_args.block_size
    split = make_model(model_args, AutoModelForCausalLM, tokenizer, length, training_args, config)
    initial = Path(training_args.output_dir) / "initial"
    whole = AutoModelForCausalLM.from_pretrained(initial, quantization_config=sparse_args.make_config())
    tokens = torch.arange(2, 2 + 2 * length).view(2, length)
    losses = [model(input_ids=tokens, labels=tokens).loss for model in (split, whole)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    names = sparse_weights(whole).keys()
    assert sparse_weights(split).keys() == names
    for name in names:
        torch.testing.assert_close(
            split.get_parameter(name).grad.full_tensor(), whole.get_parameter(name).grad, msg=name
        )
    print(f"rank {dist.get_rank()}: {len(names)} weights agree")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
