"""What training a model on many GPUs would hold and move, in bytes, computed: what `hf-sparse24 plan` prints.

Read in this order: `sizes.py` (what is read from a model), this file, `pruning_costs.py` (bytes that pruning moves, and
when sparse GEMMs pay for it), and `plan_text.py`, which prints. What is exact here is compared with what processes hold
and move by `tests/tools/test_plan.py`; what is an assumption says so, and the command prints it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from ..methods import SparseMethod
from ..weights.sparse_weight import first_of_each, sparse_weights
from .pruning_costs import MASTER_BYTES, LayerCost, layer_cost
from .sizes import Part, Setting, blocks, parts, sharded

KEPT_AUTOCAST, KEPT_CAST = 1.78, 1.21
"""Bytes that a layer of a Llama in eager mode keeps for the backward pass, over those of the inputs and outputs of its
linear layers: with fp32 Parameters under autocast, and with FSDP2, which casts them. Measured on a CPU by the tests."""
_LONG_RUN = 10_000  # optimizer steps of the run that schedules and refreshes are averaged over
_COUNT_BYTES = 8


class Collective(NamedTuple):
    """One kind of communication in a step.

    Attributes:
        kind: `"all_reduce"`, `"all_gather"` or `"reduce_scatter"`.
        what: the name of what is moved.
        nbytes: of the whole tensors per step: what is reduced, or what a process has after gathering, padding included.
    """

    kind: str
    what: str
    nbytes: float

    def sent(self, ranks: int) -> float:
        """Bytes that each of `ranks` processes sends per step, by the ring algorithms: a reduction is a reduce-scatter
        and an all-gather."""
        return (2 if self.kind == "all_reduce" else 1) * self.nbytes * (ranks - 1) / ranks


class Plan(NamedTuple):
    """What one sparse step costs each GPU.

    Attributes:
        setting: how the model is trained.
        memory: bytes that the first process holds, which has the most, by what they are for.
        collectives: what moves between GPUs.
        layers: pruning and sparse GEMMs of each patched layer.
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
    """The plan of one sparse step of training with AdamW; the model is patched, and may be on the meta device."""
    method: Any = next(iter(sparse_weights(model).values())).method
    sparse_share, refreshes = _averages(method)
    all_parts = list(parts(model))
    layers = [layer_cost(part, part.weight, setting, refreshes) for part in all_parts if part.weight is not None]
    memory = _memory(model, all_parts, layers, setting)
    collectives = _collectives(model, setting, method, refreshes) if setting.gpus > 1 else []
    return Plan(setting, memory, collectives, layers, sparse_share)


def _averages(method: SparseMethod) -> tuple[float, float]:
    """The share of a long run's steps that are sparse, and how often one of them computes masks or scales anew."""
    schedule = method.schedule(_LONG_RUN)
    last = _LONG_RUN if schedule.first_tail is None else schedule.first_tail
    # What is computed when sparsity begins is no cost of a step.
    refreshed = sum(method.refreshes_state(step, _LONG_RUN) for step in range(schedule.first_sparse + 1, last + 1))
    sparse = last - schedule.first_sparse
    return sparse / _LONG_RUN, refreshed / sparse


def _memory(
    model: PreTrainedModel, all_parts: Iterable[Part], layers: Iterable[LayerCost], setting: Setting
) -> dict[str, float]:
    is_fsdp2 = setting.parallel == "fsdp2"
    elements = sum(sharded(parameter, setting.gpus if is_fsdp2 else 1) for parameter in model.parameters())
    found: dict[str, float] = {
        "parameters, fp32": elements * MASTER_BYTES,
        "gradients, fp32": elements * MASTER_BYTES,
        "AdamW's moments, fp32": 2 * elements * MASTER_BYTES,
    }
    if not is_fsdp2 and setting.gpus > 1:
        found["DDP's buckets, fp32"] = elements * MASTER_BYTES  # a second copy of the gradients
    found["masks, scales and other buffers"] = sum(buffer.nbytes for buffer in model.buffers())
    if is_fsdp2:
        # An assumption on what coincides: what is outside the layers, which stays, two layers (one computes, the next
        # is fetched), and the whole gradient of one.
        sizes = _elements_by_block(model, ranks=1)
        largest = max((size for block, size in sizes.items() if block is not None), default=0)
        found["gathered layers"] = (sizes[None] + 3 * largest) * setting.dtype.itemsize
        found["encodings of one layer"] = max(layer.encodings for layer in layers)
    else:
        found["encodings, kept for the step"] = sum(layer.encodings * layer.part.matrices for layer in layers)
    features: Counter[str] = Counter()
    entering: dict[str, int] = {}
    for part in all_parts:
        if part.block is not None:
            features[part.block] += round((part.out + part.inputs) * part.matrices * part.token_share)
            entering.setdefault(part.block, part.inputs)  # the first linear layer reads what comes into its layer
    output: Any = model.get_output_embeddings()  # an image classifier has none, and few logits
    found["activations and logits"] = activations(
        list(features.values()), max(entering.values(), default=0), 0 if output is None else len(output.weight), setting
    )
    return found


def activations(features: list[int], hidden: int, vocabulary: int, setting: Setting) -> float:
    """Bytes that wait for the backward pass: of the linear layers times the factors above, and of the logits, of which
    there is a copy in fp32 and its gradient. Checkpointing keeps what goes into each layer, and everything of the one
    layer that runs again.

    Args:
        features: inputs + outputs of the linear layers, of each transformer layer.
        hidden: size of what goes from layer to layer, in fp32 under autocast; the largest of all stacks.
        vocabulary: size of each token's logits.
    """
    itemsize = setting.dtype.itemsize
    factor, entering = (KEPT_CAST, itemsize) if setting.parallel == "fsdp2" else (KEPT_AUTOCAST, MASTER_BYTES)
    layers = [size * itemsize * factor for size in features]
    kept = entering * hidden * len(layers) + max(layers, default=0.0) if setting.checkpointing else sum(layers)
    return setting.tokens * (kept + vocabulary * (itemsize + 2 * 4))


def _collectives(model: PreTrainedModel, setting: Setting, method: SparseMethod, refreshes: float) -> list[Collective]:
    """The collectives of a step. DDP reduces all gradients; `Sparse24Trainer` lets it broadcast no buffers.

    FSDP2 gathers every layer for the forward and again for the backward pass, Parameters outside the layers once, and
    reduces fp32 gradients. Gradient checkpointing adds nothing: a layer runs again while it is gathered for the
    backward pass.
    """
    ranks, itemsize = setting.gpus, setting.dtype.itemsize
    if setting.parallel == "ddp":
        gradients = sum(parameter.numel() for parameter in model.parameters()) * MASTER_BYTES
        return [Collective("all_reduce", "gradients", gradients)]
    sizes = _elements_by_block(model, ranks)
    total = sum(sizes.values())
    found = [
        Collective("all_gather", "parameters, forward", total * itemsize),
        Collective("all_gather", "parameters, backward", (total - sizes[None]) * itemsize),
        Collective("reduce_scatter", "gradients", total * MASTER_BYTES),
    ]
    weights = first_of_each(sparse_weights(model))
    for name, weight in weights.items():
        inputs, m = weight.sizes[1], method.pattern.m
        if weight.input_dim == -2 and not weight.is_stack and inputs % (ranks * m):
            raise ValueError(
                f"FSDP2 over {ranks} GPUs splits groups of {m} of {name}, which has its {inputs} inputs in the first "
                f"dimension; this is not planned: take a number of GPUs that divides {inputs // m}"
            )
    if refreshes:
        whole = sum(sharded(weight.parameter, ranks) for weight in weights.values()) * ranks * MASTER_BYTES
        found.append(Collective("all_gather", "weights, for refreshes", whole * refreshes))
    if refreshes and method.flips_at_refresh:
        found.append(Collective("all_reduce", "counts of flips", len(weights) * _COUNT_BYTES * refreshes))
    return found


def _elements_by_block(model: PreTrainedModel, ranks: int) -> Counter[str | None]:
    """Elements of the whole Parameters, padded as `ranks` processes gather them, by transformer layer; under None of
    those outside."""
    block, sizes = blocks(model), Counter[str | None]()
    for name, parameter in model.named_parameters():
        sizes[block[name]] += sharded(parameter, ranks) * ranks
    return sizes
