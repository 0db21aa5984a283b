"""Calibration: statistics of what each layer of a model gets as input, one Block of the model after the other."""

import inspect
import itertools
import time
from collections.abc import Container, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..progress import Progress, count, duration, get_logger
from ..weights.sparse_weight import SparseWeight
from ..weights.storage import layer_name
from .prune_layer import Options
from .replay import Call, Computed, Course, Effect, ModelInputs, Replay, tensors
from .report import LayerReport
from .statistics import InputHooks, Statistics, counted, matrix, padding_masks

logger = get_logger(__name__)

FEW = 8  # tokens: by fewer of an expert's, masks were no better than by magnitude


class BlockExample(NamedTuple):
    """A call of a block with the inputs of the pruned model, the dense model's output there, and which tokens count."""

    call: Call
    target: Tensor
    counts: Tensor | None

    def error(self) -> Tensor:
        """The squared error of the output relative to the target's square, for each token that counts: `[tokens]`."""
        output, target = tensors(self.call.compute().output)[0].float(), self.target.float()
        if self.counts is not None:
            output, target = output[self.counts], target[self.counts]
        size = target.square().sum(-1)
        # A token that the dense model sets to almost nothing must not outweigh all others.
        least = (0.1 * size.median()).clamp(min=torch.finfo().tiny) if len(size) else size
        return ((output - target).square().sum(-1) / size.clamp(min=least)).flatten()


@dataclass
class Block:
    """A block of the model by its name in `Replay.blocks`, with its weights to prune by theirs.

    Calibration gives `statistics` of the inputs of each weight's matrices, and `examples` to reconstruct the block.
    Pruning adds the `masks` of weights that no earlier block has, in the layout of the stored weights, a report of each
    matrix in `layers`, and the `errors` before and after reconstruction.
    """

    name: str
    module: nn.Module
    weights: dict[str, SparseWeight] = field(default_factory=dict)
    statistics: dict[str, list[Statistics]] = field(default_factory=dict)
    examples: list[BlockExample] = field(default_factory=list)
    masks: dict[str, Tensor] = field(default_factory=dict)
    layers: list[LayerReport] = field(default_factory=list)
    errors: tuple[float, float] | None = None


def check_batch(index: int, batch: Mapping[str, Tensor] | Tensor, model: nn.Module) -> ModelInputs:
    """Return a batch as keyword arguments of `model`, without what only the loss reads."""
    inputs = {"input_ids": batch} if isinstance(batch, Tensor) else batch
    if isinstance(inputs, Mapping):
        has_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        # An encoder-decoder makes its decoder's input of the labels.
        reads_labels = has_decoder and not {"decoder_input_ids", "decoder_inputs_embeds"} & {*inputs}
        left_out = {"return_loss"} if reads_labels else {"return_loss", "labels"}
        inputs = {name: value for name, value in inputs.items() if name not in left_out and value is not None}
        ids = inputs.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() < 2:  # such as the rows of a tensor
            need = "must be [sequences, tokens], as of a DataLoader"
            raise ValueError(f"batch {index} of data: input_ids are {list(ids.shape)}, {need}")
        if all(isinstance(value, Tensor | int | float | str) for value in inputs.values()):
            _check_takes(model, inputs)
            _check_padding(index, inputs)
            return inputs
    found = {k: type(v).__name__ for k, v in inputs.items()} if isinstance(inputs, Mapping) else type(batch)
    need = "must be a dict of tensors, or a tensor of input_ids, as of a DataLoader"
    raise ValueError(f"batch {index} of data is {found}: {need}")


def _check_takes(model: nn.Module, inputs: ModelInputs) -> None:
    try:
        inspect.signature(model.forward).bind(**inputs)
    except TypeError as error:  # as with a SentenceTransformer, which takes one dict
        what = f"{type(model).__name__} is not called with {sorted(inputs)} ({error})"
        raise ValueError(f"{what}; prune the Transformers model inside") from error


def _check_padding(index: int, inputs: ModelInputs) -> None:
    """Raise ValueError where encoder and decoder differ in padding and not in length: masks are found by length."""
    if "decoder_attention_mask" in inputs:
        theirs = inputs["decoder_attention_mask"]
    elif "decoder_input_ids" in inputs:
        theirs = torch.ones_like(inputs["decoder_input_ids"])
    elif "labels" in inputs:
        theirs = inputs["labels"] != -100
    else:
        return
    mask = inputs.get("attention_mask")
    if mask is not None and mask.shape == theirs.shape and not torch.equal(mask.bool(), theirs.bool()):
        way = "pad the decoder's to another length"
        raise ValueError(f"batch {index} of data: encoder and decoder have one length and other padding; {way}")


def calibrate(
    model: nn.Module,
    weights: dict[str, SparseWeight],
    batches: list[ModelInputs],
    options: Options,
    finished: Container[str] = (),
) -> Generator[Block, None, None]:
    """Yield the blocks that have `weights`, in the order that they run, under `torch.no_grad` and in eval mode.

    The caller may change a block's weights until it asks for the next block, whose inputs then come from the changed
    one. Batches with the same names must run the same blocks in the same order. For the examples of block
    reconstruction, every block computes a third time for each batch. `finished` blocks come without statistics and
    examples: the caller restores them.
    """
    blocks: dict[str, Block] = {}
    for name, weight in weights.items():
        path = _block_of(model, name)
        blocks.setdefault(path, Block(path, model.get_submodule(path))).weights[name] = weight
    pruned_effects: list[list[Effect]] = [[] for _ in batches]
    dense_effects: list[list[Effect]] = [[] for _ in batches]
    progress = Progress("calibration", len(batches) * len(blocks), "batch", logger.info)
    replay = Replay(model)
    with progress, evaluating(model), _without_caches(model), replay.intercepting(), ExitStack() as stack:
        courses: dict[frozenset[str], Course] = {}
        for inputs in batches:
            if frozenset(inputs) not in courses:
                courses[frozenset(inputs)] = replay.study(inputs)
        longest_first = sorted(courses.values(), key=lambda course: -len(course.calls))  # texts alone skip images
        order = dict.fromkeys(name for course in longest_first for name in course.ends if name in blocks)
        _check_reached([name for block in blocks.values() if block.name not in order for name in block.weights])
        hooks = InputHooks(replay, weights, stack, options.calibrate_all_experts)
        first = next((number for number, name in enumerate(order) if name not in finished), None)
        for number, block in enumerate(map(blocks.pop, [*order])):
            is_new, start = block.name not in finished, time.monotonic()
            if is_new:
                for name, weight in block.weights.items():
                    block.statistics[name] = [options.statistics(matrix(view), len(batches)) for view in weight.views()]
            for inputs, pruned, dense in zip(batches, pruned_effects, dense_effects):
                progress.update()
                course = courses[frozenset(inputs)]
                if block.name not in course.ends:
                    continue
                calls: Computed = []
                if is_new:
                    with hooks.measuring(block.statistics, padding_masks(inputs)):
                        calls = replay.run(inputs, course, pruned, course.ends[block.name])
                if options.reconstruct == "block":
                    targets = replay.run(inputs, course, dense, course.ends[block.name])
                    if is_new:
                        block.examples += _examples(replay, block.name, calls, targets, inputs)
            views = [view for name in block.statistics for view in block.weights[name].views()]
            found = [(view.name, each) for view, each in zip(views, itertools.chain(*block.statistics.values()))]
            for name, statistics in found:
                if not statistics.squares.isfinite().all():
                    raise ValueError(f"NaN or inf in the inputs of {name}: check the data and the dtype")
                statistics.finish(is_starved(name, statistics.tokens))
            _check_reached([name for name, each in found if each.tokens == 0 and not is_starved(name, 0)])
            yield block
            hooks.unpruned -= block.weights.keys()
            if number == first and blocks:
                rest = len(blocks) * (time.monotonic() - start)
                takes = f"{duration(rest)}, until {datetime.now() + timedelta(seconds=rest):%Y-%m-%d %H:%M}"
                logger.info(f"pruning the other {count(len(blocks), 'block')} takes about {takes}")


def is_starved(name: str, tokens: int) -> bool:
    """Return whether a matrix is an expert's, by its `WeightView.name`, that saw too few tokens to prune it by them."""
    return tokens < FEW and ("expert" in name or name.endswith("]"))


def _examples(
    replay: Replay, block: str, calls: Computed, targets: Computed, inputs: ModelInputs
) -> list[BlockExample]:
    """Return the calls of a block in the pruned model, each with the output of the same call in the dense one."""
    ours = [call for call, _ in calls if replay.blocks[call.block] == block]
    outputs = [tensors(effect.output)[0] for call, effect in targets if replay.blocks[call.block] == block]
    if len(ours) != len(outputs):
        why = "other blocks run between its calls; take reconstruct='layer'"
        raise ValueError(f"reconstruct='block' cannot train {block}: {why}")
    masks = padding_masks(inputs)
    return [BlockExample(call, output, counted(masks, output)) for call, output in zip(ours, outputs)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode within the block."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def uncached(weights: Mapping[str, SparseWeight]) -> torch.autocast:
    """Return the caller's autocast without its cache: weights change while blocks run."""
    device = next(iter(weights.values())).parameter.device.type
    torch.clear_autocast_cache()  # of the weights as they were
    dtype, is_on = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return torch.autocast(device, dtype, is_on, cache_enabled=False)


@contextmanager
def _without_caches(model: nn.Module) -> Iterator[None]:
    """Make none of the caches for generation that Transformers makes in eval mode."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", False) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


def _block_of(model: nn.Module, name: str) -> str:
    """Return the name of the member of the outermost `nn.ModuleList` that a module is in."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:i])), nn.ModuleList):
            return ".".join(parts[: i + 1])
    raise ValueError(f"{layer_name(name)} is in no nn.ModuleList, as oneshot needs: leave it out of target_modules")


def _check_reached(missing: list[str]) -> None:
    if missing:
        first = layer_name(missing[0])
        way = "use more data, or leave them out with exclude_modules"
        raise ValueError(f"no calibration tokens reach {len(missing)} layers, such as {first}: {way}")
