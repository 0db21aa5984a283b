"""A method of one's own: masks that change by the gradient (dynamic sparse training), against a mask that is kept.

    python recipes/stdlib_text.py
    python recipes/dynamic_masks.py magnitude-100                   # one run; as long as one of compare_methods.py
    python recipes/dynamic_masks.py never sign-100 magnitude-100 --steps 1000  # shorter ones, in turn

Dropped weights are zero. Every `interval` steps some kept weights leave the mask: those whose sign has flipped since
the last exchange (`drop="sign"`; DeepR, Bellec et al. 2018, arXiv 1711.05136; pytorch/ao#3222), or the smallest of the
layer (`drop="magnitude"`; RigL, Evci et al. 2020, arXiv 1911.11134). In their groups of four, the dropped weights with
the largest gradients enter, at zero, so the mask stays exactly 2:4. One JSON per run; what came out: `LOG.md`,
2026-11-23.

The gradient goes straight through the mask here, so that dropped weights have one. It is used, then masked.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compare_methods
import stdlib_text
import torch
from running import run as run_script
from sparse24_kernels import nm_mask, pack_bits, unpack_bits
from torch import Tensor

from hf_sparse24.methods import (
    GemmSettings,
    KeptMaskMethod,
    PhaseSettings,
    Piece,
    StepContext,
    WeightView,
    is_length,
    is_non_negative,
    is_positive_length,
    one_of,
    register_method,
    setting,
    to_steps,
)

RESULTS = Path(__file__).resolve().parent / "results" / "dynamic_masks"
VARIANTS: dict[str, dict[str, Any]] = {
    "never": {"exchange_until": 0},  # a fixed mask, but for clipping, which sees the dropped weights' gradients too
    **{f"sign-{interval}": {"drop": "sign", "interval": interval} for interval in (1, 10, 100)},
    **{f"magnitude-{interval}": {"drop": "magnitude", "interval": interval} for interval in (10, 100)},
}


def exchanged(mask: Tensor, leaving: Tensor, gradient: Tensor, n: int, m: int, dim: int) -> Tensor:
    """The mask once `leaving`, some of what it keeps, has given its places to others of the same groups.

    Args:
        mask: bool, exactly `n` of every `m` along `dim`.
        leaving: bool, of the mask's shape.
        gradient: of all weights: those that enter have the largest magnitudes among those that were dropped before.

    Returns:
        bool, exactly `n` of every `m`. What is leaving stays only where its group has nothing else to keep (3:4).
    """
    score = gradient.abs().clamp(torch.finfo(gradient.dtype).tiny, torch.finfo(gradient.dtype).max)
    score = score.masked_fill(leaving, 0).masked_fill(mask & ~leaving, math.inf)
    return nm_mask(score, n, m, dim)


@register_method("dynamic-mask")
class DynamicMask(KeptMaskMethod):
    """Masks by magnitude at first; weights that leave them give their places to those with the largest gradients."""

    @dataclass(frozen=True, kw_only=True)
    class Settings(PhaseSettings, GemmSettings):
        drop: str = setting("sign", one_of("sign", "magnitude"), "which weights leave: flipped, or the smallest")
        interval: int | float = setting(100, is_positive_length, "length of training from exchange to exchange (RigL)")
        exchange_until: int | float = setting(0.75, is_length, "length of training in which masks change (RigL)")
        fraction: float = setting(
            0.3, is_non_negative, "drop='magnitude': share of the kept weights that leave, falling to 0 (RigL)"
        )

    def init_state(self, view: WeightView, step: int, total_steps: int) -> dict[str, Tensor]:
        mask_bits = nm_mask(view.matrix, *self.pattern, view.dim, packed=True)
        return {"mask_bits": mask_bits, "sign_bits": pack_bits(view.matrix > 0)}

    def change_gradients(self, pieces: list[Piece], context: StepContext) -> None:
        if context.is_dense:
            return
        end = to_steps(self.settings.exchange_until, context.total_steps)
        interval = to_steps(self.settings.interval, context.total_steps)
        step = context.step + 1
        for piece in pieces:
            weight = context.weights[piece.name]
            if piece.values.shape != weight.master.shape:
                raise ValueError(f"{piece.name} is split among processes; train with dynamic-mask in one")
            width = piece.values.shape[-1]
            mask = unpack_bits(weight.state["mask_bits"], width)
            piece.values.masked_fill_(~mask, 0)  # a patched model begins with its own weights
            if step <= end and step % interval == 0:
                signs = unpack_bits(weight.state["sign_bits"], width)
                leaving = mask & self._leaves(piece.values, mask, signs, 0.5 + 0.5 * math.cos(math.pi * step / end))
                after = exchanged(mask, leaving, piece.gradient, *self.pattern, weight.input_dim)
                piece.values.masked_fill_(~after, 0)
                # What has left forgets its moments, so what enters has none: its first step is by its gradient alone.
                for moment in context.optimizer.state.get(weight.master, {}).values():
                    if isinstance(moment, Tensor) and moment.shape == mask.shape:
                        moment.masked_fill_(~(mask & after), 0)
                positive = torch.where(mask & after, piece.values > 0, piece.gradient < 0)
                weight.set_state({"mask_bits": pack_bits(after), "sign_bits": pack_bits(positive)})
                mask = after
            piece.gradient.masked_fill_(~mask, 0)

    def _leaves(self, values: Tensor, mask: Tensor, signs: Tensor, share: float) -> Tensor:
        """Which weights leave, if they are kept; `share` of `fraction` is what RigL's schedule has come down to."""
        if self.settings.drop == "sign":
            return (values > 0) != signs
        sizes = values.abs()
        count = int(self.settings.fraction * share * mask.sum())
        return sizes <= sizes[mask].kthvalue(count).values if count else torch.zeros_like(mask)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = compare_methods.VARIANTS | {name: ("dynamic-mask", settings) for name, settings in VARIANTS.items()}
    parser.add_argument("variants", nargs="+", choices=known, metavar="variant", help=", ".join(known))
    parser.add_argument("--rate", type=float, default=4e-3, help="learning rate of the hidden layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=None, help="shorter runs, to try things out")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the runs' JSON")
    parser.add_argument("--data", default="runs/stdlib_text", help="directory of the text and its tokenizer")
    args = parser.parse_args(argv)
    results = args.results / f"{args.steps}_steps" if args.steps else args.results
    results.mkdir(parents=True, exist_ok=True)
    stdlib_text.prepare(args.data)
    for variant in args.variants:
        name = f"{variant}-lr{args.rate:g}-seed{args.seed}"
        if (results / f"{name}.json").exists():
            print(f"{name}: there already, in {results}")
            continue
        result = compare_methods.run(variant, args.rate, args.seed, args.data, args.steps, known)
        print(f"{name}: {result['eval_loss']:.4f} in {result['train_seconds']:.0f} s", flush=True)
        stdlib_text.replace_file(results / f"{name}.json", json.dumps(result) + "\n")


if __name__ == "__main__":
    run_script(main)
