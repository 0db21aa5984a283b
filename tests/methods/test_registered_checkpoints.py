"""The Parameters and the name of a method from outside the package: in checkpoints, exports and other processes."""

import pytest
import torch
import zoo
from own_method import ADAPTING
from own_models import give_adapters_a_value, patched
from safetensors.torch import load_file, save_file
from sparse_models import logits
from transformers import AutoModelForCausalLM

from hf_sparse24 import Sparse24Config, export_model, patch_model, sparse_weights, unpatch_model
from hf_sparse24.methods import METHODS
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.run import set_phase, sparse_run


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_export_and_unpatch_merge_what_takes_part(name, tmp_path):
    model = patched(name).eval()
    give_adapters_a_value(model)
    with torch.no_grad():
        for phase in ("sparse", ADAPTING, "dense"):
            set_phase(model, phase)
            logits = model(**zoo.batch()).logits
            export_model(model, tmp_path / phase)
            exported = AutoModelForCausalLM.from_pretrained(tmp_path / phase)
            torch.testing.assert_close(exported(**zoo.batch()).logits, logits)
            first = next(iter(sparse_weights(model)))
            dim = sparse_weights(model)[first].input_dim
            assert is_nm_sparse(exported.get_parameter(first), dim=dim) == (phase == "sparse")
        set_phase(model, ADAPTING)
        logits = model(**zoo.batch()).logits
        unpatch_model(model)
        torch.testing.assert_close(model(**zoo.batch()).logits, logits)
    assert model.state_dict().keys() == zoo.build(name).state_dict().keys()


def test_a_checkpoint_without_its_adapters_is_refused(tmp_path):
    patched().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.left"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks \['model.layers.1.mlp.up_proj.left'\]"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_dense_weights_give_a_model_without_any_its_state_and_adapters():
    dense = zoo.build("llama", seed=3)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(dense.config)
    patch_model(model, Sparse24Config(method="own"))
    model.to_empty(device="cpu")
    model.load_state_dict(dense.state_dict())  # strict
    patch_model(dense, Sparse24Config(method="own"))
    ours, theirs = model.state_dict(), dense.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_loading_needs_the_registration(tmp_path, monkeypatch):
    model = patched().eval()
    give_adapters_a_value(model)
    set_phase(model, ADAPTING)
    model.save_pretrained(tmp_path)
    with (
        monkeypatch.context() as forgotten,
        pytest.raises(ValueError, match=r"method='own': must be one of .*--import"),
    ):
        forgotten.delitem(METHODS, "own")
        AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sparse_run(loaded).phase == ADAPTING and torch.equal(logits(loaded), logits(model))
