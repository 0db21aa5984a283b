"""torchao on a CPU: int8 weights of a dense export keep its zeros, and the recipe for FP8 refuses other devices."""

import pytest
import serving

pytestmark = pytest.mark.slow

QUANTIZE = """
import json, sys
import torch
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
from transformers import AutoModelForCausalLM, TorchAoConfig
import serving

torch.set_num_threads(1)
directory = serving.Path(sys.argv[1])
int8 = Int8DynamicActivationInt8WeightConfig()
model = AutoModelForCausalLM.from_pretrained(directory, quantization_config=TorchAoConfig(int8))
plain = AutoModelForCausalLM.from_pretrained(directory)
names = json.loads((directory / "sparse24.json").read_text())["weights"]
for name in names:
    path, _, kind = name.rpartition(".")
    quantized, weight = getattr(model.get_submodule(path), kind), plain.get_parameter(name)
    assert type(quantized).__name__ == "Int8Tensor" and quantized.qdata.dtype == torch.int8, type(quantized)
    assert not quantized.qdata[weight == 0].any() and not quantized.dequantize()[weight == 0].any(), name
    assert (quantized.dequantize().unflatten(1, (-1, 4)) != 0).sum(-1).max() == 2, name
quantize_(plain, int8, filter_fn=lambda module, path: f"{path}.weight" in names)
for tokens in serving.prompts(directory):
    found = serving.greedy(model, tokens)
    assert torch.equal(found, serving.greedy(plain, tokens))
print("weights:", len(names))
"""


def test_int8_weights_keep_the_zeros_and_compute_what_those_of_a_plain_model_do(smollm2_24, tmp_path):
    environment = serving.install(tmp_path / "packages", "torchao")
    assert serving.run(["-c", QUANTIZE, smollm2_24], environment).endswith("weights: 210\n")
