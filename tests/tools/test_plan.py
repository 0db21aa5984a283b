"""hf-sparse24 plan: its bytes against what models hold, and against literal numbers."""

import runpy
from itertools import product

import pytest
import torch
import zoo
from cslt import stand_in  # noqa: F401 (a fixture)
from paths import RECIPES
from sparse_models import keep_encodings
from transformers import LlamaConfig, LlamaForCausalLM

from hf_sparse24 import Sparse24Config, patch_model, sparse_run, sparse_weights
from hf_sparse24.tools.plan import break_even, plan_step
from hf_sparse24_command import main


def llama(**sizes):
    """On the meta device, one layer: an MLP of 8192 x 2048."""
    config = LlamaConfig(
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 1, "num_attention_heads": 16, **sizes}
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def patched(method, **sizes):
    model = llama(**sizes)
    patch_model(model, Sparse24Config(method=method))
    return model


def test_sparse_gemms_and_what_pruning_moves():
    plan = plan_step(patched("s-ste"), 8192)
    gate, up, _ = plan.layers
    assert gate == up and gate.sparse == ("output", "grad_weight")
    assert gate.flops == 2 * (2 * 8192 * 8192 * 2048)
    # An fp32 weight is read, and written in bf16, dense for grad_input and compressed; a bf16 gradient is compressed.
    assert gate.pruning == 8192 * 2048 * (4 + 2 + 9 / 8) + 8192 * 8192 * (2 + 9 / 8)
    assert plan.flops == gate.flops * 3  # gate, up and down
    few = plan_step(patched("s-ste"), 8)  # rows that grad_weight cannot contract over
    assert few.layers[0].sparse == ("output",)


def test_patterns_within_24_are_planned_as_sparse():
    found = {}
    for pattern, method in product(("1:2", "1:16", "2:8", "4:8", "3:4"), ("s-ste", "t-sr-ste")):
        model = llama()
        patch_model(model, Sparse24Config(method=method, pattern=pattern, weight_grad="mvue-1:2"))
        found[pattern, method] = plan_step(model, 8192).layers[0].sparse
    for pattern in ("1:2", "1:16", "2:8"):
        assert found[pattern, "s-ste"] == ("output", "grad_weight")
        assert found[pattern, "t-sr-ste"] == ("output", "grad_input", "grad_weight")
    for pattern in ("4:8", "3:4"):
        assert found[pattern, "s-ste"] == found[pattern, "t-sr-ste"] == ("grad_weight",)


def test_masked_decay_and_refreshes_cost_what_they_move():
    def bytes_per_weight(method):
        found = plan_step(patched(method), 16).layers[0]
        gradients = 16 * 8192 * (2 + 9 / 8) if method != "sr-ste" else 0
        return (found.pruning - gradients) / (8192 * 2048)

    # The weight is read, and written as each GEMM multiplies by it; the mask has 1/8.
    dense, sparse = 2, 9 / 8
    assert bytes_per_weight("s-ste") == pytest.approx(4 + sparse + dense)
    assert bytes_per_weight("sr-ste") == pytest.approx(4 + sparse + dense + (4 + 1 / 8) + (3 * 4 + 1 / 8))
    t_sr_ste = 4 + 1 / 8 + 2 * sparse + (3 * 4 + 1 / 8) + (4 + 1 / 8) / 40
    assert bytes_per_weight("t-sr-ste") == pytest.approx(t_sr_ste, rel=1e-3)  # the number of refreshes is whole


def test_long_dense_phases():
    phases = {"t-sr-ste": {"dense_start": 20_000, "dense_tail": 0.5}, "step": {"switch_by": 20_000, "dense_tail": 0.5}}
    for method, settings in phases.items():
        model = llama()
        patch_model(model, Sparse24Config(method=method, **settings))
        assert plan_step(model, 16).sparse_share == pytest.approx(0.4)


def test_break_even():
    """Pruning of a fifth of the time of dense GEMMs is paid back when these take four fifths."""
    assert break_even(1000, 2, 100) == pytest.approx(1.25)
    assert break_even(1000, 0, 100) == 1
    assert break_even(1000, 5, 100) == 2 and break_even(1000, 5.1, 100) is None
    assert break_even(0, 1, 100) is None
    plans = [plan_step(patched("s-ste"), tokens) for tokens in (1024, 4096, 65536)]
    assert break_even(plans[0].flops, plans[0].pruning, 295) is None
    assert break_even(plans[1].flops, plans[1].pruning, 295) > break_even(plans[2].flops, plans[2].pruning, 295) > 1


@pytest.mark.parametrize("method", ["ste", "s-ste", "t-sr-ste"])
def test_a_model_holds_what_is_planned(stand_in, method):  # noqa: F811
    model = zoo.build("llama").bfloat16()
    patch_model(model, Sparse24Config(method=method))
    memory = plan_step(model, 32).memory
    with keep_encodings(sparse_run(model)):
        model(**zoo.batch(rows=2, length=16)).loss.backward()
        kept = sum(zoo.kept_bytes(weight) for weight in sparse_weights(model).values())
    assert memory["encodings, kept for the step"] == kept > 0
    assert memory["parameters, fp32"] == 4 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", [*zoo.CAUSAL, *zoo.MASKED, *zoo.MOE])
def test_every_architecture_has_a_plan(name):
    with torch.device("meta"):
        model = zoo.build(name)
    patch_model(model, Sparse24Config(target_modules="mlp"))
    assert plan_step(model, 4096).pruning > 0


def test_experts_prune_weights_alone():
    with torch.device("meta"):
        model = zoo.build("qwen3_moe")  # 4 experts
    patch_model(model, Sparse24Config())
    stacks = plan_step(model, 1024).layers
    assert [found.sparse for found in stacks] == [()] * 4  # two of each of two layers: there is no sparse grouped GEMM
    out, inputs = next(iter(sparse_weights(model).values())).sizes
    assert stacks[0].pruning == 4 * (out * inputs * (4 + 2))  # to dense; their gradients are exact


@pytest.fixture
def directory(tmp_path):
    llama(architectures=["LlamaForCausalLM"]).config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_command(directory, capsys):
    arguments = ["plan", directory, "--tokens", "4096", "--method", "t-sr-ste"]
    assert main(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in ("0.198 billion parameters, 25% of them", "4096 tokens", "parameters, fp32 0.793", "295 FLOP", "83%"):
        assert part in printed
    assert main([*arguments, "--flops-per-byte", "5000"]) == 0
    assert "pruning takes longer than sparse GEMMs can save" in capsys.readouterr().out


@pytest.mark.slow
def test_the_page_is_what_the_command_writes(tmp_path):
    plan_table = runpy.run_path(RECIPES / "plan_table.py")
    plan_table["main"](tmp_path / "plan.md")
    assert (tmp_path / "plan.md").read_text() == plan_table["PAGE"].read_text()
