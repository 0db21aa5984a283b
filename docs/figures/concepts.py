"""Figures of the concept pages: what 2:4 is, which GEMM can use it, and how methods choose what stays."""

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from sparse24_kernels import mvue, nm_mask, nm_prune, s_ste_scale, soft_threshold, transposable_mask
from style import BLUE, GREEN, GREY, GRID, INK, MUTED, ORANGE, PURPLE, arrow, cells, matrix, picture
from torch import Tensor

from hf_sparse24.metrics import kept_magnitude


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# 2:4 and the hardware


@picture(
    "hardware-packed",
    "A row of sixteen 2:4 weights in four groups becomes eight values and a mask of sixteen bits: 18 bytes instead of "
    "32 in bf16",
    height=210,
)
def packed(figure: Figure) -> None:
    axis = figure.subplots()
    cells(axis, 21.2, 7.6, left=-3.2, top=-0.9)
    row = nm_prune(torch.randn(1, 16, generator=generator(2)))
    right, _ = matrix(axis, row.tolist(), 2.2)
    axis.text(-0.3, 0.5, "weights", ha="right", va="center")
    axis.text(right, -0.35, "16 x 16 bits", ha="right", color=MUTED)
    for group in range(4):
        left = group * 4.35
        kept = [i for i in range(4) if row[0, group * 4 + i]]
        values = [[row[0, group * 4 + i].item() for i in kept]]
        matrix(axis, values, 2.2, (left + 1, 3))
        for place, i in enumerate(kept):
            arrow(axis, (left + i + 0.5, 1.1), (left + place + 1.5, 2.9))
        for i in range(4):
            bit = "1" if i in kept else "0"
            axis.text(left + i + 0.5, 5.5, bit, ha="center", va="center", family="DejaVu Sans Mono")
            axis.add_patch(Rectangle((left + i + 0.05, 5.05), 0.9, 0.9, fill=False, edgecolor=GRID, linewidth=1))
    axis.text(-0.3, 3.5, "values", ha="right", va="center")
    axis.text(right, 4.55, "8 x 16 bits", ha="right", color=MUTED)
    axis.text(-0.3, 5.5, "mask", ha="right", va="center")
    axis.text(right, 6.55, "16 x 1 bit", ha="right", color=MUTED)


# Rows of tokens, geometric mean, lowest and highest speed-up over the shapes of LLM layers; bf16, H100 PCIe, cuSPARSELt
# 0.8.1 over cuBLASLt, each with its best algorithm. Raw data of arXiv 2603.05232 (bcacdwk/vllmbench, commit 92a8ca4).
PUBLISHED = {
    "up to 128": (0.87, 0.43, 1.49),
    "256 to 512": (1.11, 0.67, 1.57),
    "1024": (1.39, 0.89, 1.99),
    "2048 to 4096": (1.50, 0.94, 1.89),
    "8192 to 16384": (1.57, 1.35, 1.74),
}


@picture(
    "hardware-gemm",
    "Published speed-ups of one 2:4 GEMM over a dense one by the number of tokens: 0.87 at up to 128 tokens, rising to "
    "1.57 at 8192 to 16384; the theoretical factor is 2",
    height=290,
)
def published_gemm(figure: Figure) -> None:
    axis = figure.subplots()
    for y, (mean, lowest, highest) in enumerate(PUBLISHED.values()):
        axis.plot([lowest, highest], [y, y], color=BLUE, linewidth=2)
        axis.plot(mean, y, "o", color=BLUE, markersize=8)
        axis.text(mean, y - 0.22, f"{mean:.2f}", ha="center", color=BLUE)
    for x, label in [(1, "as fast as dense"), (2, "theory")]:
        axis.axvline(x, color=MUTED, linestyle="--", linewidth=1.4)
        axis.text(x, -0.75, label, ha="center", color=MUTED)
    axis.set(yticks=range(len(PUBLISHED)), ylim=(4.5, -0.65), xlim=(0.35, 2.15), ylabel="tokens in the GEMM")
    axis.set_yticklabels(PUBLISHED)
    axis.set(xlabel="one GEMM: 2:4 over dense, H100 PCIe, bf16\n(published, not ours)")
    axis.grid(axis="y", visible=False)


# The three GEMMs


@picture(
    "gemms",
    "The three GEMMs of a linear layer. Output contracts over in, grad_input over out, grad_weight over tokens; the "
    "operand that can be 2:4 has its groups of four along that dimension",
    height=500,
)
def gemms(figure: Figure) -> None:
    rows, inner, outer = 5, 8, 8  # tokens are drawn as 8 where they are contracted
    gemm_rows = [
        ("output", ("X", "T", "in", rows, inner), ("Wᵀ", "in", "out", inner, outer), ("Z", "T", "out"), 1, "in"),
        ("grad_input", ("dZ", "T", "out", rows, outer), ("W", "out", "in", outer, inner), ("dX", "T", "in"), 1, "out"),
        ("grad_weight", ("dZᵀ", "out", "T", 8, 8), ("X", "T", "in", 8, inner), ("dW", "out", "in"), 0, "T"),
    ]
    wanted = ["W 2:4 along in: any 2:4 mask", "W 2:4 along out: a transposable mask", "dZ 2:4 along tokens: MVUE"]
    for axis, (name, left, right, result, sparse, along), text in zip(figure.subplots(3, 1), gemm_rows, wanted):
        cells(axis, 40, 13.2, left=-2.6, top=-3)
        axis.text(-2.4, -2.3, name, weight="bold", fontsize=14)
        axis.text(37.2, -2.3, text, color=BLUE, ha="right")
        x = 0.0
        for position, (symbol, first, second, height, width) in enumerate((left, right)):
            top = (8 - height) / 2
            if position == sparse:
                values = torch.ones(height, width)
                groups = "rows" if position == 0 else "columns"
                keep = nm_mask(torch.rand(height, width, generator=generator(3)), dim=1 if position == 0 else 0)
                end, _ = matrix(axis, (values * keep).tolist(), 1.3, (x, top), groups, gap=0.4)
            else:
                axis.add_patch(Rectangle((x, top), width, height, facecolor=GREY, alpha=0.25))
                end = x + width
            axis.text(
                (x + end) / 2,
                top + height + (1.3 if position == sparse else 0.9),
                symbol,
                ha="center",
                va="center",
                weight="bold",
                fontsize=15,
            )
            contracted = {"color": ORANGE, "weight": "bold"}
            down, across = (contracted if (position == 1) else {}), (contracted if position == 0 else {})
            axis.text((x + end) / 2, top - 0.35, second, ha="center", **across)
            axis.text(x - 0.25, top + height / 2, first, ha="right", va="center", **down)
            x = end + 4.8
            if position == 0:
                axis.text(end + 1, 4, "\u00d7", ha="center", va="center", fontsize=15)
        axis.text(x - 3.6, 4, "=", ha="center", va="center", fontsize=15)
        height, width = left[3], right[4]
        top = (8 - height) / 2
        axis.add_patch(Rectangle((x + 0.6, top), width, height, facecolor=GREY, alpha=0.25))
        axis.text(
            x + 0.6 + width / 2, top + height + 0.9, result[0], ha="center", va="center", weight="bold", fontsize=15
        )
        axis.text(x + 0.6 + width / 2, top - 0.35, result[2], ha="center")
        axis.text(x + 0.35, top + height / 2, result[1], ha="right", va="center")
        axis.text(x + 9.2, 4, f"sums\nover\n{along}", color=ORANGE, va="center", weight="bold")


# Hard and soft threshold


def _moving_groups() -> tuple[Tensor, Tensor]:
    """One weight from -1.5 to 1.5 next to three that stay."""
    moving = torch.linspace(-1.5, 1.5, 601)
    return moving, torch.stack([moving, *torch.tensor([0.3, -0.6, 1.0]).expand(601, 3).t()], dim=1)


def _plot_jumps(axis: Axes, x: Tensor, y: Tensor, **line) -> None:
    """A curve without the vertical strokes that would join its jumps."""
    y = y.clone()
    y[1:][(y[1:] - y[:-1]).abs() > 0.05] = torch.nan
    axis.plot(x.tolist(), y.tolist(), **line)


@picture(
    "thresholds",
    "Four weights of a group, pruned, while one of them moves from -1.5 to 1.5. With a hard threshold two of them jump "
    "by 0.6 where the moving weight overtakes -0.6; with a soft threshold all four curves are continuous",
    height=300,
)
def thresholds(figure: Figure) -> None:
    moving, groups = _moving_groups()
    axes = figure.subplots(1, 2, sharey=True)
    lines = [("moving", BLUE, 3), ("0.3", GREEN, 2), ("-0.6", ORANGE, 2), ("1.0", PURPLE, 2)]
    for axis, pruned, title in zip(axes, (nm_prune(groups), soft_threshold(groups)), ("hard", "soft (S-STE)")):
        for i, (label, colour, width) in enumerate(lines):
            _plot_jumps(axis, moving, pruned[:, i], color=colour, linewidth=width, label=label)
        axis.set(title=title, xlabel="the moving weight", ylim=(-1.65, 1.65), xticks=[-1.5, -0.6, 0, 0.6, 1.5])
    axes[0].set(ylabel="what is multiplied")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, columnspacing=1.2)


@picture(
    "thresholds-loss",
    "The loss of the same group against the moving weight: with a hard threshold it jumps where the mask changes, with "
    "a soft one it has kinks but no jump",
    height=270,
)
def thresholds_loss(figure: Figure) -> None:
    moving, groups = _moving_groups()
    target = torch.tensor([1.0, 0.2, -0.2, 1.0])
    scale = s_ste_scale(torch.randn(64, 64, generator=generator()))
    axis = figure.subplots()
    for pruned, colour, label in [
        (nm_prune(groups), ORANGE, "hard threshold"),
        (soft_threshold(groups, scale=scale), BLUE, "soft threshold, with scale"),
    ]:
        _plot_jumps(axis, moving, ((pruned - target) ** 2).sum(1), color=colour, label=label)
    axis.set(xlabel="the moving weight (target: 1.0)", ylabel="squared error", xticks=[-1.5, -0.6, 0, 0.6, 1.0, 1.5])
    axis.legend()


# Transposable masks


TILE = [[0.9, 0.8, 0.1, 0.3], [0.7, 0.2, 0.4, 0.1], [0.8, 0.6, 0.5, 0.2], [0.1, 0.9, 0.2, 0.7]]


@picture(
    "transposable",
    "A 4 x 4 tile of magnitudes under two masks. The two largest of each row keep 5.8 of the sum but leave columns "
    "with 3, 3, 1 and 1; the best transposable mask keeps 5.1 with two in every row and column",
    height=200,
)
def transposable(figure: Figure) -> None:
    axis = figure.subplots()
    cells(axis, 18.6, 7.5, left=-0.2, top=-1.7)
    tile = torch.tensor(TILE)
    masks = [
        ("magnitudes", torch.ones_like(tile, dtype=torch.bool)),
        ("2:4 by rows", nm_mask(tile)),
        ("transposable", transposable_mask(tile)),
    ]
    for place, (title, mask) in enumerate(masks):
        x = place * 6.4
        matrix(axis, (tile * mask).tolist(), 1.3, (x, 0), "none", colour=BLUE)
        for i in range(4):
            for j in range(4):
                colour = INK if mask[i, j] else GREY
                axis.text(
                    x + j + 0.5, i + 0.53, f"{TILE[i][j]:.1f}", color=colour, ha="center", va="center", fontsize=11.5
                )
        axis.text(x + 2, -1.05, title, ha="center", weight="bold")
        axis.text(x + 2, -0.3, f"sum {(tile * mask).sum():.1f}", ha="center", color=MUTED)
        if place:
            for i in range(4):
                for count, at in [
                    (int(mask[i].sum()), (x + 4.35, i + 0.53)),
                    (int(mask[:, i].sum()), (x + i + 0.5, 4.5)),
                ]:
                    axis.text(
                        *at, str(count), ha="center", va="center", color=GREEN if count == 2 else ORANGE, weight="bold"
                    )
            axis.text(x + 2, 5.25, "kept per column", ha="center", color=MUTED, fontsize=12)


@picture(
    "transposable-kept",
    "Share of the L1 norm of a Gaussian matrix that a 2:4 mask keeps: 0.745 by rows, 0.703 best transposable, 0.692 "
    "greedy, 0.631 two-approx",
    height=210,
)
def transposable_kept(figure: Figure) -> None:
    weight = torch.randn(1024, 1024, generator=generator())
    kept = {"by rows": kept_magnitude(weight, nm_mask(weight))}
    for solver in ("exact", "greedy", "two-approx"):
        kept[f'"{solver}"'] = kept_magnitude(weight, transposable_mask(weight, solver=solver))
    axis = figure.subplots()
    axis.barh(range(4), list(kept.values()), color=[GREY, BLUE, GREEN, PURPLE], height=0.62)
    for y, value in enumerate(kept.values()):
        axis.text(value + 0.01, y, f"{value:.3f}", va="center")
    axis.set(yticks=range(4), ylim=(3.5, -0.5), xlim=(0, 0.84), xlabel="kept share of the L1 norm, Gaussian weights")
    axis.set_yticklabels(kept)
    axis.grid(axis="y", visible=False)


# MVUE


@picture(
    "mvue",
    "Top: the mean of MVUE draws of four numbers approaches the numbers themselves within a few hundred draws. Bottom: "
    "squared error of one draw relative to the gradient: the exact estimator is below the approximate one for "
    "Gaussian, Laplace and log-normal gradients; keeping the two largest has less error, but it is biased",
    height=600,
)
def mvue_means(figure: Figure) -> None:
    top, bottom = figure.subplots(2, 1)
    group, draws = torch.tensor([0.2, -0.5, 1.0, 2.3]), 2000
    means = mvue(group.repeat(draws, 1), key=0).double().cumsum(0) / torch.arange(1, draws + 1)[:, None]
    shown = [i - 1 for i in sorted({round(10 ** (e / 24)) for e in range(80)}) if i <= draws]
    for i, colour in enumerate((BLUE, ORANGE, GREEN, PURPLE)):
        top.axhline(group[i].item(), color=colour, linestyle=":", linewidth=1.5)
        top.plot([s + 1 for s in shown], means[shown, i].tolist(), color=colour)
        top.text(2150, group[i].item(), f"{group[i].item():.1f}", color=colour, va="center")
    top.set(xscale="log", xlim=(1, 2000), xlabel="draws", ylabel="mean of the draws", title="Four numbers")
    top.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    top.minorticks_off()

    size = (4000, 4)
    signs = torch.randn(size, generator=generator(1)).sign()
    gradients = {
        "Gaussian": torch.randn(size, generator=generator()),
        "Laplace": torch.empty(size).exponential_(generator=generator()) * signs,
        "log-normal": torch.randn(size, generator=generator()).mul(1.5).exp() * signs,
    }
    estimates = [
        ("exact", BLUE, lambda x: mvue_error(x, "exact")),
        ("approx", GREEN, lambda x: mvue_error(x, "approx")),
        ("two largest (biased)", GREY, lambda x: ((nm_prune(x) - x) ** 2).sum().item() / (x**2).sum().item()),
    ]
    for shift, (label, colour, error) in zip((-0.28, 0, 0.28), estimates):
        values = [error(x) for x in gradients.values()]
        bottom.barh([i + shift for i in range(3)], values, height=0.25, color=colour, label=label)
        for i, value in enumerate(values):
            bottom.text(value + 0.006, i + shift, f"{value:.3f}", va="center", fontsize=12)
    bottom.set(yticks=range(3), xlabel="squared error / squared size", title="Error of one draw", xlim=(0, 0.58))
    bottom.set_yticklabels(gradients)
    bottom.invert_yaxis()
    bottom.grid(axis="y", visible=False)
    bottom.legend(loc="lower right")


def mvue_error(x: Tensor, estimator: str, draws: int = 40) -> float:
    """Mean squared error of a 2:4 draw, relative to the squared size of the gradient."""
    errors = sum((((mvue(x, estimator=estimator, key=key) - x).double()) ** 2).sum().item() for key in range(draws))
    return errors / draws / (x.double() ** 2).sum().item()
