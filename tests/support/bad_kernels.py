"""An implementation whose `nm_mask` is wrong in a way of choice; its `unpack_nm` is the reference's."""

import os
import signal
import time

import torch
from sparse24_kernels import dispatch, reference
from sparse24_kernels.operators import Operators


def lies(*arguments):
    mask = reference.masks.nm_mask(*arguments)
    mask[..., -1:] = 0
    return mask


def raises(*arguments):
    raise RuntimeError("an illegal instruction was encountered")


def hangs(*arguments):
    time.sleep(1000)


def crashes(*arguments):
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves_memory_as_it_was(*arguments):
    return torch.empty_like(reference.masks.nm_mask(*arguments))


IN_PROCESS = {
    lies: "elements differ, first False at",
    raises: "RuntimeError: an illegal instruction was encountered",
    leaves_memory_as_it_was: "elements differ, first True at",
}
IN_A_CHILD = {
    hangs: "it did not end within",
    crashes: "it ended its process: Segmentation fault",
}
bad = globals()[os.environ.get("BAD_KERNELS", "lies")]  # as a child process is told


def load():
    return Operators(nm_mask=bad, unpack_nm=reference.packed.unpack_nm)


def unsupported(device, dtype):
    return None if device.type == "cpu" else "a CPU is needed"


def implementation() -> dispatch.Implementation:
    return dispatch.Implementation("bad", load, unsupported, str, lambda: bad.__name__)
