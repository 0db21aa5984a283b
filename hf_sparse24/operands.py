"""What a layer's products multiply with: made from its master weight once per training step, and kept until it changes.

Pruning and compressing cost a pass over the weight each. Micro-batches of one optimizer step, recomputation under
gradient checkpointing, and both passes use the same weight, so they share the results.

Stale results would be a silent error, so they are dropped by every sign of change: the version counters of the weight
and of the method's state, the weight's storage, and any step of any torch optimizer (some write behind the version
counter's back). What none of these shows, writing through `weight.data`, happens around evaluations (averaged weights
swapped in and out, adapters merged): so what runs without gradients always makes its operands anew. Whoever does it
between two forward passes in training calls `layer.operands.clear()`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

FORMS = ("dense", "compressed", "compressed-transposed")
"""`[out, in]` with its zeros; the same for sparse tensor cores; and its transpose for them, with transposable masks."""

_optimizer_steps = 0


def _count_optimizer_step(*_) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_optimizer_step)


class Operands:
    """The forms of one layer's sparse weight that its products have asked for."""

    def __init__(self):
        # Sources and forms are one tuple, replaced whole: threads that share a model never see half of it.
        self._kept: tuple[list, dict[str, Tensor]] = [], {}
        self.frozen = False
        """Whether the compressed form is all there is, its master weight given up (see `drop_master_weights`)."""

    def get(
        self,
        names: list[str],
        make: Callable[[list[str]], list[Tensor]],
        weight: Tensor,
        state: dict[str, Tensor],
        *key,
    ) -> list[Tensor]:
        """The named forms, from memory where nothing has changed since they were made.

        Args:
            names: of `FORMS`. make: computes forms by their names, all in one pass over the weight.
            weight, state: what it is computed from. key: whatever else it depends on, such as a dtype.
        """
        if self.frozen:
            if names != ["compressed"]:
                self.must_not_be_frozen()
            return [self.compressed]
        names = list(dict.fromkeys(names))
        tensors = [weight, *state.values()]
        if not _may_be_kept(tensors):
            return make(names)
        # The detached weight keeps its storage alive, so that no other can come to lie at the same address.
        sources = [*tensors, weight.data_ptr(), *(x._version for x in tensors), _optimizer_steps, *key]
        kept_sources, forms = self._kept
        if len(sources) != len(kept_sources) - 1 or any(not _same(a, b) for a, b in zip(sources, kept_sources)):
            forms = {}
        missing = [name for name in names if name not in forms]
        if missing:
            forms = forms | dict(zip(missing, make(missing)))
            self._kept = [*sources, weight.detach()], forms
        return [forms[name] for name in names]

    def clear(self) -> None:
        """Forget everything: the next product makes its operands anew. Frees their memory."""
        self.must_not_be_frozen()
        self._kept = [], {}

    def must_not_be_frozen(self) -> None:
        """Raise where the master weight is needed and gone."""
        if self.frozen:
            raise RuntimeError(
                "this layer's master weight was dropped: it computes under torch.no_grad() and cannot be trained, "
                "saved, exported or moved; load the model again"
            )

    def freeze(self, compressed: Tensor) -> None:
        """From now on, `compressed` is all there is."""
        self._kept, self.frozen = ([], {"compressed": compressed}), True

    @property
    def compressed(self) -> Tensor:
        """What a frozen layer multiplies with."""
        return self._kept[1]["compressed"]

    def kept_forms(self) -> dict[str, Tensor]:
        """What is held now, by name."""
        return dict(self._kept[1])

    def nbytes(self) -> int:
        """Memory that is held now."""
        return sum(form.numel() * form.element_size() for form in self._kept[1].values())

    def __deepcopy__(self, memo: dict) -> "Operands":
        copied = Operands()  # the rest is derived, and keyed by the original's tensors
        if self.frozen:
            copied.freeze(self.compressed.clone())
        return copied

    def __reduce__(self):
        self.must_not_be_frozen()
        return Operands, ()


def _may_be_kept(tensors: list[Tensor]) -> bool:
    """Where nobody could tell a change, operands are made anew: without gradients (see above), for tensors of inference
    mode, which have no version, and in graphs, which run again without looking."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or any(x.is_inference() for x in tensors):
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _same(a, b) -> bool:
    return a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b
