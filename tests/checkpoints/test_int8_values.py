"""Packed models with int8 values: exported, loaded, saved, trained around, and damaged."""

import copy

import peft
import pytest
import sparse24_kernels as kernels
import torch
import zoo
from checkpoints import patched
from lora_models import lora
from lora_models import patched as lora_base
from safetensors.torch import load_file
from sparse_models import logits
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_sparse24 import (
    export_model,
    make_model_card,
    pack_model,
    sparse_weights,
    unpack_model,
)
from hf_sparse24.packed_format import buffer_names
from hf_sparse24.weights.storage import PACKED

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
NAME = "model.layers.0.mlp.up_proj.weight"
VALUES, MASK, SCALES = buffer_names(NAME)


def exported(directory, model: PreTrainedModel, **arguments) -> PreTrainedModel:
    export_model(model, directory, "packed", values="int8", **arguments)
    return AutoModelForCausalLM.from_pretrained(directory)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [*((name, "2:4") for name in ("llama", "gpt2", "gpt_neox", *zoo.MOE)), ("llama", "16:32"), ("mixtral", "6:8")],
)
def test_an_export_is_the_model_packed_in_memory(name, pattern, tmp_path):
    """Linear layers, Conv1D and stacks of experts; loaded, saved again and copied."""
    model = patched(name, pattern=pattern)
    expected = {}
    for key, weight in sparse_weights(model).items():
        expected[key] = kernels.quantize_packed(
            kernels.pack_nm(weight.storage.out_in(weight.pruned()), *weight.pattern)
        )
    before = logits(model)
    export_model(model, tmp_path / "export", "packed", values="int8", max_shard_size="40KB")
    assert torch.equal(logits(model), before)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values()) and loaded.config.quantization_config.facts.packed.values == "int8"
    assert sparse_weights(loaded, PACKED).keys() == expected.keys()
    for key, weight in sparse_weights(loaded, PACKED).items():
        assert weight.storage.pattern == expected[key].pattern
        assert all(torch.equal(*parts) for parts in zip(weight.storage.packed[:3], expected[key][:3], strict=True))
    freed = pack_model(model, values="int8")
    assert freed > 0 and not torch.equal(logits(model), before)
    torch.testing.assert_close(logits(model), before, atol=0.02, rtol=0)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    for other in (loaded, again, copy.deepcopy(loaded)):
        assert torch.equal(logits(other), logits(model))
    assert again.config.quantization_config.facts.packed.values == "int8"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype, tmp_path):
    """Scales have the model's dtype, also of one that it is loaded or cast in; values stay int8."""
    model = patched("llama").to(dtype)
    loaded = exported(tmp_path, model)
    assert loaded.dtype == dtype
    assert {weight.storage.packed.dtype for weight in sparse_weights(loaded, PACKED).values()} == {dtype}
    stored = load_file(tmp_path / "packed.safetensors")
    assert (stored[VALUES].dtype, stored[SCALES].dtype, stored[SCALES].shape) == (torch.int8, dtype, (64, 1))
    assert sum(stored[name].nbytes for name in (VALUES, MASK)) == 64 * 32 * 5 / 8
    wide = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    dense = {name: weight.storage.whole() for name, weight in sparse_weights(wide, PACKED).items()}
    for name, weight in sparse_weights(loaded, PACKED).items():
        assert torch.equal(weight.storage.whole(), dense[name].to(dtype))  # rounded once
    if dtype == torch.float32:
        half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        for model in (half, copy.deepcopy(loaded).to(torch.bfloat16)):
            parts = [sparse_weights(each, PACKED)[NAME].storage.packed for each in (model, loaded)]
            assert torch.equal(parts[0].values, parts[1].values)
            assert torch.equal(parts[0].scales, parts[1].scales.bfloat16())


def test_adapters_train_on_it_and_are_merged_once_it_is_unpacked():
    model = lora_base()
    pack_model(model, values="int8")
    adapted = peft.get_peft_model(model, lora())
    adapted(**zoo.batch()).loss.backward()
    assert all(parameter.grad is not None for parameter in adapted.parameters() if parameter.requires_grad)
    computed = logits(adapted.eval())
    for merge in (adapted.merge_adapter, adapted.merge_and_unload):
        with pytest.raises(ValueError, match=r"the base has int8 values, and merging would round .* unpack_model"):
            merge()
        assert torch.equal(logits(adapted), computed)
    unpack_model(adapted)
    torch.testing.assert_close(logits(adapted), computed)
    torch.testing.assert_close(logits(adapted.merge_and_unload()), computed, atol=1e-5, rtol=1e-4)


def test_wrong_arguments(tmp_path):
    model = patched()
    for values in ("int4", None, 8, ["int8"]):
        for call in (lambda v: export_model(model, tmp_path, "packed", values=v), lambda v: pack_model(model, v)):
            with pytest.raises(ValueError, match=r"values=.*: must be one of \['float', 'int8'\]"):
                call(values)
    for call in (lambda: export_model(model, tmp_path, values="int8"), lambda: make_model_card(model, values="int8")):
        with pytest.raises(ValueError, match="values='int8': with format='dense' they keep the model's dtype"):
            call()
    assert not any(tmp_path.iterdir()) and sparse_weights(model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("inf")
    for values in ("float", "int8"):
        with pytest.raises(ValueError, match=r"NaN or inf in .*1\.mlp\.up_proj\.weight; nothing was changed"):
            pack_model(model, values=values)
        assert not sparse_weights(model, PACKED)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj.*nothing was exported"):
        export_model(model, tmp_path, "packed", values="int8")
    assert not any(tmp_path.iterdir())
