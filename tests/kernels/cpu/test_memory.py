"""Blocks of dropped tensors are used again, and never those of tensors that live."""

import threading

import pytest
import torch
from sparse24_kernels.cpu import memory
from sparse24_kernels.cpu.memory import reused_memory

SHAPE, DTYPE = (256, 512), torch.float32


@pytest.fixture(autouse=True)
def no_blocks(monkeypatch):
    monkeypatch.setattr(memory, "_blocks", [])


def test_a_block_is_used_again_when_all_that_shares_it_is_dropped():
    tensor = reused_memory(SHAPE, DTYPE)
    address, view = tensor.data_ptr(), tensor.t()[3:]
    del tensor
    other = reused_memory(SHAPE, DTYPE)
    assert other.data_ptr() != address
    del view
    again = reused_memory(SHAPE[::-1], DTYPE)
    assert again.data_ptr() == address and again.shape == SHAPE[::-1] and again.is_contiguous()
    assert len(memory._blocks) == 2


@pytest.mark.parametrize("shape", [(4,), SHAPE])
def test_memory_is_the_cpus_whatever_the_default_device_is(shape):
    with torch.device("meta"):
        assert reused_memory(shape, DTYPE).device.type == "cpu"


def test_what_autograd_keeps_is_not_used_again():
    kept = reused_memory(SHAPE, DTYPE).fill_(2.0)
    x = torch.ones(SHAPE, requires_grad=True)
    product = x * kept
    del kept
    reused_memory(SHAPE, DTYPE).fill_(5.0)
    product.sum().backward()
    assert (x.grad == 2).all()


def test_small_tensors_take_no_block_and_free_ones_are_given_back(monkeypatch):
    assert reused_memory((8,), DTYPE).shape == (8,) and not memory._blocks
    monkeypatch.setattr(memory, "MOST_FREE", 2**20)
    for size in (256, 512, 1024):
        reused_memory((size, 512), DTYPE)
    reused_memory((2048, 512), DTYPE)
    assert sorted(map(len, memory._blocks)) == [2**20, 2**22]


def test_threads_never_share_a_block():
    wrong = []

    def work(number):
        for _ in range(200):
            tensor = reused_memory(SHAPE, DTYPE).fill_(number)
            if not (tensor == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
