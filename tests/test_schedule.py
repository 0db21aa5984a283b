"""Schedules and metrics on literal numbers."""

import pytest
import torch

from hf_sparse24 import Sparse24Config
from hf_sparse24.metrics import flip_rate, is_nm_sparse, kept_magnitude
from hf_sparse24.schedule import Schedule


def phases(config: Sparse24Config, total: int) -> str:
    schedule = Schedule.from_config(config, total)
    return "".join(schedule.phase(step)[0] for step in range(total))


def test_phases():
    assert phases(Sparse24Config(), 4) == "ssss"
    assert phases(Sparse24Config(method="t-sr-ste"), 12) == "ssssssssssdd"
    assert phases(Sparse24Config(method="t-sr-ste"), 2) == "sd"  # a sixth of 2 is rounded up
    assert phases(Sparse24Config(dense_start=2, dense_tail=0.25), 8) == "ddssssdd"
    assert phases(Sparse24Config(dense_start=0.07), 100).count("d") == 7  # not 8: 0.07 * 100 is 7.000000000000001


def test_a_run_without_a_tail_leaves_a_sparse_model_and_one_with_a_tail_a_dense_one():
    assert Schedule.from_config(Sparse24Config(), 4).phase(4) == "sparse"
    assert Schedule.from_config(Sparse24Config(method="t-sr-ste"), 12).phase(12) == "dense"


def test_mask_searches():
    schedule = Schedule.from_config(Sparse24Config(method="t-sr-ste", mask_interval=3, dense_start=1, dense_tail=2), 12)
    assert [step for step in range(13) if schedule.searches_mask(step)] == [1, 4, 7]
    fraction = Schedule.from_config(Sparse24Config(method="t-sr-ste", mask_interval=0.25, dense_tail=0), 8)
    assert fraction.mask_interval == 2
    assert not any(Schedule.from_config(Sparse24Config(), 8).searches_mask(step) for step in range(9))


@pytest.mark.parametrize(
    ("arguments", "total", "message"),
    [
        ({"dense_start": 5, "dense_tail": 5}, 10, "total_steps=10 leaves no sparse step: dense_start=5 is 5 steps"),
        ({"method": "t-sr-ste"}, 1, "total_steps=1 leaves no sparse step"),
        ({"dense_start": 100}, 10, "leaves no sparse step"),
        ({}, 0, "total_steps=0: a run needs at least 1"),
    ],
)
def test_too_few_steps(arguments, total, message):
    with pytest.raises(ValueError, match=message):
        Schedule.from_config(Sparse24Config(**arguments), total)


def test_flip_rate():
    old = torch.tensor([True, True, False, False])
    assert flip_rate(old, old) == 0
    assert flip_rate(old, torch.tensor([True, False, True, False])) == 0.5  # a swapped pair counts as two
    with pytest.raises(ValueError, match="two bool masks of one shape"):
        flip_rate(old, old[:2])
    with pytest.raises(ValueError, match="two bool masks"):
        flip_rate(old.float(), old.float())


def test_kept_magnitude():
    weight = torch.tensor([3.0, -1.0, 0.0, 0.0])
    assert kept_magnitude(weight, torch.tensor([True, False, True, False])) == 0.75
    assert kept_magnitude(torch.zeros(4), torch.ones(4, dtype=torch.bool)) == 0


def test_is_nm_sparse():
    weight = torch.tensor([[1.0, 2, 0, 0], [0, 0, 3, 4]])
    assert is_nm_sparse(weight) and not is_nm_sparse(weight, 1, 4)
    assert is_nm_sparse(torch.ones(4, 2) * torch.tensor([[1], [0], [1], [0]]), dim=0)
    assert not is_nm_sparse(torch.zeros(4, 6))  # 6 is not a multiple of 4
