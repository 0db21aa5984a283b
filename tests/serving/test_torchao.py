"""torchao on a CPU: int8 weights of a dense export keep its zeros; the recipe for FP8 refuses other devices."""

import sys

import pytest
import serving
import torch
import torchao_fp8
from paths import RECIPES

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
    assert torch.equal(serving.greedy(model, tokens), serving.greedy(plain, tokens))

sys.path.insert(0, sys.argv[2])
import torchao_fp8
chosen = torchao_fp8.quantization(directory).fqn_to_config
assert list(chosen) == list(names) and {x.packing_format for x in chosen.values()} == {"sparse_2d_data_2d_metadata"}
print("weights:", len(names))
"""


@pytest.mark.slow
def test_int8_weights_keep_the_zeros_and_compute_what_those_of_a_plain_model_do(smollm2_24, tmp_path):
    environment = serving.install(tmp_path / "packages", "torchao")
    assert serving.run(["-c", QUANTIZE, smollm2_24, RECIPES], environment).endswith("weights: 210\n")


def test_the_recipe_for_fp8_refuses_other_devices(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["torchao_fp8.py", "my-export"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"compute capability 9\.0, and torch finds no GPU"):
        torchao_fp8.main()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    for capability, refusal in {(8, 0): "needs compute capability 9.0; A100 has 8.0", (9, 0): None}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert (torchao_fp8.refusal() or "").endswith(refusal or "") and bool(torchao_fp8.refusal()) == bool(refusal)
