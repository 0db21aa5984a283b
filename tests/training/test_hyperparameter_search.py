"""Trainer.hyperparameter_search with Sparse24Trainer: every trial has its own sparse model."""

import types

import zoo
from training_runs import arguments, dataset
from transformers.hyperparameter_search import ALL_HYPERPARAMETER_SEARCH_BACKENDS
from transformers.trainer_utils import BestRun, HPSearchBackend

from hf_sparse24 import Sparse24Config, Sparse24Trainer
from hf_sparse24.run import patched_config
from hf_sparse24.training.decay_search import DecayTuning, tune_masked_decay


class Trials:
    """A backend of `Trainer.hyperparameter_search` that treats a trainer as that for Optuna does."""

    def __init__(self, trials: list[dict]):
        self.trials, self.runs = trials, []

    def ensure_available(self):
        pass

    def run(self, trainer, n_trials, direction):
        for number in range(n_trials):
            trainer.train(trial=types.SimpleNamespace(number=number, params=self.trials[number]))
            trainer.objective = trainer.compute_objective(trainer.evaluate())
            config = patched_config(trainer.model)
            self.runs.append((trainer.objective, trainer.args.learning_rate, trainer.patch_report, config))
            trainer.model_wrapped = trainer.model = None
            trainer.accelerator.clear()
        return BestRun("0", min(objective for objective, *_ in self.runs), {})


def search(monkeypatch, tmp_path, config, trials, **overrides) -> Trials:
    backend = Trials(trials)
    monkeypatch.setitem(ALL_HYPERPARAMETER_SEARCH_BACKENDS, HPSearchBackend.OPTUNA, lambda: backend)
    monkeypatch.setattr("transformers.integrations.hp_params", lambda trial: trial.params)  # knows Optuna's alone
    run = Sparse24Trainer(
        args=arguments(tmp_path, **overrides),
        model_init=lambda: zoo.build("llama"),
        train_dataset=dataset(),
        eval_dataset=dataset(4),
        sparse24_config=config,
    )
    run.hyperparameter_search(lambda trial: trial.params, n_trials=len(trials), backend="optuna")
    return backend


def test_hyperparameter_search_patches_the_model_of_every_trial(tmp_path, monkeypatch):
    """`step` makes another optimizer: a trial with the settings of the first one ends where that one did."""
    trials = [{"learning_rate": rate, "max_steps": steps} for rate, steps in ((1e-2, 3), (1e-3, 2), (1e-2, 3))]
    runs = search(monkeypatch, tmp_path, Sparse24Config(method="step"), trials).runs
    losses = [objective for objective, *_ in runs]
    assert losses[0] == losses[2] != losses[1]
    assert [rate for _, rate, *_ in runs] == [1e-2, 1e-3, 1e-2]
    assert len({id(report) for *_, report, _ in runs}) == 3


def test_every_trial_finds_its_own_masked_decay(tmp_path, monkeypatch):
    """With its own learning rate; the probes train copies of the trial's model, not models that `model_init` makes."""
    asked = []

    def tune(run, candidates, steps):
        asked.append(run.args.learning_rate)
        tune_masked_decay(run, (1e-3,), 4)
        return DecayTuning(1e-3, {}, 1e-5 * len(asked))

    monkeypatch.setattr("hf_sparse24.training.trainer.tune_masked_decay", tune)
    config = Sparse24Config(method="sr-ste", masked_decay="auto")
    runs = search(monkeypatch, tmp_path, config, [{"learning_rate": 1e-2}, {"learning_rate": 1e-3}]).runs
    assert asked == [1e-2, 1e-3]
    assert [config.masked_decay for *_, config in runs] == [1e-5, 2e-5]
