"""The chart of the first screen: what pruning costs in quality."""

import json

import frontier_page as frontier
import pretrained_page as smollm2
from matplotlib.figure import Figure
from results import RESULTS
from style import BLUE, MUTED, ORANGE, picture

ONE_SHOT = {"oneshot 16:32": "oneshot, 16:32", "oneshot": "oneshot, 2:4", "ours, sparsegpt alone": "SparseGPT, 2:4"}
ONE_SHOT |= {"llm-compressor, sparsegpt": "llm-compressor, 2:4", "modelopt, sparsegpt": "ModelOpt, 2:4"}
ROUNDED = "llama.cpp Q4_K_M"


@picture(
    "quality",
    "Perplexity of SmolLM2-135M over dense, one shot at half of the weights, held-out text: oneshot at 16:32 and 2:4, "
    "SparseGPT by hf_sparse24, by llm-compressor and by ModelOpt, and llama.cpp's Q4_K_M for comparison",
    height=520,
)
def draw_quality(figure: Figure) -> None:
    runs = [json.loads(path.read_text()) for path in sorted((RESULTS / "pretrained/runs").glob("*.json"))]
    at_once = {run["variant"]: run for run in smollm2.at(runs, 0)}
    dense = smollm2.perplexity(at_once["dense"], "validation")
    rows = frontier.read(RESULTS / "frontier")
    bars = {ROUNDED: (float(frontier.perplexity(rows, rows[ROUNDED], "validation")), ORANGE)}
    for variant, label in ONE_SHOT.items():
        colour = BLUE if variant.startswith("oneshot") else MUTED
        bars[label] = smollm2.perplexity(at_once[variant], "validation") / dense, colour
    axis = figure.subplots()
    for row, (value, colour) in enumerate(bars.values()):
        axis.barh(row, value - 1, left=1, color=colour, height=0.6)
        axis.text(value + 0.06, row, f"{value:.2f}", va="center")
    axis.axvline(1, color=MUTED, linestyle="--", linewidth=1.4)
    axis.set_yticks(range(len(bars)), bars)
    axis.set(ylim=(len(bars) - 0.4, -0.6))
    axis.grid(False, axis="y")
    axis.set(title="Pruned in one shot, not trained", xlabel="perplexity over dense, held-out text", xlim=(0.9, 6.6))
