"""patch_model and unpatch_model on every architecture, and what they refuse."""

import copy

import peft
import pytest
import torch
import zoo
from sparse_models import logits
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_sparse24 import Sparse24Config, Sparse24Conv1D, Sparse24Linear, patch_model, sparse_weights, unpatch_model
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.run import patched_config, set_phase, sparse_run

# Suffixes of the layers that each group must find, the same in every block.
EXPECTED = {
    "gpt2": (["mlp.c_fc", "mlp.c_proj"], ["attn.c_attn", "attn.c_proj"]),
    "gpt_neox": (["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"], ["attention.query_key_value", "attention.dense"]),
    "opt": (["fc1", "fc2"], ["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.out_proj"]),
    "bloom": (["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"], ["self_attention.query_key_value", "self_attention.dense"]),
    "phi3": (["mlp.gate_up_proj", "mlp.down_proj"], ["self_attn.o_proj", "self_attn.qkv_proj"]),
    "albert": (["ffn", "ffn_output"], ["attention.query", "attention.key", "attention.value", "attention.dense"]),
    "distilbert": (["ffn.lin1", "ffn.lin2"], [f"attention.{part}_lin" for part in ("q", "k", "v", "out")]),
    "modernbert": (["mlp.Wi", "mlp.Wo"], ["attn.Wqkv", "attn.Wo"]),
}
EXPECTED["falcon"] = EXPECTED["bloom"]
for _name in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "olmo2"):
    EXPECTED[_name] = (
        ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"],
    )
for _name in ("bert", "roberta", "electra"):
    EXPECTED[_name] = (
        ["intermediate.dense", "output.dense"],
        ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"],
    )
EXPECTED["deberta-v2"] = (
    ["intermediate.dense", "output.dense"],
    [f"attention.self.{part}" for part in ("query_proj", "key_proj", "value_proj", "pos_key_proj", "pos_query_proj")]
    + ["attention.output.dense"],
)


def in_block(name: str) -> str:
    """The part of a layer's name behind its last block number."""
    parts = name.split(".")
    last = max(i for i, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[last + 1 :])


@pytest.mark.parametrize("name", zoo.NAMES)
def test_targets(name):
    mlp, attention = EXPECTED[name]
    blocks = 1 if name == "albert" else 2  # ALBERT's two layers are one shared block
    for target, expected in {"mlp": mlp, "attention": attention, "all-linear": mlp + attention}.items():
        report = patch_model(zoo.build(name), Sparse24Config(target_modules=target))
        assert sorted(in_block(layer) for layer in report.patched) == sorted(expected * blocks)
        assert "output embedding" in report.skipped.values()
        assert set(report.patched).isdisjoint(report.skipped)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_patching_keeps_parameters_and_unpatching_keeps_outputs(name):
    model = zoo.build(name).eval()
    before = dict(model.named_parameters(remove_duplicate=False))
    classes = {key: type(module) for key, module in model.named_modules()}
    masters = copy.deepcopy(model.state_dict())
    dense_logits = logits(model)
    patch_model(model, Sparse24Config(target_modules="all-linear"))
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys() and all(before[key] is after[key] for key in before)
    for name, weight in sparse_weights(model).items():
        assert weight.parameter is before[name] and isinstance(weight.module, Sparse24Linear | Sparse24Conv1D)
        pruned = weight.module.sparse_weight()
        assert pruned.shape == weight.parameter.shape and pruned.dtype == weight.parameter.dtype
        assert is_nm_sparse(pruned, dim=weight.input_dim) and (pruned != 0).any()
        assert not torch.signbit(pruned[pruned == 0]).any()
    sparse_logits = logits(model)
    assert not torch.equal(dense_logits, sparse_logits)

    as_sparse = unpatch_model(copy.deepcopy(model))
    assert torch.equal(logits(as_sparse), sparse_logits)
    as_dense = unpatch_model(model, sparse=False)
    assert as_dense is model
    assert torch.equal(logits(model), dense_logits)
    for restored in (as_sparse, as_dense):
        assert {key: type(module) for key, module in restored.named_modules()} == classes
        assert not hasattr(restored.config, "quantization_config")
        assert restored.state_dict().keys() == masters.keys()
        assert patched_config(restored) is None


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "opt"])
def test_tied_weights_stay_tied(name):
    model = zoo.build(name, tie_word_embeddings=True)
    patch_model(model, Sparse24Config(target_modules="all-linear"))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_heads_poolers_and_routers_are_not_touched_by_expressions():
    config = AutoConfig.for_model("bert", vocab_size=96, **zoo.MASKED["bert"])
    model = AutoModelForSequenceClassification.from_config(config)
    report = patch_model(model, Sparse24Config(target_modules=r".*"))
    assert report.skipped.keys() == {"bert.pooler.dense", "classifier"}
    moe = patch_model(zoo.build("qwen2_moe"), Sparse24Config(target_modules="all-linear"))
    assert moe.skipped["model.layers.0.mlp.shared_expert_gate"] == "router"


def test_selection_by_regex_endings_exclusion_and_block():
    def patched(**arguments):
        return patch_model(zoo.build("llama"), Sparse24Config(**arguments)).patched

    up = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
    assert patched(target_modules=["up_proj"]) == up
    assert patched(target_modules=["mlp.up_proj"], layers_to_transform=1) == up[1:]
    assert patched(target_modules=r".*\.up_proj", layers_to_transform=[0]) == up[:1]
    assert patched(exclude_modules=["gate_proj", "down_proj"]) == up
    assert patched(exclude_modules=r".*(gate|down)_proj") == up
    assert len(patched(target_modules="all-linear", exclude_modules="attention")) == 6


def test_odd_sizes_are_skipped_with_the_reason():
    model = zoo.build("llama", intermediate_size=66)
    report = patch_model(model)
    assert report.skipped["model.layers.0.mlp.down_proj"] == "input size 66 is not a multiple of 4"
    assert "model.layers.0.mlp.up_proj" in report.patched
    unpatch_model(model)
    report = patch_model(model, Sparse24Config(method="t-sr-ste", target_modules="all-linear"))
    assert "output size 66 is not a multiple of 4" in report.skipped["model.layers.0.mlp.up_proj"]


def test_patching_twice():
    model = zoo.build("llama")
    config = Sparse24Config(method="sr-ste")
    first = patch_model(model, config)
    assert patch_model(model, config) == first and patch_model(model) == first
    with pytest.raises(ValueError, match=r"already patched with another config \(method='sr-ste', now 'ste'\)"):
        patch_model(model, Sparse24Config(method="ste"))
    with pytest.raises(ValueError, match=r"another config \(target_modules='mlp', now 'attention'\)"):
        patch_model(model, Sparse24Config(method="sr-ste", target_modules="attention", masked_decay=0.1))
    assert patched_config(model).masked_decay == 2e-4
    patch_model(model, Sparse24Config(method="sr-ste", masked_decay=0.1, weight_grad="mvue", backend="dense"))
    now = sparse_run(model)
    assert (now.config.masked_decay, now.config.backend) == (0.1, "dense")
    assert sparse_run(model).method.gemms.grad_weight.estimator == "mvue"
    patch_model(model, Sparse24Config(method="sr-ste"))  # what it does not give stays
    assert (now.config.masked_decay, now.config.backend) == (0.1, "auto")
    unpatch_model(model)
    patch_model(model, Sparse24Config(method="ste"))
    with pytest.raises(ValueError, match="not patched"):
        unpatch_model(zoo.build("llama"))


class Gated(nn.Linear):
    """Not a plain linear layer, though a subclass of one."""

    def forward(self, x):
        return torch.sigmoid(super().forward(x))


class Block(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.mlp = nn.ModuleDict({"plain": nn.Linear(8, 8), "odd": linear})

    def forward(self, x):
        return self.mlp["odd"](self.mlp["plain"](x))


def test_a_plain_module_works_and_foreign_linears_are_left_alone():
    model = nn.Module()
    model.layers = nn.ModuleList([Block(Gated(8, 8))])
    report = patch_model(model)
    assert report.patched == ("layers.0.mlp.plain",)
    assert report.skipped["layers.0.mlp.odd"] == "its class Gated is not a plain linear layer"
    out = model.layers[0](torch.randn(8))  # a single vector, as nn.Linear allows
    assert out.shape == (8,)


def test_layers_that_share_one_weight():
    model = nn.Module()
    model.layers = nn.ModuleList([Block(nn.Linear(8, 8)), Block(nn.Linear(8, 8))])
    model.layers[1].mlp["plain"].weight = model.layers[0].mlp["plain"].weight
    report = patch_model(model)
    assert len(report.patched) == 4 and report.patched_parameters == 3 * 64
    x = torch.randn(2, 8)
    before = model.layers[1](model.layers[0](x))
    unpatch_model(model)
    torch.testing.assert_close(model.layers[1](model.layers[0](x)), before)
    assert model.layers[1].mlp["plain"].weight is model.layers[0].mlp["plain"].weight


def test_layers_whose_weight_is_used_without_calling_them():
    config = AutoConfig.for_model(
        "mamba", vocab_size=96, hidden_size=32, state_size=4, num_hidden_layers=1, time_step_rank=4
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    report = patch_model(model, Sparse24Config(target_modules="all-linear"))
    assert report.skipped["backbone.layers.0.mixer.dt_proj"] == "MambaMixer uses its weight without calling it"
    assert "backbone.layers.0.mixer.in_proj" in report.patched
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    with pytest.raises(ValueError, match="uses its weight without calling it"):
        patch_model(encoder, Sparse24Config(target_modules=r".*"))


@pytest.mark.parametrize(
    "targets", [["model.layers.0.mlp.up_proj"], r"model\.layers\.\d\.mlp\.\w+", r"layers\.\d\.mlp\.\w+"]
)
def test_names_with_and_without_the_head(targets):
    model = zoo.build("llama")
    whole = patch_model(model, Sparse24Config(target_modules=targets)).patched
    unpatch_model(model)
    assert {f"model.{name}" for name in patch_model(model.model, Sparse24Config(target_modules=targets)).patched} == {
        *whole
    }


def test_a_weight_shared_with_a_dense_module_stays_dense():
    model = nn.Module()
    model.layers = nn.ModuleList([Block(nn.Linear(8, 8)), Block(nn.Linear(8, 8))])
    model.layers[1].mlp["plain"].weight = model.layers[0].mlp["plain"].weight
    report = patch_model(model, Sparse24Config(layers_to_transform=0))
    assert report.patched == ("layers.0.mlp.odd",)
    assert report.skipped["layers.0.mlp.plain"] == "its weight is shared with a module that stays dense"


def test_parametrized_layers_are_left_alone():
    model = zoo.build("llama")
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    assert "model.layers.0.mlp.up_proj" not in patch_model(model).patched


def assert_untouched(model):
    assert not sparse_weights(model) and not hasattr(getattr(model, "config", None), "quantization_config")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Sparse24Config(target_modules=r"lm.*d"), r"lm_head: output embedding.*A list of whole names.* reaches every"),
        (Sparse24Config(layers_to_transform=7), "layers_to_transform=7"),
        (Sparse24Config(exclude_modules="mlp"), "in exclude_modules='mlp'"),
        (Sparse24Config(method="ste", pattern="3:5"), r"\((?!.*q_proj).*_proj: input size 32 is not a multiple of 5"),
    ],
)
def test_nothing_to_patch(config, message):
    model = zoo.build("llama")
    with pytest.raises(ValueError, match=message):
        patch_model(model, config)
    assert_untouched(model)


def test_no_linear_layers():
    with pytest.raises(ValueError, match=r"nothing to patch.*no linear layers"):
        patch_model(nn.ReLU())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights(value):
    model = zoo.build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = value
    with pytest.raises(ValueError, match=r"NaN or inf in the weights of model.layers.1.mlp.down_proj; nothing was"):
        patch_model(model)
    assert_untouched(model)


def test_wrapped_models():
    model = zoo.build("llama")
    with pytest.raises(ValueError, match="compile holds on"):
        patch_model(torch.compile(model))
    with pytest.raises(ValueError, match="DataParallel holds on"):
        patch_model(nn.DataParallel(model))
    for wrapper, message in [("FullyShardedDataParallel", "^FSDP1"), ("FSDPModule", "^FSDP2")]:
        wrapped = type(wrapper, (nn.Module,), {})()
        wrapped.module = model
        with pytest.raises(ValueError, match=message):
            patch_model(wrapped)
    assert_untouched(model)
    model.compile()
    with pytest.raises(ValueError, match="compile holds on"):
        patch_model(model)
    assert_untouched(model)


def test_quantized_models():
    model = zoo.build("llama")
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match="quantized with gptq"):
        patch_model(model)


@pytest.mark.parametrize("method", ["s-ste", "t-sr-ste", "ste"])
def test_meta_device(method):
    real = zoo.build("llama")
    config = real.config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    report = patch_model(model, Sparse24Config(method=method))
    assert report.patched and all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    weight = next(iter(sparse_weights(model).values()))
    if weight.state:
        with pytest.raises(RuntimeError, match="patched on the meta device and has no state yet"):
            weight.pruned()
    weights = real.state_dict()
    model.load_state_dict(weights)  # dense weights: strict, the state is computed from them
    patch_model(real, Sparse24Config(method=method))
    for mine, theirs in zip(sparse_weights(model).values(), sparse_weights(real).values()):
        assert torch.equal(mine.pruned(), theirs.pruned())


def test_a_dense_model_whose_config_says_that_it_is_sparse_is_patched_so(tmp_path):
    """As `from_config` of a sparse model's makes it; its run starts again, whatever phase the other was saved in."""
    other = zoo.build("llama")
    patch_model(other, Sparse24Config(method="t-sr-ste", target_modules=["up_proj"], mask_interval=3))
    set_phase(other, "dense")
    other.save_pretrained(tmp_path)
    for config in (AutoConfig.from_pretrained(tmp_path), other.config):
        model = AutoModelForCausalLM.from_config(config)
        assert not sparse_weights(model)
        patch_model(model)
        assert patched_config(model) == patched_config(other) and sparse_run(model).phase == "sparse"
        assert sparse_run(other).phase == "dense"
    model = AutoModelForCausalLM.from_config(config)
    patch_model(model, Sparse24Config(method="ste"))
    assert patched_config(model).method == "ste"


@pytest.mark.parametrize("names", [{"target_modules": ["down_proj"]}, {"target_modules": r"model\..*\.down_proj"}])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_layers_below_adapters_go_by_the_names_that_they_have_without(names):
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(layer_patterns={"down_proj": "1:4"}, **names))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["down_proj"]))
    report = patch_model(adapted)
    assert len(report.patched) == 2 and all(name.endswith("down_proj.base_layer") for name in report.patched)
