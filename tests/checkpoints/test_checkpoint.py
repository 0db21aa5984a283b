"""save_pretrained and from_pretrained: fresh processes, shards, dtypes, damage."""

import json

import pytest
import torch
import zoo
from checkpoints import edit_config, patched
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sparse_models import logits
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_sparse24 import (
    Sparse24Config,
    export_model,
    oneshot,
    patch_model,
    sparse_run,
    sparse_weights,
    unpack_model,
    unpatch_model,
)
from hf_sparse24.checkpoints.quantizer import Sparse24Quantizer
from hf_sparse24.facts import RunFacts
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.run import patched_config, set_phase
from hf_sparse24_command import main

FILES = {"README.md", "config.json", "generation_config.json", "model.safetensors", "sparse24.json"}


ROUND_TRIPS = [(name, method) for method in ("s-ste", "t-sr-ste") for name in zoo.NAMES]


@pytest.mark.parametrize(("name", "method"), ROUND_TRIPS + [(name, "s-ste") for name in [*zoo.OTHERS, "mamba"]])
def test_round_trip_of_every_architecture(name, method, tmp_path):
    model = patched(name, method)
    if method == "t-sr-ste":  # a mask that the weights alone do not give back
        for weight in sparse_weights(model).values():
            bits, before = weight.state["mask_bits"], weight.state["mask_bits"].clone()
            bits.copy_(bits.flip(0))  # still transposable
            assert not torch.equal(bits, before)
    expected = logits(model)
    for what in ("save", "export"):
        model.save_pretrained(tmp_path / what) if what == "save" else export_model(model, tmp_path / what)
        loaded, loading = zoo.auto_class(name).from_pretrained(tmp_path / what, output_loading_info=True)
        assert not any(loading.values())
        assert torch.equal(logits(loaded), expected)
        assert bool(sparse_weights(loaded)) == (what == "save")


def test_an_ordinary_model_comes_back(tmp_path):
    model = patched("bert")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert not loaded.is_quantized and not hasattr(loaded, "hf_quantizer")
    assert not hasattr(loaded.config, "_is_quantized")
    assert loaded.config.quantization_config is sparse_run(loaded).saved  # so that what is saved follows the phase
    assert torch.equal(logits(unpatch_model(loaded)), logits(model))
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert again.half().dtype == torch.float16 and again.float().dtype == torch.float32


def test_config_json_says_what_the_model_is(tmp_path):
    model = patched(method="t-sr-ste")
    set_phase(model, "dense")
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (saved["quant_method"], saved["method"], saved["phase"]) == ("sparse24", "t-sr-ste", "dense")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {weight.run.phase for weight in sparse_weights(loaded).values()} == {"dense"}
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dense", [False, True])
def test_loading_in_low_precision_keeps_the_scale_in_fp32(dtype, dense, tmp_path):
    model = zoo.build("llama") if dense else patched()
    model.save_pretrained(tmp_path)
    passed = {"quantization_config": Sparse24Config(target_modules="all-linear")} if dense else {}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, **passed)
    for name, weight in sparse_weights(loaded).items():
        assert weight.parameter.dtype == dtype and weight.state["scale"].dtype == torch.float32
        if not dense:
            assert torch.equal(weight.state["scale"], sparse_weights(model)[name].state["scale"])
    assert logits(loaded).isfinite().all()


def test_export_is_plain_and_leaves_the_model_alone(tmp_path):
    model = patched("gpt2")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export_model(model, tmp_path)
    export_model(model, tmp_path)  # over its own output
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert patched_config(model) is not None and model.config.quantization_config is not None
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert not [key for key in file.keys() if "scale" in key]  # noqa: SIM118  not a dict
        for name, weight in sparse_weights(model).items():
            assert is_nm_sparse(file.get_tensor(name), dim=weight.input_dim)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    with pytest.raises(ValueError, match=r"not patched; use model.save_pretrained"):
        export_model(zoo.build("gpt2"), tmp_path)


def test_a_checkpoint_that_was_saved_again_without_the_library(tmp_path):
    """It has the config, and the dense weights alone; the message says how to go on from these."""
    model = patched()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    dense = {name: tensor for name, tensor in tensors.items() if not name.endswith("scale")}
    one = "model.layers.1.mlp.up_proj.scale"
    for kept, lacks in (({x: tensors[x] for x in tensors if x != one}, rf"\['{one}'\]"), (dense, "")):
        save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=rf"lacks {lacks}.*remove quantization_config"):
            AutoModelForCausalLM.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    saved = Sparse24Config.from_dict(config.pop("quantization_config"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=saved)
    assert patched_config(again) == patched_config(model)
    assert torch.equal(logits(again), logits(model))  # the scale of the same weights


@pytest.mark.parametrize("method", ["s-ste", "sr-ste", "ste", "step"])
def test_weights_that_a_dense_model_has_saved_are_refused(method, tmp_path):
    """The config alone is that of a sparse model, as where a plain Trainer or a process without the import saves."""
    patched(method=method).save_pretrained(tmp_path)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"'{method}' trained, but lacks .*remove quantization_config"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_checkpoint_has_one_marker_and_neither_model_nor_export_has_it(tmp_path):
    model = patched(method="ste")
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    (marker,) = saved.keys() - model.state_dict().keys()
    model.load_state_dict(saved)
    assert not sparse_run(model).facts.marked
    export_model(model, tmp_path / "export")
    assert load_file(tmp_path / "export" / "model.safetensors").keys() == model.state_dict().keys()
    unpatch_model(model).save_pretrained(tmp_path / "dense")
    assert load_file(tmp_path / "dense" / "model.safetensors").keys() == model.state_dict().keys()

    del saved[marker]
    save_file(saved, tmp_path / "model.safetensors", {"format": "pt"})
    edit_config(tmp_path, marked=False)
    assert sparse_weights(AutoModelForCausalLM.from_pretrained(tmp_path))


def test_nan_in_a_checkpoint(tmp_path):
    model = patched()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"NaN or inf in the weights of model.layers.0.mlp.up_proj"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_missing_and_truncated_shards(tmp_path):
    model = patched()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))
    for shard in sorted(tmp_path.glob("*.safetensors"))[:2]:
        whole = shard.read_bytes()
        shard.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(OSError, match=rf"{shard.name} is damaged or cut short"):
            AutoModelForCausalLM.from_pretrained(tmp_path)
        shard.write_bytes(whole)
    shard.unlink()
    with pytest.raises(OSError, match=shard.name):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_run_takes_nothing_of_another_run(tmp_path):
    dense, ended = zoo.build("llama"), zoo.build("llama")
    dense.save_pretrained(tmp_path)
    oneshot(ended, [zoo.batch()], Sparse24Config(method="fixed-mask"), passes=1)
    sparse_run(ended).record(phase="dense", finished=True)
    for passed in (ended.config.quantization_config, sparse_run(ended).config):
        run = sparse_run(AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=passed))
        assert run.config == sparse_run(ended).config and run.facts == RunFacts()


@pytest.mark.parametrize("format", ["training", "packed"])
def test_another_config_for_a_sparse_checkpoint_is_refused(format, tmp_path):
    model = patched()
    model.save_pretrained(tmp_path) if format == "training" else export_model(model, tmp_path, format)
    for config in (Sparse24Config(), sparse_run(model).saved):
        with pytest.raises(ValueError, match="the checkpoint is sparse, with a config of its own"):
            AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)  # as the message says
    if format == "packed":
        unpack_model(model)
    patch_model(model, Sparse24Config(backend="dense", target_modules="all-linear"))
    assert patched_config(model).backend == "dense"


@pytest.mark.parametrize("pre_quantized", [True, False])
def test_weights_that_loading_has_sharded_are_refused(pre_quantized):
    """As `from_pretrained(..., tp_plan="auto")` does in several processes."""
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="t-sr-ste"))
    next(iter(sparse_weights(model).values())).parameter.ds_id = 0
    quantizer = Sparse24Quantizer(sparse_run(model).saved, pre_quantized=pre_quantized)
    with pytest.raises(ValueError, match=r"gate_proj.weight is partitioned by DeepSpeed ZeRO-3; use"):
        quantizer._process_model_after_weight_loading(model)


def test_a_sparse_head_that_the_class_lacks_is_refused(tmp_path):
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="fixed-mask", target_modules=["up_proj", "lm_head"]))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"target_modules=.*no linear layer's name ends in \['lm_head'\]"):
        AutoModel.from_pretrained(tmp_path)
    assert len(sparse_weights(AutoModelForCausalLM.from_pretrained(tmp_path))) == 3


def test_a_dequantized_gguf_model_is_refused():
    """As Transformers marks it: with a quantizer that neither saves nor trains."""
    model = zoo.build("llama")
    model.config.quantization_config = QuantizationConfigMixin(quant_method="gguf")
    with pytest.raises(ValueError, match="quantized with gguf"):
        patch_model(model)


class _Custom(LlamaForCausalLM):
    """As remote code is: Transformers initialises such a class where any tensor of a module is not in the files."""

    _auto_class = "AutoModelForCausalLM"  # as of code from the Hub; Transformers 5.11 does not know it otherwise

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_()


def test_the_weights_of_custom_code_are_those_of_its_files(tmp_path):
    dense = zoo.build("llama")
    dense.save_pretrained(tmp_path)
    model = _Custom.from_pretrained(tmp_path, quantization_config=Sparse24Config(method="s-ste"))
    patch_model(dense, Sparse24Config(method="s-ste"))
    assert torch.equal(logits(model), logits(dense)) and len(sparse_weights(model)) == 6


@pytest.mark.parametrize("method", ["s-ste", "ste"])
def test_a_tied_head_that_stayed_dense_stays_so(method, tmp_path):
    model = zoo.build("gpt2", tie_word_embeddings=True)
    patch_model(model, Sparse24Config(method=method, target_modules=["c_fc", "lm_head"]))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sparse_weights(loaded).keys() == sparse_weights(model).keys()
    assert torch.equal(logits(loaded), logits(model))


def test_a_head_that_is_excluded_may_be_absent(tmp_path):
    model = zoo.build("llama")
    config = {"target_modules": "all-linear", "exclude_modules": ["lm_head"], "layer_patterns": {"up_proj": "1:4"}}
    patch_model(model, Sparse24Config(method="s-ste", **config))
    model.save_pretrained(tmp_path)
    assert len(sparse_weights(AutoModel.from_pretrained(tmp_path))) == len(sparse_weights(model)) == 14


@pytest.mark.parametrize("shared", ["layer", "weight"])
def test_shared_weights_are_exported_under_each_name_and_refused_packed(shared, tmp_path):
    model = zoo.build("llama")
    first, second = (layer.mlp for layer in model.model.layers[:2])
    if shared == "layer":
        second.up_proj = first.up_proj
    else:
        second.up_proj.weight = first.up_proj.weight
    patch_model(model, Sparse24Config(method="s-ste"))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight is the weight of another layer too"):
        export_model(model, tmp_path / "packed", format="packed")
    export_model(model, tmp_path / "dense")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "dense")), logits(model.eval()))


@pytest.mark.skipif("gte" not in CONFIG_MAPPING, reason="later than the lowest version of Transformers")
def test_layers_that_files_hold_as_one_are_listed_and_verified(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModel.from_config(CONFIG_MAPPING["gte"](**sizes, vocab_size=zoo.VOCAB)).eval()
    patch_model(model, Sparse24Config(method="s-ste", target_modules="all-linear", exclude_modules=["k_proj"]))
    export_model(model, tmp_path)
    assert main(["verify", str(tmp_path)]) == 0
    listed = json.loads((tmp_path / "sparse24.json").read_text())["weights"]
    assert {name.split(".", 3)[3] for name in listed} == {
        "attention.o_proj.weight",
        "mlp.up_gate_proj.weight",
        "mlp.down_proj.weight",
    }
    model.save_pretrained(tmp_path / "training")
    for source in (tmp_path, tmp_path / "training"):
        loaded = AutoModel.from_pretrained(source)
        assert torch.equal(loaded(torch.arange(1, 9)[None])[0], model(torch.arange(1, 9)[None])[0])


def test_patterns_are_listed_by_the_names_in_files(tmp_path):
    """Where files hold each expert of a stack as a tensor."""
    config = Sparse24Config(method="s-ste", pattern="1:4", layer_patterns={"down_proj": "2:4"})
    patch_model(model := zoo.build("mixtral"), config)
    export_model(model, tmp_path)
    assert main(["verify", str(tmp_path)]) == 0
    patterns = json.loads((tmp_path / "sparse24.json").read_text())["patterns"]
    assert {name.rpartition("experts.")[2] for name in patterns} == {"0.w2.weight", "1.w2.weight"}
