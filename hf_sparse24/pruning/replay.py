"""Forward passes that compute a block only where its output may have changed, and replay it elsewhere.

Each block's inputs are needed once all blocks before it are pruned. The model runs its own forward for each block, so
whatever it does around and between blocks stays right. But a call with nothing unpruned before it computes only once.
Later passes replay it: it returns a copy of that output, and writes again what it wrote into dicts among its arguments
(Gemma 3n passes keys and values in one). A pass computes two blocks: the last pruned one and the one to calibrate.

Outputs of a batch stay in memory while something still reads them: the last one, and those that skip blocks, such as
an encoder's. The others become NaN of the same shape, so that an unexpected reader does not go unnoticed.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

ModelInputs = dict[str, Any]  # a batch: keyword arguments of the model, tensors, numbers, bools or strings


class Effect(NamedTuple):
    """The result of a block's call: its output, and what it wrote into each dict among its arguments."""

    output: object
    writes: list[dict[object, object]]


class Call:
    """A call of a block with its arguments, which is computed or replayed."""

    def __init__(self, block: nn.Module, arguments: list[object], forward: Callable[[], object]):
        self.block, self._arguments, self._forward = block, arguments, forward
        self._dicts = [value for value in arguments if isinstance(value, MutableMapping)]

    def compute(self) -> Effect:
        before = [dict(values) for values in self._dicts]
        output = self._forward()
        writes = [{k: v for k, v in now.items() if v is not old.get(k)} for now, old in zip(self._dicts, before)]
        return Effect(output, writes)

    def replay(self, effect: Effect) -> Effect:
        for values, writes in zip(self._dicts, effect.writes):
            values.update(writes)
        return effect

    def gets_nan(self) -> bool:
        given = tensors([self._arguments, [dict(values) for values in self._dicts]])
        return any(bool(tensor.isnan().any()) for tensor in given)

    def versions(self) -> list[int]:
        """Numbers that change when the block writes into its arguments, but for those in dicts."""
        given = tensors([value for value in self._arguments if not isinstance(value, MutableMapping)])
        return [tensor._version for tensor in given if not tensor.is_inference()]


Computed = list[tuple[Call, Effect]]  # calls that a pass has computed, with their effects


@dataclass(frozen=True)
class Course:
    """The order in which forward passes over batches of one kind call the blocks.

    `ends` has the number of each block's last call by the block's name; `last_use`, for each call, the number of the
    last call that depends on its effect.
    """

    calls: tuple[nn.Module, ...]
    ends: dict[str, int]
    last_use: tuple[int, ...]


class Replay:
    """Runs a model on batches again and again while its blocks are being pruned, within `intercepting()`.

    `blocks` has each block, with the name of the member of an outermost `nn.ModuleList` that it is or is part of. The
    caller sets `final` to False when a layer runs that is not pruned yet: effects from then on are not kept.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.blocks = dict(_blocks(model))
        self.final = True
        self._is_inside = False  # a block computes: blocks within it are not intercepted
        self._on_call: Callable[[Call], object] = lambda call: call.compute().output

    @contextmanager
    def intercepting(self) -> Iterator[None]:
        """Let the current pass make every call of a block that does not run within another block."""
        # accelerate puts a forward into the instance, which must come back.
        own = {block: block.__dict__.get("forward") for block in self.blocks}
        try:
            for block in own:
                intercepted = functools.partial(self._call, block, block.forward)
                block.__dict__["forward"] = functools.wraps(block.forward)(intercepted)
            yield
        finally:
            for block, forward in own.items():
                block.__dict__.pop("forward", None)
                if forward is not None:
                    block.__dict__["forward"] = forward

    def _call(self, block: nn.Module, forward: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        if self._is_inside:
            return forward(*args, **kwargs)

        def compute() -> object:
            self._is_inside = True
            try:
                return forward(*args, **kwargs)
            finally:
                self._is_inside = False

        return self._on_call(Call(block, [*args, *kwargs.values()], compute))

    def run(self, inputs: ModelInputs, course: Course, effects: list[Effect], stop: int) -> Computed:
        """Run one pass up to the call with number `stop`, and return the calls that it computed.

        The first calls are replayed from `effects`. Effects of the following calls are added to it if final.
        """
        self.final = True
        computed: Computed = []

        def make(number: int, call: Call) -> Effect:
            if course.calls[number : number + 1] != (call.block,):
                other = f"another with arguments {sorted(inputs)}: give batches that run the same blocks"
                name = f"{self.blocks[call.block]} is number {number} of the blocks that run for one batch"
                raise ValueError(f"{name} and not for {other}")
            if number < len(effects):
                return call.replay(_copy(effects[number]))
            effect = call.compute()
            computed.append((call, effect))
            if self.final:
                effects.append(_copy(effect))
                for i, last in enumerate(course.last_use[: number + 1]):
                    if last == number:
                        effects[i] = _nan(effects[i])
            return effect

        self._pass(inputs, make, stop)
        return computed

    def study(self, inputs: ModelInputs) -> Course:
        """Return the course of batches with these names, and check that replaying changes no block's output."""
        calls: list[nn.Module] = []
        effects: list[Effect] = []

        def record(number: int, call: Call) -> Effect:
            effect = call.compute()
            calls.append(call.block)
            effects.append(_copy(effect))
            return effect

        self._pass(inputs, record, None)
        last_use = tuple(self._last_use(inputs, effects, number) for number in range(len(calls)))
        course = Course(tuple(calls), {self.blocks[block]: number for number, block in enumerate(calls)}, last_use)
        replayed: list[Effect] = []
        for number, expected in enumerate(effects):
            try:
                found = self.run(inputs, course, replayed, number)[-1][1]
                torch.testing.assert_close(tensors(found), tensors(expected), equal_nan=True)
            except Exception as error:  # whatever it is, the pass without replay has succeeded
                what = f"{type(error).__name__}: {error}".partition("\n")[0]
                when = f"{self.blocks[calls[number]]} differs when the blocks before it only return their outputs again"
                raise ValueError(f"oneshot cannot prune this model block by block: {when} ({what})") from error
        return course

    def _last_use(self, inputs: ModelInputs, effects: list[Effect], dropped: int) -> int:
        """Return `last_use` of a call, from a pass that replays all calls, this one with NaN."""
        readers = [dropped]

        def make(number: int, call: Call) -> Effect:
            if call.gets_nan():
                readers.append(number)
            return call.replay(_nan(effects[number]) if number == dropped else _copy(effects[number]))

        try:
            self._pass(inputs, make, len(effects) - 1)
        except Exception:  # the model reads it between blocks, and raises
            return len(effects)
        return readers[-1]

    def _pass(self, inputs: ModelInputs, make: Callable[[int, Call], Effect], stop: int | None) -> None:
        """Run a forward pass in which `make(number, call)` makes the calls, up to number `stop` or to the end."""
        numbers = itertools.count()

        def on_call(call: Call) -> object:
            number = next(numbers)
            effect = make(number, call)
            if number == stop:
                raise _PassDone
            return effect.output

        self._on_call = on_call
        inputs = tree_map_only(Tensor, lambda x: x.to(next(self.model.parameters()).device), inputs)
        with suppress(_PassDone):
            self.model(**inputs)


class _PassDone(Exception):
    """Ends a forward pass at its last call of interest."""


def _blocks(module: nn.Module, name: str = "", member: str | None = None) -> Iterator[tuple[nn.Module, str]]:
    """Yield the outermost modules with a forward of their own in `nn.ModuleList`s; see `Replay.blocks`."""
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        inner = path if member is None and isinstance(module, nn.ModuleList) else member
        if inner is not None and type(child).forward is not nn.Module.forward:
            yield child, inner
        else:
            yield from _blocks(child, path, inner)


def tensors(tree: object) -> list[Tensor]:
    """Return the tensors of nested tuples, lists, dicts and outputs of Transformers, in their order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _copy(effect: Effect) -> Effect:
    """Return a copy that is safe from writes. What `_nan` made is shared: it has one element, and no data."""
    return tree_map_only(Tensor, lambda x: x if x.untyped_storage().nbytes() < x.nbytes else x.clone(), effect)


def _nan(effect: Effect) -> Effect:
    """Return the effect with NaN for every float, which takes no memory. Other tensors are kept."""
    return tree_map_only(Tensor, lambda x: x.new_tensor(torch.nan).expand_as(x) if x.is_floating_point() else x, effect)
