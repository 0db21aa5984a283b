"""N:M by layer."""

import pytest
import torch
import zoo
from training_runs import arguments, dataset
from transformers import AutoModelForCausalLM

from hf_sparse24 import (
    Sparse24Config,
    Sparse24Trainer,
    export_model,
    patch_model,
    sparse_weights,
    unpatch_model,
)
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.weights.storage import PACKED
from hf_sparse24_command import main

LAYERS = {"down_proj": "1:4", "layers.0.mlp.up_proj": "2:8", "attention": "1:2"}
EXPECTED = {"down_proj": (1, 4), "gate_proj": (2, 4), "q_proj": (1, 2)}


def test_layers_with_a_packed_form_are_packed_and_others_keep_their_zeros(tmp_path, capsys):
    patterns = {"up_proj": "16:32", "gate_proj": "6:8", "down_proj": "3:5"}
    model = zoo.build("llama", intermediate_size=80).eval()
    patch_model(model, Sparse24Config(method="ste", target_modules="mlp", layer_patterns=patterns))
    export_model(model, tmp_path, format="packed")
    loaded, batch = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), zoo.batch(0)
    found = {name.split(".")[-2]: str(w.storage.pattern) for name, w in sparse_weights(loaded, PACKED).items()}
    assert found == {"up_proj": "16:32", "gate_proj": "6:8"}
    assert is_nm_sparse(loaded.model.layers[1].mlp.down_proj.weight, 3, 5)
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    assert main(["verify", str(tmp_path)]) == 0 and "6 weights are 3:5 and 6:8 and 16:32" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["ste", "s-ste", "sr-ste", "t-sr-ste", "fixed-mask", "step"])
def test_each_layer_has_its_pattern_in_training_and_on_disk(method, tmp_path, capsys):
    config = Sparse24Config(method=method, target_modules="all-linear", layer_patterns=LAYERS, dense_tail=0)
    if method == "step":
        config = config.replace(switch_after=1, switch_by=2)
    model = zoo.build("llama")
    report = patch_model(model, config)
    weights = sparse_weights(model)
    zeros = sum(weight.parameter.numel() * (1 - weight.pattern.n / weight.pattern.m) for weight in weights.values())
    assert report.zero_parameters == zeros and "yes; 1:4" in str(report)
    args = arguments(tmp_path / "run", max_steps=4, learning_rate=1e-2)
    Sparse24Trainer(model, args, train_dataset=dataset(), sparse24_config=config).train()
    assert tuple(weights["model.layers.0.mlp.up_proj.weight"].pattern) == (2, 8)
    assert tuple(weights["model.layers.1.mlp.up_proj.weight"].pattern) == (2, 4)
    for name, weight in weights.items():
        expected = EXPECTED.get(name.split(".")[-2], tuple(weight.pattern))
        assert tuple(weight.pattern) == expected and is_nm_sparse(weight.pruned(), *expected)

    batch, model = zoo.batch(0), model.eval()
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    assert {n: w.pattern for n, w in sparse_weights(loaded).items()} == {n: w.pattern for n, w in weights.items()}
    for format in ("dense", "packed"):
        export_model(model, tmp_path / format, format=format)
        assert main(["verify", str(tmp_path / format)]) == 0
        assert "weights are 1:2 and 1:4 and 2:4 and 2:8" in capsys.readouterr().out
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / format).eval()
        torch.testing.assert_close(exported(**batch).logits, model(**batch).logits)
    unpatch_model(model)
    assert is_nm_sparse(model.model.layers[0].mlp.down_proj.weight, 1, 4)


def test_a_weight_that_is_not_of_its_own_pattern_is_found(tmp_path, capsys):
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="ste", layer_patterns={"down_proj": "1:4"}))
    export_model(model, tmp_path)
    manifest = (tmp_path / "sparse24.json").read_text()
    (tmp_path / "sparse24.json").write_text(manifest.replace('"1:4"', '"1:8"'))
    assert main(["verify", str(tmp_path)]) != 0
    assert "is not 1:8 along" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("layer_patterns", "message"),
    [
        ({"down_proj": "4:2"}, "layer_patterns=.*'4:2'.*: must be"),
        ({"": "1:4"}, "layer_patterns=''"),
        (["1:4"], r"layer_patterns=\['1:4'\]: must be a dict"),
        ({"donw_proj": "1:4"}, r"layer_patterns='donw_proj': no linear layer's name ends in"),
        (
            {"mlp": "2:4", "down_proj": "1:4"},
            r"layer_patterns=.*'mlp': '2:4', 'down_proj': '1:4'.*layers.0.mlp.down_proj",
        ),
        ({"q_proj": "1:4"}, r"layer_patterns='q_proj': none of its layers is in target_modules='mlp'"),
    ],
)
def test_wrong_patterns(layer_patterns, message):
    with pytest.raises(ValueError, match=message):
        patch_model(zoo.build("llama"), Sparse24Config(layer_patterns=layer_patterns))


def test_two_entries_may_give_a_layer_the_same_pattern():
    config = Sparse24Config(method="ste", layer_patterns={"mlp": "1:4", "down_proj": "1:4"})
    assert not patch_model(zoo.build("llama"), config).skipped.keys() & {"model.layers.0.mlp.down_proj"}


def test_what_an_own_pattern_does_not_divide_stays_dense():
    report = patch_model(zoo.build("llama", intermediate_size=72), Sparse24Config(layer_patterns={"down_proj": "1:16"}))
    assert report.skipped["model.layers.0.mlp.down_proj"] == "input size 72 is not a multiple of 16"
