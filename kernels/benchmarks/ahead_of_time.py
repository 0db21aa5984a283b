"""The kernels compiled without a GPU: registers, spills, memory accesses, instructions, a bound on speed.

Triton compiles every kernel for Hopper, with meta tensors and a stand-in for the driver; its `cuobjdump` disassembles.
"At most" is the share of copy bandwidth that arithmetic leaves on an H200 if everything else is hidden, by the
instructions in the code: both sides of a branch, one turn of a
loop other than that over K.

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
    # The address and the opcode of every instruction, without the predicate in front, and its operands.
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?(?!NOP)([A-Z][\w.]*)([^;]*);", text)
    counts = Counter(word for _, word, _ in found)
    kinds = ("LDG.", "LDGSTS", "STG", "RED.", "REDG", "ATOM")
    memory = {word: n for word, n in sorted(counts.items()) if word.startswith(kinds)}
    # A loop over K is the longest jump back. It runs once per block of the weight.
    sizes = {name: kernel.src.constants.get((i,), 0) for i, name in enumerate(kernel.src.fn.arg_names)}
    if block := sizes.get("ROWS", 0) * sizes.get("COLS", 0):
        jumps = [(int(at, 16), int(rest.split("0x")[1], 16)) for at, word, rest in found if word == "BRA"]
        end, start = max(jumps, key=lambda jump: jump[0] - jump[1])
        inside = Counter(word for at, word, _ in found if start <= int(at, 16) <= end)
        for word, n in inside.items():
            counts[word] += n * (elements // (programs * block) - 1)
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
