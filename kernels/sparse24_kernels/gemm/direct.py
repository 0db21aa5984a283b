"""cuSPARSELt called by ctypes, in the copy that torch has loaded: 2:4 GEMMs whose plans are kept.

torch's operator makes and drops a plan in every call, which took the host 585 us beside an H100. What this rests on,
from the headers of 0.7.1, 0.8.0, 0.8.1 and 0.10.0, which agree:

* Structs are opaque, 1024 bytes at most, at multiples of 16. The library keeps pointers between them: they never move.
* A handle belongs to the device that is current when it is made and to one thread, and so does what is made with it.
* A GEMM is asynchronous. Its call reads alpha, beta and the stream on the host, and the bias' address in a descriptor.
"""

import ctypes
import os
import sys
import threading
from collections import OrderedDict
from functools import cache

import torch
from torch import Tensor

PLANS = 1024  # that a thread keeps; of more, the least recently used are dropped
VERSIONS = ((0, 7), (0, 10))  # the first and the last whose header was read
_STRUCT = 1024
_DTYPES = {torch.bfloat16: 14, torch.float16: 2}  # cudaDataType
_ROW, _COLUMN = 2, 1  # cusparseOrder_t
_COMPUTE_32F = 2  # cusparseComputeType
_BIAS, _ALGORITHM = 8, 0  # CUSPARSELT_MATMUL_BIAS_POINTER, CUSPARSELT_MATMUL_ALG_CONFIG_ID
_MATRIX, _FROM_0_8 = "MatDescriptorDestroy", "MatmulAlgSelectionDestroy"

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "u": ctypes.c_uint32, "z": ctypes.c_size_t}
_FUNCTIONS = """
GetProperty:ip Init:p Destroy:p StructuredDescriptorInit:ppllluiii DenseDescriptorInit:ppllluii MatDescriptorDestroy:p
SpMMACompressedSize2:pppp SpMMACompress2:ppiipppp MatmulDescriptorInit:ppiippppi MatmulDescSetAttribute:ppipz
MatmulAlgSelectionInit:pppi MatmulAlgSetAttribute:ppipz MatmulAlgSelectionDestroy:p MatmulPlanInit:pppp
MatmulGetWorkspace:ppp MatmulPlanDestroy:p Matmul:ppppppppppi
"""


class Library(threading.local):
    """The functions, and the handles by device and the plans that this thread has made.

    OSError or AttributeError: the library is not loaded, of another version, or lacks a function.
    """

    def __init__(self, name: str, mode: int):
        loaded, self.functions = ctypes.CDLL(name, mode), {}
        for function, types in (each.split(":") for each in _FUNCTIONS.split()):
            if function != _FROM_0_8 or hasattr(loaded, f"cusparseLt{function}"):
                self.functions[function] = getattr(loaded, f"cusparseLt{function}")
                self.functions[function].argtypes = [_TYPES[each] for each in types]
        version = (ctypes.c_int * 3)()
        for part in range(3):
            self.call("GetProperty", part, ctypes.addressof(version) + 4 * part)
        if not VERSIONS[0] <= tuple(version[:2]) <= VERSIONS[1]:
            raise OSError(f"the structs of cuSPARSELt {'.'.join(map(str, version))} are not known")
        self.handles: dict[torch.device, _Structs] = {}
        self.plans: OrderedDict[tuple, _Plan] = OrderedDict()

    def call(self, function: str, *arguments: int | None) -> None:
        if status := self.functions[function](*arguments):
            raise RuntimeError(f"cusparseLt{function} returns {status}: take backend='dense' for such sizes")

    def structs(self, device: torch.device, most: int) -> "_Structs":
        """Memory for structs, with the handle of a device, which is the current one."""
        if device not in self.handles:
            torch.zeros(1, device=device)  # a new thread has no context before its first launch
            handle = _Structs(self, None, 1)
            handle.make("Init", "Destroy")
            self.handles[device] = handle
        return _Structs(self, self.handles[device], most)


@cache
def load() -> Library | str:
    """The library that torch has loaded, or in words why it is not called directly."""
    try:
        return Library("libcusparseLt.so.0", os.RTLD_NOW | os.RTLD_NOLOAD)
    except (OSError, AttributeError, RuntimeError) as error:  # Windows has no such modes
        return str(error)


class _Structs:
    """Structs of the library, which end with this object, the last first."""

    def __init__(self, library: Library, handle: "_Structs | None", most: int):
        self.call, self.functions, self.parent = library.call, library.functions, handle  # which outlives them
        self.handle: tuple[int, ...] = () if handle is None else (handle.start,)
        self.memory = ctypes.create_string_buffer(most * _STRUCT + 64)
        self.start: int = -(-ctypes.addressof(self.memory) // 64) * 64
        self.free, self.made = self.start, list[tuple[str, int]]()

    def make(self, function: str, destroy: str, *arguments: int) -> int:
        """The address of a new struct, by a function that takes the handle before and `arguments` behind it."""
        address, self.free = self.free, self.free + _STRUCT
        self.call(function, *self.handle, address, *arguments)
        self.made.append((destroy, address))
        return address

    def __del__(self) -> None:
        while self.made and not sys.is_finalizing():  # where the process ends, it may be too late for a driver
            destroy, address = self.made.pop()
            self.functions.get(destroy, bool)(address)


class _Plan:
    """How a GEMM of one size runs by one algorithm. The operands, the stream and the bias' address may change."""

    def __init__(self, library: Library, key: tuple, bias: int | None):
        device, m, n, k, dtype, transposed, algorithm, _ = key
        kind, self.structs = _DTYPES[dtype], library.structs(device, 6)
        make, self.call, self.handle = self.structs.make, library.call, self.structs.handle[0]
        sparse = make("StructuredDescriptorInit", _MATRIX, m, k, k, 16, kind, _ROW, 0)
        dense = make("DenseDescriptorInit", _MATRIX, *((n, k, k) if transposed else (k, n, n)), 16, kind, _ROW)
        leading, order = (m, _COLUMN) if transposed else (n, _ROW)
        result = make("DenseDescriptorInit", _MATRIX, m, n, leading, 16, kind, order)
        self.matmul = make("MatmulDescriptorInit", "", 0, transposed, sparse, dense, result, result, _COMPUTE_32F)
        self.bias, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.set_bias(bias)
        selection = make("MatmulAlgSelectionInit", _FROM_0_8, self.matmul, 0)
        number, size = ctypes.c_int(algorithm), ctypes.c_size_t()
        self.call("MatmulAlgSetAttribute", self.handle, selection, _ALGORITHM, ctypes.addressof(number), 4)
        self.plan = make("MatmulPlanInit", "MatmulPlanDestroy", self.matmul, selection)
        self.call("MatmulGetWorkspace", self.handle, self.plan, ctypes.addressof(size))
        self.workspace, self.scales = size.value, (ctypes.c_float * 2)(1, 0)
        self.alpha, self.streams = ctypes.addressof(self.scales), ctypes.addressof(self.stream)

    def set_bias(self, address: int | None) -> None:
        if address != self.bias.value:
            self.bias.value = address
            self.call("MatmulDescSetAttribute", self.handle, self.matmul, _BIAS, ctypes.addressof(self.bias), 8)


def matmul(
    library: Library, compressed: Tensor, dense: Tensor, bias: Tensor | None, transposed: bool, algorithm: int
) -> Tensor:
    """`cusparselt.matmul` of operands as the library takes them, on the current device. RuntimeError: it fails."""
    device, m, (k, n) = dense.device, len(compressed), dense.shape
    address = None if bias is None else bias.data_ptr()
    key = (device, m, n, k, dense.dtype, transposed, algorithm, bias is None)  # a plan is with a bias or without
    plan = library.plans.get(key)
    if plan is None:
        plan = library.plans[key] = _Plan(library, key, address)
        if len(library.plans) > PLANS:
            library.plans.popitem(last=False)
    library.plans.move_to_end(key)
    plan.set_bias(address)
    result = dense.new_empty((n, m) if transposed else (m, n))
    space = dense.new_empty(plan.workspace, dtype=torch.uint8) if plan.workspace else None
    a, b, c = compressed.data_ptr(), dense.data_ptr(), result.data_ptr()
    plan.stream.value, workspace = _stream(device), None if space is None else space.data_ptr()
    library.call("Matmul", plan.handle, plan.plan, plan.alpha, a, b, plan.alpha + 4, c, c, workspace, plan.streams, 1)
    return result


def compress(library: Library, matrix: Tensor) -> Tensor:
    """A contiguous 2:4 matrix `[m, k]` in the library's layout `[m, columns]`, on the current device."""
    (m, k), device, sizes = matrix.shape, matrix.device, (ctypes.c_size_t * 2)()
    structs = library.structs(device, 1)
    sparse = structs.make("StructuredDescriptorInit", _MATRIX, m, k, k, 16, _DTYPES[matrix.dtype], _ROW, 0)
    library.call("SpMMACompressedSize2", *structs.handle, sparse, at := ctypes.addressof(sizes), at + 8)
    result = matrix.new_empty(m, -(-sizes[0] // (m * matrix.itemsize)))
    space = matrix.new_empty(sizes[1], dtype=torch.uint8)
    addresses = matrix.data_ptr(), result.data_ptr(), space.data_ptr()
    library.call("SpMMACompress2", *structs.handle, sparse, 1, 0, *addresses, _stream(device))
    return result


def _stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
