"""Resuming: from the newest checkpoint that is whole, into the run that it is of."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import zoo
from training_runs import arguments, dataset, decay_trainer, train, weights
from transformers import AutoModelForCausalLM, Trainer

from hf_sparse24 import Sparse24Callback, Sparse24Config, Sparse24Trainer, patch_model, sparse_weights
from hf_sparse24.run import sparse_run
from hf_sparse24.training.resume import checkpoint_damage, last_whole_checkpoint

SAVING = {"save_strategy": "steps", "save_steps": 2}
CONFIG = Sparse24Config(method="t-sr-ste", mask_interval=1)
FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


def resume(directory, checkpoint: bool | str = True, config: Sparse24Config = CONFIG, **overrides) -> Sparse24Trainer:
    model = zoo.build("llama", seed=9)
    args = arguments(directory, **SAVING | overrides)
    run = Sparse24Trainer(model, args, train_dataset=dataset(), sparse24_config=config)
    run.train(resume_from_checkpoint=checkpoint)
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 4 steps with checkpoints 2 and 4, and its weights; copy it to change it."""
    directory = tmp_path_factory.mktemp("finished")
    return directory, weights(train(directory, config=CONFIG, **SAVING).model)


@pytest.fixture
def run_dir(finished, tmp_path) -> Path:
    shutil.copytree(finished[0], tmp_path / "run")
    return tmp_path / "run"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("name", [*FILES, "config.json", "training_args.bin"])
def test_files_that_are_cut_short_or_missing_are_noticed(name, run_dir):
    checkpoint = run_dir / "checkpoint-4"
    assert checkpoint_damage(checkpoint) is None
    for length in (0, 1, 100, (checkpoint / name).stat().st_size - 2):
        whole = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(whole[:length])
        assert checkpoint_damage(checkpoint).startswith(f"{name} is cut short or damaged")
        (checkpoint / name).write_bytes(whole)
    if name in FILES:
        (checkpoint / name).unlink()
        kind = name.removesuffix(".pth").removesuffix(".pt")
        assert kind in checkpoint_damage(checkpoint) or checkpoint_damage(checkpoint) == "it has no weights"
        assert last_whole_checkpoint(run_dir) == str(run_dir / "checkpoint-2")


def test_a_missing_shard_is_noticed(run_dir):
    checkpoint = run_dir / "checkpoint-4"
    (checkpoint / "model.safetensors").unlink()
    zoo.build("llama").save_pretrained(checkpoint, max_shard_size="20KB")
    assert checkpoint_damage(checkpoint) is None
    shard = sorted(checkpoint.glob("model-*.safetensors"))[1]
    cut(shard)
    assert checkpoint_damage(checkpoint).startswith(f"{shard.name} is cut short or damaged")
    shard.unlink()
    assert checkpoint_damage(checkpoint) == f"{shard.name} is missing"
    index = checkpoint / "model.safetensors.index.json"
    cut(index)
    assert checkpoint_damage(checkpoint) == "model.safetensors.index.json is cut short or damaged"


def test_a_half_written_checkpoint_is_skipped(finished, run_dir, caplog):
    cut(run_dir / "checkpoint-4" / "optimizer.pt")
    (run_dir / "checkpoint-6").mkdir()
    (run_dir / "checkpoint-best").mkdir()
    run = resume(run_dir)
    assert torch.equal(weights(run.model), finished[1])
    (warning,) = [record.getMessage() for record in caplog.records if "newest whole" in record.getMessage()]
    assert "checkpoint-6: trainer_state.json, which is written last, is missing" in warning
    assert "checkpoint-4: optimizer.pt is cut short or damaged" in warning and "from" in warning
    assert last_whole_checkpoint(run_dir) == str(run_dir / "checkpoint-4")  # written over


def test_without_a_whole_checkpoint_it_is_said(run_dir, tmp_path):
    for checkpoint in run_dir.glob("checkpoint-*"):
        (checkpoint / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match=r"checkpoint-4: trainer_state.json"):
        resume(run_dir)
    with pytest.raises(ValueError, match=r"no whole checkpoint in .*\(none at all\)"):
        resume(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"checkpoint-2: trainer_state.json"):
        resume(run_dir, str(run_dir / "checkpoint-2"))


def test_a_checkpoint_that_is_being_written_over_is_not_whole(run_dir, monkeypatch):
    """Its old files are whole each, and of another moment than the new ones."""

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Sparse24Trainer, "_save_rng_state", killed)
    with pytest.raises(KeyboardInterrupt):
        resume(run_dir, str(run_dir / "checkpoint-2"), learning_rate=0.1)
    assert last_whole_checkpoint(run_dir) == str(run_dir / "checkpoint-2")


def test_a_checkpoint_of_the_model_only_is_whole(tmp_path):
    train(tmp_path, config=CONFIG, save_only_model=True, **SAVING)
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


@pytest.mark.parametrize(
    ("config", "difference"),
    [
        (Sparse24Config(method="fixed-mask"), "method='t-sr-ste', now 'fixed-mask'"),
        (CONFIG.replace(pattern="1:4"), "pattern='2:4', now '1:4'"),
        (CONFIG.replace(target_modules="all-linear"), "target_modules='mlp', now 'all-linear'"),
        (CONFIG.replace(layers_to_transform=[0]), r"layers_to_transform=None, now \[0\]"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(config, difference, run_dir):
    with pytest.raises(ValueError, match=f"cannot resume from .*{difference}.*patch the model with the config of"):
        resume(run_dir, str(run_dir / "checkpoint-2"), config)


def test_other_settings_cost_a_warning(run_dir, caplog):
    for config in (CONFIG.replace(backend="dense"), CONFIG.replace(masked_decay=0.5, dense_tail=0)):
        resume(run_dir, str(run_dir / "checkpoint-2"), config)
    (warning,) = [record.getMessage() for record in caplog.records if "was saved with" in record.getMessage()]
    assert "masked_decay=6e-05, now 0.5" in warning and "dense_tail=0.1666" in warning and "backend" not in warning


def test_a_dense_run_with_experts_is_refused(tmp_path):
    """Its checkpoint has each expert by itself, and a Trainer would leave the stacks as they are."""
    Trainer(zoo.build("qwen3_moe"), arguments(tmp_path, **SAVING), train_dataset=dataset()).train()
    with pytest.raises(ValueError, match=r"experts\.\d.*load it by from_pretrained, call patch_model"):
        experts(tmp_path, 9).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_masks_of_a_run_that_goes_on_from_a_dense_one_are_of_its_weights(tmp_path, caplog):
    Trainer(zoo.build("llama"), arguments(tmp_path, **SAVING), train_dataset=dataset()).train()
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    patch_model(dense, config := Sparse24Config(method="fixed-mask"))
    run = Sparse24Trainer(
        zoo.build("llama", seed=1),
        arguments(tmp_path, learning_rate=0.0),
        train_dataset=dataset(),
        sparse24_config=config,
    )
    run.train(str(tmp_path / "checkpoint-2"))
    assert "a model that was not patched" in caplog.text
    expected = {name: weight.mask() for name, weight in sparse_weights(dense).items()}
    assert all(torch.equal(weight.mask(), expected[name]) for name, weight in sparse_weights(run.model).items())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
def test_adapters_resume_with_the_decay_and_phase_of_the_model_below(tmp_path, monkeypatch):
    """Their checkpoints have no config.json."""
    from peft import LoraConfig, get_peft_model

    def run(trains_below=False, **overrides) -> Sparse24Trainer:
        made = decay_trainer(tmp_path, decay="auto", method="t-sr-ste", **overrides)
        model = get_peft_model(made.model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
        model.base_model.model.model.layers[0].mlp.down_proj.weight.requires_grad_(trains_below)
        return Sparse24Trainer(model, made.args, train_dataset=made.train_dataset)

    monkeypatch.setattr("hf_sparse24.training.trainer.tune_masked_decay", None)
    first = run(save_strategy="steps", save_steps=6)
    first.train()
    record = tmp_path / "checkpoint-6" / "sparse24_config.json"
    saved = json.loads(record.read_text())
    assert saved["masked_decay"] == 0.0 and saved["phase"] == "sparse"  # all frozen, there is neither decay nor a tail
    for checkpoint in (True, str(tmp_path / "checkpoint-6")):
        resumed = run(save_strategy="no")
        resumed.train(resume_from_checkpoint=checkpoint)
        assert sparse_run(resumed.model).phase == "sparse"
        assert torch.equal(weights(resumed.model), weights(first.model))
    record.unlink()
    with pytest.raises(ValueError, match=r"masked_decay=.auto.: .*checkpoint-6"):
        run(trains_below=True).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


def experts(directory, seed, **overrides) -> Trainer:
    """A sparse run of stacked experts."""
    model = zoo.build("qwen3_moe", seed=seed)
    patch_model(model, Sparse24Config(method="ste"))
    run = Trainer(model, arguments(directory, learning_rate=1e-2, **overrides), train_dataset=dataset())
    Sparse24Callback.add_to(run)
    return run


def test_a_callback_goes_on_from_the_checkpoint_that_was_named(tmp_path):
    """And never from that of another run, with the same number in the output directory."""
    first = experts(tmp_path / "first", 0, **SAVING)
    first.train()
    experts(tmp_path / "other", 5, **SAVING).train()
    named = str(tmp_path / "first" / "checkpoint-2")
    again = experts(tmp_path / "first", 9)
    added = experts(tmp_path / "other", 9)
    replaced = experts(tmp_path / "other", 9, restore_callback_states_from_checkpoint=True)
    for run in (again, added, replaced):
        run.train(resume_from_checkpoint=named)
        assert torch.equal(weights(run.model), weights(first.model))


def test_a_plain_trainer_refuses_another_method_before_its_optimizer_is_loaded(tmp_path):
    train(tmp_path, config=Sparse24Config(method="step", switch_after=1, switch_by=2), **SAVING)
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="s-ste"))
    run = Trainer(model, arguments(tmp_path), train_dataset=dataset())
    Sparse24Callback.add_to(run)
    with pytest.raises(ValueError, match="method='step'"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_checkpoint_without_the_state_of_the_methods_optimizer_is_refused(tmp_path):
    """The optimizer would begin again, dense, in the middle of a run that is sparse."""
    config = Sparse24Config(method="step", switch_after=1, switch_by=2)
    train(tmp_path, config=config, save_only_model=True, **SAVING)
    with pytest.raises(ValueError, match=r"step 2: method 'step'"):
        resume(tmp_path, config=config, checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_run_that_is_longer_already_is_refused(run_dir):
    with pytest.raises(ValueError, match="max_steps=3: the checkpoint is at step 4 already"):
        resume(run_dir, max_steps=3)


def test_a_checkpoint_that_has_ended_dense_is_fine_tuned_dense(finished, run_dir, tmp_path):
    """Also where fine-tuning is interrupted; and an earlier checkpoint of the first run goes on as it began."""
    source = run_dir / "checkpoint-4"
    assert json.loads((source / "config.json").read_text())["quantization_config"]["finished"] is True

    def tune(directory: Path, checkpoint=None) -> Sparse24Trainer:
        model = AutoModelForCausalLM.from_pretrained(source)
        run = Sparse24Trainer(model, arguments(directory, **SAVING), train_dataset=dataset(), sparse24_config=CONFIG)
        run.train(resume_from_checkpoint=checkpoint)
        return run

    whole = tune(tmp_path / "tuned")
    phases = [log["sparse_phase"] for log in whole.state.log_history if "loss" in log]
    assert phases and not any(phases) and sparse_run(whole.model).facts.finished
    again = tune(tmp_path / "again", str(tmp_path / "tuned" / "checkpoint-2"))
    assert torch.equal(weights(again.model), weights(whole.model))

    again.train(resume_from_checkpoint=str(run_dir / "checkpoint-2"))
    assert torch.equal(weights(again.model), finished[1])


def test_a_finished_run_changes_nothing_more(tmp_path):
    """By a learning rate that does not end at zero, within an epoch: the Trainer takes one more step."""
    constant = {"lr_scheduler_type": "constant", "learning_rate": 1e-2}
    before = weights(train(tmp_path, config=CONFIG, **SAVING, **constant).model)
    again = resume(tmp_path, **constant)
    assert again.state.global_step == 5 and torch.equal(weights(again.model), before)
