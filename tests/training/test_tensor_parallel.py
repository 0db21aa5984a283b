"""Tensor parallelism of Transformers: every method trains as in one process, and its checkpoints load anywhere."""

import pytest
import ranks
import torch
import zoo
from distributed_runs import METHODS, SOME, check_equal, settings
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_sparse24 import export_model, sparse_weights
from hf_sparse24_command import main

WITH_PARAMETERS = ("own", "slope-adapters")


@pytest.mark.parametrize("method", [one for name, one in zip(METHODS, SOME) if name not in WITH_PARAMETERS])
def test_two_processes_train_as_one(method):
    # Random gradients are drawn by the features that a process has, so no other split draws the same.
    config = settings(method) | ({"weight_grad": "dense"} if METHODS[method] is not None else {})
    check_equal(2, "llama", config, "tp")


@pytest.mark.slow
def test_four_processes():
    sizes = {"num_key_value_heads": 4}
    check_equal(4, "llama", settings("t-sr-ste") | {"weight_grad": "dense"}, "tp", sizes=sizes)


def test_random_gradients_are_unbiased_draws_of_each_process():
    first, second = ranks.run(2, _losses)
    assert first == second and first[-1] < first[0]


def _losses(rank, world):
    model, optimizer, controller = ranks.make("llama", settings("s-ste"), "tp", 8)
    return [ranks.run_step(model, optimizer, controller, 0, rank, world, "tp")[0] for _ in range(8)]


def test_a_weight_that_all_processes_hold_draws_alike_in_all():
    whole, split = zip(*ranks.run(2, _keys))
    assert whole[0] == whole[1] and split[0] != split[1]


def _keys(rank, world):
    model, _, _ = ranks.make("deepseek_v3", settings("s-ste") | {"target_modules": "all-linear"}, "tp", 8)
    weights = sparse_weights(model).values()
    keys = [[int(weight.rng_key) for weight in weights if weight.storage.is_split is split] for split in (False, True)]
    assert all(keys)
    return keys


def test_a_split_that_cuts_groups_is_refused():
    with pytest.raises(RuntimeError, match=r"splits weight \[32, 24\] within groups of 4"):
        ranks.run(2, _cut)


def _cut(rank, world):
    ranks.make("llama", settings("t-sr-ste"), "tp", 4, sizes={"intermediate_size": 24})


@pytest.mark.parametrize("method", WITH_PARAMETERS)
def test_parameters_of_a_method_are_refused(method):
    with pytest.raises(RuntimeError, match=r"tensor parallelism does not split \["):
        ranks.run(2, _load, method)


def _load(rank, world, method):
    ranks.make("llama", settings(method), "tp", 4)


def test_checkpoints_and_exports(tmp_path):
    states = ranks.run(2, _save, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    again = ranks.state_of(loaded)
    for kind in ("weights", "state", "masks"):
        assert again[kind].keys() == states[0][kind].keys()
        assert all(torch.equal(again[kind][name], tensor) for name, tensor in states[0][kind].items())
    assert main(["verify", str(tmp_path / "packed")]) == 0
    export_model(loaded, tmp_path / "one", "packed")
    ours, theirs = (load_file(tmp_path / folder / "packed.safetensors") for folder in ("packed", "one"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    for resumed in ranks.run(2, _reload, tmp_path / "saved"):
        for name, tensor in states[0]["state"].items():
            assert torch.equal(resumed["state"][name], tensor)


def _save(rank, world, folder):
    model, optimizer, controller = ranks.make("llama", settings("t-sr-ste") | {"dense_tail": 0}, "tp", 4)
    for step in range(3):
        ranks.run_step(model, optimizer, controller, step, rank, world, "tp")
    model.save_pretrained(folder / "saved")
    export_model(model, folder / "packed", "packed")
    return ranks.state_of(model)


def _reload(rank, world, folder):
    from transformers.distributed import DistributedConfig

    plan = DistributedConfig(tp_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan, dtype=torch.float64)
    model(**zoo.batch()).loss.backward()
    return ranks.state_of(model)


def test_adapters_and_unpatching_are_refused():
    for adapters, unpatched in ranks.run(2, _refused):
        assert "tensor parallelism splits weights below adapters" in adapters
        assert "is sharded: " in unpatched


def _refused(rank, world):
    model, _, controller = ranks.make("llama", settings("s-ste"), "tp", 4)
    controller.end()
    return ranks.refusals(model)
