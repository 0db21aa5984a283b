"""How good are the solvers for transposable masks? Kept magnitude against the optimum, and time, as a table.

python recipes/mask_quality.py [--size 1024] [--seed 0]
"""

import argparse
import time
from functools import partial

import torch
from sparse24_kernels import nm_mask, transposable_mask
from sparse24_kernels.transposable import SOLVERS

from hf_sparse24.metrics import kept_magnitude, mask_diversity

PATTERNS = ((2, 4), (4, 8), (8, 16))


def table(size: int, seed: int) -> str:
    """Markdown; Gaussian weights `[size, size]`, `size` a multiple of 16."""
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    head = (
        "pattern",
        "solver",
        "kept of the L1 norm",
        "of the optimum",
        "kept",
        "ns per weight",
        "masks per 256 weights",
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for n, m in PATTERNS:
        best = kept_magnitude(weight, transposable_mask(weight, n, m))
        count = f"{mask_diversity(f'{n}:{m}', 256):.1e}"
        both_ways = f"{mask_diversity(f'{n}:{m}', 256, transposable=True):.1e}" if m <= 8 else "not counted"
        rows = [("rows only", partial(nm_mask, weight, n, m), count)]
        rows += [(solver, partial(transposable_mask, weight, n, m, solver), both_ways) for solver in SOLVERS]
        for name, make, count in rows:
            start = time.perf_counter()
            mask = make()
            seconds = time.perf_counter() - start
            kept = kept_magnitude(weight, mask)
            lines.append(
                f"| {n}:{m} | {name} | {kept:.4f} | {kept / best:.4f} | {mask.float().mean():.4f} | "
                f"{seconds / weight.numel() * 1e9:.1f} | {count} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.size % 16:
        parser.error(f"--size {args.size}: must be a multiple of 16")
    print(f"Gaussian weights {args.size} x {args.size}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print(table(args.size, args.seed))


if __name__ == "__main__":
    main()
