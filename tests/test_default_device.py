"""A user's default device, such as "cuda", is not the library's: its tensors are where the model is, or on the CPU."""

import ast

import pytest
import torch
import zoo
from method_runs import every_method, loop, method_config
from paths import ROOT
from sparse_models import assert_same_state

from hf_sparse24 import Sparse24Config, oneshot, patch_model

FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"}
FACTORIES |= {"tensor", "zeros"}


def test_no_tensor_is_made_without_a_device():
    """vLLM sets the default device for its layers to be made on."""
    found = []
    for package in ("hf_sparse24", "kernels/sparse24_kernels"):
        for path in (path for path in (ROOT / package).rglob("*.py") if path.name != "vllm_plugin.py"):
            for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
                is_factory = isinstance(call.func, ast.Attribute) and call.func.attr in FACTORIES
                if is_factory and getattr(call.func.value, "id", "") == "torch":
                    given = {keyword.arg for keyword in call.keywords}  # None where they come as **
                    found += [] if given & {"device", None} else [f"{path.name}:{call.lineno}"]
    assert not found


@every_method
def test_training_is_the_same_under_another_default_device(method):
    models, batches = [zoo.build("llama") for _ in range(2)], [zoo.batch(seed) for seed in range(4)]
    for model, default in zip(models, ("cpu", "meta")):
        with torch.device(default):
            patch_model(model, method_config(method))
            optimizer, controller = loop(model)
            for batch in batches:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            controller.load_state_dict(controller.state_dict())
            assert controller.metrics()
    assert_same_state(*models)


@pytest.mark.parametrize("reconstruct", ["block", "layer", None])
def test_oneshot_is_the_same_under_another_default_device(reconstruct):
    models, batches = [zoo.build("llama") for _ in range(2)], [zoo.batch(seed) for seed in range(4)]
    for model, default in zip(models, ("cpu", "meta")):
        with torch.device(default):
            oneshot(model, batches, Sparse24Config(method="fixed-mask"), reconstruct=reconstruct, passes=1)
    assert_same_state(*models)
