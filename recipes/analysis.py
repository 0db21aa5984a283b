"""What a step of training was predicted to gain and what it gained, and which masks flip: `results/analysis.json`.

    python recipes/analysis.py      # the runs that the results lack; --only and --seeds choose some

The measurements are those by which two papers argue: S-STE (arXiv 2409.09099, Figures 1 and 2) that hard thresholds
make training unpredictable, and T-SR-STE (arXiv 2404.01847, section 3) that masks flip where two of them are nearly as
good. We know their definitions from captions alone, so these are ours. F is the loss of one batch as a function of the
weights that the GEMMs see, S the pruning function, w and w' all weights before and after the optimizer step on it:

    actual           F(S(w)) - F(S(w')), the amount of descent, "AoD". Below zero the step made its own batch worse.
    held             F(S(w)) - F(L w'), with L the linear map that S is around w (S(w) = L w): for masks the mask of w
                     on the weights w'. For the soft threshold also which weight gives the threshold, and the signs.
                     The papers' dF1 is -actual, dF2 is -held: they differ by what weights that flip do to the loss.
    predicted        <g, w - w'>, g the gradient that the method trains with: the straight-through estimate takes the
                     gradient by S(w) for that by w
    predicted_pruned <g, S(w) - S(w')>, the first-order prediction of the weights that the GEMMs see

w - w' is all that the step does: AdamW with its momentum and decay, after clipping; g is that before clipping and
masked decay. All variants have one learning rate, the same initial weights and the same batches. MVUE is off: a random
gradient would hide what is asked about S. `t-sr-ste` has no dense tail, so that masks flip until the end.
"""

import argparse
import copy
import json
import platform
from collections.abc import Callable, Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import stdlib_text
import torch
import train
import transformers
from arguments import UsageError, parse_arguments
from methods_runs import EMBEDDING_RATE, Run
from models import make_model
from running import run as run_script
from sparse24_kernels import nm_mask, transposable_mask
from text_data import make_datasets
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup, set_seed

from hf_sparse24 import Sparse24Config, Sparse24Controller, __version__, patch_model, sparse_weights

RECIPES = Path(__file__).resolve().parent
RESULTS = RECIPES / "results" / "analysis.json"
SETTINGS = {"steps": 600, "every": 4, "refresh": 40, "learning_rate": 2.5e-3, "embedding_rate": EMBEDDING_RATE}
NO_TAIL = {"weight_grad": "dense", "dense_tail": 0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "ste": ("ste", {}),
    "sr-ste": ("sr-ste", {}),
    "s-ste": ("s-ste", {"weight_grad": "dense"}),
    "t-sr-ste": ("t-sr-ste", NO_TAIL),
    "t-sr-ste-6e-3": ("t-sr-ste", NO_TAIL | {"masked_decay": 6e-3}),
}
"""Each variant's method and settings. 6e-3 is what the paper's rule found for this model, warmed up for 400 steps."""

Weights = dict[str, Tensor]


def linear_piece(method: str, weight: Tensor, mask: Tensor, scale: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """The linear map that the pruning function is around `weight`, as a function of other weights.

    Args:
        method: of the library; `"s-ste"` has a soft threshold, the others a mask.
        weight: `[out, in]`, at which the map equals the pruning function.
        mask: bool, what is kept of it.
        scale: S-STE's.
    """
    if method != "s-ste":
        return lambda other: other * mask
    groups = weight.unflatten(-1, (-1, 4))
    second = groups.abs().argsort(-1)[..., 1:2]  # which weight of a group gives the threshold
    signs = groups.sign() * groups.gather(-1, second).sign()

    def soft(other: Tensor) -> Tensor:
        values = other.unflatten(-1, (-1, 4))
        return scale * (values - signs * values.gather(-1, second)).flatten(-2) * mask

    return soft


PATTERNS = torch.tensor(
    [
        [column in row for row in rows for column in range(4)]
        for rows in product(combinations(range(4), 2), repeat=4)
        if all(sum(column in row for row in rows) == 2 for column in range(4))
    ],
    dtype=torch.float32,
)
"""The 90 transposable masks of a 4 x 4 tile, [90, 16]."""


def tiles(matrix: Tensor) -> Tensor:
    """The 4 x 4 tiles of a matrix, `[tiles, 16]`."""
    return matrix.unflatten(0, (-1, 4)).unflatten(2, (-1, 4)).transpose(1, 2).flatten(0, 1).flatten(1)


def l1_gaps(matrix: Tensor) -> Tensor:
    """What the best transposable mask of each tile keeps of its L1 norm, less what the second best keeps."""
    best = (tiles(matrix).abs() @ PATTERNS.T).topk(2, dim=1).values
    return best[:, 0] - best[:, 1]


class Probe:
    """Takes the weights and gradients of a step's start, and says after the step what it did to the batch's loss.

    Args:
        model: patched, or dense.
        twin: a dense copy, which computes the loss of any weights.
        method: the model's, `"dense"` for none.
        names: of the weights that are sparse, or would be.
    """

    def __init__(self, model: nn.Module, twin: nn.Module, method: str, names: list[str]):
        self.model, self.twin, self.method, self.names = model, twin, method, names

    def weights(self) -> Weights:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def pruned(self) -> Weights:
        """The weights as the GEMMs see them."""
        return self.weights() | {name: weight.pruned() for name, weight in sparse_weights(self.model).items()}

    def loss(self, weights: Weights, batch: dict[str, Tensor]) -> float:
        with torch.no_grad():
            return torch.func.functional_call(self.twin, weights, kwargs=batch).loss.item()

    def matrices(self) -> Weights:
        """The dense weights that are pruned, or would be."""
        parameters = dict(self.model.named_parameters())
        return {name: parameters[name].detach() for name in self.names}

    def row_masks(self) -> Tensor:
        """The 2:4 masks by magnitude, which dense weights have too, one after the other."""
        return torch.cat([nm_mask(matrix).flatten() for matrix in self.matrices().values()])

    def before(self) -> None:
        self._weights, self._pruned, self._masks = self.weights(), self.pruned(), self.row_masks()
        self._gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self._pieces = {
            name: linear_piece(self.method, weight.master.detach().clone(), weight.mask(), weight.state.get("scale"))
            for name, weight in sparse_weights(self.model).items()
        }

    def after(self, batch: dict[str, Tensor], start: float) -> dict[str, float]:
        """What stands at the top of this file, and `flip_rate` of the row masks; `start` is the loss before."""
        weights, pruned = self.weights(), self.pruned()
        held = weights | {name: piece(weights[name]) for name, piece in self._pieces.items()}
        return {
            "loss": start,
            "predicted": self._first_order(self._weights, weights),
            "predicted_pruned": self._first_order(self._pruned, pruned),
            "actual": start - self.loss(pruned, batch),
            "held": start - self.loss(held, batch),
            "flip_rate": (self._masks ^ self.row_masks()).float().mean().item(),
        }

    def _first_order(self, old: Weights, new: Weights) -> float:
        return sum(((old[name] - new[name]) * g).sum().item() for name, g in self._gradients.items())


class Tiles:
    """Counts how often the transposable masks of 4 x 4 tiles flip, from one refresh to the next."""

    def __init__(self, probe: Probe):
        self.probe = probe
        self.rates: list[tuple[int, float]] = []
        self.masks = self._masks()
        self.flips = torch.zeros(len(self.masks))

    def refresh(self, step: int) -> None:
        masks = self._masks()
        self.rates.append((step, (self.masks ^ masks).float().mean().item()))
        self.flips += (self.masks ^ masks).sum(1)
        self.masks = masks

    def result(self, shown: int = 300) -> Run:
        """Flips and L1 gap at the end by tenths of the tiles, their rank correlation, and some tiles to draw."""
        gaps = torch.cat([l1_gaps(matrix) for matrix in self.probe.matrices().values()])
        tenths = [(gaps[part].mean(), self.flips[part].mean()) for part in gaps.argsort().chunk(10)]
        some = slice(None, None, max(1, len(gaps) // shown))
        return {
            "flip_rates": [(step, _short(rate)) for step, rate in self.rates],
            "tiles": len(gaps),
            "never": _short((self.flips == 0).float().mean()),
            "correlation": _short(torch.corrcoef(torch.stack([_ranks(gaps), _ranks(self.flips)]))[0, 1]),
            "tenths": [(_short(gap), _short(flips)) for gap, flips in tenths],
            "some": [(_short(gap), int(flips)) for gap, flips in zip(gaps[some], self.flips[some])],
        }

    def _masks(self) -> Tensor:
        weights = sparse_weights(self.probe.model)
        matrices = self.probe.matrices().items()
        masks = [weights[name].mask() if weights else transposable_mask(matrix) for name, matrix in matrices]
        return torch.cat([tiles(mask) for mask in masks])


def measure(
    variant: str,
    seed: int,
    data: str,
    *,
    steps: int,
    every: int,
    refresh: int,
    more: dict[str, Any] | None = None,
    **rates: float,
) -> Run:
    """Train one model and return what was measured at every so many steps; `more` are further flags of train.py."""
    flags: dict[str, Any] = {"dataset": f"{data}/train.jsonl", "validation_file": f"{data}/validation.jsonl"}
    flags |= {"tokenizer_name": f"{data}/tokenizer", "seed": seed, "output_dir": data} | (more or {})
    argv = [f"{RECIPES}/methods.yaml", *(f"--{key}={value}" for key, value in flags.items())]
    model_args, _, data_args, _, _, args = parse_arguments(train.ARGUMENTS, argv)
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name)
    model = make_model(model_args, AutoModelForCausalLM, tokenizer, data_args.block_size, args)
    blocks, validation = make_datasets(data_args, tokenizer, seed)
    twin = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters() if ".mlp." in name]
    method, settings = VARIANTS[variant]
    if method != "dense":
        patch_model(model, Sparse24Config.from_dict({"method": method, "target_modules": "mlp", **settings}))
    ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    hidden = [p for p in model.parameters() if all(p is not end for end in ends)]
    groups = [
        {"params": [p for p in hidden if p.dim() > 1], "lr": rates["learning_rate"]},
        {"params": [p for p in hidden if p.dim() < 2], "lr": rates["learning_rate"], "weight_decay": 0.0},
        {"params": ends, "lr": rates["embedding_rate"]},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(args.adam_beta1, args.adam_beta2), weight_decay=args.weight_decay)
    schedule = get_cosine_schedule_with_warmup(optimizer, int(args.warmup_steps * steps), steps)
    if method != "dense":
        Sparse24Controller(model, optimizer, steps, seed=seed, metrics_interval=steps)
    probe = Probe(model, twin, method, names)
    counted = Tiles(probe) if method in ("dense", "t-sr-ste") else None
    points = []
    for step, batch in enumerate(batches(blocks, args.train_batch_size, seed, steps), 1):
        loss = model(**batch).loss
        loss.backward()
        if step % every == 0:
            probe.before()
        nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % every == 0:
            found = probe.after(batch, loss.item())
            points.append({"step": step} | {name: _short(value) for name, value in found.items()})
        if counted is not None and step % refresh == 0:
            counted.refresh(step)
    held_out = list(batches(validation, args.eval_batch_size, None, len(validation) // args.eval_batch_size))
    return {
        "variant": variant,
        "seed": seed,
        "eval_loss": _short(sum(probe.loss(probe.pruned(), batch) for batch in held_out) / len(held_out)),
        "points": {key: [point[key] for point in points] for key in points[0]},
        "tiles": counted and counted.result(),
    }


def batches(blocks: Any, size: int, seed: int | None, count: int) -> Iterator[dict[str, Tensor]]:
    """So many batches of blocks, in an order drawn by the seed, again when they are through; in order for None."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(count):
        if len(order) < size:
            order = list(range(len(blocks)) if seed is None else torch.randperm(len(blocks), generator=generator))
        chosen, order = order[:size], order[size:]
        yield train.collate_causal([blocks[int(i)] for i in chosen])


def _short(value: Any) -> float:
    return float(f"{float(value):.4g}")


def _ranks(values: Tensor) -> Tensor:
    """Ranks, the mean rank for equal values."""
    _, index, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[index]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="only these variants")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="default: 0 1")
    parser.add_argument("--steps", type=int, default=SETTINGS["steps"], help="default: %(default)s")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: recipes/results/analysis.json")
    parser.add_argument("--data", default="runs/stdlib_text", help="directory of the text and its tokenizer")
    args = parser.parse_args(argv)
    settings = SETTINGS | {"steps": args.steps}
    versions = {"hf_sparse24": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    fresh = {"settings": settings, "versions": versions | {"python": platform.python_version()}, "runs": []}

    def read() -> dict[str, Any]:
        return json.loads(args.results.read_text()) if args.results.exists() else fresh

    results = read()
    if results["settings"] != settings:
        raise UsageError(f"{args.results}: runs of {results['settings']}, not {settings}; name another with --results")
    stdlib_text.prepare(args.data)
    for seed, variant in product(args.seeds, args.only):
        if (variant, seed) not in {(run["variant"], run["seed"]) for run in results["runs"]}:
            run = measure(variant, seed, args.data, **settings)
            print(f"{variant}, seed {seed}: validation loss {run['eval_loss']}", flush=True)
            results = read()  # another process may have added its own meanwhile
            results["runs"].append(run)
            stdlib_text.replace_file(args.results, json.dumps(results) + "\n")


if __name__ == "__main__":
    run_script(main)
