"""GEMMs of 8-bit numbers with a 2:4 operand beside dense ones of the same type, alone. The library has none of them.

torch's operators are called as they are: `_int_mm` and `_scaled_mm` (cuBLAS), `_cslt_sparse_mm` (cuSPARSELt).
"""

from functools import partial
from itertools import product

import torch
from sparse24_kernels import nm_prune
from torch import Tensor

from .cases import BF16, draw
from .gemms import Layer, sets_that_fill
from .sections import Row, Run, Section
from .timing import Call, Maker

SHAPES = ((14336, 4096), (4096, 14336), (8192, 2048))
TOKENS = (8192, 16, 256, 2048)
IDS = dict.fromkeys(("int8", "fp8"), (0, 1, 5, 11, 17, 20, 21, 22, 23, 25)) | {"bf16": (0, 3, 12, 17, 20)}
"""Algorithms of cuSPARSELt that are tried."""
CASTS = {
    "int8": lambda x: (30 * x).clamp(-127, 127).to(torch.int8),
    "fp8": lambda x: x.to(torch.float8_e4m3fn),
    "bf16": lambda x: x.to(BF16),
}


def dense(kind: str, x: Tensor, weight: Tensor) -> Call:
    if kind == "int8":
        return lambda: torch._int_mm(x, weight.t())
    one = torch.ones((), device=x.device)
    if kind == "fp8":
        return lambda: torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=BF16)
    return lambda: x @ weight.t()


class EightBit(Section):
    name, group = "8-bit GEMMs", "8-bit"
    note = "Both results in bf16, but int8's dense one in int32. An algorithm further than 2 % from fp32 is not timed."

    def entries(self) -> list[Layer]:
        return [Layer(kind, *shape, n) for n, shape, kind in product(TOKENS, SHAPES, IDS)]

    def measure(self, run: Run, entry: Layer) -> Row:
        make, cast = partial(draw, run.machine.device), CASTS[entry.name]
        shapes = (entry.tokens, entry.inputs), (entry.out, entry.inputs)
        sets = range(sets_that_fill(run, entry))
        operands = [(cast(make(shapes[0], seed=i)), cast(nm_prune(make(shapes[1], seed=i)))) for i in sets]
        options = {} if entry.name == "bf16" else {"out_dtype": BF16}

        def sparse(algorithm: int) -> list[Call]:
            settings = {"transpose_result": True, "alg_id": algorithm, **options}
            found = [(x.t(), torch._cslt_compress(weight)) for x, weight in operands]
            calls = [partial(torch._cslt_sparse_mm, compressed, x, **settings) for x, compressed in found]
            truth = operands[0][0].float() @ operands[0][1].float().t()
            error = ((calls[0]().float() - truth).norm() / truth.norm()).item()
            assert error < 0.02, f"{error:.3f} from fp32"
            return calls

        makers: dict[str, Maker] = {"dense": lambda: [dense(entry.name, *each) for each in operands]}
        return run.compare(makers | {f"sparse, id {number}": partial(sparse, number) for number in IDS[entry.name]})
