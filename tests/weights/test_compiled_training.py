"""What compiled training multiplies by: made once a step, in memory that stays, equal to eager training's."""

import copy

import pytest
import sparse24_kernels.prune
import torch
from sparse_models import model_of
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from hf_sparse24 import Sparse24Config, Sparse24Controller, patch_model, sparse_weights

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.fixture
def prunings(monkeypatch):
    """A list with an entry for each pass over a weight, in graphs too."""
    made, implementation = [], sparse24_kernels.prune.implementation
    count = lambda name, *tensors: (made.append(name), implementation(name, *tensors))[1]  # noqa: E731
    monkeypatch.setattr(sparse24_kernels.prune, "implementation", count)
    return made


class Training:
    """A model with a controller, compiled or not, and its gradients of each step."""

    def __init__(self, model: nn.Module, compiler: str | None, steps: int = 6):
        torch._dynamo.reset()
        self.model, self.graphs = model, CompileCounterWithBackend(compiler)
        self.forward = torch.compile(model, fullgraph=True, backend=self.graphs) if compiler else model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.controller = Sparse24Controller(model, self.optimizer, total_steps=steps)

    def step(self, micro_batches: int = 4, x: torch.Tensor = X) -> list[torch.Tensor]:
        for number in range(micro_batches):
            self.forward(x * (number + 1)).float().square().mean().backward()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return gradients


def both(model: nn.Module, **steps: int) -> tuple[Training, Training]:
    eager = Training(copy.deepcopy(model), None, **steps)
    return eager, Training(model, "aot_eager", **steps)


def equal(eager: Training, compiled: Training) -> bool:
    return all(map(torch.equal, eager.step(), compiled.step()))


def addresses(model: nn.Module) -> list[int]:
    held = [vars(weight.encodings).values() for weight in sparse_weights(model).values()]
    return [tensor.data_ptr() for values in held for tensor in values if isinstance(tensor, torch.Tensor)]


def test_each_weight_is_pruned_once_a_step(prunings):
    training = Training(model_of("s-ste"), "eager")
    training.step()
    places = addresses(training.model)
    for _ in range(3):
        prunings.clear()
        training.step(micro_batches=4)
        assert len(prunings) == len(places) == 2
    assert training.graphs.frame_count == 1 and addresses(training.model) == places
    training.controller.end()
    assert not addresses(training.model)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["s-ste", "t-sr-ste", "fixed-mask", "slope"])
def test_equal_to_eager_training_through_all_phases(method):
    dense = {} if method in ("fixed-mask", "slope") else {"dense_start": 1, "dense_tail": 1}
    eager, compiled = both(model_of(method, **dense))
    assert all(equal(eager, compiled) for _ in range(6))


@pytest.mark.slow
def test_writes_within_a_step(caplog):
    eager, compiled = both(model_of("t-sr-ste"))
    other = model_of("t-sr-ste")
    for weight in sparse_weights(other).values():
        nn.init.normal_(weight.parameter)
        weight.init_state()
    assert equal(eager, compiled)
    for training in (eager, compiled):
        training.model.load_state_dict(other.state_dict())
    assert equal(eager, compiled)
    for training in (eager, compiled):
        for weight in sparse_weights(training.model).values():
            weight.parameter.data.mul_(2)
            weight.clear_encodings()
    assert equal(eager, compiled) and "clear_encodings" not in caplog.text
    for training in (eager, compiled):
        for weight in sparse_weights(training.model).values():
            weight.init_state()
            nn.init.normal_(weight.parameter, generator=torch.Generator().manual_seed(1))
    assert not equal(eager, compiled)
    assert "clear_encodings" in caplog.text and compiled.graphs.frame_count == 1


@pytest.mark.slow
def test_evaluation_with_averaged_weights_within_a_step():
    eager, compiled = both(model_of("s-ste"))
    for training in (eager, compiled):
        training.step()
    outputs = []
    for training in (eager, compiled):
        outputs.append([training.forward(X)])
        for factor in (2, 0.5):
            for parameter in training.model.parameters():
                parameter.data.mul_(factor)
            with torch.no_grad():
                outputs[-1].append(training.forward(X))
    assert all(map(torch.equal, *outputs)) and not torch.equal(outputs[0][1], outputs[0][2])
    assert equal(eager, compiled)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # as Dynamo reads it
def test_layers_that_share_a_graph(prunings):
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(12))
    model.forward = lambda x: nn.Sequential(*model.layers)(x)
    patch_model(model.bfloat16(), Sparse24Config(method="t-sr-ste", target_modules="all-linear"))
    training = Training(model, None)
    graphs = CompileCounterWithBackend("eager")
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=graphs)
    training.step()
    prunings.clear()
    training.step()
    assert len(prunings) == 12
    assert graphs.frame_count == 2  # the input of the first one needs no gradient
