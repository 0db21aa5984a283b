"""Merging adapters into sparse weights, and exporting them: the result stays 2:4, or it is refused."""

import copy
import io

import pytest
import torch
import zoo
from lora_models import TARGETS, adapted, around, logits, lora, patched
from sparse_models import assert_same_state, snapshot

from hf_sparse24 import export_model, pack_model, patch_model, sparse_weights, unpack_model, unpatch_model
from hf_sparse24.metrics import is_nm_sparse

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore:Already following adapters were merged"),
    pytest.mark.filterwarnings("ignore:Adapter second was active which is now deleted"),
]

METHODS = ["s-ste", "t-sr-ste", "ste"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", TARGETS)
def test_a_merge_changes_nothing_but_rounding_is_2_to_4_and_is_undone_bit_for_bit(base, method, dtype):
    model = adapted(base, method, dtype)
    expected, before = logits(model), snapshot(model)
    with model.disable_adapter():
        assert (logits(model) - expected).abs().max() > 0.1
    close = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    model.merge_adapter()
    torch.testing.assert_close(logits(model), expected, **close)
    for adapter in around(model):
        layer = adapter.base_layer
        assert is_nm_sparse(layer.weight, 2, 4, layer.sparse24["weight"].input_dim)
        assert torch.equal(layer.sparse_weight(), layer.weight)
    model.unmerge_adapter()
    assert_same_state(model, before)
    assert torch.equal(logits(model), expected)

    unpatched = unpatch_model(copy.deepcopy(model))
    assert torch.equal(logits(unpatched), expected)
    for merged in (model.merge_and_unload(safe_merge=True), unpatched.merge_and_unload()):
        torch.testing.assert_close(logits(merged), expected, **close)
        modules = dict(merged.named_modules())
        names = [name for name in modules if name.endswith(tuple(TARGETS[base]))]
        assert all(is_nm_sparse(modules[name].weight, 2, 4, -2 if base == "gpt2" else -1) for name in names)


def test_several_adapters_merge_together_and_one_by_one():
    model = adapted()
    model.add_adapter("second", lora())
    model.base_model.set_adapter(["default", "second"])
    expected, before = logits(model), snapshot(model)
    for calls in ([["default", "second"]], [["default"], ["second"]]):
        for names in calls:
            model.merge_adapter(names)
        torch.testing.assert_close(logits(model), expected)
        model.unmerge_adapter()
        assert_same_state(model, before)


def test_adapters_are_switched_scaled_disabled_and_mixed_in_a_batch():
    model = adapted()
    model.add_adapter("second", lora())
    first = logits(model)
    with model.disable_adapter():
        none = logits(model)
    model.set_adapter("second")
    second = logits(model)
    for adapter in around(model):
        adapter.set_scale("second", 0.0)
    torch.testing.assert_close(logits(model), none)
    for adapter in around(model):
        adapter.set_scale("second", 1.0)
    torch.testing.assert_close(logits(model), second)
    rows = {key: value for key, value in zoo.batch().items() if key == "input_ids"}
    mixed = logits(model, **rows, adapter_names=["default", "second"])
    torch.testing.assert_close(mixed, torch.stack([first[0], second[1]]))
    model.delete_adapter("second")
    model.set_adapter("default")
    assert torch.equal(logits(model), first)


def test_a_merged_model_is_neither_packed_nor_unpacked_nor_unpatched():
    sparse, packed = adapted(), adapted()
    pack_model(packed.get_base_model())
    for model, function in ((sparse, pack_model), (packed, unpack_model), (adapted(), unpatch_model)):
        model.merge_adapter()
        merged, before = logits(model), snapshot(model)
        with pytest.raises(ValueError, match=r"proj: an adapter is merged .*: model\.unmerge_adapter\(\)"):
            function(model.get_base_model())
        assert_same_state(model, before)
        assert torch.equal(logits(model), merged)
        model.unmerge_adapter()
        function(model.get_base_model())
    patch_model(sparse_again := adapted().get_base_model())  # patched already: nothing is done
    assert sparse_weights(sparse_again)


@pytest.mark.parametrize("targets", [["up_proj"], ["q_proj"]])  # sparse, dense
@pytest.mark.parametrize("replicas", [None, [[0, 1], [0, 1]]])
def test_a_merge_that_would_change_another_layer_is_refused(targets, replicas, caplog):
    """With tied layers or PEFT's replicas, around sparse and dense layers; those with masks also in the dense form."""
    model = patched()
    if replicas is None:
        (block,) = model.model.layers
        block.mlp.gate_proj.weight = block.mlp.up_proj.weight
        block.self_attn.o_proj.weight = block.self_attn.q_proj.weight
    with caplog.at_level("WARNING"):
        model = peft.get_peft_model(model, lora(target_modules=targets, layer_replication=replicas)).eval()
    adapters = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert f"{len(adapters)} adapters share weights" in caplog.text
    for unpatch in (lambda model: model, unpatch_model)[: 1 if targets == ["q_proj"] else 2]:
        before = logits(unpatch(model))
        for merge in (model.merge_adapter, model.merge_and_unload):
            with pytest.raises(ValueError, match=rf"{targets[0]} shares its weight.*keep the adapter"):
                merge()
            assert not any(adapter.merged for adapter in adapters)
        assert torch.equal(logits(model), before)


EVERYWHERE = [*TARGETS["llama"], "q_proj"]  # attention is dense, and comes first

DENSE = {
    "LoHa": lambda: peft.LoHaConfig(target_modules=EVERYWHERE, init_weights=False),
    "LoKr": lambda: peft.LoKrConfig(target_modules=EVERYWHERE, init_weights=False),
    "VeRA": lambda: peft.VeraConfig(target_modules=EVERYWHERE, init_weights=False),
    "OFT": lambda: peft.OFTConfig(target_modules=EVERYWHERE, init_weights=False, use_cayley_neumann=False),
    "AdaLoRA": lambda: peft.AdaLoraConfig(target_modules=EVERYWHERE, init_lora_weights=False, total_step=10),
}


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.filterwarnings("ignore")  # PEFT's own
def test_a_merge_that_would_densify_is_refused_and_changes_nothing(kind):
    model = peft.get_peft_model(patched(), DENSE[kind]()).eval()
    expected, before = logits(model), snapshot(model)
    for merge in (model.merge_adapter, model.merge_and_unload, lambda: model.merge_adapter(safe_merge=True)):
        with pytest.raises(ValueError, match=r"is not 2:4.* call unpatch_model\(model\) first"):
            merge()
        assert_same_state(model, before)
        assert torch.equal(logits(model), expected)
    unpatch_model(model)
    torch.testing.assert_close(logits(model.merge_and_unload()), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("feedforward", [[], ["down_proj"]], ids=["outputs", "inputs"])
def test_ia3_scales_rows_or_columns_and_merges_into_2_to_4(feedforward):
    config = peft.IA3Config(target_modules=TARGETS["llama"], feedforward_modules=feedforward, init_ia3_weights=False)
    model = peft.get_peft_model(patched(method="ste"), config).eval()
    expected = logits(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=1e-4)
    layer = merged.model.layers[0].mlp.down_proj
    assert torch.equal(layer.weight, layer.sparse_weight())


def test_a_merge_of_nan_is_refused():
    model = adapted()
    with torch.no_grad():
        around(model)[-1].lora_B["default"].weight[0, 0] = torch.nan
    before = snapshot(model)
    with pytest.raises(ValueError, match="or not finite"):
        model.merge_adapter(safe_merge=True)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)


def test_models_are_copied_pickled_and_moved_with_their_adapters():
    model = adapted()
    expected = logits(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(logits(twin), expected)
        twin.merge_adapter()
        torch.testing.assert_close(logits(twin), expected)
        assert not model.base_model.model.model.layers[0].mlp.up_proj.merged
        twin.bfloat16().unmerge_adapter()
        torch.testing.assert_close(logits(twin.float()), expected, atol=0.1, rtol=0.1)


UNMERGED = {
    "lora": lora,
    "prompts": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "tokens": lambda: lora(trainable_token_indices=[5, 6]),
}


@pytest.mark.filterwarnings("ignore:Unsupported layer type")  # PEFT's own
@pytest.mark.parametrize("kind", UNMERGED)
def test_an_export_of_a_model_with_adapters_is_refused(kind, tmp_path):
    model = peft.get_peft_model(patched(), UNMERGED[kind]())
    with pytest.raises(ValueError, match=r"the model has adapters: .* merge_and_unload\(\)"):
        export_model(model, tmp_path)
    assert not list(tmp_path.iterdir())
