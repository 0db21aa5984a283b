"""Encodings of weights: kept within an open step, and without gradients while samples of the weight stay the same."""

import copy
import pickle

import pytest
import torch
import zoo
from cslt import stand_in  # noqa: F401 (a fixture)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sparse_models import count_prunings, keep_encodings, model_of
from torch import nn
from torch._subclasses import FakeTensorMode

from hf_sparse24 import Sparse24Controller, sparse_weights
from hf_sparse24.run import set_phase, sparse_run
from hf_sparse24.weights.encodings import sample_of

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
EVALUATIONS = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
BACKENDS = pytest.mark.parametrize("backend", ["auto", "dense"])


def kept(model: nn.Module) -> int:
    """Bytes of encodings that the model holds."""
    return sum(zoo.kept_bytes(weight) for weight in sparse_weights(model).values())


prunings = pytest.fixture(count_prunings)


@BACKENDS
def test_kept_across_micro_batches_and_recomputation(stand_in, prunings, backend):  # noqa: F811
    model = model_of("s-ste", backend)
    x = X.clone().requires_grad_()
    with keep_encodings(sparse_run(model)):
        for _ in range(3):
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).float().sum().backward()
        assert len(prunings) == 2 and kept(model) > 0  # one pass makes all forms of a weight


def test_not_kept_without_an_open_step(stand_in, prunings):  # noqa: F811
    """As in a training loop without a controller, where nothing says when the weights change."""
    model = model_of("ste")
    for i in range(3):
        model(X).sum().backward()
        assert len(prunings) == 2 * (i + 1) and kept(model) == 0


@EVALUATIONS
def test_training_and_evaluation_use_each_others(prunings, mode):
    model = model_of("ste", "dense")
    with mode():
        for _ in range(3):
            expected = model(X)
    assert len(prunings) == 2 and kept(model) > 0
    with keep_encodings(sparse_run(model)):
        for _ in range(2):
            trained = model(X)
            trained.float().sum().backward()  # what was made in inference mode could not be saved for backward
        with mode():
            assert torch.equal(model(X), expected) and torch.equal(trained, expected)
    assert len(prunings) == 2


@EVALUATIONS
def test_writes_through_data_around_evaluations(stand_in, mode):  # noqa: F811
    """As averaged weights are swapped in, or adapters merged; no version counter sees them."""
    model = model_of("ste")
    with keep_encodings(sparse_run(model)):
        trained = model(X)
        with mode():
            before = model(X)
            for parameter in model.parameters():
                parameter.data.mul_(2)
            assert not torch.equal(model(X), before)
            for parameter in model.parameters():
                parameter.data.mul_(0.5)
            assert torch.equal(model(X), before)
        assert torch.equal(model(X), trained)


@settings(max_examples=200, deadline=None)
@example(3, 18)
@given(st.integers(1, 300), st.integers(1, 300))
def test_a_sample_has_elements_of_every_row_and_column(rows, columns):
    numbers = sample_of(torch.arange(rows * columns).view(rows, columns))
    assert len((numbers // columns).unique()) == rows and len((numbers % columns).unique()) == columns
    # Of ten numbers in a row, one is coprime to a number below 2 * 3 * 5 * 7 * 11: so long is the stride at least.
    assert len(numbers) <= rows * columns / max(1, min(rows, columns) - 9) + 1


def test_a_sample_of_state_that_is_no_matrix():
    assert sample_of(torch.tensor(3.0)).tolist() == [3.0] and len(sample_of(torch.zeros(0, 4))) == 0
    assert len(sample_of(torch.arange(7))) == 7
    assert sample_of(torch.zeros(6, 4).t()).shape == (4, 6)  # not contiguous: all of it


def test_fake_tensors_keep_none():
    model, mode = model_of("ste", "dense"), FakeTensorMode()
    fakes = {name: mode.from_tensor(parameter) for name, parameter in model.named_parameters()}
    with mode, torch.no_grad():
        for _ in range(2):
            torch.func.functional_call(model, fakes, mode.from_tensor(X))
    assert kept(model) == 0


def changes():
    def in_place(model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)

    def load(model):
        model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()})

    def load_by_assignment(model):
        state = {name: 2 * tensor for name, tensor in model.state_dict().items()}
        model.load_state_dict(state, assign=True)

    def replace(model):
        for parameter in model.parameters():
            parameter.data = 2 * parameter.data

    def cast(model):
        model.float().bfloat16()
        in_place(model)

    def state(model):
        for weight in sparse_weights(model).values():
            weight.state["scale"].mul_(2)

    def another_state(model):
        for weight in sparse_weights(model).values():
            weight.set_state({"scale": 2 * weight.state["scale"]})

    return [in_place, load, load_by_assignment, replace, cast, state, another_state]


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
@BACKENDS
def test_no_change_within_a_step_goes_unseen(stand_in, change, backend):  # noqa: F811
    model = model_of("s-ste", backend)
    with keep_encodings(sparse_run(model)):
        before = model(X)
        assert torch.equal(model(X), before) and kept(model)
        change(model)
        after = model(X)
    expected = copy.deepcopy(model)(X)  # a copy starts without encodings
    assert torch.equal(after, expected) and not torch.equal(after, before)


def test_reassigned_data_at_a_recycled_address(stand_in):  # noqa: F811
    model = model_of("ste")
    with keep_encodings(sparse_run(model)):
        for _ in range(20):
            before = model(X)
            for parameter in model.parameters():
                parameter.data = 2 * parameter.data
                parameter.data = parameter.data / 4
            assert not torch.equal(model(X), before)


def test_another_dtype_has_encodings_of_its_own(prunings):
    model = model_of("ste", "dense").float()
    x = X.float()
    with keep_encodings(sparse_run(model)):
        exact = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == torch.bfloat16
        assert len(prunings) == 4
        assert torch.equal(model(x), exact)


class WritesThroughData(torch.optim.Optimizer):
    """An optimizer whose writes no version counter sees: `.data` has another one."""

    def step(self):
        self.kept = kept(self.model)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(2)


def test_a_controller_keeps_them_between_two_steps(stand_in, prunings):  # noqa: F811
    model = model_of("t-sr-ste")
    optimizer = WritesThroughData(model.parameters(), {})
    optimizer.model = model
    Sparse24Controller(model, optimizer, total_steps=100)
    before = model(X)
    assert kept(model) > 0  # since the controller was made
    model(X).float().sum().backward()
    held = kept(model)
    optimizer.step()
    assert optimizer.kept == 0  # the optimizer had the memory
    after = model(X)
    assert torch.equal(after, copy.deepcopy(model)(X)) and not torch.equal(after, before)
    model(X).float().sum().backward()
    assert kept(model) == held
    for weight in sparse_weights(model).values():
        weight.clear_encodings()  # as code does that writes through `.data` within a step
    assert kept(model) == 0


def test_the_dense_phase_holds_none(stand_in):  # noqa: F811
    model = model_of("ste")
    with keep_encodings(sparse_run(model)):
        model(X)
        set_phase(model, "dense")
        assert kept(model) == 0
        model(X)
        assert kept(model) == 0


def test_a_copy_and_a_pickle_carry_none(stand_in):  # noqa: F811
    model = model_of("ste")
    run = sparse_run(model)
    with keep_encodings(run):
        model(X)
        assert kept(model) > 0
        twin = copy.deepcopy(model)
        assert kept(twin) == 0
        twin(X)
        assert kept(twin) == 0  # nor has it an open step
        assert kept(pickle.loads(pickle.dumps(model))) == 0
        assert pickle.loads(pickle.dumps(run)).open_step is None
