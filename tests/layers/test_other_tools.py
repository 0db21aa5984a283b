"""Other tools on sparse and packed layers: they record a graph of them, quantize them, copy them for threads."""

from functools import partial

import expert_models
import lora_models
import pytest
import sparse_models
import torch
import zoo
from peft import PeftModel
from torch import Tensor, nn

from hf_sparse24 import fuse_gated_mlps, pack_model, patch_model, set_phase
from hf_sparse24.extensions import is_adapter

# Of torch's exporters, of PEFT, and of packages that these miss.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def packed(model: nn.Module) -> nn.Module:
    pack_model(model.eval())
    return model


def fused(model: nn.Module) -> nn.Module:
    assert fuse_gated_mlps(model)
    return model


KINDS = {
    "layers": partial(lora_models.patched, "llama"),
    "conv1d": partial(lora_models.patched, "gpt2"),
    "experts": expert_models.patched,
    "packed layers": lambda: packed(lora_models.patched("gpt2")),
    "packed experts": lambda: packed(expert_models.patched()),
    "gated": lambda: fused(lora_models.patched("llama")),
    "adapters": partial(lora_models.adapted, "llama"),
}


class Logits(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


@pytest.mark.filterwarnings("ignore:.*:torch.jit.TracerWarning")
@pytest.mark.parametrize(
    ("kind", "tool"),
    [
        *((kind, "TorchScript") for kind in KINDS),
        ("experts", "onnx"),
        ("gated", "onnx"),
        ("conv1d", "onnx of TorchScript"),
    ],
)
@pytest.mark.slow
def test_a_graph_of_onnx_or_torchscript_is_refused_with_the_way_out(kind, tool, tmp_path):
    pytest.importorskip("onnxscript")
    model, tokens = Logits(KINDS[kind]()).eval(), zoo.batch()["input_ids"]
    with pytest.raises(Exception, match=r"convert a dense model .* export_model\(model, directory\), or unpack_model"):
        if tool == "TorchScript":
            torch.jit.trace(model, tokens)
        else:
            torch.onnx.export(model, (tokens,), tmp_path / "model.onnx", dynamo=tool == "onnx", verbose=False)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gated"])
@pytest.mark.parametrize("transform", ["grad", "jacrev", "jvp", "vmap"])
def test_torch_func_is_refused_with_the_way_out(kind, transform):
    model, x = KINDS[kind](), torch.randn(2, 4, 32)
    layer = next(x for x in model.modules() if "sparse24" in vars(x) or is_adapter(x))
    calls = {"jvp": lambda loss: torch.func.jvp(loss, (x,), (x,))}
    call = calls.get(transform, lambda loss: getattr(torch.func, transform)(loss)(x))
    with pytest.raises(RuntimeError, match=r"torch.func .* cannot transform a sparse model: unpatch_model\(model\)"):
        call(lambda x: layer(x).sum())


@pytest.mark.parametrize("kind", ["layers", "packed layers"])
def test_torch_export_takes_them(kind):
    model, tokens = Logits(KINDS[kind]()).eval(), zoo.batch()["input_ids"]
    with torch.no_grad():
        program = torch.export.export(model, (tokens,))
        assert torch.equal(program.module()(tokens), model(tokens))


def test_onnx_takes_a_dense_phase(tmp_path):
    pytest.importorskip("onnxscript")
    model = sparse_models.model_of("t-sr-ste").float()
    set_phase(model, "dense")
    torch.onnx.export(model, (torch.randn(4, 32),), tmp_path / "model.onnx", dynamo=False, verbose=False)


class Int8Tensor(Tensor):
    """As torchao's `quantize_` puts one in the place of a weight."""


Int8Tensor.__module__ = "torchao.quantization"


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("layers", "model.layers.0.mlp.up_proj", r"torchao would quantize weight, .*: call export_model\(model, dir"),
        ("packed layers", "transformer.h.0.mlp.c_fc", r"weight is packed, .*: call unpack_model\(model\) first"),
    ],
)
def test_quantizing_their_weights_in_place_is_refused(kind, name, message):
    model = KINDS[kind]()
    before, layer = sparse_models.logits(model), model.get_submodule(name)
    with pytest.raises(ValueError, match=message):
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Int8Tensor), requires_grad=False)
    assert torch.equal(sparse_models.logits(model), before)


@pytest.mark.parametrize("package", ["torchao", "bitsandbytes"])
def test_a_quantized_model_is_not_patched_and_is_no_base_of_masked_adapters(package, tmp_path):
    lora_models.adapted("llama").save_pretrained(tmp_path)
    quantized = zoo.build("llama")
    quantized.config.quantization_config = {"quant_method": package}
    with pytest.raises(ValueError, match=f"the model is quantized with {package}; load it without quantization"):
        patch_model(quantized)
    with pytest.raises(ValueError, match=r"the adapter was trained on a base .* this model is dense"):
        PeftModel.from_pretrained(quantized, tmp_path)


@pytest.mark.parametrize("kind", ["layers", "experts", "packed layers", "packed experts"])
def test_data_parallel_is_refused(kind):
    with pytest.raises(RuntimeError, match=r"nn.DataParallel runs copies .* start one process for each GPU"):
        for module in KINDS[kind]().modules():
            module._replicate_for_data_parallel()  # as nn.DataParallel does with each


def test_copies_of_dense_gated_mlps_compute_the_same():
    mlp = fused(zoo.build("llama")).model.layers[0].mlp
    replica, x = mlp._replicate_for_data_parallel(), torch.randn(4, 32)
    assert type(replica) is type(mlp) and torch.equal(replica(x), mlp(x))
