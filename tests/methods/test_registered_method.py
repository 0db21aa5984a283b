"""A method from outside the package gets everything that the published ones get (besides tests/test_contract.py)."""

import ast
import dataclasses
import json

import pytest
import sparse24_kernels as kernels
import torch
import zoo
from cslt import stand_in  # noqa: F401 (a fixture)
from method_runs import loop, run_steps, trainer
from own_method import ADAPTING, OwnAdamW, OwnMethod, is_rank
from own_models import patched
from paths import RECIPES, SUPPORT
from sparse_models import sparse_layer
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from hf_sparse24 import (
    Sparse24Config,
    Sparse24Controller,
    describe_settings,
    oneshot,
    patch_model,
    register_method,
    sparse_weights,
    unpatch_model,
)
from hf_sparse24.config import SavedConfig
from hf_sparse24.methods import METHODS, MethodSettings, SparseMethod, Values, setting
from hf_sparse24.run import SparseRun, sparse_run


def test_its_settings_are_those_of_the_config():
    config = Sparse24Config(method="own", ridge=0.5, rank=3)
    assert (config.ridge, config.rank, config.adapt_last, config.weight_grad) == (0.5, 3, 0.25, "dense")
    saved = json.loads(config.to_json_string())
    assert (saved["method"], saved["rank"]) == ("own", 3) and Sparse24Config.from_dict(saved) == config
    assert describe_settings("own")["rank"] == "rank of the adapters (default 2)"
    with pytest.raises(ValueError, match=r"rank=1\.5: must be an int > 0"):
        config.replace(rank=1.5)
    with pytest.raises(ValueError, match="rank=4: method 'ste' has no rank"):
        Sparse24Config(method="ste", rank=4)


def test_its_phases_are_those_of_the_config():
    assert SavedConfig.from_dict({"method": "own", "phase": ADAPTING}).facts.phase == ADAPTING
    with pytest.raises(ValueError, match="phase='adapting': must be one of"):
        SavedConfig.from_dict({"method": "ste", "phase": ADAPTING})


def test_wrong_registrations():
    class Other(OwnMethod):
        pass

    with pytest.raises(ValueError, match=r"'own' .*own_method\.OwnMethod"):
        register_method("own")(Other)
    assert register_method("own")(OwnMethod) is OwnMethod  # running a notebook's cell again is fine

    def rejected(base: type, message: str, **members) -> None:
        with pytest.raises(ValueError, match=message):
            register_method("wrong")(type("Wrong", (base,), members))
        assert "wrong" not in METHODS

    def settings(**fields):
        made = dataclasses.make_dataclass(
            "Made", [(k, object, v) for k, v in fields.items()], bases=(MethodSettings,), frozen=True, kw_only=True
        )
        return {"Settings": made}

    frozen = r"Wrong\.Settings: derive it from MethodSettings, below @dataclass\(frozen=True"
    rejected(OwnMethod, frozen, Settings=dataclasses.make_dataclass("NotOurs", [], frozen=True))
    rejected(OwnMethod, frozen, Settings=type("NoDataclass", (MethodSettings,), {}))
    rejected(OwnMethod, r"Settings\.power: make it by setting\(", **settings(power=dataclasses.field(default=3)))
    rejected(OwnMethod, r"Settings\.pattern: a config has a field", **settings(pattern=setting(3, is_rank, "")))
    rejected(OwnMethod, r"phases=\('a',\): must have 'sparse' and 'dense'", phases=("a",))
    rejected(SparseMethod, r"Wrong must implement mask, or prune")
    with pytest.raises(ValueError, match="must be a name"):
        register_method(3)(OwnMethod)


def test_a_patch_that_fails_leaves_nothing(monkeypatch):
    """A buffer's name that the layer has already, after one that it has not; and a shared weight with adapters."""
    model = zoo.build("gpt2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    monkeypatch.setattr(OwnMethod, "init_state", lambda self, view, *_: {"fine": torch.ones(3), "bias": torch.ones(3)})
    with pytest.raises(ValueError, match=r"method 'own' keeps 'bias' .* Conv1D has an attribute"):
        patch_model(model, Sparse24Config(method="own"))
    monkeypatch.undo()
    model.transformer.h[1].mlp.c_fc.weight = model.transformer.h[0].mlp.c_fc.weight
    with pytest.raises(ValueError, match=r"h\.1\.mlp\.c_fc\.weight is shared"):
        patch_model(model, Sparse24Config(method="own"))
    assert before.keys() == model.state_dict().keys() and not sparse_weights(model)
    assert not hasattr(model.config, "quantization_config")


def test_state_keeps_its_names():
    weight = next(iter(sparse_weights(patched("gpt2")).values()))
    with pytest.raises(ValueError, match=r"method 'own' has no state \['other'\]; it has \['mask_bits'\]"):
        weight.set_state({"other": torch.ones(3)})


def test_adapters_must_be_in_the_optimizer():
    model = zoo.build("gpt2")
    optimizer = OwnAdamW(model.parameters())
    patch_model(model, Sparse24Config(method="own"))
    with pytest.raises(ValueError, match=r"does not hold .*weight, left, .* after patch_model"):
        Sparse24Controller(model, optimizer, 10)


def test_the_backward_pass_can_take_the_dense_master():
    """Z of the pruned weight, dX of the dense one."""

    class DenseBackward(OwnMethod):
        transposable = False

        def prune_grad_input(self, view):
            return Values(view.matrix)

    run = SparseRun(Sparse24Config(method="own"))
    run.method = DenseBackward(OwnMethod.Settings(), kernels.Pattern(2, 4))
    for conv1d in (False, True):
        layer = sparse_layer(Conv1D(12, 8) if conv1d else nn.Linear(8, 12), run)
        x, grad = torch.randn(4, 8, requires_grad=True), torch.randn(4, 12)
        layer(x).backward(grad)
        torch.testing.assert_close(x.grad, grad @ (layer.weight.t() if conv1d else layer.weight).detach())


@pytest.fixture
def registered(monkeypatch):
    """Registers a class under a name that is gone after the test."""

    def register(cls: type) -> str:
        monkeypatch.setitem(METHODS, cls.__name__, None)
        register_method(cls.__name__)(cls)
        return cls.__name__

    return register


def test_a_method_needs_no_more_than_a_mask(registered, tmp_path):
    """No settings, no state: what is left is what it keeps. Here a fixed pattern, the first two of every four."""

    class FirstTwo(SparseMethod):
        def mask(self, view):
            first = torch.arange(view.matrix.shape[view.dim]) % 4 < 2
            return (first if view.dim == 1 else first[:, None]).expand(view.matrix.shape).contiguous()

    model = zoo.build("gpt2")
    patch_model(model, Sparse24Config(method=registered(FirstTwo), dense_start=1))
    optimizer, controller = loop(model)
    run_steps(model, optimizer, controller, 2)
    assert controller.metrics()["flip_rate"] == 0
    for weight in sparse_weights(model).values():
        pruned = weight.pruned().unflatten(0, (-1, 4))
        assert pruned[:, :2].all() and not pruned[:, 2:].any()
    model.eval().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(**zoo.batch()).logits, model(**zoo.batch()).logits)


@pytest.mark.parametrize("hook", ["mask", "prune", "prune_grad_input"])
def test_what_is_not_nm_is_an_error_the_first_time(registered, hook):
    """Of each operand, along the dimension that its GEMM contracts; before an export too."""

    class TooMany(METHODS["ste"]):
        transposable = hook == "prune_grad_input"

    everything = {"mask": lambda self, view: torch.ones_like(view.matrix, dtype=torch.bool)}
    everything["prune"] = everything["prune_grad_input"] = lambda self, view: Values(view.matrix)
    setattr(TooMany, hook, everything[hook])
    if hook == "mask":
        TooMany.prune = SparseMethod.prune
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method=registered(TooMany)))
    along = "output" if hook == "prune_grad_input" else "input"
    with pytest.raises(ValueError, match=rf"at most 2 of every 4 along the {along} dimension.*'TooMany'"):
        model(**zoo.batch()).loss.backward()


AUTHORS = (SUPPORT / "own_method.py", SUPPORT / "own_backend.py", RECIPES / "ablations.py", RECIPES / "methods/ast.py")


@pytest.mark.parametrize("path", AUTHORS, ids=lambda path: path.stem)
def test_authors_import_public_modules_alone(path):
    tree = ast.parse(path.read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    ours = {module for module in modules if module.startswith(("hf_sparse24", "sparse24_kernels"))}
    assert ours and ours <= {"hf_sparse24", "hf_sparse24.methods", "sparse24_kernels", "sparse24_kernels.gemm"}


def test_its_changes_of_gradients_come_once_and_last():
    """After clipping, and however many micro-batches there were; frozen weights are left out."""
    model = patched(ridge=0.5)
    frozen, *trained = sparse_weights(model)
    model.get_parameter(frozen).requires_grad_(False)
    optimizer, controller = loop(model, lr=0.0)
    for seed in range(3):
        model(**zoo.batch(seed)).loss.backward()
        controller.after_micro_step()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    assert model.get_parameter(frozen).grad is None
    for name, gradient in before.items():
        decay = 0.5 * model.get_parameter(name).detach() if name in trained else 0
        torch.testing.assert_close(model.get_parameter(name).grad, gradient + decay)


def test_oneshot_gives_it_masks():
    model = zoo.build("llama")
    oneshot(model, [zoo.batch(seed, rows=4) for seed in range(2)], Sparse24Config(method="own"), reconstruct="layer")
    masks = {name: weight.mask() for name, weight in sparse_weights(model).items()}
    magnitude = {n: kernels.nm_mask(p) for n, p in zoo.build("llama").named_parameters() if n in masks}
    assert any(not torch.equal(masks[name], magnitude[name]) for name in masks)
    run_steps(model, *loop(model), 2)
    assert all(torch.equal(weight.mask(), masks[name]) for name, weight in sparse_weights(model).items())


def test_a_dense_tail_leaves_the_adapters_out():
    model = patched(dense_start=2, dense_tail=3, adapt_last=5)
    optimizer, controller = loop(model)
    phases = []
    for _ in range(12):
        phases.append(sparse_run(model).phase)
        run_steps(model, optimizer, controller, 1)
    assert phases == ["dense"] * 2 + ["sparse"] * 5 + [ADAPTING] * 2 + ["dense"] * 3
    logits, masters = model(**zoo.batch()).logits, {n: w.parameter.clone() for n, w in sparse_weights(model).items()}
    unpatch_model(model)
    assert torch.equal(model(**zoo.batch()).logits, logits)
    assert all(torch.equal(model.get_parameter(name), master) for name, master in masters.items())


def test_the_trainer_makes_its_optimizer_and_logs_its_metrics(tmp_path):
    run = trainer(zoo.build("llama"), tmp_path, "own", logging_steps=1)
    run.train()
    assert type(run.optimizer.optimizer) is OwnAdamW
    norms = [log["adapter_norm"] for log in run.state.log_history if "loss" in log]
    # The step that a phase begins with is the first whose gradients reach the adapters.
    assert norms[:9] == [0.0] * 9 and all(norm > 0 for norm in norms[9:])
