"""What training a model on many GPUs would hold and move: what `hf-sparse24 plan` prints. Nothing is measured.

Read in this order: `sizes.py` (what the plan reads from a model), `costs.py` (bytes that a process holds and sends),
`pruning_costs.py` (bytes that pruning moves, and when sparse GEMMs pay for it), this file, and `plan_text.py`.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from ..methods import SparseMethod
from ..methods.masked_decay import MaskedDecayMethod
from ..weights.sparse_weight import SparseWeight, sparse_weights
from . import costs
from .costs import Collective, Leaf
from .pruning_costs import LayerCost, layer_cost
from .sizes import Part, Setting, boundaries, buffer_bytes, check_tp, leaves, parts, split_state_bytes

_LONG_RUN = 10_000  # optimizer steps of the run that schedules and refreshes are averaged over
_COUNT_BYTES = 8


class Plan(NamedTuple):
    """What one sparse step costs each GPU.

    Attributes:
        setting: how the model is trained.
        memory: bytes by what they are for.
        collectives: what moves between GPUs.
        layers: pruning and sparse GEMMs of the patched layers by kind.
        sparse_share: of the steps of a run; the others are dense, and gain nothing.
    """

    setting: Setting
    memory: dict[str, float]
    collectives: list[Collective]
    layers: list[LayerCost]
    sparse_share: float

    @property
    def total_memory(self) -> float:
        return sum(self.memory.values())

    @property
    def sent(self) -> float:
        """Bytes that a GPU sends in a step."""
        return sum(collective.sent(self.setting.gpus) for collective in self.collectives)

    @property
    def flops(self) -> float:
        """Of all GEMMs that can be sparse, as dense math."""
        return sum(layer.flops for layer in self.layers)

    @property
    def pruning(self) -> float:
        """Bytes that pruning moves in a GPU's memory."""
        return sum(layer.pruning for layer in self.layers)


def plan_training(model: PreTrainedModel, setting: Setting, parallel: str | None, memory: float) -> Plan:
    """`plan_step` for `parallel`. Where that is None: for DDP if it fits into `memory` bytes, otherwise for FSDP2."""
    plan = plan_step(model, replace(setting, parallel=parallel or "ddp"))
    if parallel is None and plan.total_memory > memory:
        return plan_step(model, replace(setting, parallel="fsdp2"))
    return plan


def plan_step(model: PreTrainedModel, setting: Setting) -> Plan:
    """Predict one sparse step of training with AdamW.

    Args:
        model: patched; it may be on the meta device.

    Raises:
        ValueError: tensor parallelism that Transformers has no plan for, or that cuts heads, layers or groups.
    """
    if setting.parallel == "tp":
        check_tp(model, setting.gpus)
    method: Any = next(iter(sparse_weights(model).values())).method
    sparse_share, refreshes = _averages(method)
    all_parts = list(parts(model, setting))
    layers = _layer_costs(all_parts, setting, refreshes)
    memory = _memory(model, all_parts, layers, setting)
    return Plan(setting, memory, _collectives(model, setting, method, refreshes), layers, sparse_share)


def _averages(method: SparseMethod) -> tuple[float, float]:
    """The share of a long run's steps that are sparse, and how often one of them computes masks or scales anew."""
    schedule = method.schedule(_LONG_RUN)
    last = _LONG_RUN if schedule.first_tail is None else schedule.first_tail
    steps = last - schedule.first_sparse
    # What is computed when sparsity begins is no cost of a step.
    refreshed = sum(method.refreshes_state(step, _LONG_RUN) for step in range(schedule.first_sparse + 1, last + 1))
    return steps / _LONG_RUN, refreshed / steps


def _layer_costs(all_parts: list[Part], setting: Setting, refreshes: float) -> list[LayerCost]:
    kinds: dict[tuple, tuple[Part, SparseWeight]] = {}
    for part in all_parts:
        if part.weight is not None:
            key = (part.out, part.inputs, part.token_share, part.group is None)
            before = kinds[key][0].matrices if key in kinds else 0
            kinds[key] = part._replace(matrices=before + part.matrices), part.weight
    return [layer_cost(part, weight, setting, refreshes) for part, weight in kinds.values()]


def _memory(
    model: PreTrainedModel, all_parts: list[Part], layers: list[LayerCost], setting: Setting
) -> dict[str, float]:
    tree, itemsize = list(leaves(model).values()), setting.dtype.itemsize
    found: dict[str, float] = dict(costs.held(tree, setting.parallel, setting.gpus))
    found["masks, scales and other buffers"] = buffer_bytes(model, setting)
    encodings = [(layer.encodings, layer.part.matrices) for layer in layers]
    if setting.parallel == "fsdp2":
        found["gathered layers"] = costs.unsharded(tree, itemsize)
        found["encodings of one layer"] = max(size for size, _ in encodings)
    else:
        found["encodings, kept for the step"] = sum(size * count for size, count in encodings)
    config = model.config.get_text_config()
    features: dict[str | None, int] = {}
    for part in all_parts:
        size = round((part.out + part.inputs) * part.matrices * part.token_share)
        features[part.group] = features.get(part.group, 0) + size
    found["activations and logits"] = costs.activations(
        features,
        config.hidden_size,
        config.vocab_size,
        setting.tokens,
        itemsize,
        setting.checkpointing,
        autocast=setting.parallel != "fsdp2",
    )
    return found


def _collectives(model: PreTrainedModel, setting: Setting, method: SparseMethod, refreshes: float) -> list[Collective]:
    tree, ranks, itemsize = leaves(model), setting.gpus, setting.dtype.itemsize
    sparse = [tree[name] for name in sparse_weights(model) if name in tree]  # shared ones once
    if ranks == 1:
        return []
    if setting.parallel == "ddp":
        return costs.ddp_collectives(tree.values())
    if setting.parallel == "tp":
        found = costs.tp_collectives(boundaries(model, setting), setting.tokens, itemsize)
        # The masks that are replaced are gathered too.
        whole = sum(leaf.numel for leaf in sparse if leaf.style) * costs.MASTER_BYTES + split_state_bytes(model)
    else:
        found = costs.fsdp2_collectives(tree.values(), ranks, itemsize)
        whole = _padded(sparse, ranks)
        # Where a process holds parts of groups, masks for decay and flip rates are computed from the whole weight.
        cut = [tree[name] for name, weight in sparse_weights(model).items() if name in tree and _cuts(weight, ranks)]
        if cut and isinstance(method, MaskedDecayMethod) and method.settings.masked_decay:
            found.append(Collective("all_gather", "weights, for masked decay", _padded(cut, ranks)))
        whole += 2 * _padded(cut, ranks) if method.flips_at_refresh else 0
    if refreshes:
        found.append(Collective("all_gather", "weights, for refreshes", whole * refreshes))
    if refreshes and method.flips_at_refresh:
        found.append(Collective("all_reduce", "counts of flips", len(sparse) * _COUNT_BYTES * refreshes))
    return found


def _cuts(weight: SparseWeight, ranks: int) -> bool:
    """Whether FSDP2, which splits the first dimension, splits groups of a weight that stores its inputs there."""
    (_, inputs), m = weight.sizes, weight.method.pattern.m
    return not weight.is_stack and weight.input_dim == -2 and inputs % (ranks * m) != 0


def _padded(sharded: list[Leaf], ranks: int) -> int:
    """Bytes of whole fp32 weights as processes gather them."""
    return sum(leaf.sharded(ranks) for leaf in sharded) * ranks * costs.MASTER_BYTES
