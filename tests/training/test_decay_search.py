"""Determining the masked decay by probes."""

import random

import numpy as np
import pytest
import torch
from training_runs import decay_trainer

from hf_sparse24 import Sparse24Trainer
from hf_sparse24.run import patched_config, sparse_run
from hf_sparse24.training import decay_search
from hf_sparse24.training.decay_search import DecayTuning


@pytest.mark.parametrize("method", ["sr-ste", "t-sr-ste"])
def test_stronger_decay_flips_less(method, tmp_path):
    tuning = decay_trainer(tmp_path, method=method).tune_masked_decay((1e-3, 1e3), steps=8)
    assert tuning.dense_flip_rate > 0 and list(tuning.mu) == [1e-3, 1e3]
    assert tuning.mu[1e3] < tuning.mu[1e-3] - 0.1
    assert all(text in str(tuning) for text in ("mu", "1.0e-03", "1.0e+03"))


@pytest.mark.parametrize("steepness", [0.2, 2.0])
@pytest.mark.parametrize("crossing", [1e-7, 3e-5, 6e-2, 1.0])
def test_bisection_chooses_what_all_probes_would_in_a_few(crossing, steepness, tmp_path, monkeypatch):
    def mu(decay: float) -> float:
        return 1 / (1 + 0.29 * (decay / crossing) ** steepness)  # 0.775 at the crossing

    probed = []

    def probe(trainer, decay, *_):
        probed.append(decay)
        return 1e-3 if decay is None else 1e-3 * mu(decay)

    monkeypatch.setattr(decay_search, "probe", probe)
    tuning = decay_trainer(tmp_path).tune_masked_decay(tuple(reversed(decay_search.CANDIDATES)))
    feasible = [decay for decay in decay_search.CANDIDATES if 0.60 <= mu(decay) <= 0.95]
    assert tuning.chosen == min(feasible, key=lambda decay: abs(mu(decay) - 0.775), default=None)
    assert probed[0] is None and len(probed) <= 5 and sorted(tuning.mu) == list(tuning.mu) == sorted(probed[1:])


@pytest.mark.parametrize(("warm_up", "steps"), [(7, 7), (0.5, 8), (3, 16), (0, 16)])
def test_probes_end_with_the_warm_up(warm_up, steps, tmp_path):
    run, taken = decay_trainer(tmp_path, max_steps=16, warmup_steps=warm_up), []
    training_step = run.training_step
    run.training_step = lambda *args: taken.append(1) or training_step(*args)
    run.tune_masked_decay((1e-3,))
    assert len(taken) == 2 * steps


def test_nothing_is_touched(tmp_path):
    """Training after probes equals training without: model, random states, data order."""
    tuned, plain = decay_trainer(tmp_path), decay_trainer(tmp_path)
    weights = {name: tensor.clone() for name, tensor in tuned.model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    tuned.tune_masked_decay((1e-3,), steps=4)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in tuned.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert tuned.optimizer is None and patched_config(tuned.model).masked_decay == 1e-3
    assert sparse_run(tuned.model).phase == "sparse"
    for run in (tuned, plain):
        torch.manual_seed(1)
        run.train()
    assert all(torch.equal(a, b) for a, b in zip(tuned.model.state_dict().values(), plain.model.state_dict().values()))


def test_auto(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(
        "hf_sparse24.training.trainer.tune_masked_decay", lambda *_: DecayTuning(1e-3, {6e-5: 0.8, 2e-4: 0.4}, 6e-5)
    )
    run = decay_trainer(tmp_path, decay="auto", save_strategy="steps", save_steps=6)
    with caplog.at_level("INFO", logger="hf_sparse24"):
        run.train()
    assert patched_config(run.model).masked_decay == 6e-5 and run.decay_tuning.chosen == 6e-5
    assert any("6.0e-05" in message and "chosen" in message for message in caplog.messages)
    # A resumed run takes the number it began with, and does not probe again.
    monkeypatch.setattr("hf_sparse24.training.trainer.tune_masked_decay", None)
    for checkpoint in (True, str(tmp_path / "checkpoint-6")):
        resumed = decay_trainer(tmp_path, decay="auto", save_strategy="no")
        resumed.train(resume_from_checkpoint=checkpoint)
        assert patched_config(resumed.model).masked_decay == 6e-5


def test_auto_on_a_short_run_probes_all_of_it(tmp_path, monkeypatch):
    """Its dense tail is left out: no decay acts there, and every candidate would seem to do nothing."""
    tunings = []
    tune = Sparse24Trainer.tune_masked_decay
    monkeypatch.setattr(
        Sparse24Trainer, "tune_masked_decay", lambda run: tunings.append(tune(run, (1e-3, 1e3))) or tunings[0]
    )
    run = decay_trainer(tmp_path, decay="auto", method="t-sr-ste", max_steps=8)
    monkeypatch.setattr("hf_sparse24.training.decay_search.FEASIBLE", (0.0, 2.0))
    run.train()
    assert run.state.global_step == 8 and patched_config(run.model).masked_decay in (1e-3, 1e3)
    assert tunings[0].mu[1e3] < tunings[0].mu[1e-3] - 0.1


def test_auto_on_a_run_that_is_too_short_says_what_to_set(tmp_path):
    with pytest.raises(ValueError, match=r"steps=3 ended after 3: .* at least 4 .* set masked_decay"):
        decay_trainer(tmp_path, decay="auto", max_steps=3).train()


def test_dense_probes_that_flip_nothing_say_what_to_change(tmp_path):
    with pytest.raises(ValueError, match="no mask flipped"):
        decay_trainer(tmp_path, decay="auto", learning_rate=0.0).train()


def test_auto_without_a_feasible_candidate(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "hf_sparse24.training.trainer.tune_masked_decay", lambda *_: DecayTuning(1e-3, {6e-5: 1.8}, None)
    )
    with pytest.raises(ValueError, match=r"no candidate has mu in \[0.60, 0.95\](?s:.*)6.0e-05  1.800"):
        decay_trainer(tmp_path, decay="auto").train()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"candidates": (-1,)}, r"masked_decay=-1"),
        ({"steps": 2}, "steps=2 ended after 2"),
        ({"steps": 40}, "steps=40 ended after 16"),
    ],
)
def test_wrong_arguments(arguments, message, tmp_path):
    run = decay_trainer(tmp_path, max_steps=16)
    states = torch.get_rng_state(), random.getstate()
    with pytest.raises(ValueError, match=message):
        run.tune_masked_decay(**arguments)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


def test_methods_without_decay(tmp_path):
    with pytest.raises(ValueError, match="method 's-ste' has no masked_decay"):
        decay_trainer(tmp_path, decay=None, method="s-ste").tune_masked_decay()
