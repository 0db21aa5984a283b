"""Distillation: its loss against the formula, written plainly, and a teacher among the Trainer's other features."""

import math

import peft
import pytest
import ranks
import torch
import zoo
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from training_runs import arguments, weights
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast, Trainer

from hf_sparse24 import (
    DistillationConfig,
    Sparse24Callback,
    Sparse24Config,
    Sparse24Trainer,
    distill,
    patch_model,
    sparse_weights,
)
from hf_sparse24.facts import MARKER
from hf_sparse24.training.distillation import KLDivergence, find_distiller

PEFT_WARNS = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
GIVEN = DistillationConfig(weight=0.7, temperature=3.0)


def batch(rows: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows with labels for some of their tokens: every row for another number of them."""
    made = zoo.batch(seed, rows)
    for row in range(rows):
        made["labels"][row, : 2 + row % 5] = -100
    return made


def dataset(rows: int = 32) -> Dataset:
    return Dataset.from_dict({name: x.tolist() for name, x in batch(rows).items()})


def trainer(tmp_path, model=None, teacher=None, distillation=None, config=None, **overrides) -> Sparse24Trainer:
    passed = {name: overrides.pop(name) for name in ("processing_class", "compute_loss_func") if name in overrides}
    return Sparse24Trainer(
        model or zoo.build("llama"),
        arguments(tmp_path, **overrides),
        train_dataset=dataset(),
        eval_dataset=dataset(6),
        sparse24_config=config or (None if model and sparse_weights(model) else Sparse24Config(method="ste")),
        teacher=zoo.build("llama", seed=1) if teacher is None else teacher or None,
        distillation=distillation,
        **passed,
    )


def logged(run: Trainer, name: str = "distillation_loss") -> list[float]:
    return [log[name] for log in run.state.log_history if "loss" in log]


def train_in_order(run: Trainer, rows: dict[str, torch.Tensor]) -> None:
    run.train_dataset = Dataset.from_dict({name: x.tolist() for name, x in rows.items()})
    run._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(run.train_dataset)
    run.train()


def plainly(student, teacher, inputs, config, shifted) -> dict[str, torch.Tensor]:
    """The two terms as sums over tokens, from whole tensors."""
    kept = inputs["labels"][:, 1:] != -100 if shifted else inputs["labels"] != -100
    call = {"input_ids": inputs["input_ids"]}
    ours, theirs = student.eval()(**call), teacher(**call)  # in evaluation the student has no teacher
    student.train()
    cut = (lambda x: x[:, :-1][kept]) if shifted else lambda x: x[kept]
    temperature = config.temperature
    labels = (inputs["labels"][:, 1:] if shifted else inputs["labels"])[kept]
    return {
        "cross_entropy": cross_entropy(cut(ours.logits), labels, reduction="sum"),
        "distillation_loss": temperature**2
        * kl_div(
            log_softmax(cut(ours.logits) / temperature, -1),
            log_softmax(cut(theirs.logits) / temperature, -1),
            log_target=True,
            reduction="sum",
        ),
    }


def test_the_gradient_of_the_kl_divergence():
    student, teacher = torch.randn(2, 5, 7, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: KLDivergence.apply(x, teacher, 2.5), student.requires_grad_())
    rounded = student.detach().bfloat16().requires_grad_()
    for x in (student, rounded):
        (-3 * KLDivergence.apply(x, teacher.to(x.dtype), 2.5)).backward()
    assert rounded.grad.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.grad.double(), student.grad, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma2", "modernbert", "deberta-v2", "roberta"])
@pytest.mark.parametrize("counts", [True, False])
def test_the_loss_is_the_formula(tmp_path, name, counts):
    teacher, inputs = zoo.build(name, seed=1), batch(3)
    run = trainer(tmp_path, zoo.build(name), teacher, GIVEN)
    terms = plainly(run.model, teacher.eval(), inputs, GIVEN, shifted=name not in zoo.MASKED)
    returns_mean = name in ("deberta-v2", "roberta")  # whatever a Trainer passes
    items = 20.0 if counts and not returns_mean else counted(inputs, name)
    expected = (0.3 * terms["cross_entropy"] + 0.7 * terms["distillation_loss"]) / items
    loss = run.compute_loss(run.model, inputs, num_items_in_batch=torch.tensor(20.0) if counts else None)
    torch.testing.assert_close(loss, expected)
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    found, wanted = (torch.autograd.grad(value, parameters, allow_unused=True) for value in (loss, expected))
    torch.testing.assert_close(found, wanted)


def counted(inputs, name) -> float:
    labels = inputs["labels"] if name in zoo.MASKED else inputs["labels"][:, 1:]
    return float((labels != -100).sum())


def test_accumulation_equals_one_big_batch(tmp_path):
    whole, parts = (
        trainer(tmp_path, distillation=GIVEN, optim="sgd", learning_rate=0.1, **sizes)
        for sizes in (
            {"per_device_train_batch_size": 4},
            {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        )
    )
    start = weights(whole.model).clone()
    whole.train()
    parts.train()
    torch.testing.assert_close(weights(whole.model), weights(parts.model))
    assert (weights(whole.model) - start).abs().max() > 1e-3
    for name in ("cross_entropy", "distillation_loss"):
        assert logged(whole, name) == pytest.approx(logged(parts, name), rel=1e-5) and len(logged(whole, name)) == 4


@pytest.mark.parametrize("name", ["llama", "deberta-v2"])
def test_the_log_has_the_parts_of_the_loss(tmp_path, name):
    """deberta-v2 returns means over micro-batches, which the Trainer adds up."""
    run = trainer(
        tmp_path, zoo.build(name), zoo.build(name, seed=1), GIVEN, gradient_accumulation_steps=2, logging_steps=2
    )
    run.train()
    logs = [log for log in run.state.log_history if "loss" in log]
    assert len(logs) == 2
    for log in logs:
        parts = 0.3 * log["cross_entropy"] + 0.7 * log["distillation_loss"]
        assert log["loss"] == pytest.approx(parts, rel=1e-5)
        assert 3 < log["cross_entropy"] < 12


def test_evaluation_is_without_the_teacher(tmp_path):
    run = trainer(tmp_path)
    plain = Trainer(run.model, run.args, eval_dataset=dataset(6))
    find_distiller(run.model).teacher = None
    assert run.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]


def test_the_teacher_stays_as_it_is_and_out_of_checkpoints(tmp_path):
    teacher = zoo.build("llama", seed=1)
    before = weights(teacher)
    run = trainer(tmp_path / "with", teacher=teacher, save_strategy="steps", save_steps=4)
    run.train()
    assert torch.equal(weights(teacher), before)
    assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "with" / "checkpoint-4")
    assert torch.equal(weights(saved), weights(run.model))
    (file,) = (tmp_path / "with").rglob("*.safetensors")
    own = run.model.state_dict()
    assert all(name in own or name.endswith(MARKER) for name in load_file(file))


def test_a_teacher_by_its_directory_in_the_dtype_that_it_was_saved_in(tmp_path):
    teacher = zoo.build("llama", seed=1).to(torch.bfloat16)
    patch_model(teacher, Sparse24Config(method="s-ste"))
    teacher.save_pretrained(tmp_path / "teacher")
    run = trainer(tmp_path, teacher=tmp_path / "teacher")
    assert {p.dtype for p in find_distiller(run.model).teacher.parameters()} == {torch.bfloat16}
    assert len(sparse_weights(find_distiller(run.model).teacher)) == 6
    run.train()


@PEFT_WARNS
def test_adapters_learn_from_a_teacher(tmp_path):
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="fixed-mask"))
    base = weights(model)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    run = trainer(tmp_path, model, distillation=DistillationConfig(weight=1.0), max_steps=20, learning_rate=1e-2)
    run.train()
    assert logged(run)[-1] < logged(run)[0]
    assert torch.equal(weights(model.unload()), base)


@pytest.fixture(scope="module")
def tokenizer():
    """`zoo.VOCAB - 6` tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({f"w{i}": i for i in range(zoo.VOCAB - 6)}, unk_token="w0"))
    )


def test_vocabularies_may_differ_by_padding(tmp_path, tokenizer):
    teacher = zoo.build("llama", seed=1)
    teacher.resize_token_embeddings(zoo.VOCAB - 4, mean_resizing=False)
    with pytest.raises(ValueError, match=r"96, .*92, and no tokenizer"):
        trainer(tmp_path, teacher=teacher)
    run = trainer(tmp_path, teacher=teacher, processing_class=tokenizer)
    run.compute_loss(run.model, {name: x.clamp(max=90) for name, x in batch().items()})
    teacher.resize_token_embeddings(zoo.VOCAB - 8, mean_resizing=False)
    with pytest.raises(ValueError, match="one of 88, and the tokenizer has 90 tokens"):
        trainer(tmp_path, teacher=teacher, processing_class=tokenizer)


def test_a_teacher_with_other_tokens_is_refused(tmp_path, tokenizer):
    zoo.build("llama", seed=1).save_pretrained(tmp_path / "teacher")
    trainer(tmp_path, teacher=tmp_path / "teacher", processing_class=tokenizer)  # it has no tokenizer to compare
    tokenizer.save_pretrained(tmp_path / "teacher")
    trainer(tmp_path, teacher=tmp_path / "teacher", processing_class=tokenizer)
    ids = {f"w{i}": i for i in range(10)} | {"w11": 10, "w10": 11}
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(ids, unk_token="w0")))
    other.save_pretrained(tmp_path / "teacher")
    with pytest.raises(ValueError, match=r"id 1[01] is 'w1[01]' there and 'w1[01]' here"):
        trainer(tmp_path, teacher=tmp_path / "teacher", processing_class=tokenizer)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weight": 1.5}, r"weight=1.5: must be in \(0, 1\]"),
        ({"weight": "much"}, "weight='much': must be a finite number"),
        ({"temperature": 0}, "temperature=0: must be a finite number above 0"),
    ],
)
def test_wrong_settings(values, message):
    with pytest.raises(ValueError, match=message):
        DistillationConfig(**values)


def classifier():
    return {"model": AutoModelForSequenceClassification.from_config(zoo.build("llama").config)}


def below_an_adapter():
    model = zoo.build("llama")
    patch_model(model)
    return {"model": peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear")), "teacher": model}


@PEFT_WARNS
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"teacher": False, "distillation": GIVEN}, "distillation=.* without a teacher"),
        (below_an_adapter, "shares weights"),
        (classifier, "LlamaForSequenceClassification is no causal or masked language model"),
        (lambda: {"teacher": zoo.build("bert")}, "teacher=BertForMaskedLM"),
        (lambda: {"teacher": torch.nn.Linear(2, 2)}, "Linear is no causal or masked language model"),
        (lambda: {"label_smoothing_factor": 0.1}, "no loss, .*label_smoothing_factor"),
        (lambda: {"compute_loss_func": lambda *args, **kwargs: 0}, "no loss, .*compute_loss_func"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **make()).train()


def test_batches_without_labels_are_refused(tmp_path):
    run = trainer(tmp_path)
    inputs = batch()
    outputs = run.model.eval()(**inputs)
    model, distiller = run.model.train(), find_distiller(run.model)
    with pytest.raises(ValueError, match=r"a label for each of the logits.*and there are none"):
        distiller.add_teacher(outputs.loss, outputs.logits, {"input_ids": inputs["input_ids"]})
    with pytest.raises(ValueError, match=r"no logits, .*use_liger_kernel"):
        distiller(model, (), inputs, {"loss": outputs.loss, "logits": None})
    with pytest.raises(ValueError, match=r"no loss, .*pass labels"):
        model(input_ids=inputs["input_ids"])


def test_any_trainer_and_any_loop_learn_from_a_teacher_as_ours_does(tmp_path):
    """The same weights to the last bit, with accumulation; the parts are logged by the callback, and averaged here."""
    sizes = {"gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    ours = trainer(tmp_path / "ours", distillation=GIVEN, **sizes)
    ours.train()
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="ste"))
    distill(model, zoo.build("llama", seed=1), GIVEN)
    plain = Trainer(model, arguments(tmp_path / "plain", **sizes), train_dataset=dataset())
    Sparse24Callback.add_to(plain)
    plain.train()
    assert torch.equal(weights(model), weights(ours.model))
    assert logged(ours) == logged(plain) and len(logged(ours)) == 3

    looped = zoo.build("llama")
    patch_model(looped, Sparse24Config(method="ste"))
    distiller = distill(looped, zoo.build("llama", seed=1), GIVEN)
    inputs = batch(4)
    terms = plainly(looped, zoo.build("llama", seed=1).eval(), inputs, GIVEN, shifted=True)
    total = 0.3 * terms["cross_entropy"] + 0.7 * terms["distillation_loss"]
    torch.testing.assert_close(looped(**inputs).loss, total / counted(inputs, "llama"))
    means = distiller.means()
    torch.testing.assert_close(means["cross_entropy"], (terms["cross_entropy"] / counted(inputs, "llama")).detach())
    with pytest.raises(ValueError, match="has a teacher already"):
        distill(looped, zoo.build("llama", seed=1))
    distiller.end()
    assert find_distiller(looped) is None
    torch.testing.assert_close(looped(**inputs).loss, terms["cross_entropy"] / counted(inputs, "llama"))


@pytest.mark.parametrize("name", ["llama", "deberta-v2"])
def test_a_loss_that_is_no_number_leaves_later_ones_as_they_are(tmp_path, name):
    """A first micro-batch of fp16 may overflow."""
    losses = []
    for spoilt in (False, True):
        run = trainer(tmp_path, zoo.build(name), zoo.build(name, seed=1), GIVEN)
        if spoilt:
            handle = run.model.register_forward_hook(lambda *_: _[2] | {"loss": _[2]["loss"] * torch.nan}, prepend=True)
            assert run.compute_loss(run.model, batch(3), num_items_in_batch=torch.tensor(20.0)).isnan()
            handle.remove()
        losses.append(run.compute_loss(run.model, batch(3), num_items_in_batch=torch.tensor(20.0)))
    assert torch.equal(*losses)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_steps_without_labels_leave_finite_weights(tmp_path, accumulated):
    """Such as rows that were cut inside their prompts."""
    run = trainer(
        tmp_path, distillation=GIVEN, max_steps=6, gradient_accumulation_steps=accumulated, learning_rate=1e-2
    )
    rows = batch(48)
    rows["labels"][torch.arange(48) // 2 % 5 < 3] = -100  # steps of none, of some, and of all micro-batches with labels
    train_in_order(run, rows)
    logs = [log for log in run.state.log_history if "loss" in log]
    terms = ["cross_entropy", "distillation_loss"]
    assert weights(run.model).isfinite().all()
    assert all(math.isfinite(log[name]) for log in logs for name in terms)
    assert [log["cross_entropy"] > 0 for log in logs] == [log["loss"] > 0 for log in logs]
    assert {log["loss"] > 0 for log in logs} == {True, False}


def test_a_micro_batch_without_labels_counts_for_no_mean(tmp_path):
    """But the means have all names, since processes average them one by one."""
    model = zoo.build("llama").train()
    distiller = distill(model, zoo.build("llama", seed=1), GIVEN)
    empty = batch() | {"labels": torch.full_like(batch()["labels"], -100)}
    model(**empty)
    assert distiller.means() == {"cross_entropy": 0, "distillation_loss": 0}
    model(**batch())
    means = distiller.means()
    distiller.reset()
    model(**batch())
    assert means == distiller.means()


def _logs_of_a_process(rank, world, folder):
    run = trainer(folder, max_steps=2, per_device_train_batch_size=1)
    rows = batch(8)
    rows["labels"][1::2] = -100  # the second process has none
    train_in_order(run, rows)
    return [log for log in run.state.log_history if "loss" in log]


@pytest.mark.slow
def test_processes_log_the_parts_of_one_loss(tmp_path):
    """Where one has no labels, too: a mean that it left out would be one that the other waits for."""
    first, second = ranks.run(2, _logs_of_a_process, tmp_path)
    for log, other in zip(first, second, strict=True):
        assert log["cross_entropy"] == other["cross_entropy"] > 4
        assert log["loss"] == pytest.approx(log["cross_entropy"] / 3 + log["distillation_loss"] * 2 / 3)
