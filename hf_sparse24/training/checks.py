"""Checks before training starts: the engine, agreement of the processes, and the reference model of TRL's trainers."""

from collections.abc import Mapping
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import Trainer

from ..layers.sparse_module import WeightModule
from ..methods.base import DENSE_PHASE
from ..run import sparse_run
from ..weights.sharding import is_sharded
from ..weights.sparse_weight import SparseWeight, sparse_weights
from ..weights.storage import TRAINED


def model_of(trainer: Trainer) -> nn.Module:
    """The model that a Trainer has, whatever its annotations allow."""
    return cast(nn.Module, trainer.model)


def check_engine(accelerator: Accelerator, model: nn.Module) -> None:
    """Raise ValueError, with the setting to change, where accelerate is going to wrap `model` in a way that fails."""
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        return
    if getattr(plugin, "fsdp_version", 1) != 2:
        way = "`fsdp_version: 2` in accelerate's config file, or fsdp_config={'version': 2}"
        raise ValueError(f"FSDP1 flattens weights: use FSDP2, by {way}")
    if "SHARDED_STATE_DICT" in str(plugin.state_dict_type):
        way = "`fsdp_state_dict_type: FULL_STATE_DICT` in accelerate's config file, or state_dict_type in fsdp_config"
        raise ValueError(f"SHARDED_STATE_DICT: checkpoints lack the config of the sparse model; set {way}")
    state = [name for weight in sparse_weights(model, TRAINED).values() for name in weight.state]
    if plugin.cpu_ram_efficient_loading and state:
        way = "`fsdp_cpu_ram_efficient_loading: false` in its config file, or the same in fsdp_config"
        raise ValueError(f"cpu_ram_efficient_loading=True: accelerate does not send {state[0]!r}; set {way}")


def check_ranks_agree(weights: Mapping[str, SparseWeight], settings: dict[str, object]) -> None:
    """Raise ValueError, on every process, where settings, names of sparse weights, or masks and scales differ. All
    processes must call it, with `settings` that can be pickled."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    state = [tensor for weight in weights.values() for tensor in weight.state.values()]
    whole = [tensor for tensor in state if not is_sharded(tensor) and not tensor.is_meta]
    sums = [crc32(x.detach().flatten().contiguous().view(torch.uint8).cpu().numpy().tobytes()) for x in whole]
    names, masks = crc32(repr([*weights]).encode()), crc32(repr(sums).encode())
    facts = settings | {"the sparse weights": names, "masks and scales": masks}
    of_all: list[dict[str, object]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_all, facts)
    first = of_all[0]
    for number, found in enumerate(of_all):
        if differing := sorted(name for name in first | found if first.get(name) != found.get(name)):
            shown = "; ".join(f"{name}: {found.get(name)!r}, not {first.get(name)!r}" for name in differing)
            way = "give all the same settings and weights: of one checkpoint, or made after the same torch.manual_seed"
            raise ValueError(f"process {number} differs from process 0 in {shown}; {way}")


def check_masters_unread(trainer: Trainer) -> None:
    """Raise ValueError where a trainer reads dense master weights, with which the sparse model does not compute: TRL
    (1.16) and Liger that of the head for their losses, and TRL all of them for vLLM, but those below adapters."""
    model, arguments = cast(Any, trainer.model), cast(Any, trainer.args)
    run, head = sparse_run(model), getattr(model, "get_output_embeddings", lambda: None)()
    is_trl = any(cls.__module__.startswith("trl.") for cls in type(trainer).__mro__)
    if isinstance(getattr(head, "base_layer", head), WeightModule) and (is_trl or arguments.use_liger_kernel):
        reader = "TRL" if is_trl else "use_liger_kernel=True"
        raise ValueError(f"the output embedding is sparse, and {reader} reads its dense master weight: leave it dense")
    if getattr(arguments, "use_vllm", False) and run and not (run.method.keeps_zeros or hasattr(model, "peft_config")):
        raise ValueError("use_vllm=True: TRL sends vLLM the dense master weights of the policy; set it to False")


@torch.no_grad()
def check_reference_of(trainer: Trainer) -> None:
    """Raise ValueError where the reference of a trainer of TRL is not what its patched policy computes at step 0.

    TRL loads it from the checkpoint that the policy's config names: for a policy patched in memory, the dense model.
    Not checked: a reference of another name, and a policy with adapters, whose reference is the sparse base.
    """
    policy: Any = trainer.model
    run = sparse_run(policy)
    if run is None or not hasattr(trainer, "ref_model") or hasattr(policy, "peft_config"):
        return
    for setting in ("sync_ref_model", "precompute_ref_log_probs"):
        if getattr(trainer.args, setting, False):
            why = "TRL reads the policy's dense master weights for it, with which the policy does not compute"
            raise ValueError(f"{setting}=True: {why}; set it to False")
    reference = None if trainer.ref_model is None else trainer.accelerator.unwrap_model(trainer.ref_model)
    name = getattr(policy.config, "_name_or_path", "")
    if not name or reference is None or getattr(reference.config, "_name_or_path", "") != name:
        return
    optimizer: Any = trainer.optimizer  # None but for STEP
    # In a run so long that no length of a phase rounds to nothing.
    begins_dense = run.is_dense or (not run.facts.finished and run.method.phase(0, 10**9, optimizer) == DENSE_PHASE)
    sparse = sparse_weights(reference, TRAINED)
    for key, weight in sparse_weights(policy, TRAINED).items():
        ours = weight.master if begins_dense else weight.merged()
        theirs = sparse[key].merged() if key in sparse else reference.state_dict()[key]
        if not torch.equal(ours.to(theirs.device, theirs.dtype), theirs):
            way = "save the policy with its tokenizer, load it by from_pretrained, and train that; or pass ref_model=, "
            way += "and call Sparse24Callback.add_to(trainer, check_reference=False)"
            raise ValueError(f"{key} of the reference model {name!r} differs from what the patched policy has: {way}")
