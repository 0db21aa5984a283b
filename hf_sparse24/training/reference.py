"""The reference model of TRL's trainers: what the policy computes before training.

DPO, KTO, GRPO and RLOO compare a policy with a frozen copy of what it was. They build that copy from the checkpoint
that the policy's config names, which holds dense weights where the policy was patched in memory: the reference then
differs from the policy before the first step. Here it gets the weights that the policy begins to train with.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from ..patching.packing import unpack_model
from ..patching.surgery import set_phase, unpatch_model
from ..progress import get_logger
from ..run import patched_config, sparse_run
from ..weights.packed_weight import packed_weights, trained_weights
from ..weights.sparse_weight import sparse_weights

logger = get_logger(__name__)

_LONG_RUN = 10**9
"""Steps of a run in which no length of a phase rounds to nothing."""


@torch.no_grad()
def match_reference(trainer: Trainer) -> None:
    """Let the reference of a trainer of TRL compute what its patched policy computes at step 0; call it before that.

    A reference with another name in its config than the policy's (`_name_or_path`) was not built by TRL, and is left
    as it is. With adapters there is none: TRL switches them off, and the sparse base is what remains.

    Raises:
        ValueError: `sync_ref_model`, or log-probabilities that TRL computed beforehand and that are not the policy's.
    """
    if not hasattr(trainer, "ref_model"):
        return
    policy: Any = trainer.model
    run = sparse_run(policy)
    if run is None:
        return
    if getattr(trainer.args, "sync_ref_model", False):
        raise ValueError(
            "sync_ref_model=True mixes the policy's dense master weights into the reference, and a sparse policy does "
            "not compute with them; set sync_ref_model=False"
        )
    optimizer: Any = trainer.optimizer  # None but for STEP
    phase = run.phase if run.config.finished else run.method.phase(0, _LONG_RUN, optimizer)
    if phase != run.phase:  # as the controller does when it begins
        set_phase(policy, phase)
        for weight in () if run.is_dense else sparse_weights(policy).values():
            weight.init_state()
    reference = trainer.ref_model
    if reference is None:
        _check_precomputed(trainer, policy)
        return
    reference = trainer.accelerator.unwrap_model(reference)
    name = getattr(policy.config, "_name_or_path", "")
    if hasattr(policy, "peft_config") or not name or getattr(reference.config, "_name_or_path", "") != name:
        return
    if packed_weights(reference):
        unpack_model(reference)
    if patched_config(reference) is not None:
        unpatch_model(reference)  # computes the same, and masters cannot be mistaken for weights
    if _copy(_weights(policy), reference):
        logger.warning(
            f"the reference model is {name!r} as it is on disk, which is not what the patched policy computes: it gets "
            f"the weights that the policy begins with. To keep another reference that you passed yourself, call "
            f"Sparse24Callback.add_to(trainer, match_reference=False)"
        )


def check_plain_callback(args: TrainingArguments, policy: nn.Module) -> None:
    """Raise ValueError where TRL's trainer may have a reference from disk, as those do whose arguments (in 1.16) have
    `sync_ref_model`: a callback cannot reach it."""
    if hasattr(args, "sync_ref_model") and getattr(args, "beta", None) != 0 and not hasattr(policy, "peft_config"):
        raise ValueError(
            f"{type(args).__name__}: TRL takes the reference model from disk, dense, where a callback cannot reach it. "
            f"Call Sparse24Callback.add_to(trainer) before train(), instead of passing callbacks=[Sparse24Callback()]"
        )


def _weights(policy: nn.Module) -> dict[str, Tensor]:
    """The weights that `policy` computes with, by name."""
    tensors = policy.state_dict()
    for name, weight in trained_weights(policy).items():
        if not weight.run.is_dense:
            tensors[name] = weight.merged()
    return tensors


def _copy(tensors: Mapping[str, Tensor], model: nn.Module) -> bool:
    """Write `tensors` into the model's; whether that changed any."""
    changed = False
    for name, own in model.state_dict().items():
        new = tensors[name].to(own.device, own.dtype)
        if not torch.equal(own, new):
            own.copy_(new)
            changed = True
    return changed


def _check_precomputed(trainer: Any, policy: nn.Module) -> None:
    """Compare what `precompute_ref_log_probs=True` has left in the data with the policy, on the first rows.

    TRL finds such numbers again by the weights in `state_dict`, which do not tell whether, or how, they are sparse.
    """
    columns = getattr(trainer.train_dataset, "column_names", None) or []
    if hasattr(policy, "peft_config") or "ref_chosen_logps" not in columns:
        return
    rows = [trainer.train_dataset[row] for row in range(min(4, len(trainer.train_dataset)))]
    batch = trainer._prepare_inputs(trainer.data_collator(rows))
    was_training = policy.training
    now = torch.cat(trainer.compute_ref_log_probs(policy.eval(), batch))
    policy.train(was_training)
    before = torch.cat([batch["ref_chosen_logps"], batch["ref_rejected_logps"]])
    if not torch.allclose(now.float(), before.float(), rtol=0.02, atol=0.02):
        raise ValueError(
            "precompute_ref_log_probs=True: the numbers in train_dataset are not those of the policy at step 0. It was "
            "patched after the trainer was made, begins dense (dense_start), or TRL found the numbers of the same "
            "weights without 2:4 in its cache: patch first, and set precompute_ref_log_probs=False"
        )
