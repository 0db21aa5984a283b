"""What a training step holds and moves, in bytes, as pure functions of sizes.

`plan.py` reads the sizes from a model. What is exact here is compared with what processes hold and move by
`tests/tools/test_plan.py`; what is an assumption says so, and `hf-sparse24 plan` prints it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

MASTER_BYTES = 4
"""Bytes of an element of a Parameter, a gradient, and each of AdamW's two moments: fp32, as Transformers' Trainer has
them in mixed precision."""


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
        passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}[self.kind]
        return passes * self.nbytes * (ranks - 1) / ranks


class Leaf(NamedTuple):
    """A Parameter.

    Attributes:
        shape: of the whole.
        group: the transformer layer that it belongs to, by name; None outside them.
        style: Transformers' tensor-parallel style of it, None where every process has a copy.
        grad_is_whole: with tensor parallelism, whether every process holds the gradient of all of it.
    """

    shape: tuple[int, ...]
    group: str | None
    style: str | None = None
    grad_is_whole: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def sharded(self, ranks: int) -> int:
        """Elements that the first process holds with FSDP2: its part of the first dimension, to which others pad."""
        return -(-self.shape[0] // ranks) * math.prod(self.shape[1:])

    def split(self, ranks: int) -> int:
        """Elements that a process holds with tensor parallelism."""
        return self.numel // (ranks if self.style else 1)


def by_group(leaves: Iterable[Leaf]) -> dict[str | None, list[Leaf]]:
    """The Parameters that FSDP2 gathers together: of each transformer layer, and under None those outside."""
    groups: dict[str | None, list[Leaf]] = {None: []}
    for leaf in leaves:
        groups.setdefault(leaf.group, []).append(leaf)
    return groups


def held(leaves: Sequence[Leaf], parallel: str, ranks: int) -> dict[str, int]:
    """Bytes of parameters, gradients and AdamW's state that the first process holds, which has the most.

    DDP's buckets are a second copy of the gradients; one process alone has none.
    """
    if parallel == "ddp":
        sizes = gradients = [leaf.numel for leaf in leaves]
    elif parallel == "fsdp2":
        sizes = gradients = [leaf.sharded(ranks) for leaf in leaves]
    else:
        sizes = [leaf.split(ranks) for leaf in leaves]
        gradients = [leaf.numel if leaf.grad_is_whole else size for leaf, size in zip(leaves, sizes)]
    found = {
        "parameters, fp32": sum(sizes) * MASTER_BYTES,
        "gradients, fp32": sum(gradients) * MASTER_BYTES,
        "AdamW's moments, fp32": 2 * sum(sizes) * MASTER_BYTES,
    }
    return found | ({"DDP's buckets, fp32": sum(sizes) * MASTER_BYTES} if parallel == "ddp" and ranks > 1 else {})


def unsharded(leaves: Sequence[Leaf], gather_bytes: int) -> int:
    """Bytes of what FSDP2 has gathered at most. An assumption on what coincides: what is outside the layers, which
    stays, two layers (one computes, the next is fetched), and the whole gradient of one."""
    groups = by_group(leaves)
    sizes = {group: sum(leaf.numel for leaf in members) for group, members in groups.items()}
    largest = max((size for group, size in sizes.items() if group is not None), default=0)
    return (sizes[None] + 3 * largest) * gather_bytes


def ddp_collectives(leaves: Iterable[Leaf]) -> list[Collective]:
    """The collectives of a DDP step: all gradients are reduced. `Sparse24Trainer` lets DDP broadcast no buffers."""
    return [Collective("all_reduce", "gradients", sum(leaf.numel for leaf in leaves) * MASTER_BYTES)]


def fsdp2_collectives(leaves: Iterable[Leaf], ranks: int, gather_bytes: int) -> list[Collective]:
    """The collectives of an FSDP2 step.

    Every layer is gathered for the forward and again for the backward pass, Parameters outside the layers once, and
    fp32 gradients are reduced.

    Gradient checkpointing adds nothing: a layer runs again while it is gathered for the backward pass.
    """
    sizes = {g: sum(leaf.sharded(ranks) * ranks for leaf in members) for g, members in by_group(leaves).items()}
    total = sum(sizes.values())
    return [
        Collective("all_gather", "parameters, forward", total * gather_bytes),
        Collective("all_gather", "parameters, backward", (total - sizes[None]) * gather_bytes),
        Collective("reduce_scatter", "gradients", total * MASTER_BYTES),
    ]


class Boundary(NamedTuple):
    """Where tensor parallelism communicates: a module with a tensor-parallel style.

    Attributes:
        style: Transformers' name of it.
        inputs, out: features of the whole module.
        runs_again: whether gradient checkpointing repeats what it does in the forward pass.
        grad_elements: of Parameters whose gradients are summed.
    """

    style: str
    inputs: int
    out: int
    runs_again: bool = False
    grad_elements: int = 0


TP_STYLES = ("colwise", "colwise_gather_output", "rowwise", "embedding_rowwise", "replicated_with_grad_allreduce")
"""Transformers' tensor-parallel styles whose communication is known here."""


def tp_collectives(boundaries: Iterable[Boundary], tokens: int, itemsize: int) -> list[Collective]:
    """The collectives of a tensor-parallel step.

    Every column-parallel layer reduces the gradient of its input by itself, every row-parallel one its output.

    Under autocast, inputs of layers come from norms, so their gradients are fp32, as embeddings are.

    Args:
        tokens: that all processes work on together. itemsize: bytes of an element of a layer's output.
    """
    outputs = looked_up = gradients = logits = of_norms = 0
    for boundary in boundaries:
        if boundary.style == "rowwise":
            outputs += boundary.out * (2 if boundary.runs_again else 1)
        elif boundary.style == "embedding_rowwise":
            looked_up += boundary.out
        elif boundary.style == "replicated_with_grad_allreduce":
            of_norms += boundary.grad_elements
        else:
            gradients += boundary.inputs
            logits += boundary.out if boundary.style == "colwise_gather_output" else 0
    found = [
        Collective("all_reduce", "outputs of layers", outputs * tokens * itemsize),
        Collective("all_reduce", "embeddings", looked_up * tokens * 4),
        Collective("all_reduce", "gradients of inputs", gradients * tokens * 4),
        Collective("all_gather", "logits", logits * tokens * itemsize),
        Collective("all_reduce", "gradients of norms", of_norms * MASTER_BYTES),
    ]
    return [collective for collective in found if collective.nbytes]


KEPT_AUTOCAST, KEPT_CAST = 1.78, 1.21
"""Bytes that a layer of a Llama in eager mode keeps for the backward pass, over those of the inputs and outputs of its
linear layers: with fp32 Parameters under autocast, and with FSDP2, which casts them. Measured on a CPU by the tests."""


def activations(
    features: Mapping[str | None, int],
    hidden: int,
    vocabulary: int,
    tokens: int,
    itemsize: int,
    checkpointing: bool,
    autocast: bool,
) -> float:
    """Bytes that wait for the backward pass: of the linear layers times the factors above, and of the logits, of which
    there is a copy in fp32 and its gradient.

    Args:
        features: by transformer layer, inputs + outputs of its linear layers, as this process has them; None for those
            outside, which are left out.
        hidden: size of what goes from layer to layer, in fp32 under autocast.
        vocabulary: size of the logits.
        checkpointing: keep what goes into each layer, and everything of the one layer that runs again.
    """
    factor, entering = (KEPT_AUTOCAST, 4) if autocast else (KEPT_CAST, itemsize)
    layers = [size * itemsize * factor for group, size in features.items() if group is not None]
    kept = entering * hidden * len(layers) + max(layers, default=0.0) if checkpointing else sum(layers)
    return tokens * (kept + vocabulary * (itemsize + 2 * 4))
