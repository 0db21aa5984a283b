"""Checks of the reference model of TRL's trainers.

DPO, KTO, GRPO and RLOO compare a policy with a frozen reference. TRL loads that from the checkpoint that the policy's
config names, which is dense where the policy was patched in memory: the two then differ before the first step.
"""

from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from ..methods.context import DENSE_PHASE
from ..run import sparse_run
from ..weights.sparse_weight import sparse_weights
from ..weights.storage import TRAINED

_LONG_RUN = 10**9
"""Steps of a run in which no length of a phase rounds to nothing."""


@torch.no_grad()
def check_reference(trainer: Trainer) -> None:
    """Raise ValueError where the reference of a trainer of TRL is not what its patched policy computes at step 0.

    A reference with another name in its config than the policy's (`_name_or_path`) was not loaded by TRL, and is not
    checked. With adapters there is none: TRL switches them off, and the sparse base is what remains.
    """
    policy: Any = trainer.model
    run = sparse_run(policy)
    if run is None or not hasattr(trainer, "ref_model") or hasattr(policy, "peft_config"):
        return
    arguments: Any = trainer.args
    if getattr(arguments, "sync_ref_model", False):
        raise ValueError(
            "sync_ref_model=True mixes the policy's dense master weights into the reference, and a sparse policy does "
            "not compute with them; set sync_ref_model=False"
        )
    if getattr(arguments, "precompute_ref_log_probs", False):
        raise ValueError(
            "precompute_ref_log_probs=True: TRL finds the numbers again by the dense master weights, which do not say "
            "how they are pruned; set precompute_ref_log_probs=False"
        )
    if trainer.ref_model is None:
        return
    reference = trainer.accelerator.unwrap_model(trainer.ref_model)
    name = getattr(policy.config, "_name_or_path", "")
    if not name or getattr(reference.config, "_name_or_path", "") != name:
        return
    optimizer: Any = trainer.optimizer  # None but for STEP
    begins_dense = run.is_dense or (not run.facts.finished and run.method.phase(0, _LONG_RUN, optimizer) == DENSE_PHASE)
    tensors, sparse = reference.state_dict(), sparse_weights(reference, TRAINED)
    for key, weight in sparse_weights(policy, TRAINED).items():
        ours = weight.master if begins_dense else weight.merged()
        theirs = sparse[key].merged() if key in sparse else tensors[key]
        if not torch.equal(ours.to(theirs.device, theirs.dtype), theirs):
            raise ValueError(
                f"the reference model is {name!r} as it is on disk, which is not what the patched policy computes "
                f"({key} differs): save the patched policy with its tokenizer (policy.save_pretrained), load it by "
                f"from_pretrained with hf_sparse24 imported, and train that. Or pass ref_model=, and call "
                f"Sparse24Callback.add_to(trainer, check_reference=False)"
            )


def check_plain_callback(args: TrainingArguments, policy: nn.Module) -> None:
    """Raise ValueError where TRL's trainer may have a reference from disk, as those do whose arguments (in 1.16) have
    `sync_ref_model`: a callback cannot reach it."""
    if hasattr(args, "sync_ref_model") and getattr(args, "beta", None) != 0 and not hasattr(policy, "peft_config"):
        raise ValueError(
            f"{type(args).__name__}: TRL loads the reference model from disk, where a callback cannot check it. "
            f"Call Sparse24Callback.add_to(trainer) before train(), instead of passing callbacks=[Sparse24Callback()]"
        )
