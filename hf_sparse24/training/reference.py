"""Check of the reference model of TRL's trainers.

DPO, KTO, GRPO and RLOO compare a policy with a frozen reference. TRL loads it from the checkpoint that the policy's
config names. For a policy that was patched in memory this is the dense model: the two differ before the first step.
"""

from typing import Any

import torch
from transformers import Trainer

from ..methods.context import DENSE_PHASE
from ..run import sparse_run
from ..weights.sparse_weight import sparse_weights
from ..weights.storage import TRAINED

_LONG_RUN = 10**9
"""Steps of a run in which no length of a phase rounds to nothing."""


@torch.no_grad()
def check_reference(trainer: Trainer) -> None:
    """Raise ValueError where the reference of a trainer of TRL is not what its patched policy computes at step 0.

    Not checked: a reference that TRL did not load (its config has another `_name_or_path`), and a policy with adapters,
    whose reference is the sparse base.
    """
    policy: Any = trainer.model
    run = sparse_run(policy)
    if run is None or not hasattr(trainer, "ref_model") or hasattr(policy, "peft_config"):
        return
    arguments: Any = trainer.args
    if getattr(arguments, "sync_ref_model", False):
        raise ValueError(
            "sync_ref_model=True mixes the policy's dense master weights, with which it does not compute, into the "
            "reference; set sync_ref_model=False"
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
                f"the reference model is {name!r} as it is on disk, and the patched policy computes something else "
                f"({key} differs): save the policy with its tokenizer, load it by from_pretrained, and train that; or "
                f"pass ref_model=, and call Sparse24Callback.add_to(trainer, check_reference=False)"
            )
