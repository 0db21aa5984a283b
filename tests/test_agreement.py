"""One truth about what runs: the doctor, the plans and the layers agree, for every method, pattern and size."""

from collections.abc import Iterator
from dataclasses import fields
from itertools import product

import pytest
import torch
from cslt import StandIn, stand_in  # noqa: F401 (a fixture)
from sparse24_kernels.gemm import GemmPlan, cusparselt, plan_gemm
from sparse24_kernels.gemm.sparse_backends import CusparseltBackend
from torch import nn

from hf_sparse24 import Sparse24Config, patch_model, sparse_weights
from hf_sparse24.methods import METHODS
from hf_sparse24.methods.settings import GRADIENT_ESTIMATORS, GemmSettings
from hf_sparse24.tools import doctor
from hf_sparse24.weights.sparse_weight import SparseWeight

CPU, GPU = torch.device("cpu"), torch.device("cuda")
OUT, IN = 48, 32
GEMMS = ("output", "grad_input", "grad_weight")
every_method = pytest.mark.parametrize("method", sorted(METHODS))


def patched(method: str, **settings) -> tuple[nn.Module, SparseWeight]:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(IN, OUT)]).bfloat16()
    patch_model(model, Sparse24Config(method=method, target_modules="all-linear", **settings))
    (weight,) = sparse_weights(model).values()
    return model, weight


class Spy:
    """The plans that the backend was called with, in the order of the GEMMs of a layer."""

    def __init__(self, monkeypatch):
        self.plans: list[GemmPlan] = []
        for name in ("linear", "mm"):
            monkeypatch.setattr(CusparseltBackend, name, self.recording(getattr(CusparseltBackend, name)))

    def recording(self, function):
        def record(*arguments):
            self.plans.append(arguments[-1])
            return function(*arguments)

        return record


@pytest.fixture
def spy(monkeypatch) -> Spy:
    return Spy(monkeypatch)


def gemms_that_run(layer: nn.Module, tokens: int, library: StandIn, spy: Spy) -> dict[str, tuple[int, int, int] | None]:
    """One forward and backward pass: the (m, n, k) of each GEMM that ran sparse, None where it was dense math."""
    library.gemms.clear()
    spy.plans.clear()
    x = torch.randn(tokens, IN).bfloat16().requires_grad_()
    output = layer(x)
    forward = len(library.gemms)
    output.backward(torch.randn(tokens, OUT).bfloat16())
    assert x.grad is not None and layer.weight.grad is not None
    assert all(plan.is_sparse for plan in spy.plans) and len(spy.plans) == len(library.gemms)
    ran: dict[str, tuple[int, int, int] | None] = dict.fromkeys(GEMMS)
    for index, (m, n, k, _, transposed) in enumerate(library.gemms):
        name = "output" if index < forward else "grad_input" if transposed else "grad_weight"
        assert ran[name] is None
        ran[name] = m, n, k
    return ran


def settings_of_gemms(method: str, pairs: bool) -> Iterator[dict]:
    """Every choice that the method has of gradient estimates, in `pairs` or the same for both gradients, and FP8 and
    pruned activations once each."""
    names = {field.name for field in fields(METHODS[method].Settings)} & {field.name for field in fields(GemmSettings)}
    choices = [name for name in ("weight_grad", "input_grad") if name in names]
    for values in product(GRADIENT_ESTIMATORS, repeat=len(choices)):
        if pairs or len({*values}) < 2:
            yield dict(zip(choices, values))
    for name, value in (("fp8", True), ("activations", "2:4")):
        if name in names:
            yield {name: value}


def check_agreement(model: nn.Module, weight: SparseWeight, tokens: int, library: StandIn, spy: Spy) -> None:
    dtype = weight.parameter.dtype
    plans = doctor.gemm_plans(weight, tokens, dtype, CPU)
    assert tuple(plans) == GEMMS and tuple(gemm.name for gemm in weight.method.gemms) == GEMMS
    ran = gemms_that_run(weight.module, tokens, library, spy)
    promised = {problem: problem[:3] for problem in doctor.problems(model, tokens, dtype, GPU)}
    for gemm in weight.method.gemms:
        problem, plan = gemm.problem(tokens, OUT, IN, dtype), plans[gemm.name]
        assert plan.reason and plan.is_sparse == (ran[gemm.name] is not None), (gemm, plan, ran)
        assert (problem is None) == (gemm.unsupported() is not None)
        if problem is None:
            assert plan.reason == gemm.unsupported() and not plan.is_sparse
            continue
        assert plan == plan_gemm(problem, CPU, weight.run.backend)
        # The stand-in's verdict is always "sparse": what can run sparse does, and the autotuner would be given it.
        assert (
            plan.is_sparse
            == (problem in promised)
            == (cusparselt.unsupported_matrix(problem.m, problem.k, problem.dtype) is None)
        )
        if plan.is_sparse:
            m, n, k = problem[:3]
            assert ran[gemm.name] == (m, n + -n % 16, k)  # the library is called with n padded to 16
    assert {ran[name] for name in GEMMS} - {None} == {(m, n + -n % 16, k) for m, n, k in promised.values()}


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8"])
@every_method
def test_doctor_plans_and_layers_agree(stand_in, spy, method, pattern):  # noqa: F811
    for number, settings in enumerate(settings_of_gemms(method, pairs=pattern == "2:4")):
        model, weight = patched(method, pattern=pattern, **settings)
        for tokens in (30, 32) if number else (16, 30, 32, 4096):
            check_agreement(model, weight, tokens, stand_in, spy)
        if pattern == "4:8":
            assert not doctor.gemm_plans(weight, 32, torch.bfloat16, CPU)["output"].is_sparse


@pytest.mark.parametrize("backend", ["dense", "cusparselt"])
@every_method
def test_they_agree_where_a_backend_is_asked_for(stand_in, spy, method, backend):  # noqa: F811
    _, weight = patched(method, backend=backend)
    plans = doctor.gemm_plans(weight, 32, torch.bfloat16, CPU)
    ran = gemms_that_run(weight.module, 32, stand_in, spy)
    for gemm in weight.method.gemms:
        assert plans[gemm.name].is_sparse == (ran[gemm.name] is not None)
        assert plans[gemm.name].is_sparse == (backend == "cusparselt" and gemm.unsupported() is None)
