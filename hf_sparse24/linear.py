"""The sparse linear layer, and the lesson of the three GEMMs.

A linear layer Z = X W^T with weight W `[out, in]` and T tokens costs three matrix products per training step:

    output        Z  = X  W^T       [T, in]  x [in, out]     contracts over in
    grad_input    dX = dZ W         [T, out] x [out, in]     contracts over out
    grad_weight   dW = dZ^T X       [out, T] x [T, in]       contracts over tokens

A sparse tensor core halves the work of a product when one operand has two zeros in every four elements *along the
dimension that is contracted*. Each product contracts a different dimension, so each asks for its own sparsity:

    output        wants W 2:4 along in:       any 2:4 mask
    grad_input    wants W 2:4 along out:      only a mask that is 2:4 in both directions, a transposable one
    grad_weight   wants dZ 2:4 along tokens:  neither operand is a weight; the gradient is pruned at random, unbiased

              output       grad_input    grad_weight
    STE       W sparse     dense         dense
    SR-STE    W sparse     dense         dense
    S-STE     W sparse     dense         dZ sparse (MVUE)
    T-SR-STE  W sparse     W sparse      dZ sparse (MVUE)
    STEP      W sparse     dense         dense              once it has switched; dense before
    fixed     W sparse     dense         dense

A config can ask for more: dZ pruned in the grad_input product, X pruned in the output product, operands in FP8.

`weight`, the Parameter, always stays the dense master: the optimizer updates all of it, and its gradient is that of
the sparse weight, passed straight through.
"""

from functools import partial

import sparse24_kernels as kernels
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from .config import Sparse24Config
from .methods import SparseMethod
from .operands import Operands


class _SparseLinearFunction(torch.autograd.Function):
    """The three products. `weight` is there to receive the gradient; the other two are what is multiplied.

    `output_weight` and `input_weight` are forms of the sparse weight (`operands.FORMS`), for the output and for the
    grad_input product (None where that of the output serves); their algorithms say which, None for the dense form.
    """

    @staticmethod
    def forward(ctx, x, weight, output_weight, input_weight, output_algorithm, input_algorithm, bias, method, rng_key):
        config = method.config
        if config.activations == "2:4":
            x = kernels.nm_prune(x)
        ctx.save_for_backward(x, output_weight if input_weight is None else input_weight, rng_key)
        ctx.method, ctx.input_algorithm, ctx.weight_dtype = method, input_algorithm, weight.dtype
        if config.fp8:
            x, output_weight = kernels.fp8_simulate(x, "e4m3"), kernels.fp8_simulate(output_weight, "e4m3")
        return kernels.sparse_linear(x, output_weight, bias, algorithm=output_algorithm)

    @staticmethod
    @once_differentiable  # a second derivative would be another function's, and must not pass for this one's
    def backward(ctx, grad_output):
        x, input_weight, rng_key = ctx.saved_tensors
        config = ctx.method.config
        grad_x = grad_weight = grad_bias = None
        flat_grad = grad_output.reshape(-1, grad_output.shape[-1])  # [T, out]
        if config.fp8:
            x = kernels.fp8_simulate(x, "e5m2")
        if ctx.needs_input_grad[0]:
            if config.fp8:
                input_weight = kernels.fp8_simulate(input_weight, "e5m2")
            # Groups along out, which this product contracts. Another stream than grad_weight's.
            key = None if rng_key is None or config.input_grad == "dense" else rng_key + 1
            grad = _pruned(grad_output, config.input_grad, -1, key, config.fp8)
            if ctx.input_algorithm is None:
                grad_x = grad @ input_weight
            else:
                grad_x = kernels.sparse_linear(grad, input_weight, algorithm=ctx.input_algorithm)
        if ctx.needs_input_grad[1]:
            grad_weight = _grad_weight(flat_grad, x.reshape(-1, x.shape[-1]), rng_key, config).to(ctx.weight_dtype)
        if ctx.needs_input_grad[6]:
            grad_bias = flat_grad.sum(0)  # from the whole gradient: it costs no product, so nothing is pruned
        return grad_x, grad_weight, None, None, None, None, grad_bias, None, None


def _grad_weight(grad: Tensor, x: Tensor, rng_key: Tensor | None, config: Sparse24Config) -> Tensor:
    """dZ^T X from `[T, out]` and `[T, in]`; dZ pruned at random along the tokens, where the config says so."""
    sparse = config.weight_grad in ("mvue", "mvue-approx") and len(grad) % 16 == 0
    algorithm = None
    if sparse:
        algorithm = kernels.plan_mm(grad.shape[1], x.shape[1], len(grad), grad.dtype, grad.device, _backend(config))
    if algorithm is None:
        return _pruned(grad, config.weight_grad, 0, rng_key, config.fp8).t() @ x
    estimator = "approx" if config.weight_grad == "mvue-approx" else "exact"
    pruned = kernels.mvue(grad, dim=0, estimator=estimator, key=rng_key, form="compressed")
    return kernels.sparse_mm(pruned, x, algorithm=algorithm)


def _backend(config: Sparse24Config) -> str:
    """Simulated FP8, and patterns that no hardware has, are dense math."""
    return "reference" if config.fp8 or config.pattern != "2:4" else config.backend


def _pruned(grad: Tensor, estimator: str, dim: int, key: Tensor | None, fp8: bool) -> Tensor:
    """The gradient as a product sees it: pruned at random along `dim`, then in E5M2."""
    if estimator == "mvue-1:2":
        grad = kernels.mvue(grad, 1, 2, dim, key=key)
    elif estimator != "dense":
        grad = kernels.mvue(grad, 2, 4, dim, "approx" if estimator == "mvue-approx" else "exact", key=key)
    return kernels.fp8_simulate(grad, "e5m2") if fp8 else grad


class Sparse24Layer(nn.Module):
    """What `Sparse24Linear` and `Sparse24Conv1D` share: the method, its state, the phase, and the product."""

    input_dim: int
    """Which dimension of `.weight` is the input dimension."""

    def __init__(self, *args, **kwargs):
        raise TypeError(f"{type(self).__name__} is made from a dense layer: use patch_model or from_dense")

    @classmethod
    def from_dense(cls, module: nn.Module, method: SparseMethod) -> "Sparse24Layer":
        """Turn `module` into a sparse layer in place: same object, same Parameters, same hooks.

        State comes from the weight as it is; on the meta device it waits for `init_state` or a checkpoint.
        """
        state = method.init_state(module.weight.detach(), cls.input_dim)
        module.dense_class = type(module)
        module.__class__ = cls
        module.method = method
        module.phase = "sparse"
        module.rng_key = None
        module.operands = Operands()
        module.state_names = tuple(state)
        for name, tensor in state.items():
            module.register_buffer(name, tensor)
        module.state_is_ready = not (state and module.weight.is_meta)
        return module

    def to_dense(self, weight: Tensor | None) -> nn.Module:
        """Undo `from_dense`, with `weight` written into the Parameter, or the master weight left as it is."""
        self.operands.must_not_be_frozen()
        if weight is not None:
            with torch.no_grad():
                self.weight.copy_(weight)
        self.__class__ = self.dense_class
        for name in self.state_names:
            del self._buffers[name]
        for name in ("dense_class", "method", "operands", "phase", "rng_key", "state_names", "state_is_ready"):
            delattr(self, name)
        return self

    @property
    def state(self) -> dict[str, Tensor]:
        """The method's buffers by name, such as S-STE's `scale`."""
        return {name: self._buffers[name] for name in self.state_names}

    @property
    def sizes(self) -> tuple[int, int]:
        """(out, in), however the weight is stored."""
        first, second = self.weight.shape
        return (first, second) if self.input_dim == 1 else (second, first)

    @torch.no_grad()
    def init_state(self) -> None:
        """Compute the method's state from the weight as it is now."""
        for name, tensor in self.method.init_state(self.weight, self.input_dim).items():
            self._buffers[name] = tensor
        self.state_is_ready = True

    @torch.no_grad()
    def sparse_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """The N:M weight that stands for the master weight: its shape and layout, never -0.0.

        Exactly N:M along the input dimension: at most N of every M are non-zero. `dtype` is that of the result, by
        default the master's; what is kept never depends on it.
        """
        return self._forms(["dense"], dtype or self.weight.dtype)[0]

    @torch.no_grad()
    def operands_of(self, names: list[str], dtype: torch.dtype) -> list[Tensor]:
        """The sparse weight `[out, in]` in forms that the products take (see `operands.FORMS`), pruned in one pass."""
        if self.input_dim == 1:
            return list(self._forms(names, dtype))
        # Stored as [in, out]: each form is its transpose's.
        of_stored = {"compressed": "compressed-transposed", "compressed-transposed": "compressed", "dense": "dense"}
        forms = self._forms([of_stored[name] for name in names], dtype)
        return [form.t() if name == "dense" else form for name, form in zip(names, forms)]

    def _forms(self, forms: list[str], dtype: torch.dtype) -> tuple[Tensor, ...]:
        self.operands.must_not_be_frozen()
        if not self.state_is_ready:
            raise RuntimeError(
                "this layer was patched on the meta device and has no state yet; "
                "load a checkpoint into the model, or call init_state() on its layers once they have weights"
            )
        return self.method.sparse_weight(self.weight, self.input_dim, self.state, dtype, forms)

    @torch.no_grad()
    def mask(self, packed: bool = False) -> Tensor:
        """Which weights the method keeps now: bool, shape of the weight, or its packed bits."""
        return self.method.mask(self.weight, self.input_dim, self.state, packed)

    def forward(self, x: Tensor) -> Tensor:
        if self.phase == "dense":
            self.operands.must_not_be_frozen()
            return self.dense_class.forward(self, x)
        weight, bias, dtype = self.weight, self.bias, self.weight.dtype
        if torch.is_autocast_enabled(x.device.type):
            # Pruned from the master's precision, multiplied in autocast's: a mask never depends on rounding.
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        if self.input_dim == 0:
            weight = weight.t()
        config, (out, inputs) = self.method.config, weight.shape
        tokens, backend = x.numel() // inputs, "cusparselt" if self.operands.frozen else _backend(config)
        output_algorithm = kernels.plan_linear(tokens, out, inputs, dtype, x.device, backend)
        if self.operands.frozen and output_algorithm is None:
            raise RuntimeError(
                f"no sparse algorithm that passed its checks serves {tokens} tokens of this {out} x {inputs} layer, "
                f"and its master weight was dropped; load the model again, or use another number of tokens"
            )
        input_algorithm, forms = None, ["dense" if output_algorithm is None else "compressed"]
        # A graph that is traced asks for every gradient, needed or not.
        if torch.is_grad_enabled() and (x.requires_grad or torch.compiler.is_compiling()):
            if self.method.transposable and config.input_grad == "dense":
                input_algorithm = kernels.plan_linear(tokens, inputs, out, dtype, x.device, backend)
            forms.append("dense" if input_algorithm is None else "compressed-transposed")
        make = partial(self.operands_of, dtype=dtype)
        operands = self.operands.get(forms, make, self.weight, self.state, dtype)
        output_weight, input_weight = operands[0], None if forms[-1] == forms[0] else operands[-1]
        return _SparseLinearFunction.apply(
            x, weight, output_weight, input_weight, output_algorithm, input_algorithm, bias, self.method, self.rng_key
        )

    def why_not_sparse(self) -> str | None:
        """Why the output product cannot run on sparse tensor cores, whatever its speed; None where it can."""
        out, inputs = self.sizes
        return kernels.why_not_sparse(out, inputs, self.weight.dtype, self.weight.device, _backend(self.method.config))

    def extra_repr(self) -> str:
        (out, inputs), method = self.sizes, self.method.config.method
        return f"in={inputs}, out={out}, bias={self.bias is not None}, method={method}, phase={self.phase}"

    def _apply(self, fn, recurse=True):
        # Casting a model casts its buffers. A scale rounded to bf16 would change what the model computes.
        before = self.state
        if self.operands.frozen and _is_no_change(fn, self.operands.compressed):
            return self  # such as `model.to(device)` where it is already
        self.operands.clear()
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            if tensor.is_floating_point() and not tensor.is_meta:
                self._buffers[name] = tensor.to(self._buffers[name].device)
        return self

    def _replicate_for_data_parallel(self):
        # Replicas run in threads, each with a weight of its own on another device.
        replica = super()._replicate_for_data_parallel()
        replica.operands = Operands()
        return replica

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        self.operands.must_not_be_frozen()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        self.operands.must_not_be_frozen()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        names = [prefix + name for name in self.state_names]
        if not names or prefix + "weight" not in state_dict:
            return
        if any(name in state_dict for name in names):
            self.state_is_ready = True
        else:
            # Weights of a dense model: the state starts from them, as it would when patching.
            missing[:] = [name for name in missing if name not in names]
            self.init_state()


def _is_no_change(fn, tensor: Tensor) -> bool:
    probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    changed = fn(probe)
    return (changed.dtype, changed.device) == (probe.dtype, probe.device)


class Sparse24Linear(Sparse24Layer, nn.Linear):
    """`nn.Linear` whose products use a 2:4 sparse weight. `.weight` `[out, in]` is the dense master."""

    input_dim = 1


class Sparse24Conv1D(Sparse24Layer, Conv1D):
    """GPT-2's `Conv1D`, a linear layer with its weight stored `[in, out]`, made sparse along `in`."""

    input_dim = 0
    __repr__ = nn.Module.__repr__  # Conv1D's own says "Conv1D"
