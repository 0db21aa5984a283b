"""Why a weight that was selected cannot become sparse."""

from collections.abc import Sequence
from typing import cast

import torch
from sparse24_kernels.checks import INPUTS as PRUNABLE
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.pytorch_utils import Conv1D

from ..layers.sparse_module import SparseModule
from ..methods import SparseMethod
from ..weights.input_dim import find_input_dim
from ..weights.sharding import is_sharded

_MIXERS = ("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "Mamba2Mixer", "NemotronHMamba2Mixer")
READ_BY = dict.fromkeys((*_MIXERS, "MultiheadAttention", "Zamba2MambaMixer"), ("out_proj",)) | {
    **{f"{name}Mixer": ("dt_proj", "out_proj", "x_proj") for name in ("FalconMamba", "Mamba")},
    **{f"LayoutLMv{n}Encoder": ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias") for n in (2, 3)},
    **{f"{name}MHAttentionMap": ("k_proj",) for name in ("ConditionalDetr", "Detr", "MaskFormerDetr")},
    "DabDetrMHAttentionMap": ("k_linear",),
    "DisentangledSelfAttention": ("in_proj",),
    "Gemma3nTextAltUp": ("correction_coefs", "prediction_coefs"),
    "JambaMambaMixer": ("dt_proj",),
    "LongcatFlashTopkRouter": ("classifier",),
    "LSHSelfAttention": ("query_key", "value"),
    "MobileBertLMPredictionHead": ("decoder", "dense"),
    "NeoMMEForMaskedLM": ("unembedding_projection",),
    "PPDocLayoutV2ReadingOrderEncoder": ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"),
    "TDNNLayer": ("kernel",),
    "TransformerEncoderLayer": ("linear1", "linear2"),
    "WavLMAttention": ("k_proj", "out_proj", "q_proj", "v_proj"),
}
"""The layers whose weights a class of PyTorch or Transformers multiplies by itself: a sparse layer's forward would not
run. A test looks for others in the installed Transformers."""

PLAIN = ("FalconLinear",)  # subclasses of `nn.Linear` with a forward that computes the same


def unsupported_reason(path: Sequence[tuple[str, nn.Module]], parameter: str, method: SparseMethod) -> str | None:
    """Return why `method` cannot prune the weight at a `Place` with this path and parameter, None if it can."""
    (name, module), parent = path[-1], path[-2 if len(path) > 1 else -1][1]  # a model may be one layer
    if isinstance(module, SparseModule) and parameter in module.sparse24:
        return None
    if parameter not in module._parameters:
        way = "make it a Parameter again first, by remove_parametrizations, remove_weight_norm or prune.remove"
        return f"its {parameter} is made of other tensors, as by torch.nn.utils.parametrizations: {way}"
    weight = cast(Tensor, module._parameters[parameter])
    is_stack = weight.dim() == 3
    class_name, parent_name = type(module).__name__, type(parent).__name__
    is_plain = type(module).forward in (nn.Linear.forward, Conv1D.forward) or class_name in PLAIN
    if not is_stack and not is_plain:
        return f"its class {class_name} is not a plain linear layer"
    if name in READ_BY.get(parent_name, ()):
        return f"{parent_name} uses its weight without calling it"
    input_dim = find_input_dim(module, parameter)
    if input_dim is None:
        return f"{class_name} does not say how it multiplies by {parameter}: set its attribute is_transposed"
    rows, columns = weight.shape[-2:]
    outputs, inputs = (rows, columns) if input_dim == -1 else (columns, rows)
    reason = _unsupported_method(method) if is_stack else None
    return reason or _unsupported_tensor(weight) or method.unsupported(outputs, inputs)


def _unsupported_method(method: SparseMethod) -> str | None:
    """Return why a method cannot make stacked experts sparse, which have no layers of their own; None if it can."""
    gemms = method.gemms
    if gemms.output.estimator != "none":
        return "stacked experts: activations cannot be pruned"
    if any(gemm.precision != "native" for gemm in gemms):
        return "stacked experts: FP8 cannot be simulated"
    if gemms.grad_input.weight != gemms.output.weight:
        return f"stacked experts: method {method.name!r} multiplies by another weight in the backward pass"
    if method.overrides("adapt_output"):
        return f"stacked experts: method {method.name!r} adds to what a layer returns"
    return None


def _unsupported_tensor(weight: Tensor) -> str | None:
    if weight.dtype not in PRUNABLE:
        return f"its weight is {weight.dtype}; fp64, fp32, bf16 and fp16 can be pruned"
    if weight.layout != torch.strided or (is_traceable_wrapper_subclass(weight) and not is_sharded(weight)):
        return f"its weight is a {type(weight).__name__} with {weight.layout}, not an ordinary dense tensor"
    if not weight.numel():
        return "its weight is empty"
    if 0 in weight.stride():
        return "its weight is expanded: elements share memory"
    return None


def overlapping_tensors(model: nn.Module) -> dict[int, str]:
    """Return the name of another Parameter or buffer for each one, by id, that shares memory with it."""
    spans = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor.data) is Tensor and tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta:
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
            start = tensor.data_ptr()
            spans.append((str(tensor.device), start, start + extent * tensor.element_size(), id(tensor), name))
    spans.sort()
    found = {}
    for i, (device, _, end, key, name) in enumerate(spans):
        for other_device, other_start, _, other_key, other_name in spans[i + 1 :]:
            if other_device != device or other_start >= end:
                break
            found[key], found[other_key] = other_name, name
    return found
