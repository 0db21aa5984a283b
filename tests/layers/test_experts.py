"""Stacked experts, the 3-D Parameters of mixture-of-experts models: sparse by every method, whatever reads them."""

import copy
import io
import threading
from itertools import cycle

import pytest
import torch
import zoo
from method_runs import dataset, every_method, loop, method_config, run_steps, trainer
from safetensors.torch import load_file
from sparse_models import assert_same_state, logits
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from hf_sparse24 import (
    METHODS,
    Sparse24Callback,
    Sparse24Config,
    Sparse24Trainer,
    export_model,
    oneshot,
    pack_model,
    patch_model,
    unpatch_model,
)
from hf_sparse24.layers.experts import SparseExperts, find_input_dim
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.patching.surgery import set_phase
from hf_sparse24.tools import doctor
from hf_sparse24.weights.sparse_weight import SparseWeight, sparse_weights

EXPERTS = "model.layers.1.mlp.experts"
OF_LAYERS = {"own"}  # multiplies by another weight in the backward pass, which only a layer can
EVERY_METHOD = [("gpt_oss", method) for method in sorted(set(METHODS) - OF_LAYERS)]


def patched(name: str = "qwen3_moe", method: str = "s-ste") -> PreTrainedModel:
    """A model in which stacked experts are sparse, and nothing else."""
    model = zoo.build(name)
    stacks = [name.removesuffix(".weight") for name, parameter in model.named_parameters() if parameter.dim() == 3]
    patch_model(model, method_config(method).replace(target_modules=stacks))
    return model


def emulated(model: PreTrainedModel) -> PreTrainedModel:
    """The dense model whose Parameters are the pruned weights: the same GEMMs, and the same gradients."""
    return unpatch_model(copy.deepcopy(model))


def assert_same_step(model: nn.Module, other: nn.Module) -> None:
    """One forward and backward pass, bit for bit."""
    losses = [m(**zoo.batch()).loss for m in (model, other)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    theirs = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        ours, expected = parameter.grad, theirs[name].grad
        assert (ours is None) == (expected is None) and (ours is None or torch.equal(ours, expected)), name


# What is computed.


@pytest.mark.parametrize(
    ("name", "method"), [*EVERY_METHOD, *((name, "s-ste") for name in zoo.MOE if name != "gpt_oss")]
)
def test_loss_and_gradients_are_those_of_the_pruned_weights(name, method):
    model = patched(name, method)
    weights = sparse_weights(model)
    assert weights and all(weight.is_stack for weight in weights.values())
    for weight in weights.values():
        pruned = weight.pruned()
        assert is_nm_sparse(pruned, dim=weight.input_dim) and not torch.signbit(pruned[pruned == 0]).any()
        assert not is_nm_sparse(weight.parameter, dim=weight.input_dim)
    assert_same_step(model, emulated(model))
    assert all(weight.parameter.grad.any() for weight in weights.values())


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_every_implementation_of_experts_computes_with_pruned_weights(implementation):
    reference = patched("gpt_oss")
    reference.set_experts_implementation("eager")
    model = patched("gpt_oss")
    model.set_experts_implementation(implementation)
    other = emulated(model)
    assert other.config._experts_implementation == implementation
    assert_same_step(model, other)
    torch.testing.assert_close(logits(model), logits(reference))


@every_method
def test_every_method_trains_experts_or_says_why_not(method):
    model = zoo.build("mixtral")
    report = patch_model(model, method_config(method))
    if method in OF_LAYERS:
        assert "another weight in the backward pass" in report.skipped[f"{EXPERTS}.gate_up_proj"]
        return
    optimizer, controller = loop(model)
    before = model(**zoo.batch()).loss.item()
    run_steps(model, optimizer, controller, 8)
    assert model(**zoo.batch()).loss.item() < before
    assert {"kept_magnitude", "sparse_phase", "flip_rate"} <= set(controller.metrics())
    assert f"{EXPERTS}.gate_up_proj" in controller.layer_flip_rates()
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), logits(model))
    run_steps(twin, *loop(twin), 1)
    assert not torch.equal(logits(twin), logits(model))


def test_a_scale_is_one_per_expert():
    weight = sparse_weights(patched())[f"{EXPERTS}.down_proj"]
    assert weight.state["scale"].shape == (4,) and len(set(weight.state["scale"].tolist())) == 4


def test_the_dense_phase_computes_with_the_parameters():
    model = zoo.build("mixtral")
    before = logits(model)
    patch_model(model, Sparse24Config(target_modules="gate_up_proj"))
    assert not torch.equal(logits(model), before)
    set_phase(model, "dense")
    assert torch.equal(logits(model), before)


def test_autocast_prunes_in_the_masters_precision():
    model = patched("gpt_oss", "t-sr-ste")
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_step(model, emulated(model))
    assert all(weight.parameter.grad.dtype == torch.float32 for weight in sparse_weights(model).values())


def test_gradient_checkpointing_changes_nothing():
    model, other = patched("olmoe"), patched("olmoe")
    enable = getattr(model, "activation_checkpointing_enable", None)  # older Transformers call it after gradients
    (enable or model.gradient_checkpointing_enable)()
    assert_same_step(model, other)


def test_a_block_that_is_checkpointed_by_hand_reads_the_same_weight_again():
    block = patched("mixtral").model.layers[0].mlp
    x = torch.randn(1, 5, 32, requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    recomputed, block.experts.gate_up_proj.grad = block.experts.gate_up_proj.grad, None
    block(x).sum().backward()
    assert torch.equal(block.experts.gate_up_proj.grad, recomputed)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own, after breaks
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])  # the former breaks the graph within the forward
def test_compiled(implementation):
    model = patched("mixtral")
    model.set_experts_implementation(implementation)
    block, x = model.model.layers[0].mlp, torch.randn(1, 5, 32)
    output = block(x)
    output.sum().backward()
    expected = block.experts.down_proj.grad.clone()
    model.zero_grad()
    compiled = torch.compile(block, backend="eager", fullgraph=implementation != "eager")
    torch.testing.assert_close(compiled(x), output)
    compiled(x).sum().backward()
    torch.testing.assert_close(block.experts.down_proj.grad, expected)


# When it is pruned, and who sees what.


def count_prunings(monkeypatch) -> list[str]:
    calls: list[str] = []
    original = SparseWeight._pruned_to
    monkeypatch.setattr(
        SparseWeight, "_pruned_to", lambda self, *arguments: calls.append(self.name) or original(self, *arguments)
    )
    return calls


def test_a_forward_prunes_once_however_many_experts_read(monkeypatch):
    model = patched("mixtral")
    model.set_experts_implementation("eager")
    calls = count_prunings(monkeypatch)
    for _ in range(2):
        model(**zoo.batch()).loss.backward()
    assert calls == ["gate_up_proj", "down_proj"] * 4  # two layers, two passes: nothing is kept without a controller
    calls.clear()
    logits(model)
    logits(model)
    assert len(calls) == 4
    optimizer, controller = loop(model.train())
    for weight in sparse_weights(model).values():
        weight.clear_encodings()
    calls.clear()
    run_steps(model, optimizer, controller, 2)  # of two micro-batches each
    assert len(calls) == 2 * 4


def test_outside_of_its_forward_the_name_is_the_parameter():
    model = patched()
    experts = model.get_submodule(EXPERTS)
    names = [name for name, _ in experts.named_parameters()]
    assert names == ["gate_up_proj", "down_proj"]
    assert model.get_parameter(f"{EXPERTS}.gate_up_proj") is experts.gate_up_proj is experts._parameters["gate_up_proj"]
    seen = []
    experts.act_fn.register_forward_hook(lambda *_: seen.append(experts.gate_up_proj))
    model.set_experts_implementation("eager")
    logits(model)
    assert seen and all(is_nm_sparse(weight) for weight in seen)
    experts.act_fn.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model)
    assert isinstance(experts.gate_up_proj, nn.Parameter)
    experts.gate_up_proj = nn.Parameter(torch.zeros_like(experts.gate_up_proj))
    assert not experts._parameters["gate_up_proj"].any()


def test_threads_that_share_a_model_do_not_disturb_each_other():
    model = patched("mixtral")
    model.set_experts_implementation("eager")
    experts, x = model.model.layers[0].mlp.experts, torch.randn(4, 32)
    routing = torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5)
    expected = experts(x, *routing)

    def run_in_another_thread(*_) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        with torch.no_grad():
            thread = threading.Thread(target=lambda: experts(x, *routing))
            thread.start()
            thread.join()

    experts.act_fn.register_forward_hook(run_in_another_thread)
    output = experts(x, *routing)
    assert torch.equal(output, expected)
    output.sum().backward()
    assert experts.down_proj.grad is not None and isinstance(experts.down_proj, nn.Parameter)


def test_a_replica_of_data_parallel_computes_with_its_own_weights():
    experts = patched("mixtral").model.layers[0].mlp.experts
    replica = experts._replicate_for_data_parallel()
    for name in ("gate_up_proj", "down_proj"):
        setattr(replica, name, 2 * experts.get_parameter(name))  # a tensor, as torch sets it
    inputs = torch.randn(4, 32), torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5)
    assert not torch.equal(replica(*inputs), experts(*inputs)) and replica.pruned is not experts.pruned


# What is saved.


@pytest.mark.parametrize(("name", "method"), list(zip(zoo.MOE, cycle(["t-sr-ste", "s-ste"]))))
def test_saved_reloaded_exported_and_unpatched(name, method, tmp_path):
    """Transformers splits and renames experts for a file; state beside them is left alone."""
    model = zoo.build(name)
    stock = set(zoo.build(name).state_dict())
    patch_model(model, method_config(method))
    optimizer, controller = loop(model)
    run_steps(model, optimizer, controller, 1)
    controller.end()
    expected = logits(model)
    assert {key for key in model.state_dict() if not key.rpartition(".")[2].startswith(("scale", "mask_bits"))} == stock

    model.save_pretrained(tmp_path / "saved")
    reloaded, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(loading.values())
    assert_same_state(reloaded, model)
    assert torch.equal(logits(reloaded), expected)
    reloaded.train()(**zoo.batch()).loss.backward()

    export_model(model, tmp_path / "export")
    exported, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(loading.values()) and not sparse_weights(exported)
    assert torch.equal(logits(exported), expected)
    zoo.build(name).save_pretrained(tmp_path / "stock")
    ours, theirs = (load_file(tmp_path / place / "model.safetensors") for place in ("export", "stock"))
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}
    for key, weight in sparse_weights(model).items():
        matrices = exported.get_parameter(key).reshape(-1, *weight.parameter.shape[-2:])
        assert all(is_nm_sparse(matrix, dim=weight.input_dim) for matrix in matrices)

    unpatch_model(model)
    assert not any(isinstance(module, SparseExperts) for module in model.modules())
    assert torch.equal(logits(model), expected) and set(model.state_dict()) == stock


def plain_trainer(model: nn.Module, output_dir, **arguments) -> Trainer:
    args = TrainingArguments(
        str(output_dir), max_steps=8, report_to="none", disable_tqdm=True, use_cpu=True, **arguments
    )
    run = Trainer(model, args, train_dataset=dataset(), eval_dataset=dataset(8))
    Sparse24Callback.add_to(run)
    return run


def test_another_trainer_with_the_callback_resumes_as_well(tmp_path):
    whole = plain_trainer(patched(), tmp_path, save_strategy="steps", save_steps=5)
    whole.train()
    resumed = plain_trainer(patched(), tmp_path)
    with torch.no_grad():
        sparse_weights(resumed.model)[f"{EXPERTS}.down_proj"].parameter.zero_()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert_same_state(resumed.model, whole.model)


@pytest.mark.parametrize("method", ["s-ste", "t-sr-ste"])
def test_a_resumed_run_equals_an_uninterrupted_one(method, tmp_path):
    whole = trainer(zoo.build("qwen3_moe"), tmp_path, method, save_strategy="steps", save_steps=5, max_steps=8)
    whole.train()
    resumed = trainer(zoo.build("qwen3_moe", seed=9), tmp_path, method, max_steps=8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert_same_state(resumed.model, whole.model)
    assert any(isinstance(module, SparseExperts) for module in whole.model.modules())


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    steps = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    args = TrainingArguments(str(tmp_path), report_to="none", disable_tqdm=True, use_cpu=True, **steps, **best)
    run = Sparse24Trainer(zoo.build("mixtral"), args, train_dataset=dataset(), eval_dataset=dataset(8))
    run.train()
    best = AutoModelForCausalLM.from_pretrained(run.state.best_model_checkpoint)
    assert not run.state.best_model_checkpoint.endswith("-3")
    assert_same_state(run.model, best)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dense_checkpoint_is_made_sparse_while_it_loads(dtype, tmp_path):
    dense = zoo.build("mixtral")
    dense.save_pretrained(tmp_path)  # with the experts apart
    loaded, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=dtype, quantization_config=method_config("s-ste"), output_loading_info=True
    )
    assert not any(loading.values())
    dense.to(dtype)
    patch_model(dense, method_config("s-ste"))
    assert_same_state(loaded, dense)
    assert all(weight.state["scale"].dtype == torch.float32 for weight in sparse_weights(loaded).values())


def test_pickled_and_copied():
    model = patched("mixtral", "t-sr-ste")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(model)):
        assert_same_state(other, model)
        assert torch.equal(logits(other), logits(model))
        assert isinstance(other.model.layers[0].mlp.experts, type(zoo.build("mixtral").model.layers[0].mlp.experts))


def test_a_part_that_is_unpatched_leaves_the_rest_sparse(tmp_path):
    model = zoo.build("mixtral")
    patch_model(model)
    unpatch_model(model.model.layers[0])
    assert list(sparse_weights(model)) == [f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"]
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert list(sparse_weights(reloaded)) == list(sparse_weights(model))
    assert torch.equal(logits(reloaded), logits(model))


def test_state_that_no_method_has_made_is_refused_and_names_the_expert():
    model = patched()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state[f"{EXPERTS}.scale_of_down_proj"][2] = -1
    with pytest.raises(RuntimeError, match=r"experts.down_proj: expert 2: scale is -1"):
        model.load_state_dict(state)
    sparse_weights(model)[f"{EXPERTS}.down_proj"].set_state({"scale": torch.ones(3)})
    with pytest.raises(ValueError, match=r"scale is of shape \(3,\), not one for each of 4 experts"):
        export_model(model, "never-written")


# What becomes sparse.


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({"target_modules": "mlp"}, {"gate_up_proj", "down_proj"}),
        ({"target_modules": "gate_up_proj"}, {"gate_up_proj"}),
        ({"target_modules": ["experts"]}, {"gate_up_proj", "down_proj"}),
        ({"target_modules": "experts", "exclude_modules": "experts.down_proj"}, {"gate_up_proj"}),
        ({"target_modules": r".*\.experts\.g.*"}, {"gate_up_proj"}),
        ({"target_modules": "all-linear", "exclude_modules": ["experts"]}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_a_stack_is_called_by_its_own_name_or_by_its_modules(settings, ends):
    model = zoo.build("olmoe")
    report = patch_model(model, Sparse24Config(**settings))
    assert {name.rpartition(".")[2] for name in report.patched} == ends
    assert len(report.patched) == 2 * len(ends)
    assert patch_model(model).patched == report.patched  # again: nothing new
    assert torch.equal(logits(copy.deepcopy(model)), logits(unpatch_model(model)))


def test_routers_are_never_touched():
    for name in zoo.MOE:
        report = patch_model(zoo.build(name), Sparse24Config(target_modules=r".*"))
        assert not any(part in layer for layer in report.patched for part in ("router", "gate.", "mlp.gate_weight"))
        assert not any(layer.endswith((".gate", "_gate")) for layer in report.patched)


def test_the_report_counts_stacks_and_says_how_their_gradients_differ():
    report = patch_model(zoo.build("mixtral"), Sparse24Config(method="s-ste"))
    assert len(report.patched) == 4 and report.patched_parameters == 2 * 2 * (128 * 32 + 32 * 64)
    assert "yes; exact gradients, no mvue" in str(report)
    assert "exact" not in str(patch_model(zoo.build("mixtral"), Sparse24Config(method="ste")))


@pytest.mark.parametrize(
    ("settings", "overrides", "reason"),
    [
        ({"activations": "2:4"}, {}, "activations cannot be pruned"),
        ({"fp8": True}, {}, "FP8 cannot be simulated"),
        ({}, {"moe_intermediate_size": 18}, "input size 18 is not a multiple of 4"),
        ({"method": "own"}, {}, "another weight in the backward pass"),
    ],
)
def test_what_cannot_be_done_leaves_experts_dense_with_the_reason(settings, overrides, reason):
    model = zoo.build("qwen3_moe", **overrides)
    report = patch_model(model, Sparse24Config(target_modules="all-linear", **settings))
    assert reason in report.skipped[f"{EXPERTS}.down_proj"]
    assert (f"{EXPERTS}.gate_up_proj" in report.patched) == bool(overrides)  # [36, 32] is fine, [32, 18] is not
    assert "model.layers.0.self_attn.q_proj" in report.patched


class EinsumExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x):
        return torch.einsum("eti,eio->eto", x, self.up)


class MatmulExperts(EinsumExperts):
    def forward(self, x):
        return (x @ self.up).relu()


class TransposedExperts(EinsumExperts):
    def forward(self, x):
        return torch.bmm(x.clone(), self.up.transpose(1, 2))


class Block(nn.Module):
    def __init__(self, experts: nn.Module):
        super().__init__()
        self.experts = experts


class ReadingBlock(Block):
    def forward(self, x):
        return x @ self.experts.up[0]


def test_what_an_unknown_class_multiplies_by_is_found_in_its_forward_or_it_stays_dense():
    dims = [find_input_dim(cls(), "up") for cls in (MatmulExperts, TransposedExperts, EinsumExperts)]
    assert dims == [-2, -1, None]
    blocks = [Block(MatmulExperts()), Block(EinsumExperts()), ReadingBlock(MatmulExperts())]
    model = nn.ModuleList(blocks)
    report = patch_model(model, Sparse24Config(method="ste", target_modules="all-linear"))
    assert report.patched == ("0.experts.up",)
    assert report.skipped["1.experts.up"] == "EinsumExperts does not say how it multiplies by up"
    assert report.skipped["2.experts.up"] == "ReadingBlock uses its weight without calling it"
    x = torch.randn(2, 3, 8)
    assert torch.equal(blocks[0].experts(x), (x @ sparse_weights(model)["0.experts.up"].pruned()).relu())


# Beside the Trainer.


def test_doctor_lists_experts_as_dense_math():
    model = zoo.build("mixtral").bfloat16()
    patch_model(model, Sparse24Config(target_modules="all-linear"))
    rows = doctor.gains(model, 32, torch.bfloat16, torch.device("cpu"))
    assert sum(int(row[0]) for row in rows) == len(sparse_weights(model))
    (row,) = [row for row in rows if row[1] == "2 x 128 x 32"]
    assert row == ["2", "2 x 128 x 32", *["dense: stacked experts: no sparse grouped GEMM"] * 3, "1.00x"]
    without = zoo.build("mixtral")
    patch_model(without, Sparse24Config())
    assert doctor.problems(without, 32, torch.bfloat16) == []


def test_oneshot_says_that_it_does_not_calibrate_experts():
    model = zoo.build("mixtral")
    data = [zoo.batch()["input_ids"]]
    with pytest.raises(ValueError, match=r"is a stack of experts.*exclude_modules=\['down_proj', 'gate_up_proj'\]"):
        oneshot(model, data, Sparse24Config(method="fixed-mask", target_modules="all-linear"))
    assert not sparse_weights(model)
    oneshot(model, data, Sparse24Config(method="fixed-mask", target_modules="all-linear", exclude_modules=["experts"]))
    assert len(sparse_weights(model)) == 8


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
        {"target_modules": ["q_proj", "w1", "w2", "w3"]},  # as Mixtral's experts were called
        {"target_modules": "all-linear"},
    ],
)
def test_an_adapter_of_the_parameters_themselves_is_refused_before_anything_is_changed(targets, packed):
    peft = pytest.importorskip("peft")
    model = patched("mixtral")
    if packed:
        pack_model(model)
    classes = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=r"names model\.layers\.0\.mlp\.experts\..*is 2:4.* unpatch_model\(model\)"):
        peft.get_peft_model(model, peft.LoraConfig(**targets))
    assert {name: type(module) for name, module in model.named_modules()} == classes
    model(**zoo.batch())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
def test_an_adapter_of_layers_beside_experts_is_trained():
    peft = pytest.importorskip("peft")
    beside = peft.get_peft_model(patched("mixtral"), peft.LoraConfig(target_modules=["q_proj"]))
    beside(**zoo.batch()).loss.backward()
