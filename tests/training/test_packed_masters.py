"""Training packed masters: as the dense masked master does, from half of the optimizer's state."""

import pytest
import ranks
import torch
import zoo
from distributed_runs import check_equal
from training_runs import arguments, dataset, train
from transformers.distributed import DistributedConfig

from hf_sparse24 import (
    Sparse24Config,
    Sparse24Controller,
    Sparse24Trainer,
    export_model,
    patch_model,
    sparse_weights,
    unpatch_model,
)
from hf_sparse24.weights.storage import PackedMaster

FIXED = {"method": "fixed-mask", "target_modules": "all-linear"}
PACKED = FIXED | {"master": "packed"}
CONFIG = Sparse24Config(**PACKED)
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
}


def run(name: str, config: dict, optimizer: str, steps: int = 6):
    """A finished run in fp64 of two micro-batches a step, clipped; with losses, norms and the optimizer."""
    model = zoo.build(name).double()
    patch_model(model, Sparse24Config(**config))
    own = OPTIMIZERS[optimizer](model.parameters())
    controller = Sparse24Controller(model, own, total_steps=steps)
    log = []
    for step in range(steps):
        for micro in range(2):
            loss = model(**zoo.batch(seed=10 * step + micro)).loss / 2
            loss.backward()
            controller.after_micro_step()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        own.step()
        own.zero_grad()
        log.append((loss.item(), norm.item()))
    assert controller.step == steps
    return model, own, log, controller


@pytest.mark.parametrize(
    ("name", "optimizer", "method"),
    [("llama", "adamw", "fixed-mask"), ("gpt2", "fused", "slope"), ("llama", "momentum", "slope")],
)
def test_it_trains_as_the_masked_master_does(name, optimizer, method):
    expected, _, expected_log, _ = run(name, FIXED | {"method": method}, optimizer)
    model, _, log, controller = run(name, PACKED | {"method": method}, optimizer)
    torch.testing.assert_close(torch.tensor(log), torch.tensor(expected_log), rtol=2e-7, atol=1e-7)  # losses are fp32
    assert controller.metrics() == {"sparse_phase": 1.0} and controller.layer_flip_rates() == {}
    masked = dict(unpatch_model(expected).named_parameters())
    for key, parameter in unpatch_model(model).named_parameters():
        torch.testing.assert_close(parameter, masked[key], rtol=1e-12, atol=1e-12)


def test_the_optimizers_state_is_exactly_half():
    expected, theirs, _, _ = run("llama", FIXED, "adamw", 1)
    model, ours, _, _ = run("llama", PACKED, "adamw", 1)
    for name, weight in sparse_weights(model, PackedMaster).items():
        for moment in ("exp_avg", "exp_avg_sq"):
            dense = theirs.state[sparse_weights(expected)[name].parameter][moment]
            assert 2 * ours.state[weight.master][moment].nbytes == dense.nbytes


@pytest.mark.parametrize(("name", "pattern"), [("llama", "2:4"), ("gpt2", "6:8")])
def test_a_resumed_run_equals_an_uninterrupted_one(name, pattern, tmp_path):
    config = CONFIG.replace(pattern=pattern)
    saving = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    whole = train(tmp_path / "run", zoo.build(name), config, **saving)
    assert whole.state.log_history[0].keys() >= {"loss", "grad_norm", "sparse_phase"}
    assert not {"flip_rate", "kept_magnitude"} & whole.state.log_history[0].keys()
    again = Sparse24Trainer(
        zoo.build(name, seed=9), arguments(tmp_path / "run", **saving), train_dataset=dataset(), sparse24_config=config
    )
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    ours, theirs = again.model.state_dict(), whole.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    losses = [[log["loss"] for log in each.state.log_history if "loss" in log] for each in (again, whole)]
    assert losses[0] == losses[1]
    loaded = type(whole.model).from_pretrained(tmp_path / "run" / "checkpoint-6")
    further = Sparse24Trainer(loaded, arguments(tmp_path / "further"), train_dataset=dataset())
    before = {key: weight.master.clone() for key, weight in sparse_weights(loaded, PackedMaster).items()}
    further.train()
    assert all(
        not torch.equal(weight.master, before[key]) for key, weight in sparse_weights(loaded, PackedMaster).items()
    )


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(engine):
    check_equal(2, "llama", PACKED, engine)


def test_tensor_parallelism_is_refused_by_name(tmp_path):
    zoo.build("llama").save_pretrained(tmp_path)
    for error in ranks.run(2, _split, str(tmp_path)):
        assert "master='packed': tensor parallelism does not split" in error and "use DDP or FSDP2" in error


def _split(rank, world, directory):
    sharded = {"distributed_config": DistributedConfig(tp_size=world), "quantization_config": CONFIG}
    with pytest.raises(ValueError) as error:
        zoo.auto_class("llama").from_pretrained(directory, **sharded)
    torch.distributed.barrier()
    return str(error.value)


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_sharded_model_is_exported(format, tmp_path):
    expected, *errors = ranks.run(2, _export, str(tmp_path), format)
    loaded = zoo.auto_class("llama").from_pretrained(tmp_path, dtype=torch.float64)
    dense = loaded.model.layers[0].mlp.up_proj.weight
    assert torch.equal(dense, expected[0]) and "is sharded" in expected[1] and errors


def _export(rank, world, directory, format):
    model, optimizer, controller = ranks.make("llama", PACKED, "fsdp2", 2)
    ranks.run_step(model, optimizer, controller, 0, rank, world, "fsdp2")
    export_model(model, directory, format)
    weight = sparse_weights(model, PackedMaster)["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(ValueError) as error:
        unpatch_model(model)
    return weight.merged(), str(error.value)
