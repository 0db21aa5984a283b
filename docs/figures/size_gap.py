"""The figure of the gap to dense training by size, from recipes/results/scaling."""

from statistics import fmean

import scaling_page as scaling
from matplotlib.figure import Figure
from results import RESULTS
from style import BLUE, GREEN, GREY, MUTED, ORANGE, PURPLE, picture

COLOURS = {"s-ste": BLUE, "s-ste 16:32": PURPLE, "sr-ste": GREEN, "t-sr-ste": ORANGE, "dense half": GREY}


@picture("scaling", "The gap to dense training by parameters, of each method, in nats and in percent", height=560)
def draw(figure: Figure) -> None:
    runs = scaling.read(RESULTS / "scaling")
    sizes = scaling.sizes(runs)
    dense = {size: fmean(scaling.losses(runs, size, "dense").values()) for size in sizes}
    axes = figure.subplots(2, 1, sharex=True)
    for axis, unit in zip(axes, ("nats over dense", "% over dense")):
        for variant in scaling.variants(runs):
            scale = {size: 1 if unit.startswith("nats") else 100 / dense[size] for size in sizes}
            found = {size: [scale[size] * gap for gap in scaling.gaps(runs, size, variant)] for size in sizes}
            found = {sizes[size]: gaps for size, gaps in found.items() if gaps}
            colour = COLOURS[variant]
            axis.plot(list(found), [fmean(gaps) for gaps in found.values()], "o-", color=colour, label=variant)
            axis.vlines(list(found), [min(gaps) for gaps in found.values()], [max(g) for g in found.values()], colour)
        axis.axhline(0, color=MUTED, linewidth=1)
        axis.set(xscale="log", ylabel=unit)
    axes[1].set_xlabel("parameters")
    axes[1].set_xticks(list(sizes.values()), [f"{count / 1e6:.2g}M" for count in sizes.values()])
    axes[1].minorticks_off()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
