"""oneshot on a model of one layer, where the solution is known, then on whole models."""

import functools

import pytest
import sparse24_kernels as kernels
import torch
import zoo
from datasets import Dataset
from oneshot_models import LAYERWISE, OneLayer, assert_untouched, batches, correlated, fixed_mask
from sparse24_kernels import nm_mask, pack_bits
from sparse_models import assert_same_state, logits, snapshot
from torch import nn
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.pytorch_utils import Conv1D

from hf_sparse24 import (
    Sparse24Config,
    Sparse24Trainer,
    export_model,
    oneshot,
    patch_model,
    sparse_weights,
    unpatch_model,
)
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.pruning import layerwise
from hf_sparse24.pruning.prune_layer import CRITERIA
from hf_sparse24.pruning.report import OneshotReport
from hf_sparse24.run import patched_config
from hf_sparse24.weights.storage import PACKED


def linear(outputs: int, inputs: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64).requires_grad_(False)


def mask_of(layer: nn.Module) -> torch.Tensor:
    return layer.sparse24["weight"].mask()


# --- a model of one layer ---


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_reconstruction_of_weight_and_bias(criterion, bias, monkeypatch):
    """Together they are the solution of one least-squares problem, and the report's errors are the real ones."""
    monkeypatch.setattr(layerwise, "least_squares", functools.partial(layerwise.least_squares, tolerance=0))
    x, layer = correlated(300, 16, mean=0.7), linear(8, 16, bias)
    weight, outputs = layer.weight.clone(), layer(x)
    report = oneshot(OneLayer(layer), [{"x": x}], fixed_mask(), criterion=criterion, damping=0.0, **LAYERWISE).layers[0]
    mask, scale = mask_of(layer), torch.linalg.norm(x @ weight.T)
    columns = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1) if bias else x
    for i, kept in enumerate(mask):
        kept = torch.cat([kept, kept.new_ones(1)]) if bias else kept
        expected = torch.linalg.lstsq(columns[:, kept], outputs[:, i]).solution
        found = torch.cat([layer.weight[i], layer.bias[i : i + 1]]) if bias else layer.weight[i]
        torch.testing.assert_close(found[kept], expected, rtol=1e-5, atol=1e-6)
    assert report.error == pytest.approx((torch.linalg.norm(layer(x) - outputs) / scale).item())
    assert report.masked_error == pytest.approx((torch.linalg.norm(x @ (weight * ~mask).T) / scale).item())
    assert report.error < report.masked_error
    assert report.kept_magnitude == pytest.approx((weight.abs() * mask).sum().item() / weight.abs().sum().item())
    assert (report.tokens, report.dropped) == (300, 64)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_int8_values_cost_less_where_the_inputs_are_known(criterion):
    """Than rounding to nearest does after the same pruning; the report's error is that of the rounded weight."""
    x, layers = correlated(300, 136), [linear(8, 136, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    outputs, scale = layers[0](x), torch.linalg.norm(layers[0](x))
    for layer, values in zip(layers, ("float", "int8")):
        report = oneshot(OneLayer(layer), [{"x": x}], fixed_mask(), criterion=criterion, values=values, **LAYERWISE)
    assert "rounded to int8" in str(report) and report.values == "int8"
    assert report.layers[0].error == pytest.approx((torch.linalg.norm(layers[1](x) - outputs) / scale).item())
    pruned, rounded = (layer.weight for layer in layers)
    nearest = kernels.unpack_nm(kernels.quantize_packed(kernels.pack_nm(pruned)))
    assert torch.equal(mask_of(layers[0]), mask_of(layers[1])) and not torch.equal(rounded, nearest)
    assert torch.linalg.norm(x @ (rounded - pruned).T) < 0.7 * torch.linalg.norm(x @ (nearest - pruned).T)


def test_layers_without_a_packed_form_are_not_rounded_and_are_named(tmp_path, caplog):
    model = zoo.build("llama", intermediate_size=48)
    config = fixed_mask(layer_patterns={"down_proj": "7:12"})
    oneshot(model, batches(), config, criterion="magnitude", reconstruct=None, values="int8")
    assert "values='int8': 2 of 14 sparse layers have no packed form and are not rounded: model.layers.0" in caplog.text
    export_model(model, tmp_path, "packed", values="int8")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model.eval()))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("criterion", "reconstruct"), [("wanda", "block"), ("wanda", "layer"), ("wanda", None), ("sparsegpt", None)]
)
def test_an_export_stores_exactly_the_int8_values_that_oneshot_chose(name, dtype, criterion, reconstruct, tmp_path):
    model = zoo.build(name).to(dtype).eval()
    oneshot(model, batches(), fixed_mask(), criterion=criterion, reconstruct=reconstruct, values="int8", passes=2)
    model.save_pretrained(tmp_path / "trained")
    for each in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "trained")):
        export_model(each, tmp_path / "int8", "packed", values="int8")
        found = sparse_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "int8"), PACKED)
        assert found.keys() == sparse_weights(model).keys()
        for key, weight in sparse_weights(model).items():
            assert torch.equal(found[key].storage.whole(), weight.pruned())


def test_weights_that_cannot_be_packed_are_not_rounded(tmp_path):
    model = zoo.build("llama", intermediate_size=60).eval()  # down_proj has 60 inputs
    oneshot(model, batches(), fixed_mask(), values="int8", reconstruct=None)
    export_model(model, tmp_path, "packed", values="int8")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_the_bias_absorbs_the_mean_error():
    """However strongly damping holds the weights."""
    x, layer = correlated(300, 16, mean=0.7), linear(8, 16)
    weight, bias = layer.weight.clone(), layer.bias.clone()
    oneshot(OneLayer(layer), [{"x": x}], fixed_mask(), criterion="wanda", damping=1e9, **LAYERWISE)
    torch.testing.assert_close(layer.weight, weight * mask_of(layer), rtol=0, atol=1e-6)
    torch.testing.assert_close(layer.bias, bias + (weight * ~mask_of(layer)) @ x.mean(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reconstruct", ["layer", None])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_weights_of_inputs_that_are_never_active(criterion, reconstruct):
    """SparseGPT zeroes them, Wanda drops them first, and nothing moves what is left of them."""
    x, layer = correlated(300, 16), linear(8, 16)
    dead = torch.tensor([0, 1, 2, 5, 10])  # three of one group: one of them must be kept
    x[:, dead] = 0
    before = layer.weight.clone()
    report = oneshot(OneLayer(layer), [{"x": x}], fixed_mask(), criterion=criterion, reconstruct=reconstruct).layers[0]
    kept = mask_of(layer)[:, dead]
    if criterion == "sparsegpt":
        assert not layer.weight[:, dead].any()
    else:
        assert torch.equal(layer.weight[:, dead], before[:, dead] * kept)
    if criterion == "wanda":
        assert kept.sum() == 8 and kept[:, :3].sum() == 8
    assert report.damping == 0.01 and is_nm_sparse(layer.weight)


@pytest.mark.parametrize("reconstruct", ["layer", None])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_conv1d_is_the_transposed_linear(criterion, reconstruct):
    x, layer, conv = correlated(100, 16), linear(8, 16), Conv1D(8, 16).double().requires_grad_(False)
    conv.weight.copy_(layer.weight.T)
    conv.bias.copy_(layer.bias)
    one, two = (
        oneshot(OneLayer(each), [{"x": x}], fixed_mask(), criterion=criterion, reconstruct=reconstruct)
        for each in (layer, conv)
    )
    assert torch.equal(mask_of(layer), mask_of(conv).T)
    torch.testing.assert_close(layer.weight, conv.weight.T)
    torch.testing.assert_close(layer.bias, conv.bias)
    assert one.layers[0].error == pytest.approx(two.layers[0].error)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_autocast_is_for_the_model_alone(criterion):
    """The layer's weights and its report are those of full precision."""
    x, layers = correlated(300, 16).float(), [linear(8, 16).float() for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    options = {"criterion": criterion, "reconstruct": "layer"}
    one = oneshot(OneLayer(layers[0]), [{"x": x}], fixed_mask(), **options)
    with torch.autocast("cpu", torch.bfloat16):
        two = oneshot(OneLayer(layers[1]), [{"x": x}], fixed_mask(), **options)
    assert torch.equal(layers[0].weight, layers[1].weight) and one.layers == two.layers


# --- whole models ---


@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_architecture(name):
    model = zoo.build(name)
    before = snapshot(model)
    expected = patch_model(zoo.build(name), fixed_mask())
    report = oneshot(model, batches(2), fixed_mask(), criterion="wanda", reconstruct="layer")
    assert isinstance(report, OneshotReport) and report.patch == expected
    assert tuple(layer.name for layer in report.layers) == expected.patched
    for layer in report.layers:
        module = model.get_submodule(layer.name)
        weight = module.sparse24["weight"]
        assert all(is_nm_sparse(x, dim=weight.input_dim) for x in (module.weight, mask_of(module)))
        assert torch.equal(module.sparse_weight(), module.weight) and weight.run.phase == "sparse"
        assert 0 < layer.error < layer.masked_error < 0.7 and layer.tokens > 0 and layer.damping == 0.01
    touched = {f"{layer}.{part}" for layer in expected.patched for part in ("weight", "bias", "mask_bits")}
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items() if key not in touched)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("criterion", CRITERIA)
def test_reconstruction_lowers_every_error(criterion):
    plain, model = zoo.build("llama"), zoo.build("llama")
    without = oneshot(plain, batches(), fixed_mask(), criterion=criterion, reconstruct=None)
    report = oneshot(model, batches(), fixed_mask(), criterion=criterion, **LAYERWISE)
    for one, two in zip(without.layers, report.layers):
        assert two.error < one.error
        for weight in (each.get_submodule(one.name).weight for each in (plain, model)):
            assert not torch.signbit(weight[weight == 0]).any()
        if criterion == "sparsegpt":
            assert one.error < one.masked_error
        else:
            assert one.error == pytest.approx(one.masked_error)
    if criterion == "magnitude":  # then oneshot is what patch_model does
        patched = zoo.build("llama")
        patch_model(patched, fixed_mask())
        for name, weight in sparse_weights(patched).items():
            assert torch.equal(weight.pruned(), plain.get_parameter(name))
            assert torch.equal(weight.state["mask_bits"], sparse_weights(plain)[name].state["mask_bits"])


def test_later_blocks_see_the_pruned_ones_before_them():
    """The second block's Wanda mask is that of activations in a model whose first block is pruned."""
    model = zoo.build("llama")
    oneshot(model, batches(), fixed_mask(), criterion="wanda", **LAYERWISE)
    half, data = zoo.build("llama").eval(), batches()
    oneshot(half, data, fixed_mask(layers_to_transform=0), criterion="wanda", **LAYERWISE)
    inputs = []
    target = half.model.layers[1].mlp.down_proj
    with torch.no_grad(), target.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, 1))):
        for batch in data:
            half(input_ids=batch["input_ids"])
    x = torch.cat(inputs)
    mask = sparse_weights(model)["model.layers.1.mlp.down_proj.weight"].mask()
    assert torch.equal(mask, kernels.nm_mask(target.weight.abs() * x.square().sum(0).sqrt()))


def test_a_block_that_runs_twice_is_calibrated_on_both():
    report = oneshot(zoo.build("albert"), batches(1), fixed_mask(), reconstruct=None)
    assert {layer.tokens for layer in report.layers} == {2 * 4 * 24}


@pytest.mark.parametrize("pattern", ["2:4", "4:8", "1:4"])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_patterns(pattern, criterion, tmp_path):
    model = zoo.build("gpt2")
    oneshot(model, batches(1), fixed_mask(pattern=pattern), criterion=criterion, reconstruct="layer")
    n, m = map(int, pattern.split(":"))
    for weight in sparse_weights(model).values():
        assert is_nm_sparse(weight.pruned(), n, m, weight.input_dim)
        assert weight.mask().unflatten(0, (-1, m)).sum(1).eq(n).all()
    export_model(model, tmp_path)
    assert is_nm_sparse(AutoModelForCausalLM.from_pretrained(tmp_path).transformer.h[1].mlp.c_fc.weight, n, m, dim=0)


@pytest.mark.parametrize("criterion", ["wanda", "sparsegpt"])
def test_life_after(criterion, tmp_path):
    """Fine-tuning keeps the masks and lowers the loss; saving, exporting and unpatching keep the outputs."""
    model = zoo.build("llama")
    oneshot(model, batches(), fixed_mask(), criterion=criterion, **LAYERWISE)
    masks = {name: weight.state["mask_bits"].clone() for name, weight in sparse_weights(model).items()}
    before = snapshot(model)
    dense = dict(zoo.build("llama").named_parameters())
    magnitude = {name: pack_bits(nm_mask(dense[name])) for name in masks}
    ids = (torch.arange(3, 35)[:, None] + torch.arange(12)).tolist()
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=6, learning_rate=1e-2, weight_decay=0.1, logging_steps=1, report_to="none",
        disable_tqdm=True, use_cpu=True, save_strategy="no",
    )  # fmt: skip
    run = Sparse24Trainer(model, arguments, train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}))
    run.train()
    losses = [log["loss"] for log in run.state.log_history if "loss" in log]
    assert losses[-1] < losses[0]

    expected = logits(model)
    model.save_pretrained(tmp_path / "saved")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for each in (model, reloaded):
        for name, weight in sparse_weights(each).items():
            bits = weight.state["mask_bits"]
            assert torch.equal(bits, masks[name]) and not torch.equal(bits, magnitude[name])
            assert is_nm_sparse(weight.pruned()) and not torch.equal(weight.parameter, before[name])
    assert patched_config(reloaded) == patched_config(model)
    export_model(model, tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert is_nm_sparse(exported.model.layers[0].mlp.up_proj.weight) and not sparse_weights(exported)
    unpatch_model(model)
    for each in (reloaded, exported, model):
        assert torch.equal(logits(each), expected)


def test_magnitude_keeps_the_zeros_that_are_there():
    """An unstructured sparse model loses what does not fit, and reports it; an N:M sparse one loses nothing."""
    model = zoo.build("llama")
    weight = model.model.layers[0].mlp.up_proj.weight.data
    weight[torch.rand_like(weight) < 0.6] = 0
    expected = int((weight.view(-1, 4).count_nonzero(1) - 2).clamp(min=0).sum())
    targets = fixed_mask(target_modules=["0.mlp.up_proj"])
    report = oneshot(model, batches(), targets, criterion="magnitude", reconstruct="layer")
    assert report.layers[0].dropped == expected > 0

    unpatch_model(model)
    sparse = snapshot(model)
    for criterion in CRITERIA:
        report = oneshot(model, batches(), targets, criterion=criterion, reconstruct="layer")
        assert (report.layers[0].dropped, report.layers[0].error, report.layers[0].kept_magnitude) == (0, 0.0, 1.0)
        unpatch_model(model)
        assert_untouched(model, sparse)


def test_defaults_and_kinds_of_data():
    model, ids = zoo.build("llama"), zoo.batch()["input_ids"]
    assert oneshot(model, (ids for _ in range(2))).layers[0].tokens == 48
    assert patched_config(model) == Sparse24Config(method="fixed-mask")
    for data in ([ids], [{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}]):
        assert oneshot(zoo.build("llama").eval(), data, reconstruct=None).layers[0].tokens == 24
    assert torch.is_grad_enabled()


def test_report():
    lines = str(oneshot(zoo.build("llama"), batches(), fixed_mask(), reconstruct="layer")).splitlines()
    assert lines[0].startswith("one-shot 2:4 by sparsegpt masks, weights reconstructed by layer;")
    assert len(lines) == 2 + 7 and lines[1].split()[:4] == ["module", "group", "layers", "tokens"]
    group = next(line for line in lines if line.startswith("model.layers.*.mlp.down_proj"))
    assert group.split()[1:3] == ["2", "288"] and f"{2 * 32 * 64 // 2:,}" in group and group.count("%") == 4
    assert len({len(line) for line in lines[1:]}) == 1


def test_too_little_data_warns(caplog):
    oneshot(zoo.build("llama"), [zoo.batch(rows=1)], fixed_mask(), reconstruct=None)
    assert "fewer calibration tokens than inputs" in caplog.text
    caplog.clear()
    oneshot(zoo.build("llama"), [zoo.batch(rows=1)], fixed_mask(), reconstruct=None, damping=0.0)
    assert "Gram matrix not positive definite with damping=0.0; used" in caplog.text


@pytest.mark.parametrize("criterion", ["magnitude", "wanda"])
def test_errors_of_masks_alone_are_measured_on_a_sample(criterion, monkeypatch):
    """A Gram matrix would cost as much as the forward passes do."""
    monkeypatch.delattr("hf_sparse24.pruning.statistics.Gram.__init__")
    x, layer = correlated(6000, 16, mean=0.7), linear(8, 16, True)
    weight, outputs = layer.weight.clone(), layer(x)
    batches = [{"x": part} for part in x.split(1500)]
    report = oneshot(OneLayer(layer), batches, fixed_mask(), criterion=criterion, reconstruct=None).layers[0]
    assert report.tokens == 6000
    error = torch.linalg.norm(layer(x) - outputs) / torch.linalg.norm(x @ weight.T)
    assert report.error == pytest.approx(error.item(), rel=0.15) and report.masked_error == pytest.approx(report.error)
    if criterion == "wanda":
        assert torch.equal(mask_of(layer), kernels.nm_mask(weight.abs() * x.square().sum(0).sqrt()))


def test_batches_may_hold_what_else_the_model_takes(tmp_path):
    """What is no tensor reaches the model, and decides which finished blocks are of the same call; None is left out."""
    given = {"use_cache": False, "return_dict": True, "attention_mask": None, "logits_to_keep": 2}
    models, seen = [zoo.build("llama").eval() for _ in range(2)], []
    models[1].register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    for model, others in zip(models, ({}, given)):
        data = [batch | others for batch in batches()]
        oneshot(model, data, fixed_mask(), passes=1, resume_dir=tmp_path / str(len(others)))
    assert_same_state(*models)
    assert all(kwargs["logits_to_keep"] == 2 and "attention_mask" not in kwargs for kwargs in seen) and seen
    with pytest.raises(ValueError, match="blocks of another model, or of other data"):
        oneshot(zoo.build("llama").eval(), batches(), fixed_mask(), passes=1, resume_dir=tmp_path / "4")
