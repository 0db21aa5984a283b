"""PEFT on patched layers: every tuner in PEFT's registry that takes a dense model takes a patched one.

LoRA acts through the mask, so it is compared with what it is on the unpatched model, where the mask stays.
"""

import copy
import dataclasses
from functools import partial

import pytest
import sparse_models
import torch
import zoo
from lora_models import ONE_BLOCK, TARGETS, trained
from torch import nn
from transformers import AutoModelForCausalLM

from hf_sparse24 import Sparse24Config, patch_model, sparse_weights, unpatch_model
from hf_sparse24.peft.bypass import check_adapters

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # PEFT's own, of every tuner
    pytest.mark.usefixtures("quiet_peft"),
]
peft = pytest.importorskip("peft")
CONFIGS = peft.PEFT_TYPE_TO_CONFIG_MAPPING

# What tuners need for layers this small, besides `target_modules`.
ARGUMENTS = {
    "ADALORA": {"total_step": 10},
    "C3A": {"block_size": 8},
    "IA3": {"feedforward_modules": []},
    "MISS": {"r": 4},
    "ROAD": {"group_size": 8},
    "SHIRA": {"r": 2},
    "VBLORA": {"vector_length": 8, "num_vectors": 8},
    "WAVEFT": {"n_frequency": 16},
}
VARIANTS = {"LORA": [{}, {"use_rslora": True}, {"init_lora_weights": "gaussian"}]}
# They compute with `base_layer.weight`; FROD has another weight instead, LN_TUNING a copy of the layer.
BYPASS = {"FROD", "HIRA", "HRA", "LN_TUNING", "PEANUT", "SHIRA", "SUPERTUNING"}
EXACT_CLASS = {"GLORA"}  # refuses every subclass of nn.Linear
NAMES = sorted(kind.value for kind in peft.PeftType if kind in CONFIGS)
CASES = [("llama", name, extra) for name in NAMES for extra in VARIANTS.get(name, [{}])]
CASES += [("gpt2", "LORA", extra) for extra in VARIANTS["LORA"]]


@pytest.fixture
def quiet_peft(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")


def dense(base: str) -> nn.Module:
    """A model whose weights are the pruned ones of `patched(base)`."""
    return unpatch_model(patched(base))


def patched(base: str) -> nn.Module:
    return sparse_models.patched(base, ONE_BLOCK[base], method="ste", weight_grad="dense")


def adapted(model: nn.Module, base: str, name: str, extra: dict) -> nn.Module:
    cls = CONFIGS[peft.PeftType(name)]
    fields = {field.name for field in dataclasses.fields(cls)}
    if "target_modules" not in fields:
        pytest.skip("adapts no layers")
    arguments = {"target_modules": TARGETS[base], "task_type": "CAUSAL_LM", **ARGUMENTS.get(name, {}), **extra}
    if base == "gpt2" and "fan_in_fan_out" in fields:
        arguments["fan_in_fan_out"] = True
    torch.manual_seed(1)
    return peft.get_peft_model(model, cls(**arguments)).eval()  # without dropout and sampled adapters


def reference(base: str, name: str, extra: dict) -> nn.Module:
    """The tuner on a dense model; what does not work there is not ours to test."""
    model = dense(base)
    try:
        model = adapted(model, base, name, extra)
        model(**zoo.batch()).loss.backward()
    except Exception as error:
        pytest.skip(f"not on a dense {base}: {str(error)[:80]}")
    if name == "LORA":
        model = unpatch_model(adapted(patched(base), base, name, extra))
    model.zero_grad()
    return model


@pytest.mark.parametrize(("base", "name", "extra"), CASES)
def test_a_tuner_does_on_a_patched_model_what_it_does_on_the_pruned_one(base, name, extra, tmp_path):
    expected = reference(base, name, extra)
    if name in EXACT_CLASS:
        with pytest.raises(ValueError, match=r"not a plain torch\.nn\.Linear"):
            adapted(patched(base), base, name, extra)
        return
    if name in BYPASS:
        with pytest.raises(ValueError, match=r"computes with the layer's dense weight, .* call unpatch_model\(model\)"):
            adapted(patched(base), base, name, extra)
        return
    model = adapted(patched(base), base, name, extra)
    assert trained(model).keys() == trained(expected).keys()
    assert all(weight.module.weight.grad is None for weight in sparse_weights(model).values())
    # The same adapter, whatever it was initialised with, and not one that does nothing yet.
    with torch.no_grad():
        for key, parameter in trained(expected).items():
            parameter += 0.05 * torch.randn_like(parameter)
            trained(model)[key].copy_(parameter)
        buffers = dict(model.named_buffers())
        for key, buffer in expected.named_buffers():
            buffers[key].copy_(buffer)
    logits = {}
    for each in (expected, model):
        output = each(**zoo.batch())
        output.loss.backward()
        logits[each] = output.logits.detach()
    torch.testing.assert_close(logits[model], logits[expected])
    for key, parameter in trained(model).items():
        torch.testing.assert_close(parameter.grad, trained(expected)[key].grad, atol=1e-5, rtol=1e-4)

    keys = peft.get_peft_model_state_dict(model).keys()
    assert keys == peft.get_peft_model_state_dict(expected).keys()
    model.save_pretrained(tmp_path)
    unpatch_model(model)  # the pruned weights: a merge has nothing to prune
    with torch.no_grad():
        torch.testing.assert_close(model(**zoo.batch()).logits, logits[model])
        try:
            merged = copy.deepcopy(expected).merge_and_unload()
        except (NotImplementedError, ValueError, AttributeError):
            return  # PEFT cannot merge this one
        torch.testing.assert_close(model.merge_and_unload()(**zoo.batch()).logits, merged(**zoo.batch()).logits)


@pytest.mark.parametrize("config", [peft.HRAConfig, partial(peft.LoraConfig, use_dora=True)], ids=["HRA", "DoRA"])
@pytest.mark.parametrize("inference_mode", [False, True])
def test_an_adapter_that_computes_with_the_dense_weight_is_refused(config, inference_mode):
    model = patched("llama")
    with pytest.raises(ValueError, match="computes with the layer's dense weight"):
        peft.get_peft_model(model, config(target_modules=TARGETS["llama"], inference_mode=inference_mode))


def test_dora_is_refused_where_another_adapter_is_active_and_its_weights_are_not_read_yet():
    config = partial(peft.LoraConfig, target_modules=TARGETS["llama"])
    model = peft.get_peft_model(patched("llama"), config())
    with pytest.raises(ValueError, match="computes with the layer's dense weight"):
        model.add_adapter("second", config(use_dora=True), low_cpu_mem_usage=True)


def test_an_option_or_a_tuner_of_ones_own_that_reads_the_dense_weight_is_refused():
    bat = peft.MissConfig(r=4, init_weights="bat", target_modules=TARGETS["llama"])
    with pytest.raises(ValueError, match="computes with the layer's dense weight"):
        peft.get_peft_model(patched("llama"), bat)

    class BaseTunerLayer(nn.Module):  # found by its name, as PEFT's
        def __init__(self, layer):
            super().__init__()
            self.base_layer, self._get_available_adapters = layer, lambda: {"mine"}

        def forward(self, x):
            return self.base_layer(x) + x @ self.base_layer.weight.T

    model = patched("llama")
    model.model.layers[0].mlp.up_proj = BaseTunerLayer(model.model.layers[0].mlp.up_proj)
    with pytest.raises(ValueError, match="computes with the layer's dense weight"):
        check_adapters(model)


@pytest.mark.parametrize("base", TARGETS)
def test_what_a_layer_returns_can_be_changed_in_place(base):
    model = patched(base)
    (layer, *_) = (weight.module for weight in sparse_weights(model).values())
    x = torch.randn(2, 3, 32, requires_grad=True)
    output = layer(x)
    expected = torch.autograd.grad((output * 2).square().sum(), [x, layer.weight], retain_graph=True)
    changed = layer(x)
    changed *= 2
    torch.testing.assert_close(torch.autograd.grad(changed.square().sum(), [x, layer.weight]), expected)


def test_the_config_of_a_model_patched_in_part_names_layers_without_the_adapters_around_them(tmp_path):
    model = zoo.build("llama")
    patch_model(model.model, Sparse24Config(method="ste"))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["up_proj"]))
    adapted.merge_and_unload().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sparse_weights(loaded).keys() == sparse_weights(model).keys()
