"""Which stacked experts become sparse, and what doctor, oneshot and adapters say of them."""

import copy

import pytest
import torch
import zoo
from expert_models import EXPERTS, patched
from sparse_models import logits
from torch import nn

from hf_sparse24 import Sparse24Config, pack_model, patch_model, sparse_weights, unpatch_model
from hf_sparse24.tools import doctor


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({"target_modules": "mlp"}, {"gate_up_proj", "down_proj"}),
        ({"target_modules": "gate_up_proj"}, {"gate_up_proj"}),
        ({"target_modules": ["experts"]}, {"gate_up_proj", "down_proj"}),
        ({"target_modules": "experts", "exclude_modules": "experts.down_proj"}, {"gate_up_proj"}),
        ({"target_modules": r".*\.experts\.g.*"}, {"gate_up_proj"}),
        ({"target_modules": "all-linear", "exclude_modules": ["experts"]}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_a_stack_is_called_by_its_own_name_or_by_its_modules(settings, ends):
    model = zoo.build("olmoe")
    report = patch_model(model, Sparse24Config(**settings))
    assert {name.rpartition(".")[2] for name in report.patched} == ends
    assert len(report.patched) == 2 * len(ends)
    assert patch_model(model).patched == report.patched  # again: nothing new
    assert torch.equal(logits(copy.deepcopy(model)), logits(unpatch_model(model)))


def test_routers_are_never_touched():
    for name in zoo.MOE:
        report = patch_model(zoo.build(name), Sparse24Config(target_modules=r".*"))
        assert not any(part in layer for layer in report.patched for part in ("router", "gate.", "mlp.gate_weight"))
        assert not any(layer.endswith((".gate", "_gate")) for layer in report.patched)


def test_the_report_counts_stacks_and_says_how_their_gradients_differ():
    report = patch_model(zoo.build("mixtral"), Sparse24Config(method="s-ste"))
    assert len(report.patched) == 4 and report.patched_parameters == 2 * 2 * (128 * 32 + 32 * 64)
    assert "yes; exact gradients, no mvue" in str(report)
    assert "exact" not in str(patch_model(zoo.build("mixtral"), Sparse24Config(method="ste")))


@pytest.mark.parametrize(
    ("settings", "overrides", "reason"),
    [
        ({"activations": "2:4"}, {}, "activations cannot be pruned"),
        ({"fp8": True}, {}, "FP8 cannot be simulated"),
        ({}, {"moe_intermediate_size": 18}, "input size 18 is not a multiple of 4"),
        ({"method": "own"}, {}, "another weight in the backward pass"),
    ],
)
def test_what_cannot_be_done_leaves_experts_dense_with_the_reason(settings, overrides, reason):
    model = zoo.build("qwen3_moe", **overrides)
    report = patch_model(model, Sparse24Config(target_modules="all-linear", **settings))
    assert reason in report.skipped[f"{EXPERTS}.down_proj"]
    assert (f"{EXPERTS}.gate_up_proj" in report.patched) == bool(overrides)  # [36, 32] is fine, [32, 18] is not
    assert "model.layers.0.self_attn.q_proj" in report.patched


class OwnExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x):
        return (x @ self.up).relu()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = OwnExperts()


def test_a_class_that_the_library_does_not_know_says_how_it_multiplies_or_stays_dense():
    model = nn.ModuleList([Block(), Block()])
    model[0].experts.is_transposed = True
    report = patch_model(model, Sparse24Config(method="ste", target_modules="all-linear"))
    assert report.patched == ("0.experts.up",)
    assert "OwnExperts does not say how it multiplies by up" in report.skipped["1.experts.up"]
    x = torch.randn(2, 3, 8)
    assert torch.equal(model[0].experts(x), (x @ sparse_weights(model)["0.experts.up"].pruned()).relu())


def test_doctor_lists_experts_as_dense_math():
    model = zoo.build("mixtral").bfloat16()
    patch_model(model, Sparse24Config(target_modules="all-linear"))
    rows = doctor.gains(model, 32, torch.bfloat16, torch.device("cpu"))
    assert sum(int(row[0]) for row in rows) == len(sparse_weights(model))
    (row,) = [row for row in rows if row[1] == "2 x 128 x 32"]
    assert row == ["2", "2 x 128 x 32", *["dense: stacked experts: no sparse grouped GEMM"] * 3, "1.00x"]
    without = zoo.build("mixtral")
    patch_model(without, Sparse24Config())
    assert doctor.problems(without, 32, torch.bfloat16, torch.device("cuda")) == []


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
        {"target_modules": ["q_proj", "w1", "w2", "w3"]},  # as Mixtral's experts were called
        {"target_modules": "all-linear"},
    ],
)
def test_an_adapter_of_the_parameters_themselves_is_refused_before_anything_is_changed(targets, packed):
    peft = pytest.importorskip("peft")
    model = patched("mixtral")
    if packed:
        pack_model(model)
    classes = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=r"names model\.layers\.0\.mlp\.experts\..* unpatch_model\(model\)"):
        peft.get_peft_model(model, peft.LoraConfig(**targets))
    assert {name: type(module) for name, module in model.named_modules()} == classes
    model(**zoo.batch())
