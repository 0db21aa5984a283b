"""LoRA and DoRA through the mask: what they compute, what they need, and that a merge stays 2:4."""

import copy
import io

import pytest
import torch
import zoo
from lora_models import ONE_BLOCK, TARGETS, adapted, logits, lora, patched
from sparse_models import assert_same_state, snapshot
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from hf_sparse24 import Sparse24Config, export_model, pack_model, patch_model, unpack_model, unpatch_model
from hf_sparse24.adapters import masked
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.weights.sparse_weight import sparse_weights

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore:Already following adapters were merged"),
    pytest.mark.filterwarnings("ignore:Adapter second was active which is now deleted"),
]

METHODS = ["s-ste", "t-sr-ste", "fixed-mask", "ste"]


def around(model: nn.Module) -> list[nn.Module]:
    """The adapters around sparse layers."""
    return [m for m in model.modules() if hasattr(m, "lora_A") and hasattr(m.get_base_layer(), "sparse24")]


# What it computes.


def layers(dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """A linear layer and a Conv1D of the same sizes, [out, in] = [12, 8], 2:4."""
    linear, conv = nn.Linear(8, 12, bias=False, dtype=dtype), Conv1D(12, 8).to(dtype)
    mask = torch.tensor([1, 0, 0, 1, 0, 1, 1, 0])
    with torch.no_grad():
        linear.weight.mul_(mask)
        conv.weight.copy_(linear.weight.t())
    return [linear, conv]


@pytest.mark.parametrize("chunk", [1, 30, 1000])
@pytest.mark.parametrize("layer", layers(), ids=["Linear", "Conv1D"])
def test_output_and_gradients_are_those_of_the_masked_update(layer, chunk, monkeypatch):
    monkeypatch.setattr(masked, "CHUNK", chunk)
    x, a, b = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in [(2, 3, 8), (4, 8), (12, 4)])
    weight = masked.out_in(layer, layer.weight.detach())
    expected = x @ ((weight != 0) * (0.5 * b @ a)).t()
    found = masked.masked_linear(x, a, b, 0.5, layer)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, [x, a, b], grad), torch.autograd.grad(expected, [x, a, b], grad)
    )


@pytest.mark.parametrize("needed", ["x", "a", "b"])
def test_gradients_that_nobody_needs_are_left_out(needed):
    tensors = {"x": torch.randn(3, 8), "a": torch.randn(4, 8), "b": torch.randn(12, 4)}
    tensors[needed].requires_grad_()
    masked.masked_linear(*tensors.values(), 1.0, layers(torch.float32)[0]).sum().backward()
    assert [name for name, tensor in tensors.items() if tensor.grad is not None] == [needed]


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.elements = max(self.elements, tensor.numel())
        return result


def test_neither_the_update_nor_its_gradient_is_ever_whole(monkeypatch):
    monkeypatch.setattr(masked, "CHUNK", 1024)
    layer = nn.Linear(64, 64)
    x, a, b = torch.randn(4, 64, requires_grad=True), torch.randn(4, 64, requires_grad=True), torch.randn(64, 4)
    with Largest() as largest:
        masked.masked_linear(x, a, b.requires_grad_(), 1.0, layer).sum().backward()
        masked.row_norms(a, b, 1.0, layer)
    assert 512 < largest.elements <= 1024 < layer.weight.numel()


def test_a_small_update_of_a_bf16_weight_is_not_rounded_away():
    model = adapted(dtype=torch.bfloat16)
    (adapter, *_) = around(model)
    with torch.no_grad():
        adapter.lora_B["default"].weight.mul_(1e-4)
        weight, delta = adapter.base_layer.sparse_weight(), adapter.get_delta_weight("default")
        assert ((weight + delta).bfloat16() == weight)[weight != 0].float().mean() > 0.5
        x = torch.randn(64, 32, dtype=torch.bfloat16)
        change = adapter.lora_variant["default"].forward(adapter, "default", x, torch.zeros(64, 64).bfloat16())
        expected = x.float() @ (delta * (weight != 0)).t()
    torch.testing.assert_close(change.float(), expected, rtol=0.02, atol=0.02 * float(expected.std()))


@pytest.mark.parametrize("dora", [False, True])
def test_dropout_drops_what_the_adapter_sees_and_not_what_the_base_layer_sees(dora):
    model = adapted(lora_dropout=0.5, use_dora=dora).train()
    (adapter, *_) = around(model)
    x, layer, a, b = torch.randn(5, 32), adapter.base_layer, adapter.lora_A["default"], adapter.lora_B["default"]
    weight = layer.sparse_weight()
    update = (weight != 0) * (4 * b.weight @ a.weight)
    torch.manual_seed(3)
    found = adapter(x)
    torch.manual_seed(3)
    dropped = torch.nn.functional.dropout(x, 0.5)
    if dora:
        scale = (adapter.lora_magnitude_vector["default"].weight / (weight + update).norm(dim=1))[:, None]
        update = scale * (weight + update) - weight
    torch.testing.assert_close(found, x @ weight.t() + dropped @ update.t())


def test_autocast_multiplies_in_its_dtype_and_keeps_the_mask():
    model = adapted()
    (adapter, *_) = around(model)
    x = torch.randn(2, 3, 32)
    with torch.autocast("cpu", torch.bfloat16):
        found = adapter(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), adapter(x), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("dora", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(dora):
    (adapter, *_) = around(adapted(use_dora=dora, lora_dropout=0.5).train())
    x = torch.randn(5, 32, requires_grad=True)
    inputs = [x, *(p for p in adapter.parameters() if p.requires_grad)]
    torch.manual_seed(2)
    expected = torch.autograd.grad(adapter(x).square().sum(), inputs)
    torch.manual_seed(2)
    found = torch.autograd.grad(checkpoint(adapter, x, use_reentrant=False).square().sum(), inputs)
    assert all(map(torch.equal, found, expected))


def test_the_compiled_layer_computes_the_same():
    (adapter, *_) = around(adapted())
    x = torch.randn(3, 32)
    torch.testing.assert_close(torch.compile(adapter, backend="eager", fullgraph=True)(x), adapter(x))


def test_a_dora_adapter_begins_where_its_base_is():
    model = adapted(use_dora=True, init_lora_weights=True)
    with model.disable_adapter():
        expected = logits(model)
    torch.testing.assert_close(logits(model), expected)
    torch.testing.assert_close(logits(adapted(use_dora=True)), logits(adapted()))


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "orthogonal", "gaussian", "mica"])
def test_an_initialisation_from_the_weights_keeps_outputs_and_zeros(init):
    expected = logits(patched())
    model = adapted(init_lora_weights=init)
    torch.testing.assert_close(logits(model), expected)
    takes_part = "pissa" in init or init == "olora"
    assert all((a.base_layer.weight == 0).float().mean() == (0.5 if takes_part else 0) for a in around(model))
    model.merge_adapter()
    torch.testing.assert_close(logits(model), expected)
    assert all(is_nm_sparse(adapter.base_layer.weight, 2, 4) for adapter in around(model))


# Merging.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("extra", [{}, {"use_dora": True, "use_rslora": True}], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", TARGETS)
def test_a_merge_changes_nothing_but_rounding_is_2_to_4_and_is_undone_bit_for_bit(base, method, extra, dtype):
    model = adapted(base, method, dtype, **extra)
    expected, before = logits(model), snapshot(model)
    with model.disable_adapter():
        assert (logits(model) - expected).abs().max() > 0.1
    close = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    model.merge_adapter()
    torch.testing.assert_close(logits(model), expected, **close)
    for adapter in around(model):
        layer = adapter.base_layer
        assert is_nm_sparse(layer.weight, 2, 4, layer.input_dim) and torch.equal(layer.sparse_weight(), layer.weight)
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


@pytest.mark.parametrize("dora", [False, True])
def test_several_adapters_merge_together_and_one_by_one(dora):
    model = adapted(use_dora=dora)
    model.add_adapter("second", lora(use_dora=dora))
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


def test_unpatching_a_merged_model_keeps_outputs_also_once_it_is_unmerged():
    model = adapted()
    expected = logits(model)
    model.merge_adapter()
    unpatch_model(model)
    torch.testing.assert_close(logits(model), expected)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), expected)
    assert not sparse_weights(model)


def test_a_merged_model_is_neither_packed_nor_unpacked_nor_patched():
    sparse, packed = adapted(), adapted()
    pack_model(packed.get_base_model())
    dense = peft.get_peft_model(zoo.build("llama", **ONE_BLOCK["llama"]), lora())
    for model, function in ((sparse, pack_model), (packed, unpack_model), (dense, patch_model)):
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
def test_a_merge_that_would_densify_is_refused_and_changes_nothing(kind, tmp_path):
    model = peft.get_peft_model(patched(), DENSE[kind]()).eval()
    expected, before = logits(model), snapshot(model)
    for merge in (
        model.merge_adapter,
        model.merge_and_unload,
        lambda: model.merge_adapter(safe_merge=True),
        lambda: export_model(model, tmp_path),
    ):
        with pytest.raises(ValueError, match=r"is not 2:4.* call unpatch_model\(model\) first"):
            merge()
        assert_same_state(model, before)
        assert torch.equal(logits(model), expected)
    assert not list(tmp_path.iterdir())
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
        around(model)[0].lora_B["default"].weight[0, 0] = torch.nan
    before = snapshot(model)
    with pytest.raises(ValueError, match="NaN"):
        model.merge_adapter(safe_merge=True)
    assert all(torch.equal(before[n], t) or t.isnan().any() for n, t in model.state_dict().items())


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


@pytest.mark.parametrize("method", ["s-ste", "t-sr-ste", "fixed-mask"])
@pytest.mark.parametrize("dora", [False, True])
def test_an_export_has_the_adapter_in_it_and_leaves_it_in_place(dora, method, tmp_path):
    model = adapted(method=method, use_dora=dora, target_modules=[*TARGETS["llama"], "q_proj"])
    expected, before = logits(model), snapshot(model)
    export_model(model, tmp_path)
    assert_same_state(model, before)
    assert torch.equal(logits(model), expected)
    loaded = zoo.auto_class("llama").from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(loaded), expected)
    assert is_nm_sparse(loaded.model.layers[0].mlp.up_proj.weight, 2, 4)
    assert not sparse_weights(loaded)


@pytest.mark.filterwarnings("ignore")  # PEFT's own
@pytest.mark.parametrize("kind", ["LNTuning", "OSF"])
def test_an_export_has_adapters_of_dense_layers_in_it_and_leaves_them_in_place(kind, tmp_path):
    config = {
        "LNTuning": peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
        "OSF": peft.OSFConfig(target_modules=["q_proj"], init_weights=False),
    }[kind]
    model = peft.get_peft_model(patched(), config).eval()
    without = logits(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) if parameter.requires_grad else 0)
    expected, before = logits(model), snapshot(model)
    assert (expected - without).abs().max() > 0.01
    export_model(model, tmp_path)
    assert_same_state(model, before)
    assert torch.equal(logits(model), expected)
    torch.testing.assert_close(logits(zoo.auto_class("llama").from_pretrained(tmp_path).eval()), expected)


@pytest.mark.filterwarnings("ignore")  # PEFT's own
@pytest.mark.parametrize("target", ["lm_head", "wte"])
def test_an_export_of_an_adapter_of_a_tied_weight_is_refused_and_changes_nothing(target, tmp_path):
    model = adapted("gpt2", target_modules=["c_fc", target])
    expected, before = logits(model), snapshot(model)
    with pytest.raises(ValueError, match=r"transformer\.wte and lm_head share one weight"):
        export_model(model, tmp_path)
    assert_same_state(model, before)
    assert torch.equal(logits(model), expected) and not list(tmp_path.iterdir())


def test_trained_tokens_of_tied_embeddings_are_exported(tmp_path):
    model = adapted("gpt2", target_modules=["c_fc"], trainable_token_indices=[5, 6])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(1.0 if "trainable_tokens" in name else 0)
    expected = logits(model)
    export_model(model, tmp_path)
    torch.testing.assert_close(logits(zoo.auto_class("gpt2").from_pretrained(tmp_path).eval()), expected)


def test_an_export_of_a_model_with_prompts_is_refused(tmp_path):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="prompts are no weights"):
        export_model(peft.get_peft_model(patched(), config), tmp_path)


def test_a_copy_that_trains_leaves_the_frozen_base_as_it_is():
    """Its masks are refreshed, those of frozen weights are not; and no dense tail changes what they compute."""
    from hf_sparse24 import Sparse24Controller

    model = zoo.build("llama", **ONE_BLOCK["llama"])
    patch_model(model, Sparse24Config(method="t-sr-ste", mask_interval=1))
    with torch.no_grad():  # masks that these weights would not choose
        for weight in sparse_weights(model).values():
            weight.parameter.copy_(torch.randn_like(weight.parameter))
    model = peft.get_peft_model(model, lora(target_modules=["up_proj"], modules_to_save=["down_proj"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = {n: w for n, w in sparse_weights(model).items() if not w.parameter.requires_grad}
    before = {name: weight.mask() for name, weight in frozen.items()}
    optimizer = torch.optim.SGD(trained, lr=0.5)
    controller = Sparse24Controller(model, optimizer, 6)
    for _ in range(6):
        model(**zoo.batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert controller.phase == "sparse" and frozen
    assert all(torch.equal(weight.mask(), before[name]) for name, weight in frozen.items())
