"""Kernels and GEMMs on a GPU, at the sizes that `make gpu` times: `pytest -m gpu tests/kernels`.

Every public operation is compared with the reference, captured in a CUDA graph, compiled, and checked by torch's own
`opcheck`; every sparse GEMM with dense math and fp32.
"""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from sparse24_kernels import gpu
from sparse24_kernels.dispatch import KERNEL_DTYPES, choose_kernels
from sparse24_kernels.gemm.measure import capture
from sparse24_kernels.hard_problems import compare, difference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.benchmarks import gemms, operations
from recipes.benchmarks.cases import BF16

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN that are put in on purpose
CUDA = torch.device("cuda")
WORKLOADS = list(operations.workloads())
SMALL = list({workload.name: workload.at((128, 256)) for workload in WORKLOADS}.values())
SHAPES = ((256, 128, 256), (1280, 320, 48), (1000, 1280, 5120), (2055, 2048, 512), (4096, 5120, 1280))
"""(tokens, in, out) of layers: also tokens that are no multiple of 16, which the library does not take."""

every_small_one = pytest.mark.parametrize("workload", SMALL, ids=str)


@pytest.mark.gpu
def test_the_kernels_run_here():
    chosen = {dtype: choose_kernels(CUDA, dtype) for dtype in KERNEL_DTYPES}
    assert {backend for backend, _ in chosen.values()} == {"triton"}, chosen


@pytest.mark.gpu
@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_a_timed_size_equals_the_reference(workload):
    kernel = getattr(gpu.OPERATORS, workload.operator)
    assert compare(workload.operator, kernel, workload.arguments(CUDA)) == ""


@pytest.mark.gpu
@every_small_one
def test_a_graph_replays_the_same_bits(workload):
    fresh, arguments = workload.arguments(CUDA), workload.arguments(CUDA)
    expected = [x.clone() for x in operations.tensors(workload.call(arguments))]

    def start_again() -> None:  # some operations work in place; and at other addresses they upload other tables
        for x, original in zip(operations.tensors(arguments), operations.tensors(fresh)):
            x.copy_(original)

    results = replayed(lambda: operations.tensors(workload.call(arguments)), start_again)
    for ours, theirs in zip(results, expected, strict=True):
        assert not difference(ours, theirs, theirs)


def replayed(call: Callable[[], list[Tensor]], before_each: Callable[[], None] = lambda: None) -> list[Tensor]:
    """What the second replay of a CUDA graph leaves behind, in memory that was made useless before it."""
    replay, results = capture(call)
    for _ in range(2):
        for result in results:
            result.detach().zero_()
        before_each()
        replay()
    torch.cuda.synchronize()
    return results


@pytest.mark.gpu
@every_small_one
def test_it_compiles_on_a_gpu(workload):
    """Under torch.compile without graph breaks: the same bits as eager."""
    torch._dynamo.reset()  # it counts how often one piece of code was compiled, and stops at eight
    compiled = torch.compile(workload.public, fullgraph=True)
    both = [operations.tensors(workload.call(workload.arguments(CUDA), function)) for function in (compiled, None)]
    for ours, theirs in zip(*both, strict=True):
        assert not difference(ours, theirs, theirs)


@pytest.mark.gpu
@every_small_one
def test_operators_keep_their_contract_on_a_gpu(workload):
    """torch's own checks of the operators that the public function calls: schema, fakes, autograd, tracing."""
    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "sparse24":
                calls.append((function, args))
            return function(*args, **(kwargs or {}))

    with Recorder():
        workload.call(workload.arguments(CUDA))
    assert calls, "no operator was called"
    for function, arguments in calls:
        torch.library.opcheck(function, arguments)


GEMMS = [
    gemms.Layer("GPT-2", out, inputs, tokens, name, dtype=dtype)
    for dtype, (tokens, inputs, out) in product((BF16, torch.float16), SHAPES)
    for name in (gemms.NAMES if tokens % 16 == 0 else gemms.NAMES[:2])
]


@pytest.mark.gpu
@pytest.mark.parametrize("layer", GEMMS, ids=str)
def test_a_sparse_gemm_is_as_exact_as_a_dense_one(layer):
    """The public functions, by the algorithm that would run; some groups can be stored in several ways."""
    operands = gemms.Operands(layer, layer.gemm, CUDA, zeros=64)
    if operands.plan.is_sparse:  # otherwise no algorithm passed the autotuner's checks: dense math runs
        operands.check(operands.plan)
