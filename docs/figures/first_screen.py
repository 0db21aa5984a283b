"""The two charts of the first screen: what 2:4 gains in time, and what pruning costs in quality."""

import json

import frontier_page as frontier
import pretrained_page as smollm2
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results import RESULTS
from style import BLUE, GREEN, MUTED, ORANGE, picture

STEPS = [("Llama", "t-sr-ste"), ("Llama", "s-ste"), ("GPT-2", "t-sr-ste")]
PATHS = {"avx512_bf16": ("AVX-512", BLUE, -0.14), "avx2": ("AVX2", GREEN, 0.14)}
"""Label, colour, and place next to the middle of a row."""
DECODING = ("2:4 bf16", "16:32 bf16", "16:32 int8", "llama.cpp F16", "llama.cpp Q8_0", "llama.cpp Q4_K_M")
MODELS = {frontier.LARGE: ("1B shapes", "o", -0.12), frontier.MODEL: ("SmolLM2-135M", "D", 0.12)}
"""Label, marker, and place next to the middle of a row."""
ONE_SHOT = {"oneshot 16:32": "oneshot, 16:32", "oneshot": "oneshot, 2:4", "ours, sparsegpt alone": "SparseGPT, 2:4"}
ONE_SHOT |= {"llm-compressor, sparsegpt": "llm-compressor, 2:4", "modelopt, sparsegpt": "ModelOpt, 2:4"}
ROUNDED = "llama.cpp Q4_K_M"


def _dots(axis: Axes, row: float, value: float, least: float, most: float, colour: str, marker: str) -> None:
    axis.plot([least, most], [row, row], color=colour, linewidth=1.6)
    axis.plot(value, row, marker, color=colour, markersize=7)


def _legend(axis: Axes, looks: list[tuple[str, str, str]]) -> None:
    """Of labels, markers and colours."""
    handles = [axis.plot([], [], marker, color=colour, label=label)[0] for label, marker, colour in looks]
    axis.legend(handles=handles, loc="upper right")


def _rows(axis: Axes, labels: list[str]) -> None:
    axis.axvline(1, color=MUTED, linestyle="--", linewidth=1.4)
    axis.set_yticks(range(len(labels)), labels)
    axis.set(ylim=(len(labels) - 0.4, -0.6))
    axis.grid(False, axis="y")


@picture(
    "speed",
    "Times as fast as dense PyTorch on a CPU. Top: a training step in fp32, one thread, with AVX-512 and with AVX2. "
    "Bottom: decoding by two threads, packed models in blue, llama.cpp in orange",
    height=520,
)
def draw_speed(figure: Figure) -> None:
    training, decoding = figure.subplots(2, 1, height_ratios=[2.6, 4])
    for name, row in json.loads((RESULTS / "cpu_training.json").read_text())["sections"]["training"]["rows"].items():
        _, colour, aside = PATHS[row["facts"]["path"]]
        for at, (model, method) in enumerate(STEPS):
            if row["facts"]["part"] == "steps" and name.endswith("1 thread") and model in name:
                least, speedup, most = row["facts"][f"{method} over dense"]
                _dots(training, at + aside, speedup, least, most, colour, "o")
    _rows(training, [", ".join(step) for step in STEPS])
    training.set(title="Training step, fp32, one thread", xlim=(0.9, 1.8))
    _legend(training, [(label, "o", colour) for label, colour, _ in PATHS.values()])
    for model, (_, marker, aside) in MODELS.items():
        rows = frontier.read(RESULTS / "frontier", model)
        for at, name in enumerate(DECODING):
            least, value, most = rows[name]["speed"]["2"]["over dense bf16"]
            colour = ORANGE if name.startswith("llama.cpp") else BLUE
            _dots(decoding, at + aside, value, least, most, colour, marker)
    _rows(decoding, list(DECODING))
    decoding.set(title="Decoding, two threads", xlabel="times as fast as dense PyTorch")
    _legend(decoding, [(label, marker, MUTED) for label, marker, _ in MODELS.values()])


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
    _rows(axis, list(bars))
    axis.set(title="Pruned in one shot, not trained", xlabel="perplexity over dense, held-out text", xlim=(0.9, 6.6))
