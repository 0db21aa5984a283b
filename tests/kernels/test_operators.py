"""The torch operators: schemas, fakes, torch.compile without a graph break, and which implementation is chosen."""

import pytest
import sparse24_kernels as kernels
import torch
from sparse24_kernels import first_use
from sparse24_kernels.dispatch import choose, choose_kernels
from sparse24_kernels.masks import count_flips
from sparse24_kernels.prune import prune_forms

ops = torch.ops.sparse24
WEIGHT, LARGE = torch.randn(8, 16), torch.randn(64, 128)
PACKED, INT8 = kernels.pack_nm(WEIGHT), kernels.quantize_packed(kernels.pack_nm(WEIGHT))
DENSE, ALL_FORMS, OPERANDS = "dense", "dense,transposed", "packed,packed-transposed,dense"
CALLS = {
    "nm_mask": (WEIGHT, 2, 4, 1, False),
    "nm_mask-bits": (WEIGHT.t(), 1, 2, 0, True),
    "transposable_mask": (WEIGHT, 2, 4, "exact", True),
    "transposable_mask-greedy": (WEIGHT, 4, 8, "greedy", False),
    "prune": (WEIGHT, "mask", 2, 4, 1, kernels.transposable_mask(WEIGHT), None, torch.bfloat16, ALL_FORMS),
    "prune-large": (LARGE, "mask", 2, 4, 1, LARGE > 0, None, torch.bfloat16, ALL_FORMS),
    "prune-soft": (WEIGHT.t(), "soft-threshold", 2, 4, 0, None, torch.ones(()), torch.float32, DENSE),
    "prune-any-shape": (torch.randn(2, 3, 8), "magnitude", 2, 8, 2, None, None, torch.float16, DENSE),
    "unpack_nm": tuple(PACKED),
    "unpack_nm-int8": tuple(INT8),
    "packed_linear": (torch.randn(3, 16), *PACKED, torch.randn(8)),
    "packed_linear-strided": (torch.randn(16, 3).t(), *PACKED, None),
    "packed_linear-int8": (torch.randn(3, 16), *INT8, None),
    "prune-packed": (torch.randn(32, 64), "mask", 2, 4, 1, torch.ones(32, 64) > 2, None, torch.float32, OPERANDS),
    "packed_mm": (*kernels.pack_nm(torch.randn(8, 32))[:2], torch.randn(32, 5)),
    "s_ste_scale": (WEIGHT, 2, 4, 1, "mse"),
    "fp8_simulate": (WEIGHT.t(), "e4m3"),
    "gated_activation": (WEIGHT, WEIGHT.t().contiguous().t(), "swiglu"),
    "gated_activation-grad": (WEIGHT[:, ::2].clone().requires_grad_(), WEIGHT[:, :8], "geglu"),
    "gated_activation_backward": (WEIGHT, WEIGHT, WEIGHT.t().contiguous().t(), "geglu-exact"),
    "mvue": (WEIGHT, torch.tensor(1), 2, 4, 0, "exact", "dense"),
    "mvue-packed": (torch.randn(32, 5), torch.tensor(1), 2, 4, 0, "exact", "packed-transposed"),
    "mvue-transposed": (WEIGHT[:, :6], torch.tensor(1), 1, 2, 1, "exact", "transposed"),
}


@pytest.mark.parametrize("name", CALLS)
def test_operator_contract(name):
    torch.library.opcheck(getattr(ops, name.split("-")[0]).default, CALLS[name])


def test_every_operator_is_checked_somewhere():
    elsewhere = {"cslt_compress", "cslt_mm"}
    names = {name.split("-")[0] for name in CALLS} | elsewhere
    assert {
        name.removeprefix("sparse24::") for name in torch._C._dispatch_get_all_op_names() if "sparse24" in name
    } == names


@pytest.mark.slow
def test_compiles_in_one_graph():
    def step(weight, grad, key):
        bits = kernels.transposable_mask(weight, packed=True)
        sparse, transposed = prune_forms(weight, ["dense", "transposed"], "mask", mask=bits)
        estimate = kernels.mvue(grad, dim=0, key=key, form="transposed")
        kernels.masked_decay_(grad, weight, bits, 0.1)
        flips = count_flips([bits], [kernels.nm_mask(weight, packed=True)])
        soft = kernels.soft_threshold(weight, dtype=torch.bfloat16)
        return sparse @ transposed, kernels.unpack_nm(kernels.pack_nm(estimate)), grad.sin(), flips, soft

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for rows in (8, 16):
        weight, grad, key = torch.randn(rows, 16), torch.randn(rows, 16), torch.tensor(rows)
        expected_grad = grad.clone()
        results, expected = compiled(weight, grad, key), step(weight, expected_grad, key)
        torch.testing.assert_close(results, expected)
        assert torch.equal(grad, expected_grad)


def test_the_choice_of_kernels_has_a_reason(dense_math, monkeypatch):
    monkeypatch.setattr(first_use, "verdict", lambda *_: "")
    choose.cache_clear()
    assert choose_kernels(torch.device("cpu")) == ("reference", "Triton's kernels need a CUDA device, not cpu")
    cuda = torch.device("cuda", 0)
    capability = (9, 0)
    assert choose_kernels(cuda) == ("reference", "this build of torch, or this machine, has no CUDA")
    choose.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("sparse24_kernels.dispatch.version", lambda _: "3.10.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert choose_kernels(cuda, torch.bfloat16) == ("triton", "Triton on NVIDIA H200")
    assert choose_kernels(cuda, torch.float64).reason == "the kernels take fp32, bf16 and fp16, not torch.float64"
    choose.cache_clear()
    capability = (7, 5)
    assert choose_kernels(cuda) == ("reference", "the kernels need compute capability 8.0 or more: NVIDIA H200")
    choose.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert choose_kernels(cuda) == ("reference", "Triton's kernels were never tried on AMD GPUs")
    choose.cache_clear()
