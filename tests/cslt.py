"""A CPU stand-in for torch's two cuSPARSELt operators: same sizes, same arguments, same traps."""

import pytest
import torch
from sparse24_kernels import Packed, backends, cusparselt, pack_nm, tuner, unpack_nm
from torch import Tensor


class StandIn:
    """Counts its calls. `wrong_ids` are algorithms that return wrong numbers, as some of the library's do."""

    def __init__(self, wrong_ids: tuple[int, ...] = ()):
        self.wrong_ids = wrong_ids
        self.compressed, self.products = 0, []

    def compress(self, matrix: Tensor) -> Tensor:
        assert matrix.is_contiguous() and matrix.dtype in cusparselt.DTYPES
        assert matrix.shape[0] % 16 == 0 and matrix.shape[1] % 16 == 0
        assert ((matrix.unflatten(1, (-1, 4)) != 0).sum(-1) <= 2).all(), "not 2:4"
        assert not torch.signbit(matrix[matrix == 0]).any(), "-0.0 counts as a value"
        self.compressed += 1
        values, indices = pack_nm(matrix)
        return torch.cat([values.flatten(), indices.flatten().view(matrix.dtype)])

    def matmul(self, compressed, dense, bias=None, *, transpose_result=False, alg_id=0, split_k=1, split_k_mode=-1):
        k, n = dense.shape
        assert compressed.dtype == dense.dtype, "bits would be reinterpreted"
        assert bias is None or bias.dtype == dense.dtype
        assert all(x.data_ptr() % 16 == 0 for x in (compressed, dense)), "not aligned"
        assert bias is None or (bias.is_contiguous() and bias.data_ptr() % 16 == 0)
        m = compressed.numel() * 16 // 9 // k
        # Like the real one: what is not contiguous is taken for a transpose.
        assert dense.is_contiguous() or dense.t().is_contiguous(), "other strides give wrong numbers in silence"
        assert n % 16 == 0
        values, indices = compressed.split([m * k // 2, m * k // 16])
        matrix = unpack_nm(Packed(values.view(m, k // 2), indices.view(torch.uint8).view(m, k // 8)))
        self.products.append((m, n, k, alg_id, transpose_result))
        result = torch.nn.functional.linear(dense.t(), matrix, bias) if transpose_result else matrix @ dense
        if bias is not None and not transpose_result:
            result = result + bias[:, None]
        return result + 1 if alg_id in self.wrong_ids else result


@pytest.fixture
def stand_in(monkeypatch):
    """Sparse tensor cores on every device, every product sparse by algorithm 3."""
    library = StandIn()
    monkeypatch.setattr(torch, "_cslt_compress", library.compress)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", library.matmul)
    monkeypatch.setattr(cusparselt, "why_not", lambda device: None)
    verdict = tuner.Verdict("cusparselt", cusparselt.Algorithm(3), 1.0, 2.0, "measured")
    monkeypatch.setattr(backends.tuner, "choose", lambda problem, device: verdict)
    return library
