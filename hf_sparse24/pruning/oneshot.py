"""oneshot: prune a pretrained model to N:M in one pass over calibration data, ready for fine-tuning.

Blocks are pruned in the order they run, each with inputs from the pruned blocks before it, so that later blocks make up
for what earlier ones lost. As in the block loops of SparseGPT and Wanda, every block computes twice for each batch,
once dense and once pruned: the work is linear in depth. Of the activations only the Gram matrices of one block are
kept, and for each batch the output of the last finished block; see `replay`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from os import PathLike
from typing import Any, NamedTuple

import sparse24_kernels as kernels
import torch
from torch import Tensor, nn

from ..config import Sparse24Config
from ..methods import ONESHOT_METHOD, method_class, takes_masks
from ..metrics import kept_magnitude
from ..patching.masters import wants_packed_master
from ..patching.packing import check_within_24, is_packable
from ..patching.surgery import patch_model, set_phase, unpatch_model
from ..progress import Progress, get_logger
from ..run import patched_config
from ..weights.packed_weight import format_version
from ..weights.place import layer_name
from ..weights.sharding import check_whole
from ..weights.sparse_weight import SparseWeight, sparse_weights
from . import layerwise
from .blockwise import reconstruct_block
from .calibration import CalibratedBlock, calibrate, check_batch
from .finished_blocks import FinishedBlocks
from .report import BlockReport, LayerReport, OneshotReport
from .statistics import Gram, Sample, matrix

logger = get_logger(__name__)

CRITERIA = ("magnitude", "wanda", "sparsegpt")
RECONSTRUCTIONS = ("block", "layer", None)

PASSES, STEPS = 8, 1_000
"""Of block reconstruction by default: passes, or as many as make so many steps where that is fewer."""


class _Options(NamedTuple):
    """The arguments of `oneshot` of these names."""

    criterion: str
    reconstruct: str | None
    passes: int
    learning_rate: float
    damping: float
    values: str


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
    resume_dir: str | PathLike | None = None,
) -> OneshotReport:
    """Prune a pretrained model to N:M with calibration data, in place.

    Afterwards the model is patched with a method that keeps the chosen masks: train it with `Sparse24Trainer`,
    save it, `export_model` or `unpatch_model` it. Pruned entries of the weights are zero. If anything goes wrong,
    an interrupt included, the model is left as it was.

    Takes memory for the output of one block for every batch (and of those that skip blocks, such as an encoder's last
    one), and at first of all blocks for one batch; on the CPU, for the dense weights of the targeted layers; with
    `reconstruct` or "sparsegpt", for an `[in, in]` matrix of every targeted layer of one block, of the largest
    for two or three.

    Args:
        model: not patched yet, on the device it runs on. Its mode (train or eval) is kept.
        data: a finite number of batches as the model takes them, dicts of tensors or `input_ids` alone; read once and
            kept. Labels are ignored, unless an encoder-decoder makes its `decoder_input_ids` of them, and so are tokens
            that a 2-D `attention_mask` marks as padding. 128 sequences of full length are usual. All batches with the
            same names run the same blocks in the same order.
        config: of a method that takes masks from elsewhere; None for the default settings of `"fixed-mask"`. Selects
            the layers as in `patch_model`.
        criterion: the score by which N weights of every group of M inputs are kept:

            * `"magnitude"`: its absolute value. An N:M sparse model stays as it is;
            * `"wanda"`: its absolute value times the norm of its input (arXiv 2306.11695);
            * `"sparsegpt"`: the output error of pruning it once the weights to its right have made up for it, as they
              then do (arXiv 2301.00774); weights of inputs that are never active become zero.
        reconstruct: what makes up for the weights that are dropped:

            * `"block"`: the kept weights, norms and biases of each block train to give what the dense model's block
              gives, from the inputs that the pruned blocks before it give (arXiv 2510.14444). In bf16 it takes some
              `6 * passes` times the work of running the model on the data. Run it under `torch.autocast`, or with a
              model in bf16; without, it computes in the model's dtype;
            * `"layer"`: the kept weights and the bias of each layer move to the least-squares optimum of its output
              (AdaPrune), as far as that still gains something;
            * `None`: nothing but what the criterion does.

            Weights that were zero may become non-zero where the mask keeps them.
        passes: of block reconstruction over the data; None for 8, or for as many as make 1,000 steps where that is
            fewer. Each batch is a step: give batches of 256 to 1,000 tokens.
        learning_rate: of block reconstruction with Adam, relative to the root mean square of each weight's kept values.
        damping: pull towards the dense weights, as a share of the mean squared input, which SparseGPT and the
            reconstruction add to the diagonal. 0.01 is SparseGPT's. SparseGPT raises it, with a warning, if the matrix
            is not positive definite.
        values: `"int8"` rounds the weights to the int8 values and scales that an `export_model` with `values="int8"`
            then stores exactly, chosen for the layer's output where the export alone rounds to nearest. Do it in the
            dtype that is exported, and export before the weights are trained on. Layers whose input size is no multiple
            of 8, which are not packed, are not rounded. It takes the memory of `reconstruct="layer"`.
        resume_dir: a directory that gets a file for each finished block. The same call goes on behind them after an
            interruption. Delete it afterwards: it holds the model's weights once more.

    Returns:
        A `OneshotReport` with each layer's output error.

    Raises:
        ValueError: what `patch_model` raises; a model that is patched already or on the meta device; a config of
            another method or with a dense start, which would choose other masks; stacked experts among its targets,
            which are not calibrated; an unknown `criterion` or `values`, or int8 ones of a pattern that is not within
            2:4; a negative `damping`; no data, or batches of something else; batches with the same names that run other
            blocks; a model that runs parts of its blocks, or whose blocks leave more behind than what they return;
            targeted layers that no token reaches; activations with NaN or inf.

    Reference: Hubara et al. 2021 (arXiv 2102.08124), section 4, for the reconstruction. Our deviations from their code:
    one damped least-squares problem for weights and bias, solved by conjugate gradients instead of 1000 steps of Adam;
    every criterion, magnitude too, sees the inputs that the pruned blocks before it give. For block reconstruction see
    `blockwise`.

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
    options = _Options(criterion, reconstruct, PASSES if passes is None else passes, learning_rate, damping, values)
    _check_arguments(model, config, options)
    if isinstance(data, Mapping | Tensor):
        raise ValueError(f"data is a {type(data).__name__}, one batch: give a list of batches, or a DataLoader")
    batches = [check_batch(i, batch, model) for i, batch in enumerate(data)]
    if not batches:
        raise ValueError("data has no batches (a generator that was read before is empty)")
    if passes is None:
        options = options._replace(passes=min(PASSES, math.ceil(STEPS / len(batches))))
    patch = replace(patch_model(model, config), is_pretrained=False)  # nothing has to be done first
    weights = sparse_weights(model)
    originals: dict[Tensor, Tensor] = {}
    reports: dict[str, LayerReport] = {}
    blocks: list[BlockReport] = []
    masks: dict[Tensor, Tensor] = {}
    try:
        _check_weights(weights)
        set_phase(model, "dense")  # a layer computes with its weight as it is: dense, until pruned in its turn
        settings = options._asdict()
        finished = FinishedBlocks(resume_dir, model, batches, settings | {"config": config.to_dict()})
        # A Gram matrix costs as much as running the block: only what moves weights by it needs it.
        kind = Gram if reconstruct == "layer" or criterion == "sparsegpt" or values == "int8" else Sample
        total = len({id(weight.parameter) for weight in weights.values()})
        pruning = Progress(f"pruning by {criterion}", total, "layer", logger.info)
        calibrated = calibrate(model, weights, batches, kind, reconstruct == "block", finished)
        with pruning, _fresh_autocast(), closing(calibrated):
            for block in calibrated:
                module = model.get_submodule(block.name)
                names = [name for name in weights if name.startswith(f"{block.name}.")]
                # A weight that layers share is pruned where it runs first.
                new = {name: weights[name] for name in names if weights[name].parameter not in masks}
                originals |= {p: p.to("cpu", copy=True) for p in module.parameters() if p not in originals}
                if block.name in finished:
                    found, facts = finished.load(block.name, module)
                    masks |= {weights[name].parameter: mask for name, mask in found.items()}
                    pruning.update(len(found))
                else:
                    facts = _prune_block(module, new, masks, block, options, pruning)
                    found = {name: masks[weight.parameter] for name, weight in new.items()}
                    finished.save(block.name, module, found, facts)
                reports |= {name: LayerReport(**layer) for name, layer in facts["layers"].items()}
                if facts["errors"] is not None:
                    blocks.append(BlockReport(block.name, *facts["errors"]))
                for name in names:
                    weight = weights[name]
                    (view,) = weight.views()
                    weight.set_state(weight.method.adopt_mask(view, masks[weight.parameter]))
        set_phase(model, "sparse")
    except BaseException:
        for parameter, original in originals.items():
            parameter.copy_(original)
        unpatch_model(model, sparse=False)
        raise
    tokens = max(report.tokens for report in reports.values())
    patch.config.record(pruning=settings | {"batches": len(batches), "tokens": tokens})
    few = [report.name for name, report in reports.items() if report.tokens < weights[name].sizes[1]]
    if few:
        logger.warning(f"fewer calibration tokens than inputs in {len(few)} layers, such as {few[0]}: use more data")
    layers = tuple(reports[name] for name in weights if name in reports)
    return OneshotReport(criterion, reconstruct, layers, patch, values, tuple(blocks))


@contextmanager
def _fresh_autocast() -> Iterator[None]:
    """Let autocast cast weights anew at every use: its cache would keep those from before the pruning."""
    caching = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(caching)


def _check_arguments(model: nn.Module, config: Sparse24Config, options: _Options) -> None:
    criterion, damping, values = options.criterion, options.damping, options.values
    format_version(values)
    if values == "int8":
        for pattern in (config.pattern, *(config.layer_patterns or {}).values()):
            check_within_24(pattern)
    if criterion not in CRITERIA:
        raise ValueError(f"criterion={criterion!r}: must be one of {list(CRITERIA)}")
    if options.reconstruct not in RECONSTRUCTIONS:
        raise ValueError(f"reconstruct={options.reconstruct!r}: must be one of {list(RECONSTRUCTIONS)}")
    if options.passes < 1:
        raise ValueError(f"passes={options.passes!r}: must be at least 1; reconstruct=None trains nothing")
    if not 0 < options.learning_rate < 1:
        raise ValueError(
            f"learning_rate={options.learning_rate!r}: must be between 0 and 1, as a share of the weights' size"
        )
    if not 0 <= damping < float("inf"):
        raise ValueError(f"damping={damping!r}: must be a finite number >= 0")
    if not takes_masks(method_class(config.method)):
        raise ValueError(
            f"method={config.method!r}: oneshot chooses masks once and for all, as {ONESHOT_METHOD!r} keeps them"
        )
    if wants_packed_master(config):
        raise ValueError(
            "master='packed': oneshot prunes dense weights; leave it out, and afterwards call patch_model("
            "unpatch_model(model), config) with it, which keeps the zeros"
        )
    if getattr(config, "dense_start", 0):
        raise ValueError(f"dense_start={config.dense_start!r}: other masks would be chosen after it; leave it at 0")
    if patched_config(model) is not None:
        raise ValueError("the model is already patched; call unpatch_model(model) first")


def _check_weights(weights: dict[str, SparseWeight]) -> None:
    stacks = [name for name, weight in weights.items() if weight.is_stack]
    if stacks:
        names = sorted({name.rpartition(".")[2] for name in stacks})
        raise ValueError(
            f"{stacks[0]} is a stack of experts, and oneshot calibrates linear layers only: leave stacks out with "
            f"exclude_modules={names}, or let patch_model choose their masks by magnitude"
        )
    for name, weight in weights.items():
        check_whole(name, weight.master)
    meta = [name for name, weight in weights.items() if weight.parameter.is_meta]
    if meta:
        raise ValueError(
            f"{layer_name(meta[0])} has no weight yet (meta device, or offloaded): load the model onto a device first"
        )


def _prune_block(
    module: nn.Module,
    new: dict[str, SparseWeight],
    masks: dict[Tensor, Tensor],
    block: CalibratedBlock,
    options: _Options,
    progress: Progress,
) -> dict[str, Any]:
    """Prune the `new` weights of a block, add their masks to `masks`, and return what the report says of it.

    As plain values: `layers`, what a `LayerReport` has of each; `errors`, of the block before and after its
    reconstruction, or None.
    """
    layers: dict[str, dict[str, Any]] = {}
    for name, weight in new.items():
        if weight.parameter not in masks:
            with torch.autocast(weight.parameter.device.type, enabled=False):  # for its solvers
                report, masks[weight.parameter] = _prune_weight(name, weight, block.statistics[name], options)
            layers[name] = vars(report)
            progress.update(note=f"error {report.error:.1%}")
    errors = None
    if options.reconstruct == "block":
        owned = {weight.parameter: masks[weight.parameter] for weight in new.values()}
        errors = reconstruct_block(
            module, owned, block.samples, options.passes, options.learning_rate, lambda: progress.update(0)
        )
        progress.update(0, f"error of the block {errors[1]:.1%}")
        for name, weight in new.items() if options.values == "int8" else ():
            inputs = block.statistics[name]
            assert isinstance(inputs, Gram)
            _round(weight, inputs.matrix, options.damping)
    return {"layers": layers, "errors": errors}


def _prune_weight(
    name: str, target: SparseWeight, inputs: Gram | Sample, options: _Options
) -> tuple[LayerReport, Tensor]:
    """Write a layer's new weight and bias, and return its report and its mask in the layout of the stored weight."""
    (n, m), weight = target.method.pattern, matrix(target)
    dense = weight.to(inputs.squares.dtype, copy=True)
    pruned = None
    if isinstance(inputs, Gram) and options.criterion == "sparsegpt":
        pruned, mask, used = layerwise.sparsegpt(dense, inputs.matrix[:-1, :-1], n, m, options.damping)
        if used != options.damping:
            logger.warning(
                f"{layer_name(name)}: Gram matrix not positive definite with damping={options.damping}; used {used:g}"
            )
        options = options._replace(damping=used)
    elif options.criterion == "wanda":
        mask = layerwise.wanda_mask(dense, inputs.squares, n, m)
    else:
        mask = kernels.nm_mask(dense, n, m)
    lost = dense * ~mask
    scale = inputs.output_norm(_with_bias(dense)) or 1.0  # outputs that are all zero stay so
    masked_error = error = inputs.output_norm(_with_bias(lost)) / scale
    if isinstance(inputs, Gram):
        change = _move_weights(target, dense, mask, pruned, inputs.matrix, options)
        error = inputs.output_norm(change) / scale
    else:
        weight.copy_(kernels.apply_mask(dense, mask))
    report = LayerReport(
        name=layer_name(name),
        tokens=inputs.tokens,
        masked_error=masked_error,
        error=error,
        kept_magnitude=kept_magnitude(dense, mask),
        dropped=int(lost.count_nonzero()),
        damping=options.damping,
    )
    return report, mask if target.input_dim == -1 else mask.t().contiguous()


def _move_weights(
    target: SparseWeight, dense: Tensor, mask: Tensor, pruned: Tensor | None, gram: Tensor, options: _Options
) -> Tensor:
    """Write a layer's pruned weights, and return their and the bias's difference to the dense ones, `[out, in + 1]`.

    They are those of `pruned`, or else the dense ones under the mask; moved by least squares to reconstruct layers, and
    rounded with int8 `values`, if no block is reconstructed afterwards.
    """
    weight, owned = matrix(target), target.bias
    # From here on [W, b]. A layer without bias has zeros there that the mask keeps zero.
    bias = None if owned is None else owned.to(dense)
    before = _with_bias(dense, bias)
    after = _with_bias(dense * mask if pruned is None else pruned, bias)
    if options.reconstruct == "layer":
        free = nn.functional.pad(mask, (0, 1), value=owned is not None)
        # The bias may move as far as it helps. Weights of inputs that are never active stay as the criterion left them.
        penalty = layerwise.ridge(gram[:-1, :-1], options.damping) * (gram.diagonal() > 0).to(dense)
        penalty[-1] = 0
        after = layerwise.least_squares(before, free, gram, penalty, after)
    moved = kernels.apply_mask(after[:, :-1], mask)
    weight.copy_(moved)
    if options.values == "int8" and options.reconstruct != "block":
        _round(target, gram, options.damping)
    if owned is not None:
        owned.copy_(after[:, -1])
    # From the layer's own tensors, rounded to its dtype.
    return before - _with_bias(weight.to(dense), None if owned is None else owned.to(dense))


def _round(target: SparseWeight, gram: Tensor, damping: float) -> None:
    """Round a pruned weight to int8 values, if it can be packed."""
    weight = matrix(target)
    if is_packable(target):
        values = weight.to(gram.dtype, copy=True)
        with torch.autocast(weight.device.type, enabled=False):
            weight.copy_(layerwise.round_to_int8(values, gram[:-1, :-1], damping, weight.dtype))


def _with_bias(weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `[W, b]`, with zeros if `bias` is None."""
    return nn.functional.pad(weight, (0, 1)) if bias is None else torch.cat([weight, bias[:, None]], 1)
