"""hf-sparse24 plan: its bytes against what processes move and hold, and against literal numbers."""

import runpy
from collections import Counter
from itertools import product

import pytest
import ranks
import step_bytes
import torch
import zoo
from cslt import stand_in  # noqa: F401 (a fixture)
from paths import RECIPES
from sparse_models import keep_encodings
from step_bytes import Case
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig, LlamaForCausalLM

from hf_sparse24 import Sparse24Config, patch_model, sparse_run, sparse_weights
from hf_sparse24.tools.plan import activations, plan_step
from hf_sparse24.tools.pruning_costs import break_even
from hf_sparse24.tools.sizes import Setting
from hf_sparse24_command import main

T_SR_STE = {"method": "t-sr-ste", "mask_interval": 1, "target_modules": "all-linear", "dense_tail": 0}
S_STE = {"method": "s-ste"}
UNEVEN = {"vocab_size": 97, "intermediate_size": 36, "num_key_value_heads": 4}  # rows that 2 and 4 do not divide
EVEN = {"num_key_value_heads": 4}
TIED = EVEN | {"tie_word_embeddings": True}
CASES = {
    "ddp, masks": Case("ddp", T_SR_STE),
    "ddp, scales, tied, autocast": Case("ddp", S_STE, TIED, torch.bfloat16),
    "fsdp2": Case("fsdp2", S_STE, UNEVEN),
    "fsdp2, tied, checkpointing": Case("fsdp2", S_STE, TIED, checkpointing=True),
    "fsdp2, bf16, refresh": Case("fsdp2", T_SR_STE, EVEN, torch.bfloat16),
    "fsdp2, refresh, uneven": Case("fsdp2", T_SR_STE, UNEVEN),
    "fsdp2, decay": Case("fsdp2", {"method": "sr-ste"}, UNEVEN),
    "fsdp2, GPT-2": Case("fsdp2", T_SR_STE, name="gpt2"),
}


def check(world):
    """What every process moves, and what the first one holds, is what the plan says: to the byte."""
    wrong = []
    results = ranks.run(world, step_bytes.steps, list(CASES.values()))
    for name, case, *of_ranks in zip(CASES, CASES.values(), *results):
        plan = plan_step(case.meta_model(), case.setting(world))
        expected = Counter()
        for collective in plan.collectives:
            expected[collective.kind] += round(collective.nbytes)
        found = {
            "parameters": plan.memory["parameters, fp32"],
            "gradients": plan.memory["gradients, fp32"],
            "moments": plan.memory["AdamW's moments, fp32"],
            "buffers": plan.memory["masks, scales and other buffers"],
        }
        for moved, _ in of_ranks:
            if moved != dict(expected):
                wrong.append(f"{name}: moved {moved}, planned {dict(expected)}")
        if of_ranks[0][1] != found:
            wrong.append(f"{name}: holds {of_ranks[0][1]}, planned {found}")
    assert not wrong, "\n".join(wrong)


def test_two_processes_move_and_hold_what_is_planned():
    check(2)


@pytest.mark.slow
def test_four_processes_move_and_hold_what_is_planned():
    check(4)


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


def layer(plan, out, inputs):
    """What two equal layers cost: gate and up."""
    first, second = (found for found in plan.layers if (found.part.out, found.part.inputs) == (out, inputs))
    assert first[1:] == second[1:]
    return first


def test_sparse_gemms_and_what_pruning_moves():
    plan = plan_step(patched("s-ste"), Setting(1, 8192))
    found = layer(plan, 8192, 2048)
    assert found.part.matrices == 1 and found.sparse == ("output", "grad_weight")
    assert found.flops == 2 * (2 * 8192 * 8192 * 2048)
    # An fp32 weight is read, 9/16 and all of it written in bf16; of a bf16 gradient 9/16.
    assert found.pruning == 8192 * 2048 * (4 + 9 / 8 + 2) + 8192 * 8192 * (2 + 9 / 8)
    assert plan.flops == found.flops * 3  # gate, up and down
    again = plan_step(patched("s-ste"), Setting(1, 8192, checkpointing=True))
    assert layer(again, 8192, 2048).flops == found.flops * 3 / 2 and again.pruning == plan.pruning
    few = plan_step(patched("s-ste"), Setting(1, 8))  # rows that grad_weight cannot contract over
    assert layer(few, 8192, 2048).sparse == ("output",)


def test_patterns_within_24_are_planned_as_sparse():
    found = {}
    for pattern, method in product(("1:2", "1:16", "2:8", "4:8", "3:4"), ("s-ste", "t-sr-ste")):
        model = llama()
        patch_model(model, Sparse24Config(method=method, pattern=pattern, weight_grad="mvue-1:2"))
        found[pattern, method] = layer(plan_step(model, Setting(1, 8192)), 8192, 2048).sparse
    for pattern in ("1:2", "1:16", "2:8"):
        assert found[pattern, "s-ste"] == ("output", "grad_weight")
        assert found[pattern, "t-sr-ste"] == ("output", "grad_input", "grad_weight")
    for pattern in ("4:8", "3:4"):
        assert found[pattern, "s-ste"] == found[pattern, "t-sr-ste"] == ("grad_weight",)


def test_masked_decay_refreshes_and_passes_cost_what_they_move():
    def bytes_per_weight(method, **setting):
        found = layer(plan_step(patched(method), Setting(4, 16, **setting)), 8192, 2048)
        gradients = 16 * 8192 * (2 + 9 / 8) if method != "sr-ste" else 0
        return (found.pruning - gradients) / (8192 * 2048)

    # The weight is read and written once in each form, and the mask in 1/8.
    sparse = 9 / 8
    assert bytes_per_weight("s-ste") == pytest.approx(4 + sparse + 2)
    assert bytes_per_weight("sr-ste") == pytest.approx(4 + sparse + 2 + (4 + 1 / 8) + (3 * 4 + 1 / 8))
    t_sr_ste = 4 + 1 / 8 + 2 * sparse + (3 * 4 + 1 / 8) + (4 + 1 / 8) / 40
    assert bytes_per_weight("t-sr-ste") == pytest.approx(t_sr_ste, rel=1e-3)  # the number of refreshes is whole
    # FSDP2: both passes prune what was gathered in bf16, and the recomputation does; decay works on a fourth.
    assert bytes_per_weight("s-ste", parallel="fsdp2") == pytest.approx(2 + sparse + 2 + 2)
    assert bytes_per_weight("s-ste", parallel="fsdp2", checkpointing=True) == pytest.approx(2 * (2 + sparse) + 2 + 2)
    decay = (4 + 1 / 8) + (3 * 4 + 1 / 8)
    assert bytes_per_weight("sr-ste", parallel="fsdp2") == pytest.approx(2 + sparse + 2 + 2 + decay / 4)


def test_break_even():
    """Pruning of a fifth of the time of dense GEMMs is paid back when these take four fifths."""
    assert break_even(1000, 2, 100) == pytest.approx(1.25)
    assert break_even(1000, 0, 100) == 1
    assert break_even(1000, 5, 100) == 2 and break_even(1000, 5.1, 100) is None
    assert break_even(0, 1, 100) is None
    plans = [plan_step(patched("s-ste"), Setting(1, tokens)) for tokens in (1024, 4096, 65536)]
    assert break_even(plans[0].flops, plans[0].pruning, 295) is None
    assert break_even(plans[1].flops, plans[1].pruning, 295) > break_even(plans[2].flops, plans[2].pruning, 295) > 1


@pytest.mark.parametrize("method", ["ste", "s-ste", "t-sr-ste"])
def test_encodings_take_what_is_planned(stand_in, method):  # noqa: F811
    model = zoo.build("llama").bfloat16()
    patch_model(model, Sparse24Config(method=method))
    plan = plan_step(model, Setting(1, 32))
    with keep_encodings(sparse_run(model)):
        model(**zoo.batch(rows=2, length=16)).loss.backward()
        kept = sum(zoo.kept_bytes(weight) for weight in sparse_weights(model).values())
    assert plan.memory["encodings, kept for the step"] == kept > 0


def kept_for_backward(layers, autocast, checkpointing):
    """Bytes that autograd keeps of a Llama, its Parameters left out."""
    model = zoo.build("llama", **ACTIVATIONS, num_hidden_layers=layers)
    if not autocast:
        model.bfloat16()
    if checkpointing:
        model.gradient_checkpointing_enable() if OLD else model.activation_checkpointing_enable()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # the tensor, so that no other takes its address
        return tensor

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.zeros(1, 256, dtype=torch.long))
    return sum(nbytes for nbytes, _ in kept.values())


ACTIVATIONS = {"hidden_size": 128, "intermediate_size": 448, "num_key_value_heads": 4, "head_dim": 32}
OLD = not hasattr(LlamaForCausalLM, "activation_checkpointing_enable")


@pytest.mark.parametrize("autocast", [True, False])
def test_activations_that_wait_for_the_backward_pass(autocast):
    """Of two layers more, so that what is outside layers does not count."""
    linear = 4 * (128 + 128) + 3 * (128 + 448)  # attention and MLP

    def planned(layers):
        setting = Setting(1, 256, "ddp" if autocast else "fsdp2", checkpointing=checkpointing)
        return activations([linear] * layers, 128, 0, setting)

    for checkpointing in (False, True):
        counted = kept_for_backward(4, autocast, checkpointing) - kept_for_backward(2, autocast, checkpointing)
        expected = planned(4) - planned(2)
        assert counted == (expected if checkpointing else pytest.approx(expected, rel=0.005))


@pytest.mark.parametrize("name", [*zoo.CAUSAL, *zoo.MASKED, *zoo.MOE])
def test_every_architecture_has_a_plan(name):
    with torch.device("meta"):
        model = zoo.build(name)
    patch_model(model, Sparse24Config(target_modules="mlp"))
    for parallel in ("ddp", "fsdp2"):
        plan = plan_step(model, Setting(8, 4096, parallel=parallel))
        assert plan.total_memory > 0 and plan.sent > 0 and plan.pruning > 0


def test_experts_see_a_part_of_the_tokens():
    with torch.device("meta"):
        model = zoo.build("qwen3_moe")  # 4 experts, 2 for each token
    patch_model(model, Sparse24Config())
    plan = plan_step(model, Setting(1, 1024))
    stacks = [found for found in plan.layers if found.part.token_share == 0.5]
    assert [found.part.matrices for found in stacks] == [4] * 4  # two of each of two layers
    assert [found.sparse for found in stacks] == [()] * 4  # there is no sparse grouped GEMM
    gradients = 512 * stacks[0].part.out * 2 * (1 + 1)  # of half of the tokens, pruned to dense
    assert stacks[0].pruning == 4 * (stacks[0].part.out * stacks[0].part.inputs * (4 + 2) + gradients)


@pytest.fixture
def directory(tmp_path):
    llama(architectures=["LlamaForCausalLM"]).config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_command(directory, capsys):
    arguments = ["plan", directory, "--gpus", "8", "--tokens", "4096", "--method", "t-sr-ste"]
    assert main(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in (
        "t-sr-ste: 0.198 billion parameters, 25% of them in 2:4 layers",
        "8 GPUs, ddp, 4096 tokens per GPU and step, bfloat16: computed, not measured",
        "all_reduce: gradients 0.793 1.39",
        "TFLOP in GEMMs that can be sparse; pruning moves",
        "times as fast as dense ones pay for pruning; 2 is the most they can be (on a GPU that computes 295 FLOP",
        "83% of the steps are sparse",
    ):
        assert part in printed
    assert main([*arguments, "--flops-per-byte", "5000"]) == 0
    printed = capsys.readouterr().out
    assert "pruning takes longer than sparse GEMMs can save" in printed
    assert main([*arguments, "--memory", "4", "--gradient-checkpointing"]) == 0  # GB: DDP does not fit
    printed = capsys.readouterr().out
    assert "8 GPUs, fsdp2" in printed and "reduce_scatter: gradients" in printed and "gradient checkpointing" in printed


def test_groups_that_fsdp2_cuts_are_refused(tmp_path, capsys):
    """GPT-2 stores inputs in the first dimension: 36 of them are 9 groups, which 2 processes cannot share."""
    zoo.build("gpt2", n_embd=36, n_inner=76).config.save_pretrained(tmp_path)
    arguments = ["plan", str(tmp_path), "--gpus", "2", "--tokens", "64", "--parallel"]
    assert main([*arguments, "fsdp2"]) == 2
    assert "splits groups of 4 of transformer.h.0.mlp.c_fc.weight" in capsys.readouterr().err
    assert main([*arguments, "ddp"]) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        ["--tokens", "0"],
        ["--gpus", "0", "--tokens", "64"],
        ["--gpus", "2", "--tokens", "64", "--parallel", "tp"],
    ],
)
def test_wrong_arguments(directory, wrong):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", directory, *wrong])
    assert stopped.value.code == 2


def test_one_gpu_moves_nothing_and_has_no_buckets():
    one, two = (plan_step(patched("s-ste"), Setting(gpus, 16, parallel="ddp")) for gpus in (1, 2))
    assert one.collectives == []
    assert two.memory.keys() - one.memory.keys() == {"DDP's buckets, fp32"}


@pytest.mark.slow
def test_the_page_is_what_the_command_writes(tmp_path):
    plan_table = runpy.run_path(RECIPES / "plan_table.py")
    plan_table["main"](tmp_path / "plan.md")
    written, committed = (path.read_text().splitlines() for path in (tmp_path / "plan.md", plan_table["PAGE"]))
    assert [line for line in written if line[:1] in "|-"] == [line for line in committed if line[:1] in "|-"]
