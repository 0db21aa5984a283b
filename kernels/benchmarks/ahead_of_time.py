"""The kernels compiled without a GPU: registers, spills, memory accesses, instructions, a bound on speed.

Triton compiles every kernel for Hopper, with meta tensors and a stand-in for the driver; its `cuobjdump` disassembles.
"At most" is the share of copy bandwidth that arithmetic leaves on an H200 if everything else is hidden, by the
instructions in the code: both sides of a branch, one turn of a loop.

    python kernels/benchmarks/ahead_of_time.py [TEXT IN THE NAMES OF OPERATIONS] > results/ahead_of_time_sm90.md
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    KERNELS = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(KERNELS), str(KERNELS.parent / "tests/kernels")]

import kernel_cases
import torch
import triton
from sparse24_kernels import gpu
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from benchmarks.operations import COUNTS, Workload, workloads
from benchmarks.run import table

BANDWIDTH, SMS, CLOCK = 4.3e12, 132, 1.755e9  # of an H200: a large copy, multiprocessors, clock under load
ISSUE_LANES, ALU_LANES = 128, 64  # instructions per clock and multiprocessor: all, and those of the integer unit
ALU = "IADD3 LOP3 SHF ISETP FSETP FMNMX SEL FSEL PRMT LEA PLOP3 IMNMX IABS F2FP VIADD VIMNMX I2FP HSETP2 HMNMX2 SGXT"
ALU += " BMSK VIADDMNMX"


def compile_only() -> list[tuple[str, int, Any]]:
    """From now on, launches compile and stop there; the growing list of (name, programs, kernel)."""
    launched, launch = [], jit.JITFunction.run

    def record(self, *arguments, grid, warmup, **keywords):
        kernel = launch(self, *arguments, grid=grid, warmup=True, **keywords)
        launched.append((self.fn.__name__, grid[0], kernel))
        return kernel

    jit.JITFunction.run = record
    target, device = GPUTarget("cuda", 90, 32), torch.device("meta")
    stand_in = SimpleNamespace(get_current_target=lambda: target, get_active_torch_device=lambda: device)
    stand_in.get_current_device = stand_in.get_current_stream = lambda *_: 0
    driver.set_active(stand_in)
    return launched


def examine(name: str, programs: int, kernel: Any, elements: int) -> tuple[dict[str, Any], float]:
    """One kernel: a row of the table, and seconds of arithmetic."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.check_output([tool, "-sass", "-res-usage", file.name], text=True)
    usage = {unit: int(value) for unit, value in re.findall(r"(REG|STACK):(\d+)", text)}
    # The opcode of every instruction, without the predicate in front.
    counts = Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(?!NOP)([A-Z][\w.]*)[^;]*;", text))
    memory = {word: n for word, n in sorted(counts.items()) if word.startswith(("LDG", "STG", "RED.", "REDG", "ATOM"))}
    alu = sum(n for word, n in counts.items() if word.split(".")[0] in ALU.split())
    threads = programs * kernel.metadata.num_warps * 32
    seconds = threads * max(counts.total() / ISSUE_LANES, alu / ALU_LANES) / SMS / CLOCK
    row = {"kernel": name.strip("_").removesuffix("_kernel"), "registers": usage["REG"], "spilled B": usage["STACK"]}
    row["device memory"] = ", ".join(f"{n} {word}" for word, n in memory.items())
    row["instr. per element"] = counts.total() * threads / elements
    return row, seconds


def rows_of(workload: Workload, launched: list[tuple[str, int, Any]]) -> list[dict[str, Any]]:
    """A row per kernel of a workload, or one with the error that it ended in."""
    name, elements = f"{workload.name} {str(workload.dtype)[6:]}", workload.shape[0] * workload.shape[1]
    elements *= COUNTS[workload.shape] if workload.name.endswith(", model") else 1
    launched.clear()
    try:
        kernel_cases.run(gpu, workload.function, workload.arguments(torch.device("meta")))
        if workload.exact and any("div.full" in kernel.asm["ptx"] for _, _, kernel in launched):
            raise ValueError("multiplies by a reciprocal where the reference divides: use tl.div_rn")
        found = [examine(*launch, elements) for launch in launched]
    except Exception as error:  # a kernel that does not compile must not hide the others
        return [{"": f"{name}: {type(error).__name__}: {error}".splitlines()[0][:200]}]
    share = min(1.0, workload.bytes() / BANDWIDTH / max(sum(seconds for _, seconds in found), 1e-12))
    return [{"": name} | row | {"at most": f"{share:.0%}", "target": f"{workload.target:.0%}"} for row, _ in found]


def main(text: str = "") -> None:
    last = {(workload.name, workload.dtype): workload for workload in workloads() if text in workload.name}
    launched = compile_only()
    rows = [row for workload in last.values() for row in rows_of(workload, launched)]
    print("# The kernels, compiled for sm_90\n")
    print(f"By Triton {triton.__version__}, without a GPU: `python kernels/benchmarks/ahead_of_time.py`. At most: the")
    print("share of copy bandwidth that arithmetic leaves on one H200, if everything else is hidden. Not measured.\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main(*sys.argv[1:])
