"""What a layer's products multiply with: made from its master weight once, and kept until that changes.

Pruning and compressing cost a pass over the weight each. Micro-batches of one optimizer step, recomputation under
gradient checkpointing, both passes, and every token of a generation use the same weight, so they share the results.

Stale results would be a silent error, so they are dropped by every sign of change: the version counters of the weight
and of the method's state, the weight's address, and any step of any torch optimizer (some write behind the version
counter's back). What none of these shows, writing into `weight.data` by hand, calls for `layer.operands.clear()`.
"""

from collections.abc import Callable

import sparse24_kernels as kernels
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
        self._sources: list = []
        self._forms: dict[str, Tensor] = {}
        self.frozen = False
        """Whether the compressed form is all there is, its master weight given up (see `drop_master_weights`)."""

    def get(
        self, names: list[str], make: Callable[[], Tensor], weight: Tensor, state: list[Tensor], *key
    ) -> list[Tensor]:
        """The named forms, from memory where nothing has changed since they were made.

        Args:
            names: of `FORMS`. make: computes the dense form.
            weight, state: what it is computed from. key: whatever else it depends on, such as a dtype.
        """
        if self.frozen:
            if names != ["compressed"]:
                self.must_not_be_frozen()
            return [self._forms["compressed"]]
        if torch.compiler.is_compiling():
            forms = _make(names, make)  # a graph can look at no version counter: it computes them itself
            return [forms[name] for name in names]
        # What is made in inference mode cannot be saved for a backward pass.
        key = (*key, torch.is_inference_mode_enabled())
        sources = [weight, *state, weight.data_ptr(), *map(_version, [weight, *state]), _optimizer_steps, *key]
        if len(sources) != len(self._sources) or any(not _same(a, b) for a, b in zip(sources, self._sources)):
            self._sources, self._forms = sources, {}
        missing = [name for name in names if name not in self._forms]
        if missing:
            self._forms |= _make(missing, lambda: self._forms["dense"] if "dense" in self._forms else make())
        return [self._forms[name] for name in names]

    def clear(self) -> None:
        """Forget everything: the next product makes its operands anew. Frees their memory."""
        self.must_not_be_frozen()
        self._sources, self._forms = [], {}

    def must_not_be_frozen(self) -> None:
        """Raise where the master weight is needed and gone."""
        if self.frozen:
            raise RuntimeError(
                "this layer's master weight was dropped: it computes under torch.no_grad() and cannot be trained, "
                "saved, exported or moved; load the model again"
            )

    def freeze(self, compressed: Tensor) -> None:
        """From now on, `compressed` is all there is."""
        self._forms, self.frozen = {"compressed": compressed}, True

    def nbytes(self) -> int:
        """Memory that is held now."""
        return sum(form.numel() * form.element_size() for form in self._forms.values())

    def __deepcopy__(self, memo: dict) -> "Operands":
        return Operands()  # derived, and keyed by the original's tensors

    def __reduce__(self):
        return Operands, ()


def _make(names: list[str], make: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Prune once, and keep of it what was asked for."""
    dense = make()
    forms = {"dense": dense}
    for name in names:
        if name != "dense":
            forms[name] = kernels.compress(dense if name == "compressed" else dense.t())
    return {name: forms[name] for name in names}


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _same(a, b) -> bool:
    return a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b
