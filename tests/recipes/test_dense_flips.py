"""The flip rate that dense training would have."""

import pytest
import zoo
from dense_flips import DenseFlipRateCallback
from training_runs import arguments, dataset
from transformers import Trainer

from hf_sparse24 import Sparse24Config, Sparse24Trainer, patch_model, sparse_weights
from hf_sparse24.run import patched_config

SETTINGS = {"max_steps": 8, "logging_steps": 2, "learning_rate": 1e-2}


def train_dense(directory, model, config):
    run = Trainer(
        model,
        arguments(directory, **SETTINGS),
        train_dataset=dataset(),
        callbacks=[DenseFlipRateCallback(config)],
    )
    run.train()
    return run


def rates(run: Trainer) -> dict[int, float]:
    return {log["step"]: log["flip_rate"] for log in run.state.log_history if "flip_rate" in log}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_it_is_what_a_dense_phase_logs_and_the_model_stays_dense(name, tmp_path):
    """`ste` measures the masks that its weights ask for in dense phases, too: seven of these eight steps."""
    config = Sparse24Config(method="ste", dense_start=7, target_modules="all-linear")
    run = train_dense(tmp_path, zoo.build(name), config)
    patched = Sparse24Trainer(
        zoo.build(name), arguments(tmp_path, **SETTINGS), train_dataset=dataset(), sparse24_config=config
    )
    patched.train()
    assert rates(run).keys() == {2, 4, 6, 8} and all(rates(run).values())
    assert {step: rate for step, rate in rates(run).items() if step < 8} == {
        step: rate for step, rate in rates(patched).items() if step < 8
    }
    assert patched_config(run.model) is None and not sparse_weights(run.model)
    assert all(not tensor.is_meta for tensor in run.model.state_dict().values())


def test_masks_of_t_sr_ste_are_compared_from_refresh_to_refresh(tmp_path):
    run = train_dense(tmp_path, zoo.build("llama"), Sparse24Config(method="t-sr-ste", mask_interval=4))
    assert rates(run).keys() == {4, 6, 8} and rates(run)[4] == rates(run)[6] != rates(run)[8]


def test_a_patched_model_is_refused(tmp_path):
    model = zoo.build("llama")
    patch_model(model)
    with pytest.raises(ValueError, match="the model is patched"):
        train_dense(tmp_path, model, Sparse24Config())
    for config in (None, Sparse24Config(method="fixed-mask")):
        with pytest.raises(ValueError, match="config="):
            DenseFlipRateCallback(config)
