"""TRL's trainers on a patched model, with the callback: they train, resume, and refuse a reference that differs."""

import math

import pytest
import torch
import training_runs
import zoo
from datasets import Dataset
from huggingface_hub import ModelCard
from training_runs import weights
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hf_sparse24 import (
    Sparse24Callback,
    Sparse24Config,
    export_model,
    patch_model,
    sparse_run,
    sparse_weights,
)

# TRL and PEFT still use names of Transformers 4 that Transformers 5 is renaming.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

trl = pytest.importorskip("trl")

import stdlib_text  # noqa: E402

TEXTS = [f"def function_{i}(a, b):\n    return a * {i} + b\n" for i in range(16)]
PAIRS = {
    "prompt": [text[:20] for text in TEXTS],
    "chosen": [text[20:] for text in TEXTS],
    "rejected": [text[:19:-1] for text in TEXTS],
}


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> str:
    """A dense model and its tokenizer on disk, the start of every run."""
    directory = tmp_path_factory.mktemp("start")
    stdlib_text.train_tokenizer(TEXTS, 300).save_pretrained(directory)
    model = zoo.build("llama", vocab_size=300, max_position_embeddings=128, initializer_range=0.2)
    model.save_pretrained(directory)
    return str(directory)


CONFIG = Sparse24Config(method="t-sr-ste", mask_interval=2, dense_tail=2)


def policy(start: str, auto=AutoModelForCausalLM, config: Sparse24Config = CONFIG, **settings):
    model = auto.from_pretrained(start, **settings)
    patch_model(model, config)
    return model


def saved_policy(start: str, directory, config: Sparse24Config = CONFIG):
    """A policy whose reference TRL finds on disk."""
    policy(start, config=config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(start).save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory)


SETTINGS = {"max_steps": 6, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 3}
ON_CPU = {"bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False}


def arguments(kind, tmp_path, **settings):
    return training_runs.arguments(tmp_path, kind, **SETTINGS | ON_CPU | settings)


def sft(start, tmp_path, model=None, **settings):
    passed = {name: settings.pop(name) for name in ("peft_config",) if name in settings}
    args = arguments(trl.SFTConfig, tmp_path, max_length=32, **settings)
    data = Dataset.from_dict({"text": TEXTS})
    return trl.SFTTrainer(model or policy(start), args, train_dataset=data, **passed)


def dpo(start, tmp_path, model=None, **settings):
    passed = {name: settings.pop(name) for name in ("peft_config", "ref_model") if name in settings}
    args = arguments(trl.DPOConfig, tmp_path, max_length=48, **settings)
    model = model or saved_policy(start, tmp_path / "policy")
    return trl.DPOTrainer(model, args=args, train_dataset=Dataset.from_dict(PAIRS), **passed)


def grpo(start, tmp_path, model=None, **settings):
    sizes = {"num_generations": 2, "max_completion_length": 4, "beta": 0.1}
    args = arguments(trl.GRPOConfig, tmp_path, **(sizes | settings))
    data = Dataset.from_dict({"prompt": PAIRS["prompt"]})

    def reward(completions, **kwargs) -> list[float]:
        return [float(sum(map(ord, completion)) % 7) for completion in completions]

    model = model or saved_policy(start, tmp_path / "policy")
    return trl.GRPOTrainer(model, reward, args=args, train_dataset=data)


def reward(start, tmp_path, model=None, **settings):
    args = arguments(trl.RewardConfig, tmp_path, max_length=48, **settings)
    if model is None:
        model = policy(start, AutoModelForSequenceClassification, num_labels=1)
    return trl.RewardTrainer(model, args=args, train_dataset=Dataset.from_dict(PAIRS))


@pytest.mark.parametrize("make", [sft, dpo, grpo, reward])
def test_trains_refreshes_masks_ends_dense_and_resumes(start, tmp_path, make):
    runs = []
    for checkpoint in (None, str(tmp_path / "checkpoint-3")):
        run = make(start, tmp_path)
        Sparse24Callback.add_to(run)
        run.train(resume_from_checkpoint=checkpoint)
        runs.append(run)
    whole, resumed = runs
    logs = {log["step"]: log for log in whole.state.log_history if "loss" in log}
    assert [logs[step]["sparse_phase"] for step in range(1, 7)] == [1, 1, 1, 0, 0, 0]  # at 4, the tail has begun
    assert logs[2]["flip_rate"] > 0 and sparse_run(whole.model).phase == "dense"
    assert torch.equal(weights(whole.model), weights(resumed.model))


METHODS = [
    Sparse24Config(method="s-ste"),
    Sparse24Config(method="t-sr-ste"),
    Sparse24Config(method="fixed-mask", target_modules="all-linear"),
    Sparse24Config(method="ste", dense_start=2),
]


@pytest.mark.parametrize("config", METHODS, ids=lambda config: config.method)
def test_at_step_0_the_loss_of_dpo_is_that_of_two_equal_models(start, tmp_path, config):
    model = policy(start, config=config) if config.dense_start else saved_policy(start, tmp_path / "policy", config)
    run = dpo(start, tmp_path, model, save_strategy="no", max_steps=4)
    Sparse24Callback.add_to(run)
    run.train()
    first = run.state.log_history[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/chosen"] == first["rewards/rejected"] == 0
    assert run.state.log_history[2]["loss"] != pytest.approx(math.log(2), abs=1e-4)


def test_a_reference_that_is_not_what_the_policy_computes_is_refused(start, tmp_path):
    run = dpo(start, tmp_path, policy(start), save_strategy="no", max_steps=4)
    with pytest.raises(ValueError, match=r"gate_proj\.weight .* differs"):
        Sparse24Callback.add_to(run)
    Sparse24Callback.add_to(run, check_reference=False)
    run.train()
    assert run.state.log_history[0]["rewards/chosen"] != 0
    assert sparse_run(run.model).phase == "dense"  # the tail; its reference on disk is sparse or dense, and another
    with pytest.raises(ValueError, match="differs"):
        Sparse24Callback.add_to(dpo(start, tmp_path, run.model, save_strategy="no"))


def test_a_dense_reference_that_computes_the_same_is_taken(start, tmp_path):
    """As of a policy that begins dense, or of a dense export that is patched."""
    dense_first = policy(start, config=Sparse24Config(method="ste", dense_start=2))
    export_model(policy(start), tmp_path / "export")
    AutoTokenizer.from_pretrained(start).save_pretrained(tmp_path / "export")
    exported = policy(tmp_path / "export", config=Sparse24Config(method="fixed-mask"))
    for model in (dense_first, exported):
        Sparse24Callback.add_to(dpo(start, tmp_path, model))


def test_the_card_of_a_saved_run_says_that_it_is_a_training_checkpoint(start, tmp_path):
    run = sft(start, tmp_path)
    Sparse24Callback.add_to(run)
    run.train()
    card = ModelCard.load(tmp_path / "README.md")
    assert {"hf_sparse24", "sft"} <= {*card.data.tags} and "\nimport hf_sparse24 " in card.text


def test_at_step_0_grpo_has_no_kl_divergence(start, tmp_path):
    run = grpo(start, tmp_path, save_strategy="no")
    Sparse24Callback.add_to(run)
    run.train()
    divergences = [log["kl"] for log in run.state.log_history if "kl" in log]
    assert divergences[0] == 0 and max(divergences) > 1e-4


def test_a_reference_of_another_name_is_not_checked(start, tmp_path):
    AutoModelForCausalLM.from_pretrained(start).save_pretrained(tmp_path / "other")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    Sparse24Callback.add_to(dpo(start, tmp_path, policy(start), ref_model=reference))


@pytest.mark.parametrize("setting", ["sync_ref_model", "precompute_ref_log_probs"])
def test_settings_that_take_masters_for_weights_are_refused(setting, start, tmp_path):
    with pytest.raises(ValueError, match=f"{setting}=True"):
        Sparse24Callback.add_to(dpo(start, tmp_path, **{setting: True}))


@pytest.mark.parametrize("make", [sft, dpo, grpo])
def test_a_sparse_output_embedding_is_refused(make, start, tmp_path):
    """TRL reads `lm_head.weight`, the dense master, for its loss."""
    config = Sparse24Config(method="fixed-mask", target_modules=["up_proj", "lm_head"])
    with pytest.raises(ValueError, match=r"output embedding .*TRL"):
        Sparse24Callback.add_to(make(start, tmp_path, policy(start, config=config)))


def test_generation_by_vllm_from_dense_masters_is_refused(start, tmp_path):
    trainer = grpo(start, tmp_path)
    trainer.args.use_vllm = True  # TRL makes no such trainer where there is no vLLM
    with pytest.raises(ValueError, match="use_vllm=True: TRL sends vLLM the dense master weights"):
        Sparse24Callback.add_to(trainer)


@pytest.mark.parametrize("make", [sft, dpo])
def test_adapters_on_a_sparse_base(start, tmp_path, make):
    """TRL wraps the patched model; the reference is the sparse base without the adapter."""
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(target_modules="all-linear", r=4)
    model = policy(start, config=Sparse24Config(method="fixed-mask"))
    base = weights(model)
    run = make(start, tmp_path, model, peft_config=adapter)
    Sparse24Callback.add_to(run)
    run.train()
    if make is dpo:
        assert run.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert run.state.log_history[0]["rewards/chosen"] == 0
    assert len(sparse_weights(run.model)) == 6
    assert torch.equal(weights(run.model.unload()), base)
