"""FSDP2: its options, its checkpoints, exports of sharded models, and what it must not keep in memory."""

import peft
import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
import zoo
from distributed_runs import assert_same_tensors, check_equal, settings, slow
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from hf_sparse24 import Sparse24Config, Sparse24Controller, export_model, patch_model, sparse_weights
from hf_sparse24_command import main

ODD = {"n_embd": 36, "n_inner": 76}  # half of the inputs is no multiple of 4


@pytest.mark.parametrize("method", [slow("sr-ste"), slow("s-ste"), "t-sr-ste"])
def test_conv1d_whose_groups_lie_in_two_processes(method):
    check_equal(2, "gpt2", settings(method), "fsdp2", sizes=ODD)


@pytest.mark.parametrize("method", [slow("sr-ste"), "fixed-mask"])
def test_four_processes_of_which_one_holds_nothing(method):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6}  # k_proj's 6 rows are split 2, 2, 2, 0
    check_equal(4, "llama", settings(method), "fsdp2", sizes={"hidden_size": 32, "intermediate_size": 12} | heads)


@pytest.mark.slow
def test_masks_that_are_gathered_where_some_processes_hold_nothing():
    """Those of transposable masks: k_proj's 4 rows are split 1, 1, 1, 1, 0, 0, 0, 0."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    check_equal(8, "llama", settings("t-sr-ste"), "fsdp2", sizes={"hidden_size": 32, "intermediate_size": 12} | heads)


def test_cpu_offloading_and_no_resharding():
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False), "reshard_after_forward": False}
    check_equal(2, "llama", settings("sr-ste"), "fsdp2", sizes={"num_hidden_layers": 2}, **options)


def test_experts():
    check_equal(2, "mixtral", settings("sr-ste"), "fsdp2")
    check_equal(2, "qwen3_moe", settings("t-sr-ste") | {"weight_grad": "dense"}, "fsdp2")


def test_mixed_precision():
    results = ranks.run(2, _mixed)
    for masks, forward, scale, losses in results:
        assert masks and forward
        assert scale == torch.float32 and losses == results[0][3] and losses[-1] < losses[0]


def _mixed(rank, world):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, optimizer, controller = ranks.make("llama", settings("s-ste"), "fsdp2", 8, mp_policy=policy)
    seen = []
    layer = model.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda module, args, output: seen.append((module.sparse_weight(), output.dtype)))
    losses = [ranks.run_step(model, optimizer, controller, 0, rank, world, "fsdp2")[0] for _ in range(8)]
    masks = all(bool((weight != 0).unflatten(-1, (-1, 4)).sum(-1).le(2).all()) for weight, _ in seen)
    return masks, all(dtype == torch.bfloat16 for _, dtype in seen), layer.scale.dtype, losses


@pytest.mark.parametrize("method", ["s-ste", "t-sr-ste"])
def test_nothing_of_a_weight_stays_between_its_passes(method):
    for kept, saved in ranks.run(2, _memory, method):
        assert kept == 0
        assert saved < 0.1  # of the weights' elements: no pruned copy waits for the backward pass


def _memory(rank, world, method):
    torch.manual_seed(0)
    model = zoo.build("llama", intermediate_size=512)
    patch_model(model, Sparse24Config(**settings(method)))
    ranks.shard(model, "fsdp2")
    controller = Sparse24Controller(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=4)
    weights = sparse_weights(model)
    sizes = {weight.master.numel() for weight in weights.values()}
    saved = []

    def pack(tensor):
        is_parameter = isinstance(tensor, torch.nn.Parameter)  # FSDP2 frees its memory
        saved.append(tensor.numel() if tensor.dim() == 2 and tensor.numel() in sizes and not is_parameter else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**zoo.batch(rank)).loss
    kept = sum(zoo.kept_bytes(weight) for weight in weights.values())
    loss.backward()
    with torch.no_grad():
        model(**zoo.batch(rank))
    kept += sum(zoo.kept_bytes(weight) for weight in weights.values())
    controller.end()
    return kept, sum(saved) / sum(weight.master.numel() for weight in weights.values())


def test_a_start_on_the_meta_device():
    one = ranks.make("llama", settings("s-ste"), "one", 4)[0]
    for state in ranks.run(2, _meta):
        for name, weight in sparse_weights(one).items():
            assert torch.equal(state[f"{name}.scale"], weight.state["scale"])


def _meta(rank, world):
    dense = zoo.build("llama").double()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(dense.config)
    model = model.double()
    patch_model(model, Sparse24Config(**settings("s-ste")))
    ranks.shard(model, "fsdp2")
    buffers = {name: buffer.clone() for name, buffer in dense.named_buffers()}
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = torch.distributed.tensor.distribute_tensor(
                dense.get_parameter(name).detach(), parameter.device_mesh, parameter.placements, src_data_rank=None
            )
            parameter.copy_(part)
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
    Sparse24Controller(model, torch.optim.AdamW(model.parameters()), total_steps=4)
    return ranks.state_of(model)["state"]


TIED = {"vocab_size": 61, "tie_word_embeddings": True}  # of tied weights, processes hold different parts


@pytest.mark.parametrize(("format", "sizes"), [("dense", {}), ("dense", TIED), ("packed", {})])
def test_exports_gather_one_tensor_after_the_other(tmp_path, format, sizes):
    one = ranks.make("llama", settings("t-sr-ste"), "one", 4, sizes=sizes)[0]
    export_model(one, tmp_path / "one", format)
    ranks.run(2, _export, tmp_path / "many", format, sizes)
    assert {path.name for path in (tmp_path / "one").iterdir()} == {path.name for path in (tmp_path / "many").iterdir()}
    file = "model.safetensors" if format == "dense" else "packed.safetensors"
    ours, theirs = (load_file(tmp_path / folder / file) for folder in ("many", "one"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert main(["verify", str(tmp_path / "many")]) == 0


def _export(rank, world, directory, format, sizes):
    model, _, _ = ranks.make("llama", settings("t-sr-ste"), "fsdp2", 4, sizes=sizes)
    export_model(model, directory, format)


@pytest.mark.parametrize(  # of 3 processes, one holds less than the others
    ("method", "worlds"), [("t-sr-ste", (2, 3)), ("step", (3, 2)), ("s-ste", (2, 1)), slow("step", (2, 3))]
)
def test_sharded_checkpoints_of_n_processes_resume_on_m(tmp_path, method, worlds):
    config = settings(method) | ({"weight_grad": "dense"} if method != "step" else {})
    before, after = worlds
    saved = ranks.run(before, _save, config, tmp_path)[0]
    for resumed in ranks.run(after, _resume, config, tmp_path):
        assert_same_tensors(resumed, saved, rtol=1e-9, atol=1e-12)


STEPS, ONE_LAYER = 6, {"num_hidden_layers": 1}


def _run(model, optimizer, controller, steps):
    """Every process takes the same batch, so any number of them computes the same gradient."""
    for step in steps:
        model(**zoo.batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _save(rank, world, config, folder):
    model, optimizer, controller = ranks.make("llama", config, "fsdp2", STEPS, sizes=ONE_LAYER)
    _run(model, optimizer, controller, range(3))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "controller": controller}, checkpoint_id=folder)
    _run(model, optimizer, controller, range(3, STEPS))
    return ranks.state_of(model)


def _resume(rank, world, config, folder):
    model, optimizer, controller = ranks.make("llama", config, "fsdp2", STEPS, sizes=ONE_LAYER)
    weights, moments = get_state_dict(model, optimizer)
    assert controller.step == 0  # making the optimizer's state is no step of training
    state = {"model": weights, "optimizer": moments, "controller": controller}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert controller.step == 3
    _run(model, optimizer, controller, range(3, STEPS))
    return ranks.state_of(model)


def test_a_full_state_dict_reloads_by_from_pretrained(tmp_path):
    states = ranks.run(2, _save_pretrained, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    for name, tensor in ranks.state_of(loaded)["state"].items():
        assert torch.equal(tensor, states[0]["state"][name])
    for name, tensor in states[0]["weights"].items():
        assert torch.equal(loaded.get_parameter(name), tensor)


def _save_pretrained(rank, world, folder):
    model, optimizer, controller = ranks.make("llama", settings("t-sr-ste"), "fsdp2", 4)
    _run(model, optimizer, controller, range(2))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.save_pretrained(folder, state_dict=full)
    return ranks.state_of(model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # in PEFT
def test_lora_on_a_sharded_base():
    one = _lora_losses(0, 1, "one")
    for losses in ranks.run(2, _lora_losses, "fsdp2"):
        assert losses == pytest.approx(one, rel=1e-5) and losses[-1] < losses[0]


def _lora_losses(rank, world, engine):
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(**settings("s-ste")))
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["up_proj", "q_proj"]))
    ranks.shard(model, engine)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    Sparse24Controller(model, optimizer, total_steps=4)
    losses = []
    for _ in range(4):
        loss = model(**zoo.batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if engine == "fsdp2":
        with pytest.raises(ValueError, match="the model has adapters"):
            export_model(model, "never")
    return losses


def test_what_comes_too_late_is_refused(tmp_path):
    """And by every process an export over another model."""
    (tmp_path / "adapter_config.json").write_text("{}")
    for adapters, unpatched in ranks.run(2, _too_late, tmp_path):
        assert "not sharded 4 parameters that train, such as one of shape (4, 32)" in adapters
        assert "is sharded: " in unpatched


def _too_late(rank, world, directory):
    model, dense = zoo.build("llama"), zoo.build("llama")
    fully_shard(dense)
    with pytest.raises(ValueError, match=r"FSDP2 .* holds on to this model"):
        patch_model(dense)
    patch_model(model)
    ranks.shard(model, "fsdp2")
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        export_model(model, directory)
    return ranks.refusals(model)
