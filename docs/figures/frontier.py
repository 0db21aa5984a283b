"""The figure of bytes, speed and KL of engines and formats, from recipes/results/frontier."""

import frontier_page as frontier
from matplotlib.figure import Figure
from results import RESULTS
from style import BLUE, GREEN, MUTED, ORANGE, picture

ENGINES = {"llama.cpp ": ORANGE, "OpenVINO ": GREEN, "dense": MUTED}
LEFT = {"both": ["INT8"], "bytes": ["dense bf16"]}
LEFT["speed, two threads"] = ["6:8 bf16", "8:16 bf16", "16:32 int8", "2:4 int8", "Q4_K_M"]
BELOW = {"both": ["16:32 bf16", "16:32 int8", "F16", "Q8_0"], "bytes": [], "speed, two threads": []}
"""Labels that stand left of their points, and below; the others stand right of them, and above."""
PANELS = {"bytes": "MB", "speed, two threads": "tokens per second, two threads"}


@picture(
    "frontier",
    "KL to the dense model against bytes, and against tokens per second by two threads, for each engine and format; a "
    "line joins the rows on the front",
    height=760,
)
def draw(figure: Figure) -> None:
    rows = {
        name: row for name, row in frontier.read(RESULTS / "frontier").items() if frontier.kl(row) and "speed" in row
    }
    for axis, (what, label) in zip(figure.subplots(2, 1), PANELS.items()):
        cost = frontier.AXES[what]
        places = {
            name: (abs(cost(row)) / (1e6 if what == "bytes" else 1), frontier.kl(row)) for name, row in rows.items()
        }
        line = sorted(places[name] for name in frontier.front(rows, cost))
        axis.plot(*zip(*line), color=MUTED, linewidth=1, linestyle="--") if line else None
        for name, place in places.items():
            engine = next((start for start in ENGINES if name.startswith(start)), "")
            axis.plot(*place, "o", color=ENGINES.get(engine, BLUE), markersize=7)
            short = name.removeprefix(engine) if engine != "dense" else name
            sides = LEFT["both"] + LEFT[what], BELOW["both"] + BELOW[what]
            left, below = (short in side for side in sides)
            options = {"ha": "right" if left else "left", "va": "top" if below else "bottom", "fontsize": 11.5}
            offset = (-4 if left else 4, -3 if below else 3)
            colour = ENGINES.get(engine, BLUE)
            axis.annotate(short, place, offset, textcoords="offset points", color=colour, **options)
        axis.set(xscale="log", ylim=(-0.03, 0.78), xlabel=label, ylabel="KL to dense, nats")
        axis.margins(x=0.12)
        ticks = (80, 120, 180, 270) if what == "bytes" else (20, 40, 80, 160)
        axis.set_xticks(ticks, ticks)
        axis.minorticks_off()
    handles = [axis.plot([], [], "o", color=c)[0] for c in (BLUE, *ENGINES.values())]
    names = ["sparse, Transformers", *(start.strip() for start in ENGINES)]
    figure.legend(handles, names, loc="outside lower center", ncols=2)
