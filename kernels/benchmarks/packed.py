"""Linear layers with packed weights: for few tokens, beside cuBLAS on dense ones, and where other ways take over."""

from functools import partial

import sparse24_kernels as kernels
from kernel_cases import BF16, draw
from sparse24_kernels import GemmPlan, GemmProblem
from sparse24_kernels.gemm.backend import DENSE
from sparse24_kernels.gemm.packed import PACKED
from torch.nn.functional import linear

from .gemms import AUTO, Layer, assert_three_way, sets_that_fill
from .run import Row, Run, Section
from .timing import Call, Maker

SIZES = {"Llama 8B query": (4096, 4096), "Llama 8B MLP up": (14336, 4096), "Llama 8B MLP down": (4096, 14336)}
TOKENS = (1, 16, 4, 64, 2, 8, 32, 128, 256)  # what matters most first: time may run out
BY_KERNEL = GemmPlan(PACKED, "what is measured")
BY_DENSE_MATH = GemmPlan(DENSE, "what is measured")


class PackedLayers(Section):
    name, groups = "packed weights", ("gemms",)
    note = (
        "Dense: cuBLAS on a dense weight. Packed: the kernel that reads packed weights; unpacked, "
        "compressed: an operand made in every call; auto: what `plan_packed` chooses. GB/s: of packed weights."
    )

    def entries(self) -> list[Layer]:
        return [Layer(name, *size, tokens, training=False) for tokens in TOKENS for name, size in SIZES.items()]

    def problems(self, entry: Layer) -> list[GemmProblem]:
        return [entry.problems()["output"]] if entry.tokens > 16 else []

    def goals(self, entry: Layer) -> dict[str, float]:
        return {"packed": 1.4, "auto": AUTO} if entry.tokens <= 16 else {}

    def measure(self, run: Run, entry: Layer) -> Row:
        device, problem = run.machine.device, entry.problems()["output"]
        draws = [partial(draw, device, dtype=BF16, seed=seed) for seed in range(sets_that_fill(run, entry))]
        dense = [(make((entry.tokens, entry.inputs)), make((entry.out, entry.inputs))) for make in draws]
        packed = [(x, kernels.pack_nm(weight)) for x, weight in dense]

        def ours(plan: GemmPlan) -> list[Call]:
            x, weight = packed[0]
            result, pruned = kernels.packed_linear(x, weight, plan=plan), kernels.unpack_nm(weight)
            truth = linear(x.float(), pruned.float())
            assert_three_way(result, linear(x, pruned), truth, plan.backend.name)
            return [partial(kernels.packed_linear, *operands, plan=plan) for operands in packed]

        makers: dict[str, Maker] = {"dense": lambda: [partial(linear, *operands) for operands in dense]}
        ways = {"packed": BY_KERNEL, "unpacked": BY_DENSE_MATH}
        sparse, auto = kernels.plan_gemm(problem, device, "cusparselt"), kernels.plan_packed(problem, device)
        if sparse.is_sparse and entry.tokens > 16:
            ways["compressed"] = sparse
        row = run.compare(makers | {way: partial(ours, plan) for way, plan in ways.items()})
        if "us" in row["times"]["packed"]:
            row["facts"]["GB/s"] = sum(part.nbytes for part in packed[0][1]) / row["times"]["packed"]["us"] / 1e3
        row["facts"]["auto runs"] = auto.backend.name
        chosen = {"packed": "packed", "cusparselt": "compressed", "dense": "unpacked"}[auto.backend.name]
        row["times"]["auto"] = row["times"].get(chosen, {"error": "not measured"})
        return row
