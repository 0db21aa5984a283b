"""Which layers `target_modules` and `exclude_modules` mean: names, expressions, towers of multi-modal models."""

import re
import time
from functools import partial

import pytest
import torch
import zoo
from sparse_models import logits
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_sparse24 import Sparse24Config, export_model, module_names, oneshot, patch_model, sparse_weights, unpatch_model

UP = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")


def patched(**arguments) -> tuple[str, ...]:
    return patch_model(zoo.build("llama"), Sparse24Config(**arguments)).patched


@pytest.mark.parametrize("name", ["up_proj", "mlp.up_proj"])
def test_a_name_means_what_a_list_of_it_means(name):
    assert patched(target_modules=name) == patched(target_modules=[name]) == UP
    assert patched(exclude_modules=name) == patched(exclude_modules=[name])
    assert set(patched()) - set(patched(exclude_modules=name)) == set(UP)
    assert patched(target_modules="layers.1.mlp.up_proj") == UP[1:]


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("up_porj", r"no linear layer's name ends in \['up_porj'\]; the model has \[.*'up_proj'"),
        ("proj", r"no linear layer's name ends in \['proj'\]"),
        ("MLP", r"no linear layer's name ends in \['MLP'\]; .*; groups are \['mlp', 'attention', 'all-linear'\]"),
        (["up_proj", "mpl"], r"no linear layer's name ends in \['mpl'\]"),
        ("(up|down)_proj", r"no linear layer's whole name matches \(begin with '\.\*'"),
    ],
)
def test_what_matches_nothing_is_an_error(field, value, message):
    with pytest.raises(ValueError, match=rf"{field}={re.escape(repr(value))}: {message}"):
        patched(**{field: value})


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))


def classifier() -> nn.Module:
    config = AutoConfig.for_model("bert", **zoo._BERT, vocab_size=zoo.VOCAB, num_labels=8)
    return AutoModelForSequenceClassification.from_config(config)


@pytest.mark.parametrize(
    ("build", "targets", "expected"),
    [
        (sequential, ["0", "2"], ("0", "2")),
        (sequential, "2", ("2",)),
        (lambda: nn.Linear(16, 16), "weight", ("weight",)),
        (partial(zoo.build, "llama"), "lm_head", ("lm_head",)),
        (partial(zoo.build, "llama"), ["up_proj", "lm_head"], (*UP, "lm_head")),
        (classifier, ["classifier", "pooler.dense"], ("bert.pooler.dense", "classifier")),
        (lambda: nn.ModuleList([nn.ModuleDict({"gate": nn.Linear(8, 8)})]), ["0.gate"], ("0.gate",)),
    ],
)
def test_a_whole_name_wins_over_every_rule(build, targets, expected):
    model = build()
    assert patch_model(model, Sparse24Config(target_modules=targets)).patched == expected
    assert patch_model(model).patched == expected


def test_a_whole_name_wins_over_no_other_field_and_no_tied_embedding():
    names = ["lm_head", "up_proj"]
    assert patched(target_modules=names, exclude_modules=["lm_head"]) == UP
    assert patched(target_modules=names, layers_to_transform=1) == (UP[1], "lm_head")
    report = patch_model(zoo.build("gpt2"), Sparse24Config(target_modules=["lm_head", "c_fc"]))
    assert report.skipped["lm_head"] == "its weight is shared with a module that stays dense"


@pytest.mark.parametrize("method", ["s-ste", "ste"])
def test_a_head_that_is_sparse_is_saved(method, tmp_path):
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method=method, target_modules=["up_proj", "lm_head"]))
    model.save_pretrained(tmp_path / "new")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert list(sparse_weights(loaded)) == [f"{name}.weight" for name in (*UP, "lm_head")]
    assert torch.equal(logits(loaded), logits(model))
    export_model(model, tmp_path / "export")
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "export")), logits(model))


def test_oneshot_refuses_a_layer_outside_the_blocks():
    model = zoo.build("llama")
    with pytest.raises(ValueError, match=r"lm_head is in no nn.ModuleList, as oneshot needs: leave it out"):
        oneshot(model, [zoo.batch()], Sparse24Config(method="fixed-mask", target_modules=["up_proj", "lm_head"]))
    assert not sparse_weights(model)


def test_an_excluded_group_that_the_model_lacks_is_an_error():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"mlp": nn.Linear(8, 8)})])
    with pytest.raises(ValueError, match=r"exclude_modules='attention': no linear layer is part of one; .*\['mlp'\]"):
        patch_model(model, Sparse24Config(exclude_modules="attention"))
    assert patch_model(model).patched == ("layers.0.mlp",)


def test_a_block_index_that_the_model_lacks_is_an_error():
    with pytest.raises(ValueError, match=r"layers_to_transform=\[0, 2\]: the blocks with linear layers are \[0, 1\]"):
        patched(layers_to_transform=[0, 2])


@pytest.mark.parametrize("expression", [r"(?:(?:.|.)(?:.|.))*(?!.)(?<=!)", r"(\w|\.|(?=\w).)*(?<!\w)"])
def test_an_expression_that_backtracks_without_end_is_an_error(expression, monkeypatch):
    monkeypatch.setattr(module_names, "MATCH_SECONDS", 0.2)
    config = Sparse24Config(target_modules=expression)
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"target_modules=.*: matching this regular expression .* more than 0.2 s"):
        patch_model(zoo.build("llama"), config)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "expression",
    ["a{999999999}", "(.{1000}){1000}", "(?x)a{ 9 }", "(a|b)" * 10**5, "(" * 3000, "(?:" * 450 + ")" * 450, "(?R)"],
)
def test_expressions_that_cannot_be_compiled_are_errors(expression):
    with pytest.raises(ValueError, match=r"^target_modules=.*regular expression") as error:
        Sparse24Config(target_modules=expression)
    assert len(str(error.value)) < 600


VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
LLAVA_VISION = VISION | {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8}
TEXT = zoo._LLAMA | {"num_hidden_layers": 1, "vocab_size": zoo.VOCAB}
MULTI_MODAL = {
    "llava": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": LLAVA_VISION},
    "gemma3": {"text_config": TEXT, "vision_config": VISION | {"image_size": 16, "patch_size": 8}},
    "qwen2_5_vl": {
        "text_config": TEXT | {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        "vision_config": VISION | {"depth": 1, "num_heads": 4, "out_hidden_size": 32},
    },
    "idefics": TEXT  # its text part has no config
    | {"vision_config": {"embed_dim": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}},
    "qwen2_audio": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "audio_config": {"d_model": 32, "encoder_ffn_dim": 64, "encoder_layers": 1, "encoder_attention_heads": 4},
    },
}


def multi_modal(name: str) -> nn.Module:
    config = AutoConfig.for_model(name, **MULTI_MODAL[name])
    with torch.device("meta"):
        return AutoModel.from_config(config)


@pytest.mark.parametrize("name", MULTI_MODAL)
@pytest.mark.parametrize("group", ["mlp", "attention", "all-linear"])
def test_groups_mean_the_text_model_of_a_multi_modal_one(name, group):
    report = patch_model(multi_modal(name), Sparse24Config(target_modules=group))
    towers = [layer for layer, why in report.skipped.items() if "which does not read text" in why]
    assert report.patched and towers
    assert not any(re.search(r"vision|visual|audio", layer) for layer in report.patched)
    assert all(re.search(r"vision|visual|audio", layer) for layer in towers)


def test_names_and_expressions_reach_towers():
    for targets in (["fc1"], "fc1", r".*vision.*fc1"):
        report = patch_model(multi_modal("llava"), Sparse24Config(target_modules=targets))
        assert report.patched == ("vision_tower.encoder.layers.0.mlp.fc1",)


def test_a_weight_that_layers_share_has_one_pattern():
    model = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match="1 shares its weight with a layer that has another pattern"):
        patch_model(model, Sparse24Config(method="ste", target_modules=["0", "1"], layer_patterns={"0": "1:4"}))
    patch_model(model, Sparse24Config(method="ste", target_modules=["0", "1"], layer_patterns={"0": "2:4"}))


@pytest.mark.parametrize("how", [prune.identity, parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_weight_that_is_made_of_others_is_skipped_with_its_reason(how):
    """Every linear layer is patched or skipped; where all that is named is skipped so, nothing is patched."""
    model = zoo.build("llama")
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    how(model.model.layers[1].mlp.up_proj, "weight")
    report = patch_model(model)
    assert sorted([*report.patched, *report.skipped]) == sorted(layers)
    assert "made of other tensors" in report.skipped["model.layers.1.mlp.up_proj"] and len(report.patched) == 5
    with pytest.raises(ValueError, match=r"nothing to patch: .*made of other tensors"):
        patch_model(unpatch_model(model), Sparse24Config(target_modules=["1.mlp.up_proj"]))
