"""Call the kernels for CPUs with random sizes, numbers and masks, without torch. NumPy allocates every operand to the
byte, so that a sanitizer sees what is read or written beside one; masked instructions, which it does not watch, meet a
page that is protected.

    LD_PRELOAD=$(g++ -print-file-name=libasan.so) python tests/support/fuzz_cpu_kernels.py LIBRARY SEED CALLS

What they compute is compared in tests/kernels/cpu.
"""

import ctypes
import itertools
import mmap
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

FP32, BF16, FP16 = range(3)
TASK = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
PARALLEL_FOR = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p
)
RULES = {
    "magnitude": 0,
    "soft-threshold": 1,
    "mask": 2,
    "bits": 3,
    "nm-mask": 4,
    "mvue": 5,
    "transposable": 6,
    "pack-bits": 7,
    "decay": 8,
    "decay-bits": 9,
}
PATTERNS = [(2, 4), (2, 4), (1, 2), (1, 8), (6, 8), (8, 16), (16, 32), (31, 32), (1, 64), (32, 64), (63, 64)]
EIGHTS = [0, 1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 33, 64, 65, 100]
TOKENS = [0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 64, 65, 100, 257, 600]


def stored(numbers, dtype):
    """fp32 numbers as the kernels store them, rounded towards zero."""
    if dtype == BF16:
        return (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(np.float16) if dtype == FP16 else numbers.copy()


def before_a_protected_page(array):
    """A copy of the array whose last byte is the last one of a page, behind which nothing may be touched."""
    if array is None or not array.nbytes:
        return array
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data + size), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError("mprotect")
    copy = memory[size - array.nbytes : size].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Fuzzer:
    def __init__(self, file, seed):
        self.random = np.random.default_rng(seed)
        self.library = ctypes.CDLL(file)
        self.library.sparse24_path.restype = ctypes.c_char_p
        self.paths = []
        while (name := self.library.sparse24_path(len(self.paths))) is not None:
            self.paths.append(name.decode())
        assert self.library.sparse24_path(-1) is None and self.library.sparse24_path(1000) is None
        self.pool = ThreadPoolExecutor(3)
        self.parallel_for = PARALLEL_FOR(self.run)
        self.threads = 1

    def run(self, begin, end, grain, task, context):
        """As torch does, but with any parts."""
        edges = [begin, *sorted(self.random.integers(begin, end + 1, self.threads - 1)), end]
        list(self.pool.map(lambda part: TASK(task)(*map(int, part), context), itertools.pairwise(edges)))
        return 0

    def numbers(self, shape, dtype, special):
        numbers = self.random.standard_normal(shape, np.float32)
        if special and numbers.size:
            some = self.random.integers(0, numbers.size, 3)
            numbers.reshape(-1)[some] = [np.nan, np.inf, 1e-42]
        return stored(numbers, dtype)

    def call(self):
        random = self.random
        tokens, rows = int(random.choice(TOKENS)), int(random.integers(0, 90))
        n, m = PATTERNS[random.integers(len(PATTERNS))]
        k, dtype = -(-8 * int(random.choice(EIGHTS[1:])) // m) * m, int(random.integers(3))
        int8, special, valid = (bool(random.integers(2)) for _ in range(3))
        self.threads = int(random.integers(1, 4))
        kept = (np.arange(m) < n) & np.ones((rows, k // m, m), bool)
        kept = random.permuted(kept, axis=2).reshape(rows, k)
        mask = np.packbits(kept, axis=1, bitorder="little")
        if not valid:
            mask = random.integers(0, 256, mask.shape).astype(np.uint8) | np.uint8(255 * random.integers(2))
        scales = None
        if int8:
            values = random.integers(-128, 128, (rows, k * n // m)).astype(np.int8)
            scales = self.numbers((rows, -(-k // 128)), dtype, special)
        else:
            values = self.numbers((rows, k * n // m), dtype, special)
        x = self.numbers((tokens, k), dtype, special)
        bias = self.numbers(rows, dtype, special) if random.integers(2) else None
        number = int(random.choice([number for number, name in enumerate(self.paths) if name]))
        y, dense = (stored(np.zeros(shape, np.float32), dtype) for shape in ((tokens, rows), (rows, k)))
        if is_product := bool(random.integers(2)):  # x is [k, tokens], y [rows, tokens]
            x, y, bias = np.ascontiguousarray(x.T), np.ascontiguousarray(y.T), None
        operands = [x, values, mask, scales, bias, y, dense]
        if random.integers(2):
            operands = [before_a_protected_page(operand) for operand in operands]
        pointers = [ctypes.c_void_p(None if operand is None else operand.ctypes.data) for operand in operands]
        sizes = [ctypes.c_int64(size) for size in (tokens, rows, k, 64 * n // m, m, dtype, is_product)]
        assert not self.library.sparse24_linear(number, *pointers[:6], *sizes, self.parallel_for)
        sizes = [*sizes[1:4], sizes[5]]
        assert not self.library.sparse24_unpack(number, *pointers[1:4], pointers[6], *sizes, self.parallel_for)

    def prune(self):
        random = self.random
        rule, dtype, result = str(random.choice(list(RULES))), int(random.integers(3)), int(random.integers(3))
        n, m = (
            PATTERNS[random.integers(len(PATTERNS))] if rule in ("magnitude", "soft-threshold", "nm-mask") else (2, 4)
        )
        before, size, after = (int(random.choice([0, 1, 2, 3, 5, 8])), m * int(random.choice(EIGHTS[:12])), 1)
        special = bool(random.integers(2))
        is_packed = rule in ("magnitude", "soft-threshold", "mask", "bits", "mvue") and bool(random.integers(2))
        if rule.startswith("decay"):
            dtype = result = FP32
        if is_packed:
            n, m, size, result = 2, 4, 32 * int(random.choice([0, 1, 2, 3, 9])), FP32
            dtype = FP32 if rule == "mvue" else dtype
            if random.integers(2):
                before, after = 1, int(random.integers(0, 150))
        elif rule == "transposable":
            before *= 4
        elif rule in ("mask", "bits", "pack-bits", "decay", "decay-bits"):
            size = int(random.choice([0, 1, 7, 8, 65, 4095, 4096, 4097, 9001]))
        elif random.integers(2):
            after = int(random.integers(0, 150))
        self.threads = int(random.integers(1, 4))
        masked = (size, after) if is_packed and after != 1 else (before, size)  # rows of its bits
        x = mask = random.integers(0, 2, masked).astype(np.uint8)
        bits = np.packbits(mask, axis=1, bitorder="little")
        if rule != "pack-bits":
            x = self.numbers((before, size, after), dtype, special)
        if rule in ("nm-mask", "transposable", "pack-bits"):
            y = np.full(bits.shape if rule == "pack-bits" else x.shape, 7, np.uint8)
        else:
            y = stored(np.zeros(x.shape, np.float32), result := dtype if rule == "mvue" else result)
        if is_packed:  # values, and the bits of their mask
            y = np.zeros(x.size // 2 + x.size // 32, np.float32)
        operands = [x, {"mask": mask, "bits": bits, "decay": mask, "decay-bits": bits}.get(rule), y]
        if random.integers(2):
            operands = [before_a_protected_page(operand) for operand in operands]
        pointers = [ctypes.c_void_p(None if operand is None else operand.ctypes.data) for operand in operands]
        sizes = [ctypes.c_int64(number) for number in (before, size, after, dtype, result, n, m)]
        key = int(random.integers(-(2**62), 2**62))
        rest = (ctypes.c_float(0.5), ctypes.c_int64(key), ctypes.c_int64(is_packed), self.parallel_for)
        number = int(random.choice([number for number, name in enumerate(self.paths) if name]))
        failed = self.library.sparse24_prune(number, ctypes.c_int64(RULES[rule]), *pointers, *sizes, *rest)
        assert not failed or rule.startswith("decay")  # which paths without fused multiply-add lack


if __name__ == "__main__":
    fuzzer = Fuzzer(sys.argv[1], int(sys.argv[2]))
    with np.errstate(all="ignore"):
        for _ in range(int(sys.argv[3])):
            fuzzer.call()
            fuzzer.prune()
    print(f"{sys.argv[3]} calls, paths {[name for name in fuzzer.paths if name]}")
