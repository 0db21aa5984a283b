"""Packed masters: which models can have them, how a model gets them, and back."""

import pytest
import torch
import zoo
from sparse_models import logits
from torch import nn
from transformers import AutoModelForCausalLM

from hf_sparse24 import (
    Sparse24Config,
    Sparse24Controller,
    oneshot,
    pack_model,
    patch_model,
    set_phase,
    sparse_run,
    sparse_weights,
    unpack_model,
    unpatch_model,
)
from hf_sparse24.layers.packed import PackedLinear
from hf_sparse24.weights import storage
from hf_sparse24.weights.storage import PackedMaster

pytestmark = pytest.mark.usefixtures("dense_math")  # logits are compared bit for bit
FIXED = {"method": "fixed-mask", "target_modules": "all-linear"}
PACKED = FIXED | {"master": "packed"}


def made(name: str = "llama", config: dict = PACKED, **sizes) -> nn.Module:
    model = zoo.build(name, **sizes)
    patch_model(model, Sparse24Config(**config))
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "opt"])
def test_it_computes_what_the_masked_model_computes_from_half_the_parameters(name):
    dense, masked, model = zoo.build(name), made(name, FIXED), made(name)
    assert torch.equal(logits(model), logits(masked))
    assert sparse_weights(model, PackedMaster).keys() == sparse_weights(masked).keys() and not sparse_weights(model)
    sparse = sum(weight.parameter.numel() for weight in sparse_weights(masked).values())
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == sum(parameter.numel() for parameter in dense.parameters()) - sparse // 2
    for key, weight in sparse_weights(model, PackedMaster).items():
        assert torch.equal(weight.merged(), sparse_weights(masked)[key].pruned())
        assert weight.master.requires_grad and isinstance(weight.master, nn.Parameter)
    run = sparse_run(model)
    assert run.saved is model.config.quantization_config
    assert run.facts.packed.weights == dict.fromkeys(sparse_weights(model, PackedMaster), (2, 4))


def test_the_report_says_it():
    report = patch_model(model := zoo.build("llama"), Sparse24Config(**PACKED))
    assert str(report).startswith("2:4 sparse by fixed-mask, master: packed: 14 of 15 linear layers")
    assert report.total_parameters == sum(parameter.numel() for parameter in zoo.build("llama").parameters())
    assert report.patched[0] == "model.layers.0.self_attn.q_proj" and model.get_submodule(report.patched[0])


def test_zeros_that_are_there_are_kept():
    """Those of `oneshot`, which are not where magnitudes are small."""
    model = zoo.build("llama")
    oneshot(model, [zoo.batch(seed)["input_ids"] for seed in range(4)], Sparse24Config(**FIXED), criterion="wanda")
    expected = {name: weight.pruned() for name, weight in sparse_weights(model).items()}
    same = {"target_modules": model.config.quantization_config.config.target_modules}
    with pytest.raises(ValueError, match=r"master='dense', now 'packed'\); call unpatch_model\(model\) first"):
        patch_model(model, Sparse24Config(**PACKED | same))
    patch_model(unpatch_model(model), Sparse24Config(**PACKED))
    assert all(
        torch.equal(weight.merged(), expected[name]) for name, weight in sparse_weights(model, PackedMaster).items()
    )
    with pytest.raises(ValueError, match=r"master='packed': oneshot prunes dense weights; .* patch_model"):
        oneshot(zoo.build("llama"), [zoo.batch()["input_ids"]], Sparse24Config(**PACKED))


@pytest.mark.parametrize("undo", [unpatch_model, unpack_model])
def test_back_to_a_dense_model(undo):
    model = made()
    expected, names = logits(model), [name for name, _ in zoo.build("llama").named_parameters()]
    assert undo(model) is model
    assert [name for name, _ in model.named_parameters()] == names and not sparse_weights(model, storage.PACKED)
    assert torch.equal(logits(model), expected) and type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert not hasattr(model.config, "quantization_config") and "_weight_conversions" not in vars(model)
    assert not hasattr(model, "push_to_hub") or model.push_to_hub.__func__ is type(model).push_to_hub
    patch_model(model, Sparse24Config(**PACKED))  # the same zeros
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("values", ["float", "int8"])
def test_packed_for_inference_nothing_trains(values):
    model = made()
    expected = logits(model)
    exact = {name: weight.merged() for name, weight in sparse_weights(model, PackedMaster).items()}
    before = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    freed = pack_model(model, values)
    assert freed == before - sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert sparse_weights(model, storage.PackedFrozen) and not sparse_weights(model, PackedMaster)
    assert sparse_run(model) is None
    assert not any("packed" in name for name, _ in model.named_parameters())
    if values == "float":
        assert torch.equal(logits(model), expected)
    for name, weight in sparse_weights(model, storage.PackedFrozen).items():
        rounded = 0 if values == "float" else exact[name].abs().max().item() / 254 * (1 + 1e-5)
        torch.testing.assert_close(weight.merged(), exact[name], rtol=0, atol=rounded)
    assert model.config.quantization_config.config.master == "dense" and model.is_quantized


def test_frozen_weights_stay_frozen():
    model = zoo.build("llama")
    model.model.layers[0].requires_grad_(False)
    patch_model(model, Sparse24Config(**PACKED))
    trains = {name: weight.master.requires_grad for name, weight in sparse_weights(model, PackedMaster).items()}
    assert trains == {name: ".layers.1." in name for name in trains}
    unpatch_model(model)
    assert not model.model.layers[0].mlp.up_proj.weight.requires_grad


def test_a_part_of_a_model(tmp_path):
    model = zoo.build("llama")
    patch_model(model.model, Sparse24Config(**PACKED))
    expected = logits(model)
    with pytest.raises(ValueError, match="leave out patch_model"):
        patch_model(model)
    Sparse24Controller(model, torch.optim.SGD(model.parameters()), total_steps=2)  # the whole passes by
    assert all(name.startswith("model.layers.") for name in model.config.quantization_config.facts.packed.weights)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"layer_patterns": {"down_proj": "3:5"}}, "0.mlp.down_proj has no packed form .M of a packed 3:5 must divide"),
        ({"backend": "cusparselt"}, "backend='cusparselt': master='packed' has dense math only; leave it 'auto'"),
        ({"dense_start": 0.5}, "dense_start=0.5: a packed master .*; leave dense_start at 0, or take master='dense'"),
        ({"dense_tail": 3}, "dense_tail=3: "),
        ({"activations": "2:4"}, "activations='2:4': "),
        ({"fp8": True}, "fp8=True: "),
        ({"weight_grad": "mvue"}, "weight_grad='mvue': "),
        ({"method": "s-ste"}, r"master='packed': method 's-ste' has no master; leave it None, .*'fixed-mask'"),
        ({"master": "half"}, r"master='half': must be one of \['dense', 'packed'\]"),
    ],
)
def test_settings_that_it_cannot_train_are_refused(changed, message):
    model = zoo.build("llama", intermediate_size=80)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        patch_model(model, Sparse24Config(**PACKED | changed))
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear and not hasattr(model.config, "quantization_config")


def test_models_that_it_cannot_train_are_refused():
    with pytest.raises(ValueError, match=r"down_proj has no packed form .rows .* of 8 .*, not 44.*: leave it dense"):
        made(intermediate_size=44)
    with pytest.raises(ValueError, match="gate_up_proj is a stack of experts, and master='packed'"):
        made("mixtral")
    made("mixtral", PACKED | {"target_modules": "attention"})
    shared = zoo.build("llama")
    shared.model.layers[1].mlp.up_proj.weight = shared.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj shares its weight with another layer"):
        patch_model(shared, Sparse24Config(**PACKED))
    assert type(shared.model.layers[0].mlp.up_proj) is not PackedLinear
    with pytest.raises(ValueError, match=r"trains its kept values alone already .*leave out patch_model"):
        patch_model(made(), Sparse24Config(**PACKED))


def test_it_has_one_phase():
    model = made()
    with pytest.raises(ValueError, match="phase='dense'"):
        set_phase(model, "dense")
