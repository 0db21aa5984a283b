"""A plugin of vLLM that serves packed exports; vLLM finds it by the entry point `vllm.general_plugins`.

A packed weight `[out, in]` stays packed from file to GEMM: two Parameters in place of one, with int8 values three,
loaded, stacked and split by vLLM's own code. Written against vLLM 0.32.
"""

from typing import Any

import torch
from sparse24_kernels import Packed, Pattern
from sparse24_kernels.formats import scale_columns
from sparse24_kernels.matmul import packed_layer
from torch import Tensor, nn
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.utils.torch_utils import direct_register_custom_op

from ..packed_format import PackedFormat, buffer_names
from ..weights.packed_weight import wrong_packed
from .packed_layers import WAY_OUT, check_split, packed_pattern, read_format


class Sparse24PackedConfig(QuantizationConfig):
    """The `quantization_config` of a packed export, for vLLM."""

    def __init__(self, packed: PackedFormat):
        super().__init__()
        self.packed = packed
        self.weights = dict(packed.weights)  # by the names that vLLM's model has for them

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Sparse24PackedConfig":
        return cls(read_format(config))

    @classmethod
    def get_name(cls) -> str:
        return "sparse24"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # dense math computes where no kernel runs

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json has it all

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.weights = hf_to_vllm_mapper.apply_dict(self.weights)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> linear.LinearMethodBase | None:
        if isinstance(layer, RoutedExperts):
            # Transformers stacks experts, and a packed export has its names; vLLM reads those of one expert each.
            raise ValueError(f"{prefix}: packed exports of mixtures of experts are not served; {WAY_OUT}")
        if not isinstance(layer, linear.LinearBase):
            if f"{prefix}.weight" in self.weights:
                raise ValueError(f"{prefix}: a packed {type(layer).__name__} is not served; {WAY_OUT}")
            return None
        pattern = packed_pattern(prefix, self.packed_modules_mapping, self.weights)
        return linear.UnquantizedLinearMethod() if pattern is None else Sparse24PackedMethod(self.packed, pattern)


@linear.register_weight_loader_v2_supported_method
class Sparse24PackedMethod(linear.LinearMethodBase):
    """Loads and multiplies by a packed weight, whose tensors `packed_format.py` describes."""

    def __init__(self, packed: PackedFormat, pattern: Pattern):
        self.pattern, self.has_scales = pattern, packed.values == "int8"
        self.names = buffer_names("weight")

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        inputs, out = input_size_per_partition, sum(output_partition_sizes)
        check_split(layer.prefix, inputs, input_size, self.pattern.m, self.has_scales)
        # vLLM does not notice a weight that no file has. A mask of zeros is invalid, so the check below does.
        kept = inputs * self.pattern.n // self.pattern.m
        tensors = [
            torch.zeros(out, kept, dtype=torch.int8 if self.has_scales else params_dtype),
            torch.zeros(out, inputs // 8, dtype=torch.uint8),
            torch.full((out, scale_columns(inputs)), torch.nan, dtype=params_dtype) if self.has_scales else None,
        ]
        options = {"input_dim": 1, "output_dim": 0, "weight_loader": extra_weight_attrs["weight_loader"]}
        for name, tensor in zip(self.names, tensors):
            parameter = None if tensor is None else ModelWeightParameter(data=tensor, **options)
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        for name in self.names:
            parameter = layer._parameters[name]
            if parameter is not None:  # a plain one: vLLM's costs time at every access, and stops torch.compile
                layer._parameters[name] = nn.Parameter(parameter.data, requires_grad=False)
        layer.packed_weight_m = self.pattern.m
        wrong = wrong_packed(_packed(layer))
        if wrong:
            raise ValueError(f"the checkpoint is damaged, copy or download it again: {layer.prefix}: {wrong}")

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        run = torch.ops.vllm.sparse24_packed_linear if torch.compiler.is_compiling() else _packed_linear
        return run(x, *_packed(layer), bias)


def _packed(layer: Any) -> Packed:
    tensors = (layer.packed_weight_values, layer.packed_weight_mask, layer.packed_weight_scales)
    return Packed(*tensors, layer.packed_weight_m)


def _packed_linear(
    x: Tensor, values: Tensor, mask: Tensor, scales: Tensor | None, m: int, bias: Tensor | None
) -> Tensor:
    return packed_layer(x, Packed(values, mask, scales, m), bias)


def _like_packed_linear(x: Tensor, values: Tensor, mask: Tensor, scales: Tensor | None, m: int, bias: Tensor | None):
    return x.new_empty(*x.shape[:-1], values.shape[0])


# One operator of a compiled model: which kernel runs depends on the number of tokens, which vLLM's graph leaves open.
direct_register_custom_op("sparse24_packed_linear", _packed_linear, fake_impl=_like_packed_linear)


def register() -> None:
    """Make `quant_method: "sparse24"` known to this process of vLLM."""
    register_quantization_config("sparse24")(Sparse24PackedConfig)
