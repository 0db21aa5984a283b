"""TileLang's 2:4 GEMM (`T.gemm_sp`, wgmma.sp on Hopper) as a baseline of the output GEMM, in bf16 and without bias.

TileLang is no dependency of ours: where it, nvcc or a Hopper is missing, the report says so. It runs after everything
else, because a kernel that hangs or faults ends the run.
"""

from functools import partial
from typing import Any

import sparse24_kernels as kernels
import torch
from torch import Tensor

from .gemms import MODELS, Layer, Operands, assert_three_way, mlp
from .run import Row, Run, Section
from .timing import Call, Maker

TILINGS = ((128, 256, 128, 2), (256, 128, 128, 3), (128, 128, 128, 4))
"""Of a thread block: out x tokens of the result, inputs of the sum at a time, of which TMA wants 128; and stages."""


class TileLang(Section):
    name, groups, share, base = "TileLang's gemm_sp", ("gemms",), 3, "cuSPARSELt"
    note = "The output GEMM without bias, operands packed already. In brackets: times cuSPARSELt."

    def entries(self) -> list[Layer]:
        return [mlp(model, 8192)[0] for model in list(MODELS)[:2]]

    def measure(self, run: Run, entry: Layer) -> Row:
        operands = Operands(entry, "output", run.machine.device)
        algorithm, packed = operands.plan.algorithm, operands.packed
        makers: dict[str, Maker] = {"cuSPARSELt": lambda: [partial(operands.sparse, algorithm, packed)]}
        makers |= {f"tiles of {tiling}": partial(checked_calls, entry, operands, tiling) for tiling in TILINGS}
        return run.compare(makers | {"dense": lambda: [partial(operands.dense, operands.a)]})


def checked_calls(layer: Layer, operands: Operands, tiling: tuple[int, int, int, int]) -> list[Call]:
    kernel, pruned, x = build(layer, tiling), operands.encode("dense"), operands.b
    values, indices = kernels.pack_nm(pruned)

    def call() -> Tensor:
        result = x.new_empty((layer.tokens, layer.out))
        kernel(values, indices.view(torch.int16), x, result)
        return result

    first = call()
    assert_three_way(first, operands.dense(pruned), operands.dense(pruned, Tensor.float), str(tiling))
    assert torch.equal(first, call()), f"{tiling}: other bits the second time"
    return [call]


def build(layer: Layer, tiling: tuple[int, int, int, int]) -> Any:
    """A function `(values [out, in/2], indices int16 [out, in/16], x [tokens, in], result [tokens, out])`, compiled."""
    import tilelang
    import tilelang.language as T

    (m, n, k), (bm, bn, bk, stages) = (layer.out, layer.tokens, layer.inputs), tiling

    @T.prim_func
    def sparse_gemm(
        values: T.Tensor((m, k // 2), T.bfloat16),  # type: ignore[valid-type]
        indices: T.Tensor((m, k // 16), T.int16),  # type: ignore[valid-type]
        x: T.Tensor((n, k), T.bfloat16),  # type: ignore[valid-type]
        result: T.Tensor((n, m), T.bfloat16),  # type: ignore[valid-type]
    ):
        with T.Kernel(m // bm, n // bn, threads=256) as (i, j):
            kept = T.alloc_shared((bm, bk // 2), T.bfloat16)
            metadata = T.alloc_shared((bm, bk // 16), T.int16)
            dense = T.alloc_shared((bn, bk), T.bfloat16)
            transposed = T.alloc_shared((bn, bm), T.bfloat16)
            sums = T.alloc_fragment((bm, bn), T.float32)
            T.use_swizzle(8)  # neighbouring blocks share tiles of both operands in the L2 cache
            T.clear(sums)
            for step in T.Pipelined(k // bk, num_stages=stages):
                T.copy(values[i * bm, step * (bk // 2)], kept)
                T.copy(indices[i * bm, step * (bk // 16)], metadata)
                T.copy(x[j * bn, step * bk], dense)
                # Full rows: each group of 128 threads takes all columns, by the widest instruction.
                T.gemm_sp(kept, metadata, dense, sums, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            for row, column in T.Parallel(bm, bn):
                transposed[column, row] = sums[row, column]
            T.copy(transposed, result[j * bn, i * bm])

    return tilelang.compile(sparse_gemm, target="auto")
