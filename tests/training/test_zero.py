"""DeepSpeed: ZeRO-1 and ZeRO-2 train as one process does with the same global batch; what is refused, and when.

DeepSpeed is in no extra of setup.cfg: it prints to stdout when it is imported. Its tests run where it is installed:

    python -m venv zero && zero/bin/pip install -e '.[test]' deepspeed
    zero/bin/python -m pytest tests/training/test_zero.py
"""

import importlib.util
import os
from types import SimpleNamespace

import pytest
import ranks
import torch
import zoo
from distributed_runs import METHODS, assert_same_tensors, settings
from torch import nn
from training_runs import arguments, decay_trainer
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from hf_sparse24 import Sparse24Config, Sparse24Controller, Sparse24Trainer, patch_model, sparse_weights

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="pip install deepspeed")

SUPPORTED = [name for name in METHODS if settings(name)["method"] not in ("step", "ast", "own")]
WORLD, STEPS, CLIP = 2, 6, 0.5


@pytest.fixture(scope="module", params=[1, 2])
def trained(request):
    """By method, what each process has in the end, and what one process has that takes all batches."""
    many = ranks.run(WORLD, _train_all, request.param, timeout=300)
    return {name: ([result[name] for result in many], _train_alone(name)) for name in SUPPORTED}


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("method", SUPPORTED)
def test_two_processes_train_as_one(trained, method):
    many, one = trained[method]
    for result in many:
        for (loss, phase, metrics), (loss1, phase1, metrics1) in zip(result["log"], one["log"]):
            assert phase == phase1
            assert loss == pytest.approx(loss1, rel=1e-6)
            assert metrics == pytest.approx(metrics1, rel=1e-5, abs=1e-6)
        assert_same_tensors(result, one, rtol=1e-5, atol=2e-6)
    for kind in ("weights", "state"):
        assert all(torch.equal(tensor, many[1][kind][name]) for name, tensor in many[0][kind].items())


def _make(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(**settings(name)))
    named = list(model.named_parameters())
    groups = [  # sparse weights in two of them: gradients are final one group after the other
        {"params": [p for n, p in named if "mlp" in n], "weight_decay": 0.1, "lr": 5e-3},
        {"params": [p for n, p in named if "mlp" not in n], "weight_decay": 0.0},
    ]
    # Adam makes steps of rounding errors in gradients that are next to zero, unless eps is well above them.
    return model, torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, foreach=False)


def _engine(model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, **config):
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage} | config.pop("zero_optimization", {}),
    } | config
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _train_all(rank, world, stage):
    return {name: _train(name, rank, stage) for name in SUPPORTED}


def _train(name, rank, stage):
    model, optimizer = _make(name)
    engine = _engine(model, optimizer, stage)
    controller = Sparse24Controller(engine, engine.optimizer, total_steps=STEPS, seed=5)
    log = []
    for step in range(STEPS):
        total = torch.zeros(())
        for micro in range(2):
            loss = engine(**zoo.batch(100 * step + 10 * rank + micro)).loss
            engine.backward(loss)
            engine.step()
            if micro == 0:
                controller.after_micro_step()
            total += loss.detach() / 2
        torch.distributed.all_reduce(total)
        assert controller.step == step + 1
        log.append((float(total) / WORLD, controller.phase, controller.metrics() | controller.layer_flip_rates()))
    controller.end()
    controller.end()
    assert "step" not in vars(engine.optimizer)
    return {"log": log, **ranks.state_of(model)}


def _train_alone(name):
    model, optimizer = _make(name)
    controller = Sparse24Controller(model, optimizer, total_steps=STEPS, seed=5)
    log = []
    for step in range(STEPS):
        total = torch.zeros(())
        for micro in range(2):
            for rank in range(WORLD):
                controller._streams.set(controller.seed, rank, step, micro)  # what that process draws
                loss = model(**zoo.batch(100 * step + 10 * rank + micro)).loss / (2 * WORLD)
                loss.backward()
                total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        log.append((float(total), controller.phase, controller.metrics() | controller.layer_flip_rates()))
    return {"log": log, **ranks.state_of(model)}


DECAY = 0.25
CONFIGS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True, "check_grad_overflow": True}},
    "offloaded": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "round-robin": {"zero_optimization": {"round_robin_gradients": True}, "bf16": {"enabled": True}},
}


@needs_deepspeed
@pytest.mark.slow
def test_decay_reaches_the_fp32_weights_and_skipped_steps_are_none():
    for results in ranks.run(3, _decay_all, timeout=300):  # pieces begin and end within weights
        assert results.keys() == CONFIGS.keys()
        for before, masks, after, steps in results.values():
            assert steps == [1, 1, 2]
            for name, mask in masks.items():
                expected = before[name] * torch.where(mask, 1.0, 1 - DECAY)
                torch.testing.assert_close(after[name], expected, rtol=1e-6, atol=1e-7)


def _decay_all(rank, world):
    return {name: _decay(config) for name, config in CONFIGS.items()}


def _decay(config):
    """A step whose gradients are zero, one whose gradients overflow, where DeepSpeed looks, and another one."""
    from deepspeed.utils import safe_get_full_fp32_param

    torch.manual_seed(0)
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="sr-ste", masked_decay=DECAY, target_modules="all-linear"))
    named = list(model.named_parameters())
    groups = [{"params": [p for n, p in named if ("mlp" in n) == is_mlp]} for is_mlp in (True, False)]
    accumulation = {"gradient_accumulation_steps": 1}
    engine = _engine(model, torch.optim.SGD(groups, lr=1.0), 2, **config, **accumulation)
    controller = Sparse24Controller(engine, engine.optimizer, total_steps=3)
    steps = []
    for factor in (0.0, float("inf"), 0.0):
        masks = {name: weight.mask() for name, weight in sparse_weights(model).items()}
        before = {name: safe_get_full_fp32_param(model.get_parameter(name)).clone() for name in masks}
        if factor == 0.0 or engine.optimizer.check_grad_overflow:
            engine.backward(engine(**zoo.batch()).loss * factor)
            engine.step()
        steps.append(controller.step)
    after = {name: safe_get_full_fp32_param(model.get_parameter(name)).clone() for name in masks}
    return before, masks, after, steps


@needs_deepspeed
@pytest.mark.slow
def test_a_trainer_trains_as_one_process_does_and_resumes(tmp_path):
    alone, _ = _trainer(0, 1, tmp_path / "one", None, None)
    zero = {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    keys = ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping")
    config = zero | dict.fromkeys(keys, "auto")
    many = ranks.run(WORLD, _trainer, tmp_path / "many", config, None, timeout=300)
    resumed = ranks.run(WORLD, _trainer, tmp_path / "many", config, "checkpoint-3", timeout=300)
    for log, loaded in many:
        assert [found["sparse_phase"] for found in log] == [1, 1, 1, 0, 0]
        for found, expected in zip(log, alone, strict=True):
            assert found == pytest.approx(expected, rel=1e-5)
        assert loaded
    assert [log for log, _ in resumed] == [log for log, _ in many]


def _trainer(rank, world, folder, config, checkpoint):
    """What it logs, and whether what it saved last loads as the model that it has."""
    if config is not None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    data = [{key: value[0] for key, value in zoo.batch(i).items()} for i in range(64)]
    sparse = Sparse24Config(method="t-sr-ste", masked_decay=0.05, mask_interval=2, dense_tail=1, weight_grad="dense")
    sizes = {"per_device_train_batch_size": 4 // world, "gradient_accumulation_steps": 2, "max_steps": 5}
    saving = {"save_strategy": "steps", "save_steps": 3, "deepspeed": config}
    given = arguments(folder, learning_rate=1e-2, adam_epsilon=1e-4, **sizes, **saving)
    trainer = Sparse24Trainer(zoo.build("llama"), given, train_dataset=data, sparse24_config=sparse)
    trainer.train(resume_from_checkpoint=folder / checkpoint if checkpoint else None)
    names = ("loss", "grad_norm", "sparse_phase", "kept_magnitude", "flip_rate")
    log = [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history[:-1]]
    unset_hf_deepspeed_config()
    saved = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-5").state_dict()
    return log, all(torch.equal(tensor, saved[name]) for name, tensor in trainer.model.state_dict().items())


# Without DeepSpeed.


def _optimizer(name: str, **attributes):
    """As much of one of DeepSpeed's, in accelerate's wrapper, as the controller looks at before it refuses it."""
    cls = type(name, (), {"__module__": "deepspeed.runtime.somewhere", **attributes})
    return SimpleNamespace(optimizer=cls())


@pytest.mark.parametrize("name", ["DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer", "ZenFlowZeroOptimizerSequential"])
def test_other_optimizers_of_deepspeed_are_refused(name):
    model, _ = _make("ste")
    with pytest.raises(ValueError, match=f"{name} is not supported: use ZeRO-1 or ZeRO-2"):
        Sparse24Controller(model, _optimizer(name), total_steps=STEPS)


@pytest.mark.parametrize("method", ["step", "ast", "own"])
def test_methods_that_need_whole_weights_are_refused(method):
    model, _ = _make(method)
    with pytest.raises(ValueError, match=f"method '{method}' .*FSDP2"):
        Sparse24Controller(model, _optimizer("DeepSpeedZeroOptimizer"), total_steps=STEPS)


def test_zero_3_is_refused_before_a_model_is_patched():
    model = zoo.build("llama")
    chosen = type("Chosen", (), {"is_zero3": lambda self: True})()
    set_hf_deepspeed_config(chosen)  # by a weak reference
    try:
        with pytest.raises(ValueError, match="ZeRO-3"):
            patch_model(model)
        assert not sparse_weights(model)
    finally:
        unset_hf_deepspeed_config()


def test_no_decay_is_searched_with_deepspeed(tmp_path):
    trainer = decay_trainer(tmp_path, "auto")
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ValueError, match=r"masked_decay='auto' .* DeepSpeed"):
        trainer.tune_masked_decay()
