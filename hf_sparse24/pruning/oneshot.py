"""oneshot: prune a pretrained model to N:M in one pass over calibration data, ready for fine-tuning.

Blocks are pruned in the order they run, each with inputs from the pruned blocks before it, so that later blocks make up
for what earlier ones lost. As in the block loops of SparseGPT and Wanda, the work is linear in depth: see `replay.py`.
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from os import PathLike

import torch
from torch import Tensor, nn

from ..config import Sparse24Config
from ..extensions import adapters_in
from ..methods import ONESHOT_METHOD, method_class
from ..patching.masters import check_dense_master
from ..patching.packing import check_packed_forms
from ..patching.surgery import patch_model, unpatch_model
from ..progress import Progress, get_logger
from ..run import patched_config, set_phase
from ..weights.sharding import check_whole
from ..weights.sparse_weight import SparseWeight, sparse_weights
from ..weights.storage import layer_name
from .blockwise import reconstruct_block
from .calibration import FEW, Block, calibrate, check_batch, is_starved, uncached
from .finished_blocks import FinishedBlocks
from .prune_layer import Options, prune_layer, round_layer
from .report import BlockReport, LayerReport, OneshotReport

logger = get_logger(__name__)

PASSES, STEPS = 8, 1_000  # default passes of block reconstruction: 8, or fewer, to stay within 1,000 steps


@torch.inference_mode(False)
@torch.no_grad()
def oneshot(
    model: nn.Module,
    data: Iterable[Mapping[str, Tensor] | Tensor],
    config: Sparse24Config | None = None,
    *,
    criterion: str = "sparsegpt",
    reconstruct: str | None = "block",
    passes: int | None = None,
    learning_rate: float = 0.01,
    damping: float = 0.01,
    values: str = "float",
    calibrate_all_experts: bool = False,
    resume_dir: str | PathLike | None = None,
) -> OneshotReport:
    """Prune a pretrained model to N:M with calibration data, in place.

    Afterwards the model is patched with a method that keeps the chosen masks, and pruned entries of its weights are
    zero. An error or an interrupt leaves it as it was. The guide to one-shot pruning compares the choices.

    Args:
        model: not patched yet, on the device it runs on. Its mode (train or eval) is kept.
        data: batches as the model takes them, dicts of tensors (and numbers, bools, strings; None is left out) or
            `input_ids` alone, of any lengths; read once and kept. Tokens that a 2-D `attention_mask` marks as padding
            do not count. Labels are ignored, unless an encoder-decoder makes its `decoder_input_ids` of them.
        config: of a method that takes masks from elsewhere; None for the default settings of `"fixed-mask"`. Selects
            the layers as in `patch_model`.
        criterion: which N weights of every group of M inputs stay: `"magnitude"` (an N:M sparse model stays as it is),
            `"wanda"` (arXiv 2306.11695) or `"sparsegpt"` (arXiv 2301.00774), which also moves the weights that stay.
            For `"t-sr-ste"`, and `"slope"` with `initial_mask="transposable"`, masks are N:M both ways.
        reconstruct: how kept weights make up for the dropped ones. `"block"` trains them, norms and biases to give the
            output of the dense model's block (arXiv 2510.14444); run it under `torch.autocast` or with a model in bf16.
            `"layer"` moves them and the bias towards the least-squares optimum of the layer's output, damped and
            stopped early (AdaPrune, arXiv 2102.08124). `None` leaves them.
        passes: of block reconstruction over the data; None for 8, or fewer, to stay within 1,000 steps. Each batch is a
            step: give batches of 256 to 1,000 tokens.
        learning_rate: of block reconstruction with Adam, relative to the root mean square of each weight's kept values.
        damping: pull towards the dense weights in SparseGPT and `"layer"`, as a share of the mean squared input, which
            is added to the diagonal. SparseGPT raises it, with a warning, if the matrix is not positive definite.
        values: `"int8"` rounds the weights to int8 values and scales, chosen for the layer's output; `export_model`
            with `values="int8"` stores exactly these, in the same dtype and before more training. Layers without a
            packed form (see `pack_model`) are not rounded; a warning names them.
        calibrate_all_experts: whether the inputs of each expert in a stack are those of all tokens, not only of those
            that the router gives it. The model's outputs stay as they are. A warning counts experts that got fewer than
            8 tokens; magnitude chooses their masks, and of stacks whose module routes by itself (Llama 4, JetMoe).
        resume_dir: a directory that gets a file for each finished block. The same call continues behind them after an
            interruption. Delete it afterwards: it holds the model's weights once more.

    Returns:
        A `OneshotReport` with each layer's output error.

    Raises:
        ValueError: an argument out of its range; what `patch_model` raises; a model that is patched already, sharded or
            on the meta device, or that does not run its blocks one by one; no batches, or others; a targeted layer that
            no token reaches, but for experts, or that gets NaN or inf; a `resume_dir` with blocks of another call, or
            damaged ones.
        BlockingIOError: another process uses the `resume_dir`.

    Examples:
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained("gpt2")
        >>> batches = [torch.randint(300, (4, 32)) for _ in range(4)]
        >>> report = oneshot(model, batches, criterion="sparsegpt")
        >>> len(report.layers) == len(report.patch.patched)
        True
        >>> print(report)
        one-shot 2:4 by sparsegpt masks, weights reconstructed by block; ...
    """
    config = config or Sparse24Config(method=ONESHOT_METHOD)
    settings = (PASSES if passes is None else passes, learning_rate, damping, values, bool(calibrate_all_experts))
    options = Options(criterion, reconstruct, *settings)
    _check_config(config)
    if patched_config(model) is not None:
        raise ValueError("the model is already patched; call unpatch_model(model) first")
    if adapters_in(model):
        raise ValueError("the model has adapters: prune the base before it gets them, or after merge_and_unload()")
    if isinstance(data, Mapping | Tensor):
        raise ValueError(f"data is a {type(data).__name__}, one batch: give a list of batches, or a DataLoader")
    batches = [check_batch(i, batch, model) for i, batch in enumerate(data)]
    if not batches:
        raise ValueError("data has no batches (a generator that was read before is empty)")
    if passes is None:
        options = replace(options, passes=min(PASSES, math.ceil(STEPS / len(batches))))
    patch = replace(patch_model(model, config), is_pretrained=False)  # nothing has to be done first
    weights = sparse_weights(model)
    with _all_or_nothing(model) as originals:
        _check_weights(weights)
        if calibrate_all_experts and not any(weight.is_stack for weight in weights.values()):
            raise ValueError("calibrate_all_experts=True: no stack of experts is among the targets; leave it out")
        if values == "int8":
            check_packed_forms(weights, "values='int8'", "are not rounded")
        set_phase(model, "dense")  # a layer computes with its weight as it is: dense, until pruned in its turn
        finished = FinishedBlocks(resume_dir, model, batches, asdict(options) | {"config": config.to_dict()})
        number = len({weight.parameter for weight in weights.values()})
        progress = Progress(f"pruning by {criterion}", number, "layer", logger.info)
        pruning = _Pruning(options, finished, progress, originals)
        calibrated = calibrate(model, weights, batches, options, finished)
        with closing(finished), progress, uncached(weights), closing(calibrated):
            for block in calibrated:
                pruning.add(block)
        set_phase(model, "sparse")
    inputs = {view.name: weight.sizes[1] for weight in weights.values() for view in weight.views()}
    reports = {name: pruning.layers[name] for name in inputs}
    counts = {"batches": len(batches), "tokens": max(report.tokens for report in reports.values())}
    next(iter(weights.values())).run.record(pruning=asdict(options) | counts)
    starved = [name for name, report in reports.items() if is_starved(name, report.tokens)]
    if starved:
        what = f"magnitude chose {len(starved)} masks of experts, such as that of {starved[0]}"
        logger.warning(f"{what}: fewer than {FEW} calibration tokens were seen there; use more data")
    few = [name for name, report in reports.items() if report.tokens < inputs[name] and name not in starved]
    if few:
        logger.warning(f"fewer calibration tokens than inputs in {len(few)} layers, such as {few[0]}: use more data")
    return OneshotReport(criterion, reconstruct, tuple(reports.values()), patch, values, tuple(pruning.blocks))


def _check_config(config: Sparse24Config) -> None:
    """Raise ValueError unless a config's method keeps the masks that `oneshot` chooses."""
    if not isinstance(config, Sparse24Config):
        raise ValueError(f"config={config!r}: must be a Sparse24Config or None")
    if not method_class(config.method).overrides("adopt_mask"):
        raise ValueError(f"method={config.method!r}: does not keep oneshot's masks; {ONESHOT_METHOD!r} does")
    way = "afterwards call patch_model(unpatch_model(model), config) with it, which keeps the zeros"
    check_dense_master(config, f"oneshot prunes dense weights; leave it out, and {way}")
    if getattr(config, "dense_start", 0):
        raise ValueError(f"dense_start={config.dense_start!r}: other masks would be chosen after it; leave it at 0")


def _check_weights(weights: dict[str, SparseWeight]) -> None:
    """Raise ValueError unless the weights are there and whole."""
    for name, weight in weights.items():
        check_whole(name, weight.master)
        if weight.parameter.is_meta:
            raise ValueError(f"{layer_name(name)} has no weight yet (meta device): load the model onto a device first")


@contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[dict[Tensor, Tensor]]:
    """Unpatch the model after an error, with the parameters that the context has put into the dict as they were."""
    originals: dict[Tensor, Tensor] = {}
    try:
        yield originals
    except BaseException:
        torch.set_grad_enabled(False)  # an interrupt may come where training has it on
        for parameter, original in originals.items():
            parameter.copy_(original)
        unpatch_model(model, sparse=False)
        raise


@dataclass
class _Pruning:
    """A call of `oneshot`: the masks and reports of the blocks so far, and copies of their dense parameters."""

    options: Options
    finished: FinishedBlocks
    progress: Progress
    originals: dict[Tensor, Tensor]
    masks: dict[Tensor, Tensor] = field(default_factory=dict)
    layers: dict[str, LayerReport] = field(default_factory=dict)
    blocks: list[BlockReport] = field(default_factory=list)

    def add(self, block: Block) -> None:
        """Prune a block, or load it from its file; from then on its layers compute with their masks."""
        before = set(self.originals)  # what blocks share is trained in the first
        self.originals |= {p: p.to("cpu", copy=True) for p in block.module.parameters() if p not in before}
        if block.name in self.finished:
            self.finished.load(block)
            self.progress.update(len(block.masks))
        else:
            self._prune(block, before)
            self.finished.save(block)
        self.masks |= {block.weights[name].parameter: mask for name, mask in block.masks.items()}
        self.layers |= {layer.name: layer for layer in block.layers}
        if block.errors is not None:
            self.blocks.append(BlockReport(block.name, *block.errors))
        for weight in block.weights.values():
            masks = self.masks[weight.parameter]
            views = zip(weight.views(), masks if weight.is_stack else [masks])
            states = [weight.method.adopt_mask(view, mask) for view, mask in views]
            weight.set_state({key: weight.storage.stacked([state[key] for state in states]) for key in states[0]})

    def _prune(self, block: Block, before: Container[Tensor]) -> None:
        """Prune the weights of a block that no block before has. Parameters of blocks `before` stay as they are."""
        options, masks = self.options, dict[Tensor, Tensor]()
        for name, weight in block.weights.items():
            if weight.parameter in self.masks or weight.parameter in masks:  # layers share it
                continue
            with torch.autocast(weight.parameter.device.type, enabled=False):  # for its solvers
                matrices = zip(weight.views(), block.statistics[name])
                pruned = [prune_layer(view, weight, inputs, options) for view, inputs in matrices]
            block.masks[name] = masks[weight.parameter] = weight.storage.stacked([mask for _, mask in pruned])
            block.layers += [report for report, _ in pruned]
            self.progress.update(note=f"error {max(report.error for report, _ in pruned):.1%}")
        if options.reconstruct == "block":
            block.errors = reconstruct_block(block, masks, before, options, self.progress)
            self.progress.update(0, f"error of the block {block.errors[1]:.1%}")
            if options.values == "int8":
                for name in block.masks:
                    weight = block.weights[name]
                    for view, inputs in zip(weight.views(), block.statistics[name]):
                        round_layer(view, weight, inputs, options.damping)
