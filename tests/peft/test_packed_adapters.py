"""Adapters on a packed base: they do what they do on the sparse one, and merge into packed weights."""

import pytest
import torch
import zoo
from lora_models import TARGETS, adapted, logits, lora, patched, trained
from torch import nn
from transformers import AutoModelForCausalLM, TrainingArguments

from hf_sparse24 import Sparse24Config, Sparse24Trainer, pack_model, patch_model, unpack_model
from hf_sparse24.weights.sparse_weight import sparse_weights
from hf_sparse24.weights.storage import PACKED, PackedMaster

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
KINDS = {
    "lora": {},
    "pissa": {"init_lora_weights": "pissa"},
    "rslora": {"use_rslora": True},
}


def packed(base: str, method: str = "s-ste", pattern: str = "2:4") -> nn.Module:
    model = patched(base, method, pattern=pattern)
    pack_model(model)
    return model


def adapted_packed(base: str, method: str = "s-ste", pattern: str = "2:4", **changes) -> nn.Module:
    torch.manual_seed(1)
    return peft.get_peft_model(packed(base, method, pattern), lora(base, **changes)).eval()


@pytest.mark.parametrize("base", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_as_on_the_sparse_base(base, kind):
    expected, model = adapted(base, **KINDS[kind]), adapted_packed(base, **KINDS[kind])
    assert trained(model).keys() == trained(expected).keys()
    torch.testing.assert_close(logits(model), logits(expected))
    for each in (expected, model):
        each(**zoo.batch()).loss.backward()
    for name, parameter in trained(model).items():
        torch.testing.assert_close(parameter.grad, trained(expected)[name].grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_around_packed_masters(kind):
    """The base is frozen, merges stay packed masters, and are undone bit for bit."""
    model = zoo.build("llama").eval()
    patch_model(model, Sparse24Config(method="fixed-mask", target_modules="all-linear", master="packed"))
    model = peft.get_peft_model(model, lora("llama", **KINDS[kind])).eval()
    masters = sparse_weights(model, PackedMaster)
    assert masters and not any(weight.master.requires_grad for weight in masters.values())
    model(**zoo.batch()).loss.backward()
    assert all(parameter.grad is not None for parameter in trained(model).values())
    before, computed = {name: x.clone() for name, x in model.state_dict().items()}, logits(model)
    model.merge_adapter()
    assert sparse_weights(model, PackedMaster).keys() == masters.keys()
    assert not any(weight.master.requires_grad for weight in sparse_weights(model, PackedMaster).values())
    torch.testing.assert_close(logits(model), computed, atol=2e-6, rtol=1e-5)
    model.unmerge_adapter()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert len(sparse_weights(model.merge_and_unload(), PackedMaster)) == len(masters)


@pytest.mark.parametrize("base", TARGETS)
@pytest.mark.parametrize(("kind", "pattern"), [*((kind, "2:4") for kind in KINDS), ("lora", "16:32"), ("lora", "6:8")])
def test_merging(base, kind, pattern):
    model = adapted_packed(base, pattern=pattern, **KINDS[kind])
    before, computed = {name: x.clone() for name, x in model.state_dict().items()}, logits(model)
    model.merge_adapter()
    changed = [name for name, x in model.state_dict().items() if not torch.equal(x, before[name])]
    assert changed and all(name.endswith("packed_weight_values") for name in changed)
    torch.testing.assert_close(logits(model), computed, atol=2e-6, rtol=1e-5)
    model.unmerge_adapter()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    merged = model.merge_and_unload()
    assert len(sparse_weights(merged, PACKED)) == len(TARGETS[base]) + (base == "llama")
    torch.testing.assert_close(logits(merged), computed, atol=2e-6, rtol=1e-5)
    unpack_model(merged)
    torch.testing.assert_close(logits(merged), computed, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("saved", ["down_proj", "mlp"])
def test_modules_to_save_that_are_packed_are_refused(saved):
    model = packed("llama")
    config = lora(target_modules=["q_proj"], modules_to_save=[saved])
    with pytest.raises(ValueError, match=r"names model\.layers\.0\.mlp.* packed .* unpack_model\(model\) first"):
        peft.get_peft_model(model, config)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not hasattr(model.model.layers[0].self_attn.q_proj, "lora_A")
    unpack_model(model)
    assert any("modules_to_save" in name for name in trained(peft.get_peft_model(model, config)))
    peft.get_peft_model(packed("llama"), lora(target_modules=["q_proj"], modules_to_save=["lm_head"]))


def test_packing_below_adapters(tmp_path):
    model = adapted("llama")
    computed = logits(model)
    pack_model(model)
    torch.testing.assert_close(logits(model), computed)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), computed, atol=2e-6, rtol=1e-5)
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sparse_weights(loaded, PACKED).keys() == sparse_weights(merged, PACKED).keys()
    torch.testing.assert_close(logits(loaded), computed, atol=2e-6, rtol=1e-5)
    unpack_model(merged)
    torch.testing.assert_close(logits(merged), computed, atol=2e-6, rtol=1e-5)


def test_training_around_a_packed_base(tmp_path):
    """With our Trainer, also from a checkpoint; there is no sparsity to run."""
    data = [{key: value[0] for key, value in zoo.batch().items()}] * 8
    steps = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-2}
    arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True, **steps)
    results = [logits(adapted_packed("llama"))]
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        trainer = Sparse24Trainer(adapted_packed("llama"), arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=checkpoint)
        results.append(logits(trainer.model.eval()))
    assert torch.equal(results[1], results[2]) and not torch.equal(results[0], results[1])
