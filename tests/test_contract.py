"""What every registered method must do, in the Trainer, on a CPU. A new method is picked up by itself."""

import json

import pytest
import torch
import zoo
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainingArguments

from hf_sparse24 import (
    Sparse24Config,
    Sparse24Trainer,
    export_model,
    patch_model,
    unpatch_model,
)
from hf_sparse24.methods import METHODS
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.patching import sparse_layers

# Short runs need short intervals; everything else is the preset's.
SHORT = {"t-sr-ste": {"mask_interval": 2}}
STEPS = 12


def method_config(method: str) -> Sparse24Config:
    return Sparse24Config(method=method, target_modules="all-linear", **SHORT.get(method, {}))


def dataset(rows: int = 64) -> Dataset:
    """Sequences that count upwards: something to learn within a few steps."""
    starts = torch.randint(3, zoo.VOCAB - 16, (rows,), generator=torch.Generator().manual_seed(1))
    ids = (starts[:, None] + torch.arange(12)).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def trainer(model, output_dir, method: str, **arguments) -> Sparse24Trainer:
    defaults = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
    }
    args = TrainingArguments(str(output_dir), **(defaults | arguments))
    return Sparse24Trainer(model, args, train_dataset=dataset(), sparse24_config=method_config(method))


def assert_same_state(a: torch.nn.Module, b: torch.nn.Module) -> None:
    one, two = a.state_dict(), b.state_dict()
    assert one.keys() == two.keys()
    different = [name for name in one if not torch.equal(one[name], two[name])]
    assert not different


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("method", METHODS)
def test_life_of_a_model(method, name, tmp_path):
    """Trains, its loss falls, its weights are 2:4 while sparse; saves, reloads, trains on, exports, unpatches."""
    run = trainer(zoo.build(name), tmp_path / "run", method, save_strategy="steps", save_steps=STEPS // 2)
    run.train()
    losses = [log["loss"] for log in run.state.log_history if "loss" in log]
    assert losses[-1] < 0.8 * losses[0]
    logged = [log for log in run.state.log_history if "loss" in log]
    assert all({"flip_rate", "kept_magnitude", "sparse_phase"} <= set(log) for log in logged)
    saved = json.loads((tmp_path / "run" / f"checkpoint-{STEPS // 2}" / "trainer_state.json").read_text())
    assert "flip_rate" in saved["log_history"][0]

    model = run.model.eval()
    layers = sparse_layers(model)
    for layer in layers.values():
        weight = layer.sparse_weight()
        assert is_nm_sparse(weight, dim=layer.input_dim)
        assert not torch.signbit(weight[weight == 0]).any()
    inputs = zoo.batch()
    with torch.no_grad():
        logits = model(**inputs).logits

    model.save_pretrained(tmp_path / "saved")
    reloaded, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(loading.values())
    assert_same_state(reloaded, model)
    assert [layer.phase for layer in sparse_layers(reloaded).values()] == [layer.phase for layer in layers.values()]
    with torch.no_grad():
        assert torch.equal(reloaded(**inputs).logits, logits)
    assert reloaded.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False).shape == (2, 15)
    again = Sparse24Trainer(reloaded, run.args, train_dataset=dataset())  # a reloaded model trains as it is
    again.train()

    export_model(model, tmp_path / "export")
    exported, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(loading.values()) and not sparse_layers(exported)
    assert sparse_layers(model) and model.config.quantization_config is not None
    unpatch_model(model)
    for plain in (exported, model):
        assert not hasattr(plain.config, "quantization_config")
        with torch.no_grad():
            assert torch.equal(plain(**inputs).logits, logits)


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_equals_an_uninterrupted_one(method, tmp_path):
    """Bit for bit, from a checkpoint in the middle, into a model that was built and patched anew."""
    # At step 5, between two mask searches. Logged every step: the Trainer's own loss average does not survive resuming.
    whole = trainer(zoo.build("llama"), tmp_path, method, save_strategy="steps", save_steps=5, logging_steps=1)
    whole.train()
    resumed = trainer(zoo.build("llama", seed=9), tmp_path, method, logging_steps=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert resumed.state.global_step == STEPS
    assert_same_state(resumed.model, whole.model)
    whole_logs = [log for log in whole.state.log_history if "loss" in log]
    resumed_logs = [log for log in resumed.state.log_history if "loss" in log]
    assert resumed_logs == whole_logs


@pytest.mark.parametrize("method", METHODS)
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
