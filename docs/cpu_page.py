"""The page of what `recipes/benchmarks/cpu.py` measured, from its committed results, so that tables cannot drift."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_sparse24.tables import markdown_table

INTRO = """# Packed layers on a CPU

How fast packed 2:4 and 16:32 layers are on a CPU. A ratio above 1 is faster than dense. [The frontier](frontier.md) has
whole models, other engines, and what each loses. Training steps are on [their page](costs.md)."""

NOTES = """## How to read the tables

- Decoding reads every weight for every token, so fewer bytes mean more tokens per second where memory is the limit. A
  packed weight has 9/16 of the bytes in bf16, 17/32 in fp32, and with int8 values 5/16 of bf16's.
- Layers are compared with torch's dense ones and with an equally written dense kernel (`recipes/benchmarks/dense.cpp`);
  the better of the two is "best dense".
- The variants of a row take turns in one run. A figure is the median of the turns, with the 10 % and 90 % quantiles
  in brackets. A ratio is taken within a turn.
- **Bold** ratios reach the goal that was set before measuring, *italic* ones miss it, the others had no goal.
- These are speeds alone. Sparsity costs [quality](pretrained.md), and so do llama.cpp's formats
  ([the frontier](frontier.md))."""

PACKED = ("packed", "packed 16:32", "packed int8", "packed 16:32 int8")
Rows = dict[str, dict[str, Any]]


def page(folder: Path) -> str:
    """The page of the results in a folder."""
    result = json.loads((folder / "layers.json").read_text())
    (section,) = result["sections"].values()
    how = f"`{result['command']}`, {result['date'][:10]}: {made(result)}."
    return "\n\n".join([INTRO, section["note"], *layers(section["rows"]), how, NOTES]) + "\n"


def made(result: dict[str, Any]) -> str:
    """The environment of a result, without the CPU's flags."""
    return ", ".join(f"{key} {value}" for key, value in result["environment"].items() if key != "flags")


def layers(rows: Rows) -> Iterator[str]:
    ratios = [f"{way} over best dense" for way in PACKED]
    ways = {"torch": "torch", "dense": "our dense"} | {way: way for way in PACKED}
    groups: dict[str, list[list[str]]] = {}
    for name, row in rows.items():
        layer, tokens, threads = name.split(", ")
        shape, dtype = layer.split()
        cells = [ratio(row, key) for key in ratios] + [time(row, way) for way in ways]
        groups.setdefault(f"{dtype}, {threads}", []).append([shape, tokens.split()[0], *cells])
    for group, lines in groups.items():
        yield f"## {group}"
        yield markdown_table(["layer", "tokens", *ratios, *(f"{way}, us" for way in ways.values())], lines)
    speeds = {name: row["facts"]["read, GB/s"] for name, row in rows.items() if "read, GB/s" in row.get("facts", {})}
    for threads in ("1 thread", "2 threads"):
        found = [speed[1] for name, speed in speeds.items() if name.endswith(threads)]
        if found:
            yield f"Memory was read at {min(found):.1f} to {max(found):.1f} GB/s by {threads}, in the same turns."


def time(row: dict[str, Any], way: str) -> str:
    """The median microseconds of a way, with its quantiles; or its error."""
    found = row.get("times", {}).get(way, {"error": row["error"]} if "error" in row else {})
    if "us" not in found:
        return found.get("error", "")
    return spread([found["p10_us"], found["us"], found["p90_us"]])


def ratio(row: dict[str, Any], fact: str) -> str:
    """A ratio with its quantiles, marked by whether its goal is met."""
    found = row.get("facts", {}).get(fact)
    goal = row.get("goals", {}).get(fact.removesuffix(" over best dense"))
    if found is None or goal is None:
        return spread(found)
    mark = "**" if found[1] >= goal else "*"
    return f"{mark}{found[1]:.2f}{mark}{spread(found).removeprefix(number(found[1]))}"


def spread(found: list[float] | None) -> str:
    """Low, median and high, as text: the median first."""
    return "" if found is None else f"{number(found[1])} ({number(found[0])} to {number(found[2])})"


def number(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"
