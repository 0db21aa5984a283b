"""Damaged checkpoints: a clear error, or the same model; never state that the method cannot have made."""

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file
from sparse_models import logits, patched
from torch.optim.swa_utils import AveragedModel
from transformers import AutoModelForCausalLM

from hf_sparse24 import Sparse24Config, Sparse24Controller, export_model, pack_model, patch_model, sparse_weights
from hf_sparse24.run import sparse_run

LAYER = "model.layers.0.mlp.up_proj"
SCALES = {
    "nan": (float("nan"), "scale is nan, and scale_rule='mse' gives 1 to 2"),
    "inf": (float("inf"), "scale is inf"),
    "zero": (0.0, "scale is 0"),
    "below 1": (0.9, "scale is 0.9"),
    "huge": (1e30, r"scale is 1e\+30"),
    "integer": (torch.tensor(2), r"scale is torch.int64 \(\), not torch.float32"),
}
ROWS, COLUMNS = torch.tensor([[1, 1, 0, 0]]), torch.tensor([[1], [1], [0], [0]])
MASKS = {
    "all": (torch.ones(4, 4), "does not keep {} 2 of every 4 along the {} dimension in 512 groups"),
    "3 of 4": (torch.ones(4, 4).triu(-1), "does not keep {} 2 of every 4 along the {}"),
}


def damage(directory, key: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    tensors = load_file(directory / "model.safetensors")
    tensors[key] = value
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return tensors


def bits(tile: torch.Tensor) -> torch.Tensor:
    """A mask of a 64 x 32 weight that repeats a 4 x 4 tile, as the files have it."""
    mask = tile.bool().repeat(16, 8)
    return (mask.unflatten(1, (-1, 8)) * 2 ** torch.arange(8)).sum(-1).to(torch.uint8)


def assert_refused_everywhere(method: str, name: str, value: torch.Tensor, message: str, directory) -> None:
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method=method))
    model.save_pretrained(directory)
    tensors = damage(directory, f"{LAYER}.{name}", value)
    with pytest.raises(ValueError, match=rf"the checkpoint is damaged.*{LAYER}.weight: {message}"):
        AutoModelForCausalLM.from_pretrained(directory)
    if value.dtype == model.state_dict()[f"{LAYER}.{name}"].dtype:  # load_state_dict casts
        with pytest.raises(RuntimeError, match=rf"{LAYER}.weight: {message}.*the checkpoint is damaged"):
            model.load_state_dict(tensors, strict=False)
        with pytest.raises(ValueError, match=rf"the model is damaged.*{LAYER}.weight: {message}"):
            export_model(model, directory / "export")


@pytest.mark.parametrize("case", SCALES)
def test_scales_that_no_weight_has(case, tmp_path):
    value, message = SCALES[case]
    assert_refused_everywhere("s-ste", "scale", torch.as_tensor(value), message, tmp_path)


@pytest.mark.parametrize("case", MASKS)
@pytest.mark.parametrize("method", ["t-sr-ste", "fixed-mask"])
def test_masks_that_are_not_2_of_4(method, case, tmp_path):
    tile, message = MASKS[case]
    words = ("at most", "output") if method == "t-sr-ste" else ("exactly", "input")
    assert_refused_everywhere(method, "mask_bits", bits(tile), f"mask_bits {message.format(*words)}", tmp_path)


def test_masks_of_a_solver_that_keeps_fewer_are_no_damage_once_it_is_changed(tmp_path):
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="t-sr-ste", mask_solver="greedy"))
    sparse_run(model).change_settings(mask_solver="exact")
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_masks_of_another_dtype(tmp_path):
    value = bits(torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]]).repeat(2, 1)).to(torch.int8)
    assert_refused_everywhere("t-sr-ste", "mask_bits", value, r"mask_bits is torch.int8 \(64, 4\), not", tmp_path)


def test_a_mask_by_rows_alone_is_not_transposable(tmp_path):
    tile = torch.tensor([[1, 1, 0, 0]]).repeat(4, 1)
    message = "mask_bits does not keep at most 2 of every 4 along the output dimension"
    assert_refused_everywhere("t-sr-ste", "mask_bits", bits(tile), message, tmp_path / "t-sr-ste")
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="fixed-mask"))
    model.save_pretrained(tmp_path)
    damage(tmp_path, f"{LAYER}.mask_bits", bits(tile))  # which is another mask, and a possible one
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_averaged_masks_are_made_again_as_the_error_says(tmp_path):
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="t-sr-ste"))
    averaged = AveragedModel(model, use_buffers=True)
    for seed in (1, 2):
        model.load_state_dict(zoo.build("llama", seed=seed).state_dict(), strict=False)
        for weight in sparse_weights(model).values():
            weight.init_state()
        averaged.update_parameters(model)
    for use in (logits, lambda module: export_model(module, tmp_path)):
        with pytest.raises(ValueError, match=r"call init_state\(\) on each"):
            use(averaged.module)
    for weight in sparse_weights(averaged.module).values():
        weight.init_state()
    export_model(averaged.module, tmp_path)
    assert torch.equal(logits(averaged.module), logits(AutoModelForCausalLM.from_pretrained(tmp_path)))


@pytest.mark.parametrize(("name", "method"), [("llama", "s-ste"), ("gpt2", "fixed-mask"), ("mixtral", "t-sr-ste")])
def test_dense_weights_without_state_are_loaded_with_a_warning_and_not_into_packed_ones(name, method, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("hf_sparse24.run.logger.warning", said.append)
    model, dense = patched(name, method=method), zoo.build(name, seed=1)
    controller = Sparse24Controller(model, torch.optim.SGD(model.parameters(), lr=0.0), total_steps=9)
    model(**zoo.batch()).loss.backward()
    controller.optimizer.step()
    model.load_state_dict(dense.state_dict(), strict=False)  # within training: averaged weights
    controller.end()
    assert not said
    for _ in range(2):
        model.load_state_dict(dense.state_dict(), strict=False)
    assert len(said) == 1 and "call init_state() on each of hf_sparse24.sparse_weights(model)" in said[0]
    for weight in sparse_weights(model).values():
        weight.init_state()
    expected = logits(model)
    patch_model(dense, Sparse24Config(method=method))
    assert torch.equal(logits(dense), expected)
    pack_model(model)
    with pytest.raises(RuntimeError, match=r"is packed and takes no dense weight: load it after unpack_model\(model\)"):
        model.load_state_dict(zoo.build(name).state_dict(), strict=False)


@pytest.mark.parametrize("rule", ["mse", "l1", "none"])
def test_scales_of_every_weight_load(rule, tmp_path):
    """Sizes that make the scale as large as fp32 can: magnitudes one rounding apart, in most groups none."""
    model = zoo.build("llama").eval()
    near = torch.tensor([1.0, 1.0, 1.0, 1.0 + 2**-23])
    with torch.no_grad():
        model.get_parameter(f"{LAYER}.weight").copy_(near.repeat(64, 8))
        model.get_parameter("model.layers.1.mlp.up_proj.weight").fill_(3.0)
    patch_model(model, Sparse24Config(scale_rule=rule))
    scale = float(sparse_weights(model)[f"{LAYER}.weight"].state["scale"])
    assert scale > 2**22 or rule == "none"
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))
