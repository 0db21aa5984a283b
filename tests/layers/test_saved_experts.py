"""Stacked experts that are saved: checkpoints, exports, resumed runs, copies, and state that no method has made."""

import copy
import io
from itertools import cycle

import pytest
import torch
import zoo
from expert_models import EXPERTS, patched
from method_runs import loop, method_config, run_steps
from safetensors.torch import load_file
from sparse_models import assert_same_state, logits
from transformers import AutoModelForCausalLM

from hf_sparse24 import export_model, patch_model, sparse_weights, unpatch_model
from hf_sparse24.layers.experts import SparseExperts
from hf_sparse24.metrics import is_nm_sparse


@pytest.mark.parametrize(("name", "method"), list(zip(zoo.MOE, cycle(["t-sr-ste", "s-ste"]))))
def test_saved_reloaded_exported_and_unpatched(name, method, tmp_path):
    """Transformers splits and renames experts for a file; their state is left alone."""
    model = zoo.build(name)
    stock = set(zoo.build(name).state_dict())
    patch_model(model, method_config(method))
    optimizer, controller = loop(model)
    run_steps(model, optimizer, controller, 1)
    controller.end()
    expected = logits(model)
    assert {key for key in model.state_dict() if not key.rpartition(".")[2].startswith(("scale", "mask_bits"))} == stock

    model.save_pretrained(tmp_path / "saved")
    reloaded, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(loading.values())
    assert_same_state(reloaded, model)
    assert torch.equal(logits(reloaded), expected)
    reloaded.train()(**zoo.batch()).loss.backward()

    export_model(model, tmp_path / "export")
    exported, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(loading.values()) and not sparse_weights(exported)
    assert torch.equal(logits(exported), expected)
    zoo.build(name).save_pretrained(tmp_path / "stock")
    ours, theirs = (load_file(tmp_path / place / "model.safetensors") for place in ("export", "stock"))
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}
    for key, weight in sparse_weights(model).items():
        matrices = exported.get_parameter(key).reshape(-1, *weight.parameter.shape[-2:])
        assert all(is_nm_sparse(matrix, dim=weight.input_dim) for matrix in matrices)

    unpatch_model(model)
    assert not any(isinstance(module, SparseExperts) for module in model.modules())
    assert torch.equal(logits(model), expected) and set(model.state_dict()) == stock


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dense_checkpoint_is_made_sparse_while_it_loads(dtype, tmp_path):
    dense = zoo.build("mixtral")
    dense.save_pretrained(tmp_path)  # with the experts apart
    loaded, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=dtype, quantization_config=method_config("s-ste"), output_loading_info=True
    )
    assert not any(loading.values())
    dense.to(dtype)
    patch_model(dense, method_config("s-ste"))
    assert_same_state(loaded, dense)
    assert all(weight.state["scale"].dtype == torch.float32 for weight in sparse_weights(loaded).values())


def test_pickled_and_copied():
    model = patched("mixtral", "t-sr-ste")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(model)):
        assert_same_state(other, model)
        assert torch.equal(logits(other), logits(model))
        assert isinstance(other.model.layers[0].mlp.experts, type(zoo.build("mixtral").model.layers[0].mlp.experts))


def test_state_that_no_method_has_made_is_refused_and_names_the_expert():
    model = patched()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state[f"{EXPERTS}.scale_of_down_proj"][2] = -1
    with pytest.raises(RuntimeError, match=r"experts.down_proj: expert 2: scale is -1"):
        model.load_state_dict(state)
    sparse_weights(model)[f"{EXPERTS}.down_proj"].set_state({"scale": torch.ones(3)})
    with pytest.raises(ValueError, match=r"scale is torch.float32 \(3,\), not torch.float32 \(4,\)"):
        export_model(model, "never-written")
