"""What is timed: every public operation at the sizes of GPT-2 and Llama, with the bytes that each must move.

An operation is a function of the rooms (`reference`, `gpu`), a way to make its arguments, and the public function that
takes the same ones. At a shape and a dtype it is a workload, which `cases.check` can hold against the reference, which
`ahead_of_time.py` can compile without a GPU, and which `gpu.py` times.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import sparse24_kernels as kernels
import torch
from cases import tiles
from sparse24_kernels import reference
from sparse24_kernels.cusparselt import Layout
from sparse24_kernels.layout import learn_layout
from torch import Tensor

FP32, BF16 = torch.float32, torch.bfloat16
Shape = tuple[int, int]

GPT2 = ((768, 3072), (1024, 4096), (1280, 5120), (1600, 6400))  # 124M, 355M, 774M, 1.5B: hidden x intermediate
LLAMA = ((2048, 8192), (4096, 14336))  # 1B, 8B
WEIGHTS = {FP32: GPT2 + LLAMA, BF16: GPT2 + LLAMA}
TOKENS = {BF16: ((4096, 3072), (8192, 6400), (8192, 14336), (32768, 8192)), FP32: ((8192, 6400),)}  # tokens x features
W, X = (2048, 8192), (8192, 6400)  # the weight and the activation that torch.compile is tried on
MODELS = {(768, 3072): 24, (1280, 5120): 72}  # how many such weights the MLPs of GPT-2 124M and 774M have

PUBLIC: dict[str, Callable] = {
    "decay.masked_decay_": kernels.foreach_masked_decay_,
    "fp8.fp8_quantize": kernels.fp8_quantize,
    "gated.gated_activation": kernels.gated_activation,
    "gated.gated_activation_backward": lambda *arguments: torch.ops.sparse24.gated_activation_backward(*arguments),
    "masks.count_flips": kernels.count_flips,
    "masks.nm_mask": kernels.nm_mask,
    "mvue.mvue": lambda x, key, n, m, dim, estimator, form, *_: kernels.mvue(
        x, n, m, dim, estimator, key=key, form=form
    ),
    "prune.prune": lambda weight, rule, n, m, dim, mask, scale, dtype, forms, *_: kernels.prune_forms(
        weight, forms, rule, n, m, dim, mask=mask, scale=scale, dtype=dtype
    ),
    "prune.s_ste_scale": kernels.s_ste_scale,
    "prune.unpack_nm": lambda values, indices: kernels.unpack_nm(kernels.Packed(values, indices)),
    "transposable.transposable_mask": kernels.transposable_mask,
}
"""The public function of each function of the rooms, with the arguments that the rooms take; layouts it finds out."""


@dataclass(frozen=True, eq=False)
class Operation:
    """`make(device, shape, dtype)` gives the arguments; `exact` and `terms` are those of `cases.Case`."""

    name: str
    function: str
    make: Callable[[torch.device, Shape, torch.dtype], tuple]
    shapes: dict[torch.dtype, tuple[Shape, ...]]
    exact: bool = True
    terms: Callable[..., list[Tensor]] | None = None
    target: float = 0.8  # of the bandwidth of a copy
    reads: int = 1  # how often the inputs must be read
    compile: Shape | None = None  # at which the reference is also timed under torch.compile, which takes long


@dataclass(frozen=True)
class Workload:
    """An operation at one shape and dtype; to `cases.check` it is a case."""

    operation: Operation
    shape: Shape
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.operation.name} {self.shape[0]}x{self.shape[1]} {str(self.dtype).removeprefix('torch.')}"

    function = property(lambda self: self.operation.function)
    exact = property(lambda self: self.operation.exact)
    terms = property(lambda self: self.operation.terms)

    def arguments(self, device: torch.device) -> tuple:
        """Fresh ones, the same values each time."""
        return self.operation.make(torch.device(device), self.shape, self.dtype)

    def call(self, arguments: tuple):
        """The public function; what it returns, or its first argument where it works in place."""
        results = PUBLIC[self.function](*arguments)
        return arguments[0] if results is None else results

    @property
    def elements(self) -> int:
        """Elements of the tensor (for a whole model: of all weights) that is worked on."""
        return self.shape[0] * self.shape[1] * (MODELS.get(self.shape, 3) if self.operation.name in OF_A_MODEL else 1)

    def bytes(self) -> int:
        """What must be read and written: inputs (as often as needed) and results, each once."""
        arguments = self.arguments(torch.device("meta"))
        results = self.call(arguments)
        return self.operation.reads * sum(map(_size, tensors(arguments))) + sum(map(_size, tensors(results)))


def tensors(x) -> list[Tensor]:
    """All tensors in nested lists and tuples."""
    if isinstance(x, Tensor):
        return [x]
    return [y for item in x for y in tensors(item)] if isinstance(x, list | tuple) else []


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()


def random(device: torch.device, *shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    """Gaussian values, the same ones each time; never zeros, on which a GPU can be faster."""
    if device.type == "meta":
        return torch.empty(shape, device=device, dtype=dtype)
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def workloads() -> Iterator[Workload]:
    """Every workload."""
    for operation in OPERATIONS:
        for dtype, shapes in operation.shapes.items():
            yield from (Workload(operation, shape, dtype) for shape in shapes)


def _prune(rule, dim, forms, device, shape, dtype):
    weight = random(device, *shape, dtype=dtype)
    mask = scale = None
    if rule == "mask":
        # On meta, only its size matters, and the reference is slow even there.
        search = reference.transposable.transposable_mask
        mask = _mask_bits(device, *shape) if device.type == "meta" else search(weight, 2, 4, "exact", True)
    elif rule == "soft-threshold":
        scale = torch.full((), 1.483, device=device)
    sizes = {"compressed": shape, "compressed-transposed": shape[::-1]}
    layouts = {form: _layout(device, sizes[form]) for form in forms if form in sizes}
    return weight, rule, 2, 4, dim, mask, scale, BF16, forms, layouts


def _layout(device: torch.device, shape: Shape) -> Layout:
    """For the rooms; the public functions take the library's own, which must be known before they are timed."""
    if device.type == "cuda":
        learn_layout(*shape, BF16, device)
    return tiles(device, *shape)


def _prune_operations() -> Iterator[Operation]:
    """fp32 or bf16 weights in, bf16 operands of a product out."""
    both = ["dense", "transposed"]
    alone = (["dense"], both, ["packed"], ["compressed"])
    for rule, forms in product(("magnitude", "soft-threshold"), alone):
        name = f"prune {rule}: {'+'.join(forms)}"
        yield Operation(
            name, "prune.prune", partial(_prune, rule, 1, forms), WEIGHTS, compile=None if forms == both else W
        )
    for rule in ("magnitude", "soft-threshold"):
        yield Operation(f"prune {rule}, columns: dense", "prune.prune", partial(_prune, rule, 0, ["dense"]), WEIGHTS)
    for forms in (*alone, ["packed", "packed-transposed"], ["compressed", "compressed-transposed"]):
        name = f"prune mask: {'+'.join(forms)}"
        make = partial(_prune, "mask", 1, forms)
        yield Operation(name, "prune.prune", make, WEIGHTS, compile=W if len(forms) == 2 else None)


def _scale(device, shape, dtype):
    return random(device, *shape, dtype=dtype), 2, 4, 1, "mse"


def _unpack(device, shape, dtype):
    return tuple(reference.prune.prune(random(device, *shape), "magnitude", 2, 4, 1, None, None, dtype, ["packed"]))


def _mask_operations() -> Iterator[Operation]:
    for name, dim in (("rows", 1), ("columns", 0)):
        yield Operation(
            f"nm_mask bits, {name}",
            "masks.nm_mask",
            lambda device, shape, dtype, dim=dim: (random(device, *shape, dtype=dtype), 2, 4, dim, True),
            WEIGHTS,
            compile=W if dim == 1 else None,
        )
    yield Operation(
        "transposable mask bits",
        "transposable.transposable_mask",
        lambda device, shape, dtype: (random(device, *shape, dtype=dtype), 2, 4, "exact", True),
        WEIGHTS,
        target=0.6,
        compile=(768, 3072),  # the reference is a loop over parts of the matrix, and compiles each
    )
    yield Operation("s_ste_scale", "prune.s_ste_scale", _scale, WEIGHTS, exact=False, compile=W)
    yield Operation("unpack", "prune.unpack_nm", _unpack, {BF16: WEIGHTS[BF16]}, compile=W)


def _mvue(n, m, dim, estimator, form, device, shape, dtype):
    key = torch.full((), 2**40 + 12345, device=device, dtype=torch.int64)
    layout = _layout(device, shape if dim == 1 else shape[::-1]) if form == "compressed" else None
    return random(device, *shape, dtype=dtype), key, n, m, dim, estimator, form, layout


def _mvue_operations() -> Iterator[Operation]:
    """Groups along tokens are those of dW, groups along features those of dX."""
    kinds = ((2, 4, "exact"), (2, 4, "approx"), (1, 2, "exact"))
    for (n, m, estimator), (along, dim), form in product(
        kinds, (("tokens", 0), ("features", 1)), ("dense", "transposed", "packed", "compressed")
    ):
        if (n, m) == (2, 4) or form in ("dense", "transposed"):
            name = f"mvue {n}:{m} {estimator}, {along}: {form}"
            make = partial(_mvue, n, m, dim, estimator, form)
            shapes = {BF16: TOKENS[BF16]} if form == "compressed" else TOKENS
            yield Operation(name, "mvue.mvue", make, shapes, compile=X if (dim, form) == (0, "dense") else None)


def _mask_bits(device, *shape, seed: int = 0) -> Tensor:
    """Random bits will do where no groups are looked at."""
    if device.type == "meta":
        return torch.empty(shape[0], shape[1] // 8, dtype=torch.uint8, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(256, (shape[0], shape[1] // 8), generator=generator, dtype=torch.uint8, device=device)


def _decay(grad_dtype, device, shape, dtype):
    count = MODELS.get(shape, 3)
    return (
        [random(device, *shape, dtype=grad_dtype, seed=i) for i in range(count)],
        [random(device, *shape, dtype=dtype, seed=i + 1) for i in range(count)],
        [_mask_bits(device, *shape, seed=i) for i in range(count)],
        [6e-5] * count,
    )


def _flips(device, shape, dtype):
    return tuple([_mask_bits(device, *shape, seed=i + j) for i in range(MODELS.get(shape, 3))] for j in (0, 1))


def _model_operations() -> Iterator[Operation]:
    for name, grad_dtype, dtype in (("masked decay, model", FP32, FP32), ("masked decay, model", BF16, BF16)):
        yield Operation(
            name,
            "decay.masked_decay_",
            partial(_decay, grad_dtype),
            {dtype: tuple(MODELS)},
            exact=False,
            terms=lambda grads, weights, masks, alphas: grads,
            compile=(768, 3072),
        )
    yield Operation("flips, model", "masks.count_flips", _flips, {FP32: tuple(MODELS)})


def _gated(count, kind, layout, device, shape, dtype):
    """(grad,) gate and up."""
    if layout == "row-major":
        return *(random(device, *shape, dtype=dtype, seed=i) for i in range(count)), kind
    return *(random(device, *shape[::-1], dtype=dtype, seed=i).t() for i in range(count)), kind


def _elementwise_operations() -> Iterator[Operation]:
    for kind, layout in product(("swiglu", "geglu"), ("row-major", "column-major")):
        yield Operation(
            f"{kind} forward, {layout}",
            "gated.gated_activation",
            partial(_gated, 2, kind, layout),
            TOKENS,
            exact=False,
            terms=lambda gate, up, _: [gate * up],
            compile=X if layout == "row-major" else None,
        )
        yield Operation(
            f"{kind} backward, {layout}",
            "gated.gated_activation_backward",
            partial(_gated, 3, kind, layout),
            TOKENS,
            exact=False,
            terms=lambda grad, gate, up, _: [grad * up, grad * gate],
            compile=X if layout == "row-major" else None,
        )
    for format in ("e4m3", "e5m2"):
        yield Operation(
            f"fp8_quantize {format}",
            "fp8.fp8_quantize",
            lambda device, shape, dtype, f=format: (random(device, *shape, dtype=dtype), f),
            TOKENS,
            reads=2,  # the scale must be known before the first value is written
            compile=X if format == "e4m3" else None,
        )


OF_A_MODEL = ("masked decay, model", "flips, model")
OPERATIONS = (
    *_prune_operations(),
    *_mask_operations(),
    *_mvue_operations(),
    *_model_operations(),
    *_elementwise_operations(),
)
