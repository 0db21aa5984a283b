"""Which layers of an engine are packed, and how they may be split."""

import pytest
from checkpoints import patched
from sparse24_kernels import Pattern

from hf_sparse24 import export_model
from hf_sparse24.serving.packed_layers import check_split, packed_pattern, read_format

STACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
MLP = [f"model.layers.0.mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")]
WEIGHTS = dict.fromkeys(MLP, Pattern(16, 32))


def test_an_export_says_what_is_packed_and_a_dense_one_nothing(tmp_path):
    model = patched()
    export_model(model, tmp_path / "packed", "packed", values="int8")
    export_model(model, tmp_path / "dense")
    config = type(model.config).from_pretrained(tmp_path / "packed").quantization_config
    found = read_format(config)
    assert found.values == "int8" and found.weights["model.layers.0.mlp.up_proj.weight"] == (2, 4)
    assert not hasattr(type(model.config).from_pretrained(tmp_path / "dense"), "quantization_config")


def test_a_training_checkpoint_is_refused_with_the_command_that_exports_it():
    with pytest.raises(ValueError, match=r"training checkpoint .method='ste'.*hf-sparse24 export"):
        read_format(patched("llama", "ste").config.quantization_config.to_dict())


@pytest.mark.parametrize("version", [1, 4, "3", None])
def test_an_unknown_version_is_refused(version):
    with pytest.raises(ValueError, match=f"packed.version={version!r}"):
        read_format({"packed": {"version": version, "weights": WEIGHTS}})


def test_a_stacked_layer_is_packed_where_its_parts_are():
    assert packed_pattern("model.layers.0.mlp.gate_up_proj", STACKED, WEIGHTS) == (16, 32)
    assert packed_pattern("model.layers.0.mlp.down_proj", STACKED, WEIGHTS) == (16, 32)
    assert packed_pattern("model.layers.0.self_attn.qkv_proj", STACKED, WEIGHTS) is None
    assert packed_pattern("model.layers.1.mlp.gate_up_proj", STACKED, WEIGHTS) is None


def test_a_layer_that_is_stacked_in_the_file_too_is_packed():
    assert packed_pattern("layers.0.qkv_proj", STACKED, {"layers.0.qkv_proj.weight": Pattern(6, 8)}) == (6, 8)
    assert packed_pattern("head", {}, {"head.weight": Pattern(2, 4)}) == (2, 4)


@pytest.mark.parametrize(("other", "said"), [({}, "dense"), ({MLP[1]: Pattern(2, 4)}, "2:4")])
def test_a_layer_whose_parts_differ_is_refused(other, said):
    with pytest.raises(ValueError, match=rf"0.mlp.gate_up_proj is one layer.*up_proj.weight': '{said}'.*serve a dense"):
        packed_pattern("model.layers.0.mlp.gate_up_proj", STACKED, {MLP[0]: Pattern(16, 32)} | other)


@pytest.mark.parametrize(
    ("inputs", "m", "has_scales", "step"),
    [(12, 4, False, 8), (24, 32, False, 32), (192, 4, True, 128), (64, 32, True, 128)],
)
def test_a_split_through_a_byte_a_group_or_a_scale_is_refused(inputs, m, has_scales, step):
    with pytest.raises(
        ValueError, match=f"o_proj: tensor parallelism gives each process {inputs} of.*multiple of {step}"
    ):
        check_split("o_proj", inputs, 2 * inputs, m, has_scales)


@pytest.mark.parametrize(
    ("inputs", "whole", "m", "has_scales"),
    [(8, 16, 4, False), (32, 64, 32, False), (128, 256, 4, True), (200, 200, 8, True)],
)
def test_other_splits_and_whole_layers_are_taken(inputs, whole, m, has_scales):
    check_split("o_proj", inputs, whole, m, has_scales)
