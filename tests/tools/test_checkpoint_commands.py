"""hf-sparse24 export, inspect and verify."""

import json
import re
import shutil

import pytest
import torch
import zoo
from checkpoints import patched
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sparse_models import logits
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_sparse24 import Sparse24Config, export_model, patch_model, unpack_model
from hf_sparse24_command import main


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def trained(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param) / "trained"
    model = patched(request.param)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "trainer_state.json").write_text("{}")
    return directory


@pytest.mark.usefixtures("dense_math")
@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_checkpoint_is_exported_inspected_and_verified(format, trained, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", str(trained), str(out), "--format", format]) == 0
    printed = capsys.readouterr().out
    assert f"{format}, trained by s-ste" in printed and "together" in printed
    assert (out / "tokenizer.json").exists() and not (out / "trainer_state.json").exists()
    expected = AutoModelForCausalLM.from_pretrained(trained)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(expected))
    assert main(["inspect", str(out)]) == 0
    assert capsys.readouterr().out == printed
    assert main(["verify", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "50.0%" in printed and ", and 1 file as exported" in printed and "verified: all" in printed


def test_an_export_is_replaced_by_another_form_of_itself(trained, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["export", str(trained), out]) == 0
    assert main(["export", out, out, "--format", "packed"]) == 0
    assert "\npacked, " in capsys.readouterr().out and (tmp_path / "out" / "tokenizer.json").exists()


def test_an_export_whose_files_have_other_names_than_the_model_is_packed(tmp_path, capsys):
    """Mixtral's experts lie apart in files."""
    model = zoo.build("mixtral")
    patch_model(model, Sparse24Config(method="fixed-mask", target_modules="all-linear"))
    export_model(model, tmp_path)
    assert main(["export", str(tmp_path), str(tmp_path / "packed"), "--format", "packed"]) == 0
    assert main(["verify", str(tmp_path / "packed")]) == 0
    assert "verified: all 12 weights are 2:4" in capsys.readouterr().out


def test_an_export_without_a_tokenizer_says_so(tmp_path, capsys):
    patched().save_pretrained(tmp_path / "trained")
    assert main(["export", str(tmp_path / "trained"), str(tmp_path / "out")]) == 0
    assert f"has no tokenizer: tokenizer.save_pretrained('{tmp_path / 'out'}')" in capsys.readouterr().out


@pytest.mark.parametrize(("pattern", "size", "zeros"), [("2:4", "4.61", 50), ("6:8", "6.66", 25), ("1:4", "2.56", 75)])
def test_sizes(pattern, size, zeros, tmp_path, capsys):
    export_model(patched("llama", pattern=pattern).bfloat16(), tmp_path, "packed")
    main(["inspect", str(tmp_path)])
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if "up_proj" in line)
    assert row == ["model.layers.*.mlp.up_proj.weight", "2", "4,096", size, "kB", "8.19", "kB"]  # 9/16, 13/16, 5/16
    assert main(["verify", str(tmp_path)]) == 0
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if "up_proj" in line)
    assert row[1:5] == ["2", "2", "of", "2"] and float(row[5].rstrip("%")) == pytest.approx(zeros, abs=0.5)


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_changed_file_is_found(format, tmp_path, capsys):
    export_model(patched(), tmp_path, format)
    (path,) = tmp_path.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    assert main(["verify", str(tmp_path)]) == 1
    assert f"FAILED {path.name}: is not the file that was exported" in capsys.readouterr().out


def test_a_weight_that_is_not_sparse_is_found(tmp_path, capsys):
    export_model(patched(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, :3] = 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert main(["verify", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "FAILED model.layers.1.mlp.up_proj.weight: is not 2:4 along its input dimension" in printed
    assert "1 of 2" in printed and "verified" not in printed


def test_checkpoints_that_list_no_sparse_weights_are_refused(tmp_path, capsys):
    zoo.build("llama").save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path)]) == 2
    assert "has no sparse24.json" in capsys.readouterr().err


def test_a_packed_model_that_was_saved_again(tmp_path, capsys):
    export_model(patched(), tmp_path / "first", "packed")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    for where, status in (("first", 2), ("second", 0)):
        loaded.save_pretrained(tmp_path / where)
        assert main(["verify", str(tmp_path / where)]) == status
    printed = capsys.readouterr()
    assert "remove sparse24.json" in printed.err and "listed in config.json" in printed.out


@pytest.mark.parametrize("size", ["5GB", "20KB"])
@pytest.mark.parametrize("format", ["dense", "packed"])
def test_what_is_saved_over_an_export_is_verified_and_not_lost(format, size, tmp_path, capsys):
    """`save_pretrained` leaves `sparse24.json` and packed files as they are, which no loader reads then."""
    export_model(patched(), tmp_path, format, max_shard_size=size)
    later = AutoModelForCausalLM.from_pretrained(tmp_path)
    if format == "packed":
        unpack_model(later)
    later.save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path)]) != 0
    with pytest.raises(ValueError, match="another model that is no export"):
        export_model(patched(), tmp_path)


@pytest.mark.parametrize("is_training", [True, False])
def test_a_checkpoint_that_lacks_a_tensor_is_not_exported(is_training, tmp_path, capsys):
    """Transformers would fill it with random numbers."""
    patched().save_pretrained(tmp_path) if is_training else export_model(patched(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "it lacks model.norm.weight" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_other_patterns(tmp_path, capsys):
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="ste", pattern="1:4"))
    export_model(model, tmp_path)
    assert main(["verify", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "verified: all 6 weights are 1:4" in printed and "75.0%" in printed


@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
def test_what_cannot_be_read(command, trained, tmp_path, capsys):
    end = [str(tmp_path / "out")] if command == "export" else []
    assert main([command, str(tmp_path / "nothing"), *end]) == 2
    (tmp_path / "empty").mkdir()
    assert main([command, str(tmp_path / "empty"), *end]) == 2
    zoo.build("llama").save_pretrained(tmp_path / "dense")
    if command == "export":
        assert main([command, str(tmp_path / "dense"), *end]) == 2
        assert "training checkpoint" in capsys.readouterr().err
        return
    assert main([command, str(trained)]) == 2
    assert "is a training checkpoint" in capsys.readouterr().err
    shutil.copytree(tmp_path / "dense", tmp_path / "odd")
    for text in ("[", "[]", "{}", json.dumps({"format": "x", "weights": {}, "files": {}, "config": {}})):
        (tmp_path / "odd" / "sparse24.json").write_text(text)
        assert main([command, str(tmp_path / "odd")]) == 2
        assert "sparse24.json" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["a model in the way", "no training checkpoint"])
def test_an_export_is_refused_before_anything_is_loaded(case, trained, tmp_path, capsys, monkeypatch):
    zoo.build("llama").save_pretrained(tmp_path / "dense")
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)
    source, target = (trained, "dense") if case == "a model in the way" else (tmp_path / "dense", "out")
    assert main(["export", str(source), str(tmp_path / target)]) == 2
    said = capsys.readouterr().err
    assert ("another model that is no export" if target == "dense" else "training checkpoint") in said


@pytest.mark.parametrize("case", ["none", "one too few", "one too many", "one too few, saved again"])
def test_a_packed_export_whose_config_lists_other_weights_is_not_verified(case, tmp_path, capsys):
    export_model(patched(intermediate_size=60), tmp_path, "packed")  # down_proj is not packed
    assert main(["verify", str(tmp_path)]) == 0
    config = json.loads((tmp_path / "config.json").read_text())
    weights = config["quantization_config"]["packed"]["weights"]
    if case == "none":
        del config["quantization_config"]
    elif case == "one too many":
        weights["model.norm.weight"] = "2:4"
    else:
        weights.popitem()
    (tmp_path / "config.json").write_text(json.dumps(config))
    if "saved again" in case:
        (tmp_path / "sparse24.json").unlink()
    assert main(["verify", str(tmp_path)]) == 2
    assert "packed.weights" in capsys.readouterr().err


def test_a_packed_weight_of_which_nothing_is_stored_is_named(tmp_path, capsys):
    export_model(patched(), tmp_path, "packed")
    tensors = load_file(tmp_path / "packed.safetensors")
    name = "model.layers.1.mlp.up_proj.packed_weight_values"
    kept = {key: x for key, x in tensors.items() if "1.mlp.up_proj" not in key}
    with safe_open(tmp_path / "packed.safetensors", "pt") as file:
        save_file(kept, tmp_path / "packed.safetensors", file.metadata())
    assert main(["inspect", str(tmp_path)]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize(("stored", "told"), [("float", "int8"), ("int8", "float")])
def test_a_packed_export_whose_config_has_other_values_is_not_verified(stored, told, tmp_path, capsys):
    export_model(patched(), tmp_path, "packed", values=stored)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["packed"]["values"] = told
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["verify", str(tmp_path)]) == 2
    assert re.search(f"packed.values='{told}', and it has .*_values'", capsys.readouterr().err)


@pytest.mark.parametrize("command", [["verify"], ["inspect"], ["export", "elsewhere"]])
def test_a_name_that_is_nowhere(command, capsys, tmp_path, monkeypatch):
    """The message begins with what was typed, whatever the Hub says."""
    monkeypatch.chdir(tmp_path)
    assert main([command[0], "my-exprot", *command[1:]]) == 2
    assert capsys.readouterr().err.startswith("hf-sparse24: 'my-exprot' is no directory here, and the Hub does not")
