"""Fusing gated MLPs: found by what they do, the same outputs and gradients, and nothing else changes."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from zoo import batch, build

from hf_sparse24 import Sparse24Config, patch_model, unpatch_model
from hf_sparse24.layers.gated import FusedGatedMLP, fuse_gated_mlps

KINDS = {
    "llama": "swiglu",
    "mistral": "swiglu",
    "qwen2": "swiglu",
    "qwen3": "swiglu",
    "gemma2": "geglu",
    "phi3": "swiglu",
    "olmo2": "swiglu",
    "modernbert": "geglu-exact",
}


def step(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    output = model(**batch())
    output.loss.backward()
    return output.logits, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def fused_modules(model) -> list[FusedGatedMLP]:
    return [module for module in model.modules() if isinstance(module, FusedGatedMLP)]


class GatedMLP(nn.Module):
    """A module to vary."""

    def __init__(self, act=F.silu, **more):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.act = act
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("name", KINDS)
def test_outputs_gradients_and_state_stay(name):
    model = build(name)
    parameters, keys = dict(model.named_parameters()), list(model.state_dict())
    random = torch.get_rng_state()
    logits, gradients = step(model)
    names = fuse_gated_mlps(model)
    assert fuse_gated_mlps(model) == names and torch.equal(torch.get_rng_state(), random)
    assert [n.rpartition(".")[2] for n in names] == ["mlp", "mlp"]
    assert {module.made_of[2][2] for module in fused_modules(model)} == {KINDS[name]}
    assert list(model.state_dict()) == keys
    assert all(parameters[n] is parameter for n, parameter in model.named_parameters())
    fused_logits, fused_gradients = step(model)
    torch.testing.assert_close(fused_logits, logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fused_gradients, gradients, rtol=1e-4, atol=1e-6)
    with torch.device("meta"):
        assert fuse_gated_mlps(build(name)) == names


@pytest.mark.parametrize("name", ["gpt2", "bert", "opt", "falcon", "mixtral"])
def test_other_models_are_left_alone(name):
    model = build(name)
    assert fuse_gated_mlps(model) == fused_modules(model) == []


def test_the_shared_expert_is_a_gated_mlp():
    names = fuse_gated_mlps(build("qwen2_moe"))
    assert len(names) == 2 and all(name.endswith("shared_expert") for name in names)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_before_or_after_patching(name):
    config = Sparse24Config(method="s-ste", weight_grad="dense")
    patched, before, after = build(name), build(name), build(name)
    patch_model(patched, config)
    patch_model(before, config)
    assert len(fuse_gated_mlps(before)) == 2
    fuse_gated_mlps(after)
    report = patch_model(after, config)
    assert len(fuse_gated_mlps(after)) == 2 and str(report) == str(patch_model(patched, config))
    logits, gradients = step(patched)
    for model in (before, after):
        fused_logits, fused_gradients = step(model)
        torch.testing.assert_close(fused_logits, logits, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(fused_gradients, gradients, rtol=1e-4, atol=1e-6)
    unpatch_model(before)
    assert len(fused_modules(before)) == 2
    torch.testing.assert_close(step(before)[0], logits, rtol=1e-5, atol=1e-6)


def test_under_autocast_and_gradient_checkpointing():
    model = build("llama")
    expected = step(model)
    fuse_gated_mlps(model)
    # Renamed within Transformers 5; the old name warns there.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()
    torch.testing.assert_close(step(model)[1], expected[1], rtol=1e-4, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = step(model)
    torch.testing.assert_close(logits.float(), expected[0], rtol=0.1, atol=0.02)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_stand_on_their_own(how):
    mlp = build("llama").model.layers[0].mlp
    fuse_gated_mlps(mlp)
    twin = how(mlp)
    assert type(twin) is type(mlp) and twin.gate_proj.weight is not mlp.gate_proj.weight
    x = torch.randn(3, 32)
    torch.testing.assert_close(twin(x), mlp(x))
    nn.init.zeros_(twin.down_proj.weight)
    assert (twin(x) == 0).all() and (mlp(x) != 0).any()


def test_arguments_by_name_and_hooks():
    mlp = build("phi3").model.layers[0].mlp
    seen = []
    mlp.register_forward_hook(lambda module, args, output: seen.append("mlp"))
    mlp.down_proj.register_forward_hook(lambda module, args, output: seen.append("down_proj"))
    x = torch.randn(3, 32)
    expected = mlp(x)
    assert fuse_gated_mlps(mlp) == [""]
    torch.testing.assert_close(mlp(hidden_states=x), expected)
    assert seen == ["down_proj", "mlp"] * 2


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (F.silu, "swiglu"),
        (nn.SiLU(), "swiglu"),
        (nn.GELU(), "geglu-exact"),
        (nn.GELU("tanh"), "geglu"),
        (nn.ReLU(), None),
        (nn.Sigmoid(), None),
        (lambda x: x * torch.sigmoid(1.702 * x), None),
    ],
)
def test_the_activation_is_known_by_what_it_does(act, kind):
    mlp = GatedMLP(act)
    assert fuse_gated_mlps(mlp) == ([""] if kind else [])
    assert not kind or mlp.made_of[2][2] == kind


def test_a_replaced_forward_or_a_watched_activation_is_left_alone():
    mlp = GatedMLP()
    mlp.forward = mlp.forward
    assert fuse_gated_mlps(mlp) == []
    mlp = build("llama").model.layers[0].mlp
    mlp.act_fn.register_forward_hook(lambda module, args, output: None)
    assert fuse_gated_mlps(mlp) == [] and type(mlp) is LlamaMLP


@pytest.mark.parametrize("up_first", [False, True])
def test_names_of_other_models_and_the_order_of_halves(up_first):
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj, self.down_proj = nn.Linear(8, 32), nn.Linear(16, 8)

        def forward(self, x):
            up, gate = self.gate_up_proj(x).chunk(2, -1)
            return self.down_proj(F.silu(gate) * up)

    mlp, x = Halves() if up_first else Lfm2MLP(Lfm2Config(hidden_size=8, intermediate_size=24)), torch.randn(3, 8)
    expected = mlp(x)
    assert fuse_gated_mlps(mlp) == [""] and mlp.made_of[2][1:] == (up_first, "swiglu")
    torch.testing.assert_close(mlp(x), expected)
    torch.testing.assert_close(torch.compile(mlp, fullgraph=True, backend="aot_eager")(x), expected)


def gate(mlp, x):
    return F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)


OTHERS = {
    "scaled": lambda mlp, x: 0.5 * mlp.down_proj(gate(mlp, x)),
    "norm": lambda mlp, x: mlp.down_proj(mlp.norm(gate(mlp, x))),
    "learned scale": lambda mlp, x: mlp.scale * mlp.down_proj(gate(mlp, x)),
    "dropout": lambda mlp, x: mlp.down_proj(F.dropout(gate(mlp, x), 0.1, mlp.training)),
    "more arguments": lambda mlp, x, scale=1.0: scale * mlp.down_proj(gate(mlp, x)),
    "clamped": lambda mlp, x: mlp.down_proj(F.silu(mlp.gate_proj(x).clamp(max=10)) * mlp.up_proj(x).clamp(-10, 10)),
    "another use": lambda mlp, x: mlp.down_proj(F.silu(mlp.up_proj(x) + mlp.gate_proj(x))),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("zeros", [False, True])
def test_what_behaves_otherwise_is_left_alone(kind, zeros):
    more = {"norm": {"norm": nn.LayerNorm(16)}, "learned scale": {"scale": nn.Parameter(torch.ones(()))}}
    cls = type("Other", (GatedMLP,), {"forward": OTHERS[kind]})
    mlp = cls(**more.get(kind, {})).eval()
    if zeros:
        nn.init.zeros_(mlp.down_proj.weight)
        nn.init.zeros_(mlp.down_proj.bias)
    assert fuse_gated_mlps(mlp) == [] and type(mlp) is cls
