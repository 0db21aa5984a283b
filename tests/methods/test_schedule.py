"""Schedules and metrics on literal numbers."""

import pytest
import torch

from hf_sparse24 import Sparse24Config
from hf_sparse24.metrics import is_nm_sparse, kept_magnitude
from hf_sparse24.run import SparseRun


def method_of(method: str = "s-ste", **settings):
    return SparseRun(Sparse24Config(method=method, **settings)).method


def phases(total: int, *arguments: str, **settings) -> str:
    """Of the steps 0 to `total`, by their initials: the last is how the trained model computes."""
    method = method_of(*arguments, **settings)
    return "".join(method.phase(step, total, None)[0] for step in range(total + 1))


def test_phases():
    assert phases(4) == "sssss"
    assert phases(12, "t-sr-ste") == "ssssssssssddd"
    assert phases(2, "t-sr-ste") == "sdd"  # a sixth of 2 is rounded up
    assert phases(8, dense_start=2, dense_tail=0.25) == "ddssssddd"
    assert phases(100, dense_start=0.07).count("d") == 7  # not 8: 0.07 * 100 is 7.000000000000001


def refreshes(total: int, *arguments: str, **settings) -> list[int]:
    """The steps after which the state is computed again; the first is where sparsity starts, and computes it anyway."""
    method = method_of(*arguments, **settings)
    return [step for step in range(total + 1) if step in method.schedule(total) and method.refreshes_state(step, total)]


def test_mask_refreshes():
    assert refreshes(12, "t-sr-ste", mask_interval=3, dense_start=1, dense_tail=2) == [1, 4, 7]
    assert refreshes(8, "t-sr-ste", mask_interval=0.25, dense_tail=0) == [0, 2, 4, 6, 8]
    assert refreshes(8) == []


@pytest.mark.parametrize(
    ("arguments", "total", "message"),
    [
        ({"dense_start": 5, "dense_tail": 5}, 10, "total_steps=10 .*dense_start=5"),
        ({"method": "t-sr-ste"}, 1, "total_steps=1 "),
        ({}, 0, "total_steps=0"),
    ],
)
def test_too_few_steps(arguments, total, message):
    with pytest.raises(ValueError, match=message):
        method_of(**arguments).schedule(total)


def test_masked_decay_refuses_an_optimizer_that_maximizes():
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], maximize=True)
    with pytest.raises(ValueError, match=r"AdamW\(maximize=True\)"):
        method_of("sr-ste").check_run(10, optimizer)
    method_of("sr-ste", masked_decay=0.0).check_run(10, optimizer)


def test_kept_magnitude():
    weight = torch.tensor([3.0, -1.0, 0.0, 0.0])
    assert kept_magnitude(weight, torch.tensor([True, False, True, False])) == 0.75
    assert kept_magnitude(torch.zeros(4), torch.ones(4, dtype=torch.bool)) == 0


def test_is_nm_sparse():
    weight = torch.tensor([[1.0, 2, 0, 0], [0, 0, 3, 4]])
    assert is_nm_sparse(weight) and not is_nm_sparse(weight, 1, 4)
    assert is_nm_sparse(torch.ones(4, 2) * torch.tensor([[1], [0], [1], [0]]), dim=0)
    assert not is_nm_sparse(torch.zeros(4, 6))  # 6 is not a multiple of 4
