"""The page of bytes, speed and KL of engines and formats, from the committed results, so that it cannot drift."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretrained_page as smollm2

from hf_sparse24.tables import markdown_table

Row = dict[str, Any]
MODEL, LARGE = "SmolLM2-135M", "Llama-1B"
AXES: dict[str, Callable[[Row], float]] = {
    "bytes": lambda row: row["bytes"],
    "speed, two threads": lambda row: -row["speed"]["2"]["tokens per s"][1],
    "speed, one thread": lambda row: -row["speed"]["1"]["tokens per s"][1],
}
"""What costs next to KL, less being better."""

INTRO = """# Bytes, speed and KL: the frontier

SmolLM2-135M-Instruct in {rows} engines and formats: its bytes, the tokens a second that it decodes, and the KL
divergence of its predictions from the dense model's in fp32."""

NOTES = """## How it was measured

- **The dense model is dequantized from Q4_1.** Formats of 4 bits are close to what its weights were rounded to, so they
  look better here than on a model that never was quantized. On [one such model](pretrained.md#an-encoder) int4
  in groups of 32 is still closer than 16:32.
- 2:4, 8:16, 16:32 and 6:8 are packed models in Transformers. `oneshot` pruned all linear layers of their blocks, and
  nothing was trained afterwards. The embedding, which is the head too, stays in bf16, 57 MB, where other engines
  round it.
- Rows in Transformers take compiled steps and a static cache. `dense int8` has `torch._weight_int8pack_mm` in the
  blocks. llama.cpp is built for this CPU; rows of 576 weights do not fit K-quants, and it takes other formats there.
- `W8A8 2:4` of OpenVINO is the 2:4 model with int8 activations; `sparse` adds `CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE`.
  The command measures no OpenVINO any more: these rows are of the date below.
- Each row took turns with `dense bf16`: {new} new tokens of one sequence after {prompt}, {large} of Llama-1B. Brackets
  are the 10 % and 90 %
  quantiles of the turns. KL is the mean over four held-out corpora of {documents} rows of 512 tokens, in nats per
  token. Perplexity is over that of `dense bf16`.
- Llama-1B has random weights: it is for speed alone.
- * KL and perplexity of [A pretrained model](pretrained.md), the same recipe and texts, in bf16 autocast.
- Empty cells: not measured. vLLM was not measured here ([serving](../guides/serving.md))."""


def read(folder: Path, model: str = MODEL) -> dict[str, Row]:
    """The rows of a model; a missing quality is that of the same pruned model in results/pretrained, marked by `of`."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    rows = {row["row"]: row for row in found if row["model"] == model}
    if model == MODEL:
        runs = [
            json.loads(path.read_text()) for path in sorted((folder.parent / "pretrained/runs").glob("oneshot*.json"))
        ]
        for run in runs:
            name = (run["variant"].split() + ["2:4"])[1] + " bf16"
            if name in rows and "quality" not in rows[name]:
                rows[name] = {"quality": run["corpora"], "of": run["variant"]} | rows[name]
    return dict(sorted(rows.items(), key=lambda item: -item[1]["bytes"]))


def kl(row: Row) -> float | None:
    """Nats per token over all corpora."""
    found = row.get("quality", {}).values()
    return sum(sum(c["kl"]) for c in found) / sum(sum(c["tokens"]) for c in found) if found else None


def front(rows: dict[str, Row], cost: Callable[[Row], float]) -> list[str]:
    """The rows with a KL that no other is at least as good as in KL and in cost."""
    return [name for name in rows if kl(rows[name]) is not None and not better(rows, name, cost)]


def better(rows: dict[str, Row], name: str, cost: Callable[[Row], float]) -> list[str]:
    """The rows that are at least as good in both."""
    own = (kl(rows[name]), cost(rows[name]))
    both = {other: (kl(row), cost(row)) for other, row in rows.items() if kl(row) is not None and other != name}
    return [other for other, (far, costs) in both.items() if far <= own[0] and costs <= own[1]]


def page(folder: Path) -> str:
    """The page of the results in a folder."""
    rows, large = read(folder), read(folder, LARGE)
    rows = {name: row for name, row in rows.items() if "speed" in row}
    if not rows:
        return "# Bytes, speed and KL: the frontier\n\nNot measured yet: `python recipes/benchmarks/frontier.py`.\n"
    base = next(row for name, row in rows.items() if name == "dense bf16")
    documents = len(base["quality"]["validation"]["kl"]) if "quality" in base else 16
    parts = [INTRO.format(rows=len(rows)), FIGURE, "## Is a sparse model on the front?", FRONT, verdicts(rows)]
    new = max((row["sizes"]["new"] for row in large.values()), default=0)
    parts += ["## All rows", table(rows, large), NOTES.format(documents=documents, large=new, **base["sizes"])]
    systems = sorted({row["system"].split(": ")[0] for row in rows.values()})  # without llama.cpp's CPU features
    loads = [found["load"] for row in rows.values() for found in row["speed"].values()]
    made = f"`python recipes/benchmarks/frontier.py`, {base['date'][:10]}: {base['environment']['cpu']}"
    parts.append(f"{made}, load {min(loads)} to {max(loads)}; {'; '.join(systems)}.")
    return "\n\n".join(parts) + "\n"


FIGURE = (
    "![KL to the dense model against bytes, and against tokens per second by two threads, for each engine and format; "
    "a line joins the rows on the front](../images/frontier.svg)"
)


def table(rows: dict[str, Row], large: dict[str, Row]) -> str:
    lines = []
    for name, row in rows.items():
        cells = [name, f"{row['bytes'] / 1e6:.0f}", *(rate(row, n) for n in "21")]
        far = kl(row)
        cells.append("" if far is None else f"{far:.4f}{' *' * ('of' in row)}")
        cells += [perplexity(rows, row, folder_corpus) for folder_corpus in smollm2.SHORT]
        other = large.get(name)
        cells += [f"{other['bytes'] / 1e6:,.0f}", *(rate(other, n) for n in "21")] if other else [""] * 3
        lines.append(cells)
    head = [
        "model",
        "MB",
        "tokens/s, 2 threads",
        "1 thread",
        "KL",
        *(f"{name}, x dense" for name in smollm2.SHORT.values()),
    ]
    return markdown_table([*head, "Llama-1B, MB", "Llama-1B, 2 threads", "Llama-1B, 1 thread"], lines)


def rate(row: Row, threads: str) -> str:
    if "speed" not in row:
        return ""
    low, middle, high = row["speed"][threads]["tokens per s"]
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def perplexity(rows: dict[str, Row], row: Row, corpus: str) -> str:
    if "quality" not in row or "quality" not in rows["dense bf16"]:
        return ""
    own, base = (smollm2.perplexity({"corpora": each["quality"]}, corpus) for each in (row, rows["dense bf16"]))
    return f"{own / base:.3f}"


def verdicts(rows: dict[str, Row]) -> str:
    """For each row with a KL: on each front, or how many rows are better and one of them."""
    fronts = {what: front(rows, cost) for what, cost in AXES.items()}
    lines = []
    for name in rows:
        if kl(rows[name]) is None:
            continue
        cells = [f"**{name}**" if name[0].isdigit() else name]
        for what, cost in AXES.items():
            beaten_by = better(rows, name, cost)
            cells.append("yes" if name in fronts[what] else f"no: {len(beaten_by)} ({beaten_by[-1]})")
        lines.append(cells)
    return markdown_table(["model", *AXES], lines)


FRONT = (
    "A row is on the front unless another is at least as good in both KL and the column's cost. `no: 7 (X)`: seven "
    "others are, X among them. Sparse rows are bold."
)
