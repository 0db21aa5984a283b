"""Which layers of an engine are packed, and how they may be split."""

import pytest
from checkpoints import patched

from hf_sparse24 import export_model
from hf_sparse24.serving.packed_layers import check_split, is_packed, read_format

STACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
WEIGHTS = [f"model.layers.0.{name}.weight" for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]


def test_an_export_says_what_is_packed_and_a_dense_one_nothing(tmp_path):
    model = patched()
    export_model(model, tmp_path / "packed", "packed", values="int8")
    export_model(model, tmp_path / "dense")
    config = type(model.config).from_pretrained(tmp_path / "packed").quantization_config
    found = read_format(config)
    assert found.version == 2 and "model.layers.0.mlp.up_proj.weight" in found.weights
    assert not hasattr(type(model.config).from_pretrained(tmp_path / "dense"), "quantization_config")


def test_a_training_checkpoint_is_refused_with_the_command_that_exports_it():
    with pytest.raises(ValueError, match=r"training checkpoint .method='ste'.*hf-sparse24 export"):
        read_format(patched("llama", "ste").config.quantization_config.to_dict())


@pytest.mark.parametrize("version", [0, 3, "1", None])
def test_an_unknown_version_is_refused(version):
    with pytest.raises(ValueError, match=f"packed.version={version!r}"):
        read_format({"packed": {"version": version, "weights": WEIGHTS, "files": {}}})


def test_a_stacked_layer_is_packed_where_its_parts_are():
    assert is_packed("model.layers.0.mlp.gate_up_proj", STACKED, WEIGHTS)
    assert is_packed("model.layers.0.mlp.down_proj", STACKED, WEIGHTS)
    assert not is_packed("model.layers.0.self_attn.qkv_proj", STACKED, WEIGHTS)
    assert not is_packed("model.layers.1.mlp.gate_up_proj", STACKED, WEIGHTS)


def test_a_layer_that_is_stacked_in_the_file_too_is_packed():
    assert is_packed("layers.0.qkv_proj", STACKED, ["layers.0.qkv_proj.weight"])
    assert is_packed("head", {}, ["head.weight"])


def test_a_layer_of_which_one_part_is_packed_is_refused():
    with pytest.raises(ValueError, match=r"0.mlp.gate_up_proj is one layer.*up_proj.weight.*are not; serve a dense"):
        is_packed("model.layers.0.mlp.gate_up_proj", STACKED, WEIGHTS[:1])


@pytest.mark.parametrize(("inputs", "has_scales", "step"), [(12, False, 8), (192, True, 128), (64, True, 128)])
def test_a_split_through_a_byte_or_a_scale_is_refused(inputs, has_scales, step):
    with pytest.raises(
        ValueError, match=f"o_proj: tensor parallelism gives each process {inputs} of.*multiple of {step}"
    ):
        check_split("o_proj", inputs, 2 * inputs, has_scales)


@pytest.mark.parametrize(("inputs", "whole", "has_scales"), [(8, 16, False), (128, 256, True), (200, 200, True)])
def test_other_splits_and_whole_layers_are_taken(inputs, whole, has_scales):
    check_split("o_proj", inputs, whole, has_scales)
