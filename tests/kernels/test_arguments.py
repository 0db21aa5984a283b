"""Every argument of every public function: what it does not take is a ValueError of ours, before torch sees it."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import sparse24_kernels as kernels
import torch
from backends import unregister_backend
from cslt import sparse_plan, stand_in  # noqa: F401 (a fixture)
from sparse24_kernels import gemm
from sparse24_kernels.dispatch import choose_kernels
from sparse24_kernels.fp8 import fp8_simulate
from sparse24_kernels.gemm import linear_problem
from sparse24_kernels.masks import count_flips
from sparse24_kernels.packing import gather_nm
from sparse24_kernels.prune import prune_forms

CPU, META, BF16, NAN = torch.device("cpu"), torch.device("meta"), torch.bfloat16, float("nan")
X = torch.randn(16, 32)
MASK, PACKED, W = X > 0, kernels.pack_nm(X), kernels.nm_prune(X)
PROBLEM = linear_problem(16, 16, 32, BF16)
PATTERN = {"n": 2, "m": 4, "dim": -1}
NAMED = SimpleNamespace(name="a test's")
ELSEWHERE = (choose_kernels, count_flips, fp8_simulate)
ELSEWHERE += (gather_nm, prune_forms)
PUBLIC = {name: getattr(package, name) for package in (kernels, gemm) for name in package.__all__}
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
FUNCTIONS |= {function.__name__: function for function in ELSEWHERE}
# A call of each that works, with every argument by its name.
CALLS = {
    "apply_mask": {"weight": X, "mask": MASK, "dtype": None},
    "choose_kernels": {"device": CPU, "dtype": BF16, "operator": "prune"},
    "count_flips": {"before": [MASK], "after": [MASK]},
    "fp8_simulate": {"x": X, "format": "e4m3"},
    "gated_activation": {"gate": X, "up": X, "kind": "swiglu"},
    "gather_nm": {"matrix": X, "mask": PACKED.mask},
    "linear_problem": {"tokens": 16, "out": 16, "inputs": 32, "dtype": BF16},
    "masked_decay_": {"grad": X.clone(), "weight": X, "mask": MASK, "alpha": 0.1},
    "mm_problem": {"m": 16, "n": 16, "k": 32, "dtype": BF16},
    "mvue": {"x": X, **PATTERN, "estimator": "exact", "key": 3, "form": "dense"},
    "nm_mask": {"weight": X, **PATTERN, "packed": False},
    "nm_prune": {"weight": X, **PATTERN, "dtype": None},
    "pack_bits": {"mask": MASK},
    "pack_nm": {"weight": X, "n": 2, "m": 4, "mask": None},
    "packed_linear": {"x": X, "packed": PACKED, "bias": None, "plan": None},
    "plan_gemm": {"problem": PROBLEM, "device": CPU, "backend": "auto"},
    "plan_packed": {"problem": PROBLEM, "device": CPU},
    "prune_forms": {"weight": X, "forms": ["dense"], "rule": "soft-threshold", **PATTERN}
    | {"mask": None, "scale": None, "dtype": None},
    "quantize_packed": {"packed": PACKED},
    "register_backend": {"backend": NAMED, "auto": False},
    "s_ste_scale": {"weight": X, **PATTERN, "rule": "mse"},
    "soft_threshold": {"weight": X, **PATTERN, "scale": None, "dtype": None},
    "sparse_linear": {"x": X, "weight": W, "bias": None, "plan": None},
    "sparse_mm": {"sparse": W, "dense": X.t(), "plan": None},
    "transposable_mask": {"weight": X, "n": 2, "m": 4, "solver": "exact", "packed": False},
    "unpack_bits": {"packed": kernels.pack_bits(MASK), "size": 32},
    "unpack_nm": {"packed": PACKED},
}
# Sparse tensor cores only: on the stand-in for them.
COMPRESSED = {"compress": {"matrix": W.bfloat16(), "plan": sparse_plan()}}
ODD = [3, 2.5, "no", b"no", [1], [[1.0]], {}, object(), X, X.long(), X[0], X[0, 0], X.to(META), X.to(torch.complex64)]
ODD += [None, True, -1, 0, 5, 2**70, NAN, (2, 4), torch.Size([2]), torch.zeros(3, 5), BF16, torch.int8, META, [None]]
ODD += [[X, X], MASK, [X.to(META)], torch.float8_e4m3fn, X.to(torch.float8_e4m3fn), "dense", "cpu", range(3)]
OURS = str(Path(kernels.__file__).parent)


@pytest.fixture(autouse=True)
def _unregister():
    yield
    unregister_backend(NAMED.name)


def raised(function: str, arguments: dict) -> BaseException | None:
    try:
        FUNCTIONS[function](**arguments)
    except BaseException as error:
        return error
    return None


def is_ours(error: BaseException, function: str, what: str) -> bool:
    """Raised by a check of ours, in words that name the function or the argument."""
    if function == "choose_kernels" and "unhashable" in str(error):
        return True  # it is cached
    frame = error.__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
    code = frame.tb_frame.f_code
    in_our_check = code.co_filename.startswith(OURS) and "raise ValueError" in inspect.getsource(code)
    word = {"requested": "backend", "forms": "form"}.get(what, what)
    named = re.search(rf"{function}|\b{word}", str(error))
    return type(error) is ValueError and in_our_check and named is not None


def check(calls: dict, function: str) -> None:
    call = calls[function]
    assert raised(function, call) is None
    foreign = {}
    for what in call:
        for i, odd in enumerate(ODD):
            error = raised(function, call | {what: odd})
            if error is not None and not is_ours(error, function, what):
                foreign[what, str(odd)[:40], i] = error
    assert not foreign


@pytest.mark.parametrize("function", CALLS)
def test_an_argument_that_does_not_fit_is_told_in_our_words(function):
    check(CALLS, function)


@pytest.mark.parametrize("function", COMPRESSED)
def test_so_is_one_of_a_compressed_form(function, stand_in):  # noqa: F811
    check(COMPRESSED, function)


def test_every_public_function_and_argument_is_checked():
    called = {name: CALLS.get(name, {}) | COMPRESSED.get(name, {}) for name in FUNCTIONS}
    assert {name: set(inspect.signature(function).parameters) for name, function in FUNCTIONS.items()} == {
        name: set(call) for name, call in called.items()
    }
