"""Mixture-of-experts models in which stacked experts are sparse."""

import zoo
from method_runs import method_config
from transformers import PreTrainedModel

from hf_sparse24 import patch_model
from hf_sparse24.methods import METHODS

EXPERTS = "model.layers.1.mlp.experts"
OF_LAYERS = {"own", "slope"}  # multiply by another weight in the backward pass: only layers can
EVERY_METHOD = [("gpt_oss", method) for method in sorted(set(METHODS) - OF_LAYERS)]


def patched(name: str = "qwen3_moe", method: str = "s-ste") -> PreTrainedModel:
    """A model in which stacked experts are sparse, and nothing else."""
    model = zoo.build(name)
    stacks = [name.removesuffix(".weight") for name, parameter in model.named_parameters() if parameter.dim() == 3]
    patch_model(model, method_config(method).replace(target_modules=stacks))
    return model
