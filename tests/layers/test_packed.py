"""Packed models: the same outputs from 9/16 of the bytes, on disk and in memory, and a way back to training."""

import copy
from functools import partial

import pytest
import sparse_models
import torch
import zoo
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from checkpoints import patched
from cslt import stand_in  # noqa: F401 (a fixture)
from safetensors.torch import load_file
from sparse_models import logits
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from hf_sparse24 import (
    Sparse24Config,
    Sparse24Controller,
    export_model,
    pack_model,
    patch_model,
    sparse_weights,
    unpack_model,
    unpatch_model,
)
from hf_sparse24.methods import METHODS
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.run import set_phase
from hf_sparse24.weights.storage import PACKED

pytestmark = pytest.mark.usefixtures("dense_math")  # logits are compared bit for bit


def exported(directory, model: PreTrainedModel, **arguments) -> PreTrainedModel:
    export_model(model, directory, "packed", **arguments)
    return AutoModelForCausalLM.from_pretrained(directory)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [*((name, "2:4") for name in (*zoo.NAMES, *zoo.MOE)), ("gpt2", "6:8"), ("mixtral", "16:32"), ("gpt_oss", "6:8")],
)
def test_round_trip_of_every_architecture(name, pattern, tmp_path):
    model = patched(name, pattern=pattern)
    export_model(model, tmp_path / "packed", "packed")
    loaded, report = zoo.auto_class(name).from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(logits(loaded), logits(model))
    assert sparse_weights(loaded, PACKED).keys() == sparse_weights(model).keys() and not sparse_weights(loaded)
    for key, weight in sparse_weights(loaded, PACKED).items():
        assert torch.equal(weight.storage.whole(), sparse_weights(model)[key].pruned())
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(zoo.auto_class(name).from_pretrained(tmp_path / "again")), logits(model))


def test_the_model_without_its_head(tmp_path):
    model = patched()
    export_model(model, tmp_path, "packed")
    base = AutoModel.from_pretrained(tmp_path)
    assert len(sparse_weights(base, PACKED)) == len(sparse_weights(model))
    ids = zoo.batch()["input_ids"]
    with torch.no_grad():
        assert torch.equal(base(ids)[0], model.model(ids)[0])


def test_shards(tmp_path):
    model = patched()
    export_model(model, tmp_path, "packed", max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2 and all(path.stat().st_size < 23_000 for path in shards)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    export_model(model, tmp_path, "packed", max_shard_size="20KB")
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}  # the same model, the same bytes


def test_weights_that_cannot_be_packed_are_stored_with_their_zeros(tmp_path):
    model = patched("llama", intermediate_size=60)  # down_proj has 60 inputs
    loaded = exported(tmp_path, model)
    assert len(sparse_weights(loaded, PACKED)) == 2 * 6
    assert type(loaded.model.layers[0].mlp.down_proj) is nn.Linear
    assert is_nm_sparse(loaded.model.layers[0].mlp.down_proj.weight)
    assert torch.equal(logits(loaded), logits(model))
    pack_model(model)
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear and torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("pattern", ["1:4", "16:32"])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_patterns(method, pattern, tmp_path):
    """Saved, loaded, and saved again by every method: the weights and what they compute are the same bits."""
    settings = {"mask_solver": "greedy"} if method == "t-sr-ste" else {}
    model = sparse_models.patched(method=method, pattern=pattern, target_modules="all-linear", **settings).eval()
    set_phase(model, "sparse")
    loaded = exported(tmp_path / "packed", model)
    assert sparse_weights(loaded, PACKED).keys() == sparse_weights(model).keys()
    loaded.save_pretrained(tmp_path / "again")
    for one in (loaded, AutoModelForCausalLM.from_pretrained(tmp_path / "again")):
        assert torch.equal(logits(one), logits(model))
        for name, weight in sparse_weights(one, PACKED).items():
            dense = weight.storage.whole()
            assert torch.equal(dense, sparse_weights(model)[name].merged())
            assert is_nm_sparse(dense, *sparse_weights(model)[name].method.pattern)
            assert not torch.signbit(weight.storage.packed.values[weight.storage.packed.values == 0]).any()


@pytest.mark.parametrize("pack", [pack_model, lambda model: export_model(model, "unused", "packed")])
def test_what_cannot_be_packed(pack, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="not patched"):
        pack(zoo.build("llama"))
    model = zoo.build("llama", hidden_size=40, intermediate_size=80)
    patch_model(model, Sparse24Config(method="ste", pattern="3:5"))
    before = logits(model)
    with pytest.raises(
        ValueError, match=r"^(pack_model|format='packed'): no sparse weight .* \(M of a packed 3:5 must"
    ):
        pack(model)
    assert torch.equal(logits(model), before) and sparse_weights(model)
    model = patched(method="t-sr-ste")
    set_phase(model, "dense")
    with pytest.raises(ValueError, match="dense phase"):
        pack(model)
    with pytest.raises(ValueError, match=r"format='small': must be one of \['dense', 'packed'\]"):
        export_model(model, "unused", "small")
    assert not any(path.name == "config.json" for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("method", ["s-ste", "t-sr-ste", "fixed-mask"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_packing_in_memory(name, method, tmp_path):
    model = patched(name, method)
    expected = logits(model)
    dense = sum(weight.parameter.nbytes for weight in sparse_weights(model).values())
    footprint = model.get_memory_footprint()
    state = sum(x.nbytes for weight in sparse_weights(model).values() for x in weight.state.values())
    freed = pack_model(model)
    assert freed == dense * 15 / 32 + state and model.get_memory_footprint() == footprint - freed
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(logits(torch.load(tmp_path / "model.pt", weights_only=False)), expected)
    other = patched(name, method)
    pack_model(other)
    other.load_state_dict({key: x.clone() for key, x in model.state_dict().items()})
    assert torch.equal(logits(other), expected)


def test_the_report_of_a_layer():
    model = patched()
    pack_model(model)
    layer = model.model.layers[0].mlp.up_proj
    assert repr(layer) == "PackedLinear(in=32, out=64, bias=False, dtype=torch.float32)"
    assert (layer.in_features, layer.out_features) == (32, 64) and isinstance(layer, nn.Linear)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_pass_through(name):
    """To the input and the bias, as those of the dense layer; with gradient checkpointing and autocast too."""
    model = patched(name)
    layer = next(iter(sparse_weights(model).values())).module
    dense, packed = nn.ModuleList([copy.deepcopy(layer)]), nn.ModuleList([copy.deepcopy(layer)])
    pack_model(packed)
    x = torch.randn(3, 5, 32)
    results = []
    for module in (dense, packed):
        for dtype in (None, torch.bfloat16):
            leaf = x.clone().requires_grad_()
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                output = module[0](leaf)
            output.float().square().sum().backward()
            bias = getattr(module[0], "bias", None)
            results.append([output.detach(), leaf.grad, None if bias is None else bias.grad])
            module.zero_grad()
    for ours, theirs in zip(results[2:], results[:2]):
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b)


def test_a_layer_compresses_its_weight_once(stand_in):  # noqa: F811
    model = nn.Sequential(nn.Linear(32, 48)).bfloat16()
    patch_model(model, Sparse24Config(method="fixed-mask", target_modules=["0"]))
    pack_model(model)
    x = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    expected = nn.functional.linear(x, model[0].weight, model[0].bias)
    for ours, with_gradients, count in ((model, True, 1), (copy.deepcopy(model), True, 2), (model, False, 2)):
        with torch.set_grad_enabled(with_gradients):
            torch.testing.assert_close(ours(x), expected)
        assert stand_in.compressed == count


def test_training_a_packed_model_is_refused(tmp_path):
    model = patched()
    pack_model(model)
    with pytest.raises(ValueError, match="attach trainable adapters"):
        Trainer(model, TrainingArguments(str(tmp_path), report_to="none", use_cpu=True))
    with pytest.raises(ValueError, match=r"the model is packed.*unpack_model\(model\) first"):
        patch_model(model, Sparse24Config())
    with pytest.raises(ValueError, match="not patched"):
        Sparse24Controller(model, torch.optim.SGD(model.parameters(), lr=0.1), 10)


def test_unpacking_and_training_on(tmp_path):
    model = patched()
    expected = logits(model)
    loaded = exported(tmp_path, model)
    names = [name for name, _ in loaded.named_parameters()]
    assert unpack_model(loaded) is loaded
    assert not sparse_weights(loaded, PACKED) and not hasattr(loaded.config, "quantization_config")
    assert dict(loaded.named_parameters()).keys() == dict(zoo.build("llama").named_parameters()).keys()
    assert [name for name, _ in loaded.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert len(names) < len(list(loaded.parameters()))
    assert torch.equal(logits(loaded), expected)
    loaded.float().save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="not packed"):
        unpack_model(loaded)
    patch_model(loaded, Sparse24Config(method="fixed-mask", target_modules="all-linear"))
    assert torch.equal(logits(loaded), expected)
    args = TrainingArguments(str(tmp_path / "run"), max_steps=2, report_to="none", use_cpu=True, disable_tqdm=True)
    data = [{key: value[0] for key, value in zoo.batch().items()}]
    Trainer(loaded, args, train_dataset=data).train()
    assert not torch.equal(logits(loaded), expected)


@pytest.mark.parametrize("name", ["mixtral", "granitemoe", "gpt_neox"])
def test_architectures_whose_files_have_other_names(name, tmp_path):
    """Packed files have the model's own names, also saved again; unpacked, the architecture's."""
    model = patched(name)
    expected = logits(model)
    zoo.build(name).save_pretrained(tmp_path / "stock")
    pack_model(model)
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(loaded), expected)
    unpack_model(loaded).save_pretrained(tmp_path / "unpacked")
    stored = [set(load_file(tmp_path / place / "model.safetensors")) for place in ("stock", "unpacked")]
    assert stored[0] == stored[1]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "unpacked")), expected)


def test_parts_are_refused():
    model = patched()
    for part in (model.model, model.model.layers):
        with pytest.raises(ValueError, match="the model is a part of LlamaForCausalLM"):
            pack_model(part)


def test_dtypes_at_loading(tmp_path):
    model = patched()
    export_model(model, tmp_path, "packed")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for weight in sparse_weights(loaded, PACKED).values():
        packed = weight.storage.packed
        assert packed.values.dtype == torch.bfloat16 and packed.mask.dtype == torch.uint8
    dense = AutoModelForCausalLM.from_pretrained(tmp_path).model.layers[0].mlp.up_proj.weight
    assert torch.equal(loaded.model.layers[0].mlp.up_proj.weight, dense.bfloat16())


@pytest.mark.parametrize("values", ["float", "int8"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_casts(name, values, tmp_path):
    """As of any model, where Transformers refuses them to a quantized one; other dtypes are refused with a way."""
    model = patched(name)
    export_model(model, tmp_path, "packed", values=values)
    pack_model(model, values)
    for one in (model, AutoModelForCausalLM.from_pretrained(tmp_path), copy.deepcopy(model)):
        for cast, dtype in ((one.half, torch.float16), (one.float, torch.float32), (one.bfloat16, torch.bfloat16)):
            assert cast() is one and logits(one).dtype == dtype
            assert {weight.storage.packed.dtype for weight in sparse_weights(one, PACKED).values()} == {dtype}
        for cast in (partial(one.to, torch.float8_e4m3fn), partial(one.type, torch.float16)):
            with pytest.raises(
                ValueError, match=r"packed weights cannot be cast to .*call unpack_model\(model\) first"
            ):
                cast()
        logits(one.bfloat16())
        unpack_model(one).half()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_model_that_accelerate_spreads_over_devices(name):
    """Its hooks keep the forward that each module had when it was loaded."""
    model, plain = (zoo.build(name).eval() for _ in range(2))
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook("cpu"))
    steps = (partial(patch_model, config=Sparse24Config(method="ste")), pack_model, unpack_model, patch_model)
    for change in (*steps, partial(unpatch_model, sparse=False)):
        before = logits(plain)
        change(model)
        change(plain)
        assert torch.equal(logits(model), logits(plain))
        assert change is not steps[0] or not torch.equal(logits(plain), before)
