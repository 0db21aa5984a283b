"""The three products of a linear layer and the whole layer, dense against sparse, at the sizes of models.

Every sparse result is checked before it is timed. A product stands in the tables by itself (operands packed already),
with all its packing (pruned and compressed in the same call), and by the library's default algorithm, which is what it
costs not to tune. A layer is timed forward and backward: with operands kept, as in every micro-batch but the first of a
step; with operands made, as where there is one micro-batch; and as `backend="auto"` runs it, made as well.
"""

import sparse24_kernels as kernels
import tilelang_product
import torch
from report import clean
from shapes import METHODS, Cell
from side_by_side import (
    NOT_RUN,
    Maker,
    assert_three_way,
    forget,
    judged,
    randn,
    ratio,
    sets_that_fill,
    side_by_side,
    tune_first,
)
from sparse24_kernels.cusparselt import Algorithm
from sparse24_kernels.layout import known_layout
from timing import OutOfTime, describe, time_limit
from torch import Tensor, nn

FORWARD, AUTO = 1.5, 0.98
LAYER = {"s-ste": 1.28, "t-sr-ste": 1.45}
"""How many times faster than dense: goals from `FROM_TOKENS` tokens on, packing included; `AUTO` at every size."""

FROM_TOKENS = 8192
TUNING = 0.45
"""Share of the section's time that goes into tuning."""


def section(run) -> None:
    """Tune, then every cell as far as the time goes."""
    result = run.result.setdefault("products", {})
    cells = [cell for cell in run.cells if run.options.only in str(cell)]
    for cell in cells:
        result[str(cell)] = {"flops": cell.flops, "error": NOT_RUN}
    tune_first(run, (p for cell in cells for p in cell.problems().values()), TUNING * run.left())
    tilelang_product.section(run)
    for cell in cells:
        if run.left(reserve=10) < 0:
            return
        try:
            row = measure(run, cell)
        except (Exception, OutOfTime) as error:  # no room for the operands, say
            row = {"error": clean(describe(error))}
        result[str(cell)] = {"flops": cell.flops} | row
        forget(run, str(cell))
        run.write()


def measure(run, cell: Cell) -> dict:
    """One cell: all its ways in turn, and what they come to."""
    with time_limit(min(40, run.left(reserve=5))):
        operands = Operands(run, cell)
        plans, compressed_by = operands.plans(), operands.layouts()
        makers, wrong = operands.makers(plans)
    rows, clocks = side_by_side(run, makers, 40)
    rows |= {name: {"error": error} for name, error in wrong.items()}
    result = {"clocks": clocks, "times": rows, "compressed_by": compressed_by, "products": {}, "layer": {}, "goals": []}
    for name, plan in plans.items():
        sparse, base = ratio(rows, f"{name} dense", f"{name} sparse"), f"{name} dense"
        # Dense where auto takes dense: the same call, so 1 by construction, not by a second measurement.
        result["products"][name] = plan | {
            "sparse": sparse,
            "packed_too": ratio(rows, base, f"{name} sparse, packing"),
            "default_algorithm": ratio(rows, base, f"{name} default algorithm")
            or (sparse if plan["is_default"] else None),
            "auto_ratio": sparse if plan["auto"] == "sparse" else 1.0,
        }
        result["goals"].append(judged(f"{name}, auto", result["products"][name]["auto_ratio"], AUTO))
    for method in METHODS:
        for way in ("kept", "made", "auto"):
            result["layer"][f"{method}, {way}"] = ratio(rows, "layer dense", f"layer {method}, {way}")
        result["goals"].append(judged(f"layer {method}, auto", result["layer"][f"{method}, auto"], AUTO))
    if cell.tokens >= FROM_TOKENS:
        forward = judged("forward", result["products"]["output"]["packed_too"], FORWARD)
        layers = [judged(f"layer {method}", result["layer"][f"{method}, made"], LAYER[method]) for method in METHODS]
        result["goals"] = [forward, *layers, *result["goals"]]
    return result


class Operands:
    """What a cell multiplies, in as many sets as the cache needs to be empty, and the ways to do it."""

    def __init__(self, run, cell: Cell):
        self.cell, self.device, layer = cell, run.machine.device, cell.layer
        sizes = cell.tokens * (layer.out + layer.inputs) + layer.out * layer.inputs
        self.sets = []
        for i in range(sets_that_fill(run, sizes * cell.dtype.itemsize)):
            x, grad = (
                randn(self.device, cell.tokens, features, dtype=cell.dtype, seed=2 * i + j)
                for j, features in enumerate((layer.inputs, layer.out))
            )
            self.sets.append((x, grad))
        self.weight = randn(self.device, layer.out, layer.inputs, dtype=cell.dtype, seed=99) / layer.inputs**0.5
        self.bias = randn(self.device, layer.out, dtype=cell.dtype, seed=98) if layer.bias else None
        self.scale = kernels.s_ste_scale(self.weight)
        self.mask = kernels.transposable_mask(self.weight, packed=True)
        self.key = torch.tensor(7, device=self.device)
        (self.sparse,) = self.by_mask("dense")
        self.packed = {"output": kernels.compress(self.sparse), "grad_input": kernels.compress(self.sparse.t())}

    def plans(self) -> dict[str, dict]:
        """Per product: the fastest known algorithm, and whether auto takes it."""
        tokens, out, inputs = self.cell.tokens, self.cell.layer.out, self.cell.layer.inputs
        sizes = {
            "output": (kernels.plan_linear, tokens, out, inputs),
            "grad_input": (kernels.plan_linear, tokens, inputs, out),
            "grad_weight": (kernels.plan_mm, out, inputs, tokens),
        }
        plans = {}
        for name, (plan, *size) in sizes.items():
            best, auto = (plan(*size, self.cell.dtype, self.device, backend) for backend in ("cusparselt", "auto"))
            if best is None:
                raise RuntimeError(f"{name}: every algorithm has failed the tuner's checks")
            plans[name] = {
                "algorithm": list(best),
                "is_default": best == Algorithm(),
                "auto": "dense" if auto is None else "sparse",
            }
        return plans

    # The three products, dense and sparse. A sparse one makes what it is not given.

    def dense_product(self, name: str, weight: Tensor, x: Tensor, grad: Tensor) -> Tensor:
        if name == "output":
            return nn.functional.linear(x, weight, self.bias)
        return grad @ weight if name == "grad_input" else grad.t() @ x

    def sparse_product(self, name: str, algorithm: Algorithm, x: Tensor, grad: Tensor, packed: Tensor) -> Tensor:
        if name == "output":
            return kernels.sparse_linear(x, packed, self.bias, algorithm=algorithm)
        if name == "grad_input":
            return kernels.sparse_linear(grad, packed, algorithm=algorithm)
        return kernels.sparse_mm(packed, x, algorithm=algorithm)

    def pack(self, name: str, grad: Tensor) -> Tensor:
        """Pruned and compressed. S-STE's rule for the output; the mask of T-SR-STE, which grad_input needs."""
        if name == "grad_weight":
            return self.estimate(grad, "compressed")
        if name == "output":
            return kernels.prune_forms(self.weight, ["compressed"], "soft-threshold", scale=self.scale)[0]
        return self.by_mask("compressed-transposed")[0]

    def by_mask(self, *forms: str) -> tuple[Tensor, ...]:
        return kernels.prune_forms(self.weight, forms, "mask", mask=self.mask)

    def estimate(self, grad: Tensor, form: str = "transposed") -> Tensor:
        return kernels.mvue(grad, dim=0, key=self.key, form=form)

    def layouts(self) -> dict[str, str]:
        """Who writes the compressed matrices: one kernel that prunes too, or the library from a pruned matrix."""
        out, inputs = self.weight.shape
        sizes = {"output": (out, inputs), "grad_input": (inputs, out), "grad_weight": (out, self.cell.tokens)}
        found = {name: known_layout(*size, self.cell.dtype, self.device) for name, size in sizes.items()}
        return {name: "library" if layout is None else "kernel" for name, layout in found.items()}

    def check(self, name: str, algorithm: Algorithm, grad_estimate: Tensor) -> None:
        """The product by this algorithm, three-way."""
        x, grad = self.sets[0]
        if name == "grad_weight":
            dense, truth = grad_estimate @ x, grad_estimate.float() @ x.float()
        else:
            dense = self.dense_product(name, self.sparse, x, grad)
            truth = (x.float() @ self.sparse.float().t()) if name == "output" else grad.float() @ self.sparse.float()
            truth += self.bias.float() if name == "output" and self.bias is not None else 0
        packed = kernels.compress(grad_estimate) if name == "grad_weight" else self.packed[name]
        assert_three_way(self.sparse_product(name, algorithm, x, grad, packed), dense, truth, name)

    def makers(self, plans: dict[str, dict]) -> tuple[dict[str, Maker], dict[str, str]]:
        """Every way that is right, by name; and those that are not, with what is wrong."""
        makers: dict[str, Maker] = {}
        wrong: dict[str, str] = {}
        estimate = self.estimate(self.sets[0][1])
        compressed_estimate = kernels.compress(estimate)
        for name, plan in plans.items():
            # On a weight without zeros: with them it would draw less power and run faster.
            makers[f"{name} dense"] = self._each(
                lambda x, grad, name=name: self.dense_product(name, self.weight, x, grad)
            )
            packed = compressed_estimate if name == "grad_weight" else self.packed[name]
            ways = {"sparse": Algorithm(*plan["algorithm"])}
            if not plan["is_default"]:
                ways["default algorithm"] = Algorithm()
            for way, algorithm in ways.items():
                try:
                    self.check(name, algorithm, estimate)
                except Exception as error:
                    wrong[f"{name} {way}"] = clean(describe(error))
                    continue
                makers[f"{name} {way}"] = self._each(
                    lambda x, grad, name=name, a=algorithm, p=packed: self.sparse_product(name, a, x, grad, p)
                )
                if way == "sparse":
                    makers[f"{name} sparse, packing"] = self._each(
                        lambda x, grad, name=name, a=algorithm: self.sparse_product(
                            name, a, x, grad, self.pack(name, grad)
                        )
                    )
        return makers | self._parts(estimate) | self._layers(), wrong

    def _parts(self, estimate: Tensor) -> dict[str, Maker]:
        """What packing consists of, and what it would with the library. The search is needed every 40th step only."""
        return {
            "part: soft threshold, compressed": self._each(lambda x, grad: self.pack("output", grad)),
            "part: mask, compressed both ways": self._each(
                lambda x, grad: self.by_mask("compressed", "compressed-transposed")
            ),
            "part: mvue, compressed": self._each(lambda x, grad: self.pack("grad_weight", grad)),
            "part: mask, dense": self._each(lambda x, grad: self.by_mask("dense")),
            "part: mvue, dense": self._each(lambda x, grad: self.estimate(grad)),
            "part: library compresses weight": self._each(lambda x, grad: kernels.compress(self.sparse)),
            "part: library compresses gradient": self._each(lambda x, grad: kernels.compress(estimate)),
            "part: search masks": self._each(lambda x, grad: kernels.transposable_mask(self.weight, packed=True)),
        }

    def _layers(self) -> dict[str, Maker]:
        makers: dict[str, Maker] = {"layer dense": lambda: self._layer_calls(None, "", True)}
        for method in METHODS:
            for way, backend in (("kept", "cusparselt"), ("made", "cusparselt"), ("auto", "auto")):
                makers[f"layer {method}, {way}"] = lambda method=method, backend=backend, keep=way == "kept": (
                    self._layer_calls(method, backend, keep)
                )
        return makers

    def _layer_calls(self, method: str | None, backend: str, keep: bool) -> list:
        layer = nn.Linear(self.cell.layer.inputs, self.cell.layer.out, self.bias is not None)
        layer.to(self.device, self.cell.dtype)
        with torch.no_grad():
            layer.weight.copy_(self.weight)
        patched = [] if method is None else patch(nn.ModuleList([layer]), method, backend)
        calls = [training_call(layer, patched, keep, x, grad) for x, grad in self.sets]
        if keep and patched:
            calls[0]()
            layer.operands = Kept(layer.operands.kept_forms())
        return calls

    def _each(self, call) -> Maker:
        return lambda: [lambda x=x, grad=grad: call(x, grad) for x, grad in self.sets]


def patch(module: nn.ModuleList, method: str, backend: str, target: str = "all-linear") -> list[nn.Module]:
    """The patched layers, with the random numbers of MVUE fixed."""
    from hf_sparse24 import Sparse24Config, patch_model
    from hf_sparse24.patching import sparse_layers

    patch_model(module, Sparse24Config(method=method, target_modules=target, backend=backend))
    layers = list(sparse_layers(module).values())
    for layer in layers:
        layer.rng_key = torch.tensor(7, device=layer.weight.device)
    return layers


class Kept:
    """Operands as an earlier micro-batch has left them. (While a graph is captured, real ones are made anew.)"""

    frozen = False

    def __init__(self, forms: dict[str, Tensor]):
        self.forms = forms

    def get(self, names: list[str], *_) -> list[Tensor]:
        return [self.forms[name] for name in dict.fromkeys(names)]


def training_call(module: nn.Module, patched: list[nn.Module], keep: bool, x: Tensor, grad: Tensor):
    """Forward and backward as one call; without `keep`, operands are pruned and compressed anew each time."""
    x = x.detach().requires_grad_()
    wanted = [x, *module.parameters()]

    def call():
        if not keep:
            for layer in patched:
                layer.operands.clear()
        return torch.autograd.grad(module(x), wanted, grad)

    return call
