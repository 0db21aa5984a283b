"""A CPU stand-in for torch's two cuSPARSELt operators: same sizes, same arguments, same traps."""

import pytest
import torch
from sparse24_kernels import Packed, pack_nm, unpack_nm
from sparse24_kernels.gemm import GemmPlan, autotune, cusparselt, sparse_backends
from torch import Tensor


class StandIn:
    """Counts its calls. `wrong_ids` are algorithms that return wrong numbers, as some of the library's do."""

    def __init__(self, wrong_ids: tuple[int, ...] = ()):
        self.wrong_ids = wrong_ids
        self.compressed, self.gemms = 0, []

    def positions(self, m: int, k: int) -> Tensor:
        return tiles(torch.arange(m)[:, None], torch.arange(k // 16)[None, :], m, k // 16).flatten()

    def compress(self, matrix: Tensor) -> Tensor:
        assert matrix.is_contiguous() and matrix.dtype in cusparselt.DTYPES
        assert matrix.shape[0] % 16 == 0 and matrix.shape[1] % 16 == 0
        assert ((matrix.unflatten(1, (-1, 4)) != 0).sum(-1) <= 2).all(), "not 2:4"
        assert not torch.signbit(matrix[matrix == 0]).any(), "-0.0 counts as a value"
        self.compressed += 1
        values, mask = pack_nm(matrix)[:2]  # in place of the indices that hardware takes
        units = torch.empty(mask.numel() // 2, dtype=torch.int16)
        units[self.positions(*matrix.shape)] = mask.view(torch.int16).flatten()
        return torch.cat([values.flatten(), units.view(matrix.dtype)]).view(len(matrix), -1)

    def matmul(self, compressed, dense, bias=None, *, transpose_result=False, alg_id=0):
        k, n = dense.shape
        assert compressed.dtype == dense.dtype, "bits would be reinterpreted"
        assert bias is None or bias.dtype == dense.dtype
        assert all(x.data_ptr() % 16 == 0 for x in (compressed, dense)), "not aligned"
        assert bias is None or (bias.is_contiguous() and bias.data_ptr() % 16 == 0)
        assert compressed.dim() == 2 and compressed.is_contiguous()
        m = len(compressed)
        assert compressed.shape[1] == k * 9 // 16, "the library would read something else"
        # Like the real one: what is not contiguous is taken for a transpose.
        assert dense.is_contiguous() or dense.t().is_contiguous(), "other strides give wrong numbers in silence"
        assert n % 16 == 0
        values, units = compressed.view(-1).split([m * k // 2, m * k // 16])
        mask = units.view(torch.int16)[self.positions(m, k)].view(torch.uint8).view(m, k // 8)
        matrix = unpack_nm(Packed(values.view(m, k // 2), mask))
        self.gemms.append((m, n, k, alg_id, transpose_result))
        result = torch.nn.functional.linear(dense.t(), matrix, bias) if transpose_result else matrix @ dense
        if bias is not None and not transpose_result:
            result = result + bias[:, None]
        return result + 1 if alg_id in self.wrong_ids else result


def tiles(row: Tensor, unit: Tensor, m: int, units: int) -> Tensor:
    """Tiles of 16 rows x 1 unit, rows 0, 8, 1, 9, ... in each; along the rows first."""
    return (row // 16 * units + unit) * 16 + row % 8 * 2 + row // 8 % 2


def sparse_plan(algorithm: int = 0) -> GemmPlan:
    """A plan of cuSPARSELt."""
    return GemmPlan(sparse_backends.CUSPARSELT, "a test's", algorithm)


@pytest.fixture
def stand_in(monkeypatch):
    """Sparse tensor cores on every device, every GEMM sparse by algorithm 3."""
    return install(monkeypatch, StandIn())


def install(monkeypatch, library: StandIn) -> StandIn:
    monkeypatch.setattr(torch, "_cslt_compress", library.compress)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", library.matmul)
    monkeypatch.setattr(cusparselt, "unsupported_device", lambda device: None)
    monkeypatch.setattr(cusparselt, "MULTIPLE", 16)  # so that tests are small
    verdict = autotune.Verdict("cusparselt", 3, 1.0, 2.0, "measured", measured=True)
    monkeypatch.setattr(autotune, "verdict_of", lambda problem, device: verdict)
    monkeypatch.setattr(autotune, "is_measured", lambda *which: True)
    return library
