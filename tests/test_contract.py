"""What every registered method must do, in the Trainer, on a CPU. A new method is picked up by itself."""

import copy
import json

import pytest
import torch
import zoo
from cslt import stand_in  # noqa: F401 (a fixture)
from method_runs import STEPS, dataset, every_method, loop, method_config, run_steps, trainer
from sparse_models import assert_same_state, logits
from transformers import AutoModelForCausalLM

from hf_sparse24 import Sparse24Controller, Sparse24Trainer, export_model, patch_model, sparse_weights, unpatch_model
from hf_sparse24.methods import METHODS
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.run import patched_config, sparse_run
from hf_sparse24.tools import doctor


@every_method
def test_life_of_a_model(method, tmp_path):
    """Trains, its loss falls, its weights are 2:4 while sparse; saves, reloads, trains on, exports, unpatches."""
    run = trainer(zoo.build("llama"), tmp_path / "run", method, save_strategy="steps", save_steps=STEPS // 2)
    run.train()
    losses = [log["loss"] for log in run.state.log_history if "loss" in log]
    assert losses[-1] < 0.8 * losses[0]
    logged = [log for log in run.state.log_history if "loss" in log]
    assert all({"kept_magnitude", "sparse_phase"} <= set(log) for log in logged)
    assert all("flip_rate" in log for log in logged if log["sparse_phase"])
    saved = json.loads((tmp_path / "run" / f"checkpoint-{STEPS // 2}" / "trainer_state.json").read_text())
    assert "flip_rate" in saved["log_history"][0]

    model = run.model.eval()
    weights, phase = sparse_weights(model), sparse_run(model).phase
    for weight in weights.values():
        pruned = weight.pruned()
        assert is_nm_sparse(pruned, dim=weight.input_dim)
        assert not torch.signbit(pruned[pruned == 0]).any()
        if weight.method.keeps_zeros:
            assert torch.equal(weight.parameter, pruned)
    expected = logits(model)

    model.save_pretrained(tmp_path / "saved")
    reloaded, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(loading.values())
    assert_same_state(reloaded, model)
    assert patched_config(reloaded) == patched_config(model) and sparse_run(reloaded).phase == phase
    assert torch.equal(logits(reloaded), expected)
    assert reloaded.generate(zoo.batch()["input_ids"], max_new_tokens=3, do_sample=False).shape == (2, 15)
    again = Sparse24Trainer(reloaded, run.args, train_dataset=dataset())  # a reloaded model trains as it is
    again.train()

    export_model(model, tmp_path / "export")
    exported, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(loading.values()) and not sparse_weights(exported)
    assert sparse_weights(model) and model.config.quantization_config is not None
    has_own_parameters = any(weight.parameters for weight in weights.values())
    unpatch_model(model)
    for plain in (exported, model):
        assert not hasattr(plain.config, "quantization_config")
        assert plain.state_dict().keys() == zoo.build("llama").state_dict().keys()
        if has_own_parameters:  # merged into one weight, which rounds
            torch.testing.assert_close(logits(plain), expected)
        else:
            assert torch.equal(logits(plain), expected)


@every_method
def test_a_resumed_run_equals_an_uninterrupted_one(method, tmp_path):
    """Bit for bit, from a checkpoint in the middle, into a model that is built and patched again."""
    # At step 5, between two mask refreshes. Logged every step: the Trainer's own average of the loss does not survive.
    whole = trainer(zoo.build("llama"), tmp_path, method, save_strategy="steps", save_steps=5, logging_steps=1)
    whole.train()
    resumed = trainer(zoo.build("llama", seed=9), tmp_path, method, logging_steps=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert resumed.state.global_step == STEPS
    assert_same_state(resumed.model, whole.model)
    whole_logs = [log for log in whole.state.log_history if "loss" in log]
    resumed_logs = [log for log in resumed.state.log_history if "loss" in log]
    assert resumed_logs == whole_logs


@every_method
def test_from_a_dense_checkpoint(method, tmp_path):
    """`from_pretrained(dense, quantization_config=...)` is `from_pretrained`, then `patch_model`."""
    dense = zoo.build("llama")
    dense.save_pretrained(tmp_path)
    loaded, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=method_config(method), output_loading_info=True
    )
    assert not any(loading.values())
    patch_model(dense, method_config(method))
    assert_same_state(loaded, dense)


@every_method
def test_a_loop_without_a_trainer(method):
    """Phases as the method says, a loss that falls, and a resumed loop that equals an uninterrupted one."""
    model = zoo.build("llama")
    patch_model(model, method_config(method))
    optimizer, controller = loop(model)
    before = model(**zoo.batch()).loss.item()
    run_steps(model, optimizer, controller, 5)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), controller.state_dict()))
    run_steps(model, optimizer, controller, STEPS - 5)
    phase = sparse_run(model).method.phase(STEPS, STEPS, optimizer)
    assert controller.phase == sparse_run(model).phase == phase and phase in METHODS[method].phases
    assert model(**zoo.batch()).loss.item() < before

    resumed = zoo.build("llama", seed=9)
    patch_model(resumed, method_config(method))
    resumed.load_state_dict(saved[0])
    optimizer, _ = loop(resumed)
    optimizer.load_state_dict(saved[1])
    controller = Sparse24Controller(resumed, optimizer, total_steps=STEPS)
    controller.load_state_dict(saved[2])
    run_steps(resumed, optimizer, controller, STEPS - 5)
    assert_same_state(resumed, model)


@every_method
def test_a_copy_goes_its_own_way(method):
    model = zoo.build("llama")
    patch_model(model, method_config(method))
    before = copy.deepcopy(model.state_dict())
    twin = copy.deepcopy(model)
    assert patched_config(twin) == patched_config(model) and patched_config(twin) is not patched_config(model)
    run_steps(twin, *loop(twin), 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    run_steps(model, *loop(model), 2)
    assert_same_state(twin, model)
    unpatch_model(twin)
    assert sparse_weights(model) and not sparse_weights(twin)


@every_method
def test_a_meta_model_takes_a_state_dict(method):
    real = zoo.build("llama")
    patch_model(real, method_config(method))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(zoo.build("llama").config)
    patch_model(model, method_config(method))
    model.to_empty(device="cpu")
    model.load_state_dict(real.state_dict())
    assert_same_state(model, real)
    for mine, theirs in zip(sparse_weights(model).values(), sparse_weights(real).values()):
        assert torch.equal(mine.pruned(), theirs.pruned())


@every_method
def test_doctor_predicts_gains(stand_in, method):  # noqa: F811
    model = zoo.build("llama").bfloat16()
    patch_model(model, method_config(method))
    rows = doctor.gains(model, 32, torch.bfloat16, torch.device("cpu"))
    assert sum(int(row[0]) for row in rows) == len(sparse_weights(model))
    for row in rows:
        assert len(row) == 6 and row[2] == "sparse 2.00x" and row[5].endswith("x")
    assert doctor.problems(model, 32, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("pattern", ["16:32", *(pytest.param(p, marks=pytest.mark.slow) for p in ("8:16", "6:8"))])
@every_method
def test_any_pattern_trains_and_exports(method, pattern, tmp_path):
    """What was trained computes the same bits from its export in either format."""
    model = zoo.build("llama")
    patch_model(model, method_config(method, pattern=pattern))
    run_steps(model, *loop(model), STEPS // 2)
    assert not sparse_run(model).is_dense  # as at the end of some methods
    for weight in sparse_weights(model).values():
        assert is_nm_sparse(weight.pruned(), *weight.pattern, weight.input_dim)
    expected = logits(model.eval())
    for format in ("dense", "packed"):
        export_model(model, tmp_path / format, format)
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / format)), expected)
