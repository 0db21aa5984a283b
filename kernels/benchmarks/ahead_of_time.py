"""What can be known of the kernels without a GPU: registers, spills, memory accesses, instructions, a bound on speed.

A stand-in for the driver and meta tensors make Triton compile every kernel of every operation for a GPU that is not
there; `cuobjdump`, which Triton brings along, tells what came out. The predicted time is a lower bound: the slowest of
memory and of each kind of execution unit, as if all else were hidden behind it. Instructions are those in the code, so
both sides of a branch count, and of a loop one turn; where there is a loop only memory is counted.

    python kernels/benchmarks/ahead_of_time.py [--capability 90] [--only TEXT] [--output DIR]

writes results/ahead_of_time_sm90.json and .md. Nothing is timed: the same code and the same Triton give the same files.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# ruff: noqa: E402 (imports come after the path that they need)
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch
import triton
from sparse24_kernels import gpu
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit
from workloads import OPERATIONS, Workload


@dataclass(frozen=True)
class Chip:
    """What a program can count on: bytes per second of a large copy, clock under load, and lanes per clock per SM."""

    name: str
    bandwidth: float
    sms: int
    clock: float
    registers: int = 65536
    warps: int = 64


CHIPS = {90: Chip("H200", 4.3e12, 132, 1.755e9), 80: Chip("A100 80 GB", 1.75e12, 108, 1.41e9)}
LANES = {"issue": 128, "alu": 64, "imad": 64, "special": 16, "load-store": 32}
"""Lanes per clock of one SM, by kind of unit; `issue` is what its four schedulers start."""

UNITS = {
    "alu": "IADD3 LOP3 SHF ISETP FSETP FMNMX SEL FSEL PRMT LEA PLOP3 IMNMX IABS F2FP VIADD VIMNMX I2FP HSETP2 HMNMX2 "
    "SGXT BMSK VIADDMNMX",
    "imad": "IMAD",
    "special": "MUFU F2F F2I I2F POPC FRND",
    "load-store": "LDG STG LDS STS LDL STL LDSM STSM SHFL ATOM ATOMG ATOMS RED",
}


class _Driver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def compiled_only(capability: int):
    """Launches compile for `capability` and stop there; yields the growing list of (name, programs, kernel)."""
    launched, launch = [], jit.JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **keywords):
        kernel = launch(self, *arguments, grid=grid, warmup=True, **keywords)
        launched.append((self.fn.__name__, grid[0], kernel))
        return kernel

    jit.JITFunction.run = compile_only
    before = driver._active  # `active` would look for a GPU
    driver.set_active(_Driver(capability))
    try:
        yield launched
    finally:
        jit.JITFunction.run = launch
        driver.set_active(before)


def disassemble(cubin: bytes) -> tuple[list[tuple[int, str]], dict[str, int]]:
    """Address and text of every instruction; and what the code reserves."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text, usage = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-sass", "-res-usage")
        )
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", text)
    # Without the predicate in front of an instruction.
    code = [(int(address, 16), re.sub(r"^@!?U?P\w+ ", "", line.strip())) for address, line in lines]
    return code, {name.lower(): int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}


def measure(name: str, programs: int, kernel, elements: int, chip: Chip) -> dict:
    """One kernel: what it takes of a multiprocessor, and the time of all its instructions."""
    code, usage = disassemble(kernel.asm["cubin"])
    words = [line.split()[0].split(".") for _, line in code]
    counts = Counter(word[0] for word in words if word[0] != "NOP")
    memory = Counter(".".join(word) for word in words if word[0] in UNITS["load-store"].split() + ["BAR"])
    used = {unit: sum(counts[word] for word in names.split()) for unit, names in UNITS.items()}
    used["issue"] = sum(counts.values())
    # An access of 16 bytes per lane takes as long as four of 4 bytes.
    used["load-store"] = sum(n * max(_bits(access) // 32, 1) for access, n in memory.items() if "BAR" not in access)
    jumps = [(address, re.match(r"BRA\S* .*?(0x[0-9a-f]+)", line)) for address, line in code]
    loop = any(jump and int(jump[1], 16) < address for address, jump in jumps)
    threads = programs * kernel.metadata.num_warps * 32
    clocks = {unit: n * threads / LANES[unit] / chip.sms for unit, n in used.items()}
    slowest = max(clocks, key=clocks.get)
    resident = min(chip.warps, chip.registers // (32 * -(-usage["reg"] // 8) * 8))
    return {
        "kernel": name,
        "registers": usage["reg"],
        "spilled_bytes": usage["stack"],
        "shared_bytes": kernel.metadata.shared,
        "warps_per_sm": resident // kernel.metadata.num_warps * kernel.metadata.num_warps,
        "accesses": dict(sorted(memory.items())),
        "instructions_per_element": {unit: round(n * threads / elements, 3) for unit, n in sorted(used.items())},
        "loop": loop,
        "busiest_unit": slowest,
        "picoseconds_per_element": 0.0 if loop else round(clocks[slowest] / chip.clock / elements * 1e12, 4),
    }


def _bits(access: str) -> int:
    """Width of an access in bits: LDG.E.128 -> 128, STG.E.U8 -> 8, LDS -> 32."""
    widths = [int(part.lstrip("US")) for part in access.split(".") if re.fullmatch(r"[US]?(8|16|32|64|128)", part)]
    return widths[0] if widths else 32


def examine(workload: Workload, capability: int) -> dict:
    """All kernels of a workload, and its predicted time; or the error that it ended in."""
    chip = CHIPS[capability]
    entry: dict = {"shape": list(workload.shape), "bytes": workload.bytes(), "elements": workload.elements}
    try:
        file, name = workload.function.split(".")
        with compiled_only(capability) as launched:
            getattr(getattr(gpu, file), name)(*workload.arguments(torch.device("meta")))
        if workload.exact and any("div.full" in kernel.asm["ptx"] for _, _, kernel in launched):
            raise ValueError("multiplies by a reciprocal where the reference divides: use tl.div_rn")
        entry["kernels"] = [measure(*launch, workload.elements, chip) for launch in launched]
    except Exception as error:  # a kernel that does not compile must not hide the others
        return entry | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    arithmetic = sum(kernel["picoseconds_per_element"] for kernel in entry["kernels"])
    memory = workload.bytes() / workload.elements / chip.bandwidth * 1e12
    entry["memory_picoseconds_per_element"] = round(memory, 4)
    entry["share_of_copy_at_most"] = round(min(1.0, memory / arithmetic) if arithmetic else 1.0, 3)
    return entry


def predicted_seconds(workload: Workload, results: dict) -> float | None:
    """The lower bound for a workload from `results` (the JSON file's content), or None where there is none."""
    entry = results.get("operations", {}).get(f"{workload.operation.name} {str(workload.dtype)[6:]}")
    if entry is None or "error" in entry:
        return None
    arithmetic = sum(kernel["picoseconds_per_element"] for kernel in entry["kernels"]) * workload.elements * 1e-12
    return max(arithmetic, workload.bytes() / CHIPS[results["capability"]].bandwidth)


def table(results: dict) -> str:
    chip = CHIPS[results["capability"]]
    lines = [
        f"# The kernels, compiled for sm_{results['capability']}",
        "",
        f"By Triton {results['triton']}, without a GPU: `python kernels/benchmarks/ahead_of_time.py`. At most: the "
        f"share of copy bandwidth that instructions leave on one {chip.name} ({chip.bandwidth / 1e12:g} TB/s, "
        f"{chip.sms} SMs at {chip.clock / 1e9:g} GHz), if everything else is hidden. Not measurements.",
        "",
        "| operation | kernel | registers | warps per SM | spilled B | shared B | loads and stores of device memory | "
        "instr. per element | busiest unit | at most | target |",
        "|---|---|--:|--:|--:|--:|---|--:|---|--:|--:|",
    ]
    for name, entry in results["operations"].items():
        if "error" in entry:
            lines.append(f"| {name} | {entry['error']} |" + " |" * 9)
            continue
        most = f"{entry['share_of_copy_at_most']:.0%}"
        if entry["share_of_copy_at_most"] < entry["target"]:
            most = f"**{most}**"
        for kernel in entry["kernels"]:
            device = ", ".join(
                f"{n} {a}" for a, n in kernel["accesses"].items() if a[:3] in ("LDG", "STG", "RED", "ATO")
            )
            lines.append(
                f"| {name} | {kernel['kernel'].strip('_').removesuffix('_kernel')} | {kernel['registers']} "
                f"| {kernel['warps_per_sm']} | {kernel['spilled_bytes']} | {kernel['shared_bytes']} | {device} "
                f"| {'loop' if kernel['loop'] else kernel['instructions_per_element']['issue']} "
                f"| {kernel['busiest_unit']} | {most} | {entry['target']:.0%} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", type=int, default=90, choices=CHIPS)
    parser.add_argument("--output", type=Path, help=f"a directory; by default {HERE.name}/results")
    parser.add_argument(
        "--only", default="", help="operations with this text in their names; printed alone, without --output"
    )
    options = parser.parse_args()
    results: dict = {"capability": options.capability, "triton": triton.__version__, "operations": {}}
    for operation in (operation for operation in OPERATIONS if options.only in operation.name):
        for dtype, shapes in operation.shapes.items():
            entry = examine(Workload(operation, shapes[len(shapes) // 2], dtype), options.capability)
            results["operations"][f"{operation.name} {str(dtype)[6:]}"] = entry | {"target": operation.target}
    print(table(results))
    if not results["operations"]:
        sys.exit(f"no operation has {options.only!r} in its name")
    if options.only and options.output is None:
        return  # a part must not take the place of the whole
    folder = options.output or HERE / "results"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"ahead_of_time_sm{options.capability}"
    before = json.loads(path.with_suffix(".json").read_text())["triton"] if path.with_suffix(".json").exists() else None
    if before not in (None, triton.__version__):
        print(f"{path}.json was made with Triton {before}; now it is of {triton.__version__}", file=sys.stderr)
    path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(results))


if __name__ == "__main__":
    main()
