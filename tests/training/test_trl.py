"""TRL's trainers on a patched model, with the callback: they train, resume, and their reference is the policy."""

import math

import pytest
import torch
import zoo
from datasets import Dataset
from training_runs import weights
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hf_sparse24 import Sparse24Callback, Sparse24Config, Sparse24Linear, patch_model, sparse_weights
from hf_sparse24.run import patched_config

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


def policy(start: str, auto=AutoModelForCausalLM, config: Sparse24Config | None = None, **settings):
    model = auto.from_pretrained(start, **settings)
    patch_model(model, config or Sparse24Config(method="t-sr-ste", mask_interval=2, dense_tail=2))
    return model


def arguments(kind, tmp_path, **settings):
    defaults = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    }
    return kind(str(tmp_path), **(defaults | settings))


def sft(start, tmp_path, model=None, **settings):
    passed = {name: settings.pop(name) for name in ("peft_config",) if name in settings}
    args = arguments(trl.SFTConfig, tmp_path, max_length=32, **settings)
    data = Dataset.from_dict({"text": TEXTS})
    return trl.SFTTrainer(model or policy(start), args, train_dataset=data, **passed)


def dpo(start, tmp_path, model=None, **settings):
    passed = {name: settings.pop(name) for name in ("peft_config", "ref_model") if name in settings}
    args = arguments(trl.DPOConfig, tmp_path, max_length=48, **settings)
    return trl.DPOTrainer(model or policy(start), args=args, train_dataset=Dataset.from_dict(PAIRS), **passed)


def grpo(start, tmp_path, model=None, **settings):
    sizes = {"num_generations": 2, "max_completion_length": 4, "beta": 0.1}
    args = arguments(trl.GRPOConfig, tmp_path, **(sizes | settings))
    data = Dataset.from_dict({"prompt": PAIRS["prompt"]})

    def reward(completions, **kwargs) -> list[float]:
        return [float(sum(map(ord, completion)) % 7) for completion in completions]

    return trl.GRPOTrainer(model or policy(start), reward, args=args, train_dataset=data)


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
    assert logs[2]["flip_rate"] > 0 and patched_config(whole.model).phase == "dense"
    assert torch.equal(weights(whole.model), weights(resumed.model))


def test_a_reward_model_keeps_its_score_head_dense(start, tmp_path):
    model = policy(
        start,
        AutoModelForSequenceClassification,
        Sparse24Config(method="ste", target_modules="all-linear"),
        num_labels=1,
    )
    assert type(model.score) is torch.nn.Linear and isinstance(model.model.layers[0].mlp.up_proj, Sparse24Linear)


METHODS = [
    Sparse24Config(method="s-ste"),
    Sparse24Config(method="t-sr-ste"),
    Sparse24Config(method="fixed-mask", target_modules="all-linear"),
    Sparse24Config(method="ste", dense_start=2),
]


@pytest.mark.parametrize("config", METHODS, ids=lambda config: config.method)
def test_at_step_0_the_loss_of_dpo_is_that_of_two_equal_models(start, tmp_path, config):
    run = dpo(start, tmp_path, policy(start, config=config), save_strategy="no", max_steps=4)
    Sparse24Callback.add_to(run)
    run.train()
    first = run.state.log_history[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/chosen"] == first["rewards/rejected"] == 0
    assert run.state.log_history[2]["loss"] != pytest.approx(math.log(2), abs=1e-4)


def test_without_the_callback_the_reference_would_be_the_dense_original(start, tmp_path):
    run = dpo(start, tmp_path, save_strategy="no", max_steps=4)
    Sparse24Callback.add_to(run, match_reference=False)
    original = AutoModelForCausalLM.from_pretrained(start)
    assert torch.equal(weights(run.ref_model), weights(original))
    run.train()
    assert run.state.log_history[0]["rewards/chosen"] != 0


def test_at_step_0_grpo_has_no_kl_divergence(start, tmp_path):
    run = grpo(start, tmp_path, save_strategy="no")
    Sparse24Callback.add_to(run)
    run.train()
    divergences = [log["kl"] for log in run.state.log_history if "kl" in log]
    assert divergences[0] == 0 and max(divergences) > 1e-4


def test_the_reference_of_a_sparse_checkpoint_and_of_a_policy_after_its_tail(start, tmp_path):
    """TRL patches the first as it loads it. The second is dense, and begins sparse again."""
    policy(start).save_pretrained(tmp_path / "sparse")
    AutoTokenizer.from_pretrained(start).save_pretrained(tmp_path / "sparse")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")
    for _ in range(2):
        run = dpo(start, tmp_path / "out", loaded, save_strategy="no", max_steps=4)
        Sparse24Callback.add_to(run)
        assert patched_config(run.ref_model) is None
        run.train()
        assert run.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert patched_config(loaded).phase == "dense"


def test_a_reference_of_another_name_stays(start, tmp_path):
    reference = AutoModelForCausalLM.from_pretrained(start)
    reference.save_pretrained(tmp_path / "other")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    before = weights(reference)
    Sparse24Callback.add_to(dpo(start, tmp_path, ref_model=reference))
    assert torch.equal(weights(reference), before)


def test_precomputed_references_are_those_of_the_policy(start, tmp_path):
    run = dpo(start, tmp_path, precompute_ref_log_probs=True, save_strategy="no")
    Sparse24Callback.add_to(run)
    run.train()
    assert run.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_precomputed_references_that_are_not_those_of_the_policy_are_refused(start, tmp_path):
    dense_first = policy(start, config=Sparse24Config(method="ste", dense_start=2))
    patched_later = AutoModelForCausalLM.from_pretrained(start)
    for model in (dense_first, patched_later):
        run = dpo(start, tmp_path, model, precompute_ref_log_probs=True)
        if model is patched_later:
            patch_model(model)
        with pytest.raises(ValueError, match="precompute_ref_log_probs=True: the numbers in train_dataset are not"):
            Sparse24Callback.add_to(run)


def test_a_reference_that_follows_the_masters_is_refused(start, tmp_path):
    with pytest.raises(ValueError, match="sync_ref_model=True mixes the policy's dense master weights"):
        Sparse24Callback.add_to(dpo(start, tmp_path, sync_ref_model=True))


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


@pytest.mark.parametrize("make", [sft, dpo, grpo, reward])
def test_a_plain_callback_is_refused_where_there_is_a_reference(start, tmp_path, make):
    run = make(start, tmp_path, max_steps=3, save_strategy="no")
    run.add_callback(Sparse24Callback())
    if make in (sft, reward):
        run.train()
    else:
        with pytest.raises(ValueError, match=f"{type(run.args).__name__}: TRL takes the reference model from disk"):
            run.train()


def test_a_plain_callback_is_enough_without_a_reference(start, tmp_path):
    no_divergence = grpo(start, tmp_path, beta=0.0, max_steps=3, save_strategy="no")
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(target_modules="all-linear", r=4)
    below_adapters = dpo(start, tmp_path, max_steps=3, save_strategy="no", peft_config=adapter)
    for run in (no_divergence, below_adapters):
        run.add_callback(Sparse24Callback())
        run.train()
        assert run.state.global_step == 3
