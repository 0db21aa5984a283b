"""Triton's kernels compiled for Hopper without a GPU: prints each with its registers spilled, or the error.

Run as a script, in a separate process without TRITON_INTERPRET: it replaces Triton's driver by a stand-in, and calls
every kernel on meta tensors.
"""

from types import SimpleNamespace
from typing import Any

import torch
from sparse24_kernels import gpu
from sparse24_kernels.hard_problems import INEXACT
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from recipes.benchmarks.operations import workloads


def compile_only() -> list[Any]:
    """From now on, launches compile and stop there; the growing list of compiled kernels."""
    compiled, launch = [], jit.JITFunction.run

    def record(self, *arguments, grid, warmup, **keywords):
        compiled.append(launch(self, *arguments, grid=grid, warmup=True, **keywords))
        return compiled[-1]

    jit.JITFunction.run = record
    target, device = GPUTarget("cuda", 90, 32), torch.device("meta")
    stand_in = SimpleNamespace(get_current_target=lambda: target, get_active_torch_device=lambda: device)
    stand_in.get_current_device = stand_in.get_current_stream = lambda *_: 0
    driver.set_active(stand_in)
    return compiled


def main() -> None:
    compiled = compile_only()
    # MVUE has a kernel for its exact 2:4 alone. In so many columns a sum has several parts.
    timed = [each for each in workloads() if each.operator != "mvue" or "2:4 exact" in each.name]
    kinds = {(workload.name, workload.dtype): workload for workload in timed}
    for workload in kinds.values():
        name = workload.operator
        compiled.clear()
        try:
            getattr(gpu.OPERATORS, name)(*workload.at((256, 4096)).arguments(torch.device("meta")))
            # Multiplying by a reciprocal is not what the reference does: kernels divide by tl.div_rn.
            divides = name not in INEXACT and any("div.full" in kernel.asm["ptx"] for kernel in compiled)
            print(name, len(compiled), "inexact division" if divides else "ok")
        except Exception as error:  # one that does not compile must not hide the others
            print(name, len(compiled), f"{type(error).__name__}: {error}".splitlines()[0])


if __name__ == "__main__":
    main()
