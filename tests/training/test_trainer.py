"""Sparse24Trainer and Sparse24Callback among the Trainer's other features."""

import peft
import pytest
import sparse24_kernels as kernels
import torch
import zoo
from training_runs import arguments, dataset, train, weights
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from hf_sparse24 import (
    Sparse24Callback,
    Sparse24Config,
    Sparse24Controller,
    Sparse24Trainer,
    patch_model,
    sparse_weights,
    unpatch_model,
)
from hf_sparse24.run import patched_config, sparse_run


def test_patches_by_default_and_keeps_a_patched_model(tmp_path, caplog):
    run = Sparse24Trainer(zoo.build("llama"), arguments(tmp_path))
    assert "pretrained" not in caplog.text
    zoo.build("llama").save_pretrained(tmp_path / "dense")
    Sparse24Trainer(type(run.model).from_pretrained(tmp_path / "dense"), arguments(tmp_path))
    assert "LlamaForCausalLM: its weights are pretrained, and pruning them now loses" in caplog.text
    assert patched_config(run.model) == Sparse24Config() and "up_proj" in str(run.patch_report)
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="ste"))
    assert patched_config(Sparse24Trainer(model, arguments(tmp_path)).model).method == "ste"
    with pytest.raises(ValueError, match="already patched with another config"):
        Sparse24Trainer(model, arguments(tmp_path), sparse24_config=Sparse24Config())
    Sparse24Trainer(model, arguments(tmp_path), sparse24_config=Sparse24Config(method="ste", weight_grad="mvue"))
    assert patched_config(model).weight_grad == "mvue"


@pytest.mark.parametrize(
    "config",
    [
        Sparse24Config(method="t-sr-ste", mask_interval=2, dense_tail=2),
        Sparse24Config(method="step", switch_after=2, switch_by=2),
    ],
    ids=lambda config: config.method,
)
def test_a_second_run_of_a_trainer_begins_as_the_first(config, tmp_path):
    run = Sparse24Trainer(
        args=arguments(tmp_path, logging_steps=1),
        model_init=lambda: zoo.build("llama"),
        train_dataset=dataset(),
        teacher=zoo.build("llama", seed=1),
        sparse24_config=config,
    )
    logs = []
    for _ in range(2):
        run.train()
        logs.append([(log["sparse_phase"], log["loss"]) for log in run.state.log_history if "loss" in log])
        assert len(logs[-1]) == 4 and "distillation_loss" in run.state.log_history[0]
    assert logs[0] == logs[1] and len({phase for phase, _ in logs[0]}) == 2
    run.args.max_steps = 6
    run.train()
    assert run.state.global_step == 6


def test_a_model_that_is_no_longer_patched_is_not_trained(tmp_path):
    run = Sparse24Trainer(zoo.build("llama"), arguments(tmp_path), train_dataset=dataset())
    unpatch_model(run.model)
    with pytest.raises(ValueError, match="not patched; call patch_model"):
        run.train()
    patch_model(run.model)
    run.train()
    assert run.state.global_step == 4


@pytest.mark.parametrize(
    ("overrides", "passed", "message"),
    [
        ({"optim": "adafactor"}, {}, "optim='adafactor': method 'step' makes its own optimizer"),
        ({"optim_args": "x=1"}, {}, "optim_args='x=1': method 'step'"),
        ({}, {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1.0})}, "optimizer_cls_and_kwargs=.*SGD"),
    ],
)
def test_a_method_with_its_own_optimizer_ignores_no_other(tmp_path, overrides, passed, message):
    run = Sparse24Trainer(
        zoo.build("llama"),
        arguments(tmp_path, **overrides),
        train_dataset=dataset(),
        sparse24_config=Sparse24Config(method="step"),
        **passed,
    )
    with pytest.raises(ValueError, match=message):
        run.train()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("freezes", ["lora", "mlp"])
def test_where_nothing_sparse_trains_a_method_needs_no_optimizer_of_its_own(tmp_path, freezes):
    config = Sparse24Config(method="step", switch_after=1, switch_by=2)
    model = train(tmp_path, config=config).model
    sparse = {name: weight.master.clone() for name, weight in sparse_weights(model).items()}
    if freezes == "lora":
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["up_proj"]))
    for weight in sparse_weights(model).values():
        weight.master.requires_grad_(False)
    ours = Sparse24Trainer(model, arguments(tmp_path), train_dataset=dataset())
    other = Trainer(model, arguments(tmp_path), train_dataset=dataset())
    Sparse24Callback.add_to(other)
    for run in (ours, other):
        run.train()
        assert run.state.log_history[-2]["sparse_phase"] == 1
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    controller = Sparse24Controller(model, optimizer, total_steps=1)
    model(**zoo.batch()).loss.backward()
    optimizer.step()
    assert controller.metrics()["sparse_phase"] == 1
    after = [weight.master for weight in sparse_weights(model).values()]
    assert all(map(torch.equal, after, sparse.values()))


def test_gradient_checkpointing_changes_nothing(tmp_path):
    for method in ("s-ste", "t-sr-ste"):
        config = Sparse24Config(method=method, target_modules="all-linear")
        checkpointing = zoo.build("llama")
        # Renamed within Transformers 5; the old name warns there.
        enable = getattr(checkpointing, "activation_checkpointing_enable", None)
        (enable or checkpointing.gradient_checkpointing_enable)()
        plain, checkpointed = train(tmp_path, config=config), train(tmp_path, checkpointing, config)
        assert torch.equal(weights(plain.model), weights(checkpointed.model))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["s-ste", "t-sr-ste"])
def test_torch_compile(tmp_path, method):
    """Compiled without a graph break inside a layer, through the phases, to the eager result."""
    config = Sparse24Config(method=method, dense_start=1, dense_tail=1, target_modules="all-linear")
    eager = train(tmp_path, zoo.build("llama", num_hidden_layers=1), config)
    torch._dynamo.reset()
    model = zoo.build("llama", num_hidden_layers=1)
    compiled = train(tmp_path, model, config, torch_compile=True, torch_compile_backend="aot_eager")
    torch.testing.assert_close(weights(compiled.model), weights(eager.model), atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_inductor_compiles_a_layer_in_one_graph(compiler):
    model = zoo.build("llama")
    patch_model(model)
    mlp = model.model.layers[0].mlp
    x = torch.randn(2, 6, 32)
    expected = mlp(x)
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True)
    out = compiled(x)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert mlp.up_proj.weight.grad.isfinite().all()


def train_to_the_best(path, config) -> Sparse24Trainer:
    """A run of six steps whose first checkpoint of three is the best."""
    run = Sparse24Trainer(
        zoo.build("llama"),
        arguments(
            path,
            max_steps=6,
            learning_rate=1e-2,
            eval_strategy="steps",
            save_strategy="steps",
            eval_steps=2,
            save_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="eval_runtime",  # a number to set, see below
            greater_is_better=False,
        ),
        train_dataset=dataset(),
        eval_dataset=dataset(4),
        sparse24_config=config,
    )
    losses = iter([1.0, 2.0, 3.0])
    evaluate = run.evaluate
    run.evaluate = lambda *args, **kwargs: evaluate(*args, **kwargs) | {"eval_runtime": next(losses)}
    run.train()
    assert run.state.best_model_checkpoint.endswith("checkpoint-2")
    return run


def test_the_best_model_computes_as_it_did(tmp_path):
    """A best checkpoint from the sparse phase, of a run that ends dense."""
    run = train_to_the_best(tmp_path, Sparse24Config(method="t-sr-ste", dense_tail=2))
    assert sparse_run(run.model).phase == "sparse"
    best = AutoModelForCausalLM.from_pretrained(run.state.best_model_checkpoint)
    inputs = zoo.batch()
    with torch.no_grad():
        assert torch.equal(run.model.eval()(**inputs).logits, best(**inputs).logits)


def test_a_best_model_of_the_dense_tail_has_finished(tmp_path):
    run = train_to_the_best(tmp_path, Sparse24Config(method="t-sr-ste", dense_tail=5))
    assert sparse_run(run.model).phase == "dense" and sparse_run(run.model).facts.finished


def test_a_dense_best_model_of_a_run_that_ends_sparse_warns(tmp_path, caplog):
    run = train_to_the_best(tmp_path, Sparse24Config(method="ste", dense_start=5))
    assert sparse_run(run.model).phase == "dense" and not sparse_run(run.model).facts.finished
    assert "checkpoint-2 was saved in the dense phase, so the model is dense now" in caplog.text


def test_going_on_longer_starts_the_new_sparse_phase_afresh(tmp_path):
    """Resumed with more steps, a run may be sparse again where its checkpoint was dense already."""
    config = Sparse24Config(method="t-sr-ste", dense_tail=0.5, mask_interval=40)
    train(tmp_path, config=config, max_steps=4, learning_rate=0.05, save_strategy="steps", save_steps=3)
    run = Sparse24Trainer(
        zoo.build("llama"), arguments(tmp_path, max_steps=20), train_dataset=dataset(), sparse24_config=config
    )

    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            self.masks = [
                (weight.mask(), kernels.transposable_mask(weight.parameter))
                for weight in sparse_weights(model).values()
            ]
            control.should_training_stop = True

    stop = Stop()
    run.add_callback(stop)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert all(torch.equal(mask, fresh) for mask, fresh in stop.masks)


def test_flip_rates_logged_by_the_epoch_are_fresh(tmp_path):
    run = train(tmp_path, max_steps=-1, num_train_epochs=3, logging_strategy="epoch", learning_rate=1e-2)
    rates = [log["flip_rate"] for log in run.state.log_history if "loss" in log]
    assert len(set(rates)) == 3
