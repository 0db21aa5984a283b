"""The result of `make gpu` as JSON and as a page of Markdown; both are written after every step, each in one piece."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import report_models

ROOT = Path(__file__).resolve().parent.parent.parent


def clean(error: str) -> str:
    """Without the folders of this machine, and fit for a table."""
    for folder, name in ((str(ROOT), "."), (sys.prefix, "python"), (str(Path.home()), "~")):
        error = error.replace(folder, name)
    return error.replace("|", "/")


def write(result: dict, path: Path) -> None:
    """`path` with .json and with .md. A run that is killed leaves the last complete version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", json.dumps(result, indent=1) + "\n"), (".md", page(result))):
        unfinished = path.with_name(path.name + suffix + ".tmp")
        unfinished.write_text(text)
        os.replace(unfinished, path.with_name(path.name + suffix))


def page(result: dict) -> str:
    environment = result["environment"]
    lines = [f"# Kernels on {environment.get('device', '?')}", "", f"`{result['command']}`, {result['date']}", ""]
    lines += [f"- {name}: {value}" for name, value in environment.items() if value is not None]
    lines += [f"- {name}: {value}" for name, value in result.get("clocks", {}).items() if value is not None]
    lines += [f"- {dtype} is served by {' : '.join(choice)}" for dtype, choice in result.get("kernels", {}).items()]
    lines += [f"- not finished: {result['unfinished']}"] if result.get("unfinished") else []
    lines += [f"- section {name} failed: {error}" for name, error in result.get("errors", {}).items()]
    groups = result["groups"]
    if "kernels" in groups:
        lines += gated("Gate", result.get("gate"), lambda: [*_speeds(result), *_rivals(result)])
    if groups != ["kernels"]:
        lines += gated("Gate of the products", result.get("product_gate"), lambda: report_models.page(result))
    return "\n".join(lines) + "\n"


def gated(title: str, gate: dict | None, speeds: Callable[[], list[str]]) -> list[str]:
    """What a gate has found, and the speeds behind it where it is green."""
    if gate is None:
        return ["", f"## {title}", "", "It has not run to its end; no speed is reported before."]
    failed = gate["failed"]
    lines = ["", f"## {title}", ""]
    lines += [f"{gate['passed']} checks passed, {len(failed)} failed, in {gate['seconds']:.0f} s."]
    if gate["passed"] == 0 or failed:
        return [*lines, "**Red: no speed is reported.**", "", *(f"- {name}: {why}" for name, why in failed.items())]
    return [*lines, *speeds()]


def _speeds(result: dict) -> list[str]:
    copies = "; ".join(
        f"{when} {copy['gb_per_s']:.0f} GB/s" if "gb_per_s" in copy else f"{when} {copy['error']}"
        for when, copy in result.get("copy", {}).items()
    )
    rows = result.get("operations", {})
    timed = [row for row in rows.values() if "ours" in row]
    met = sum(row["target_met"] for row in timed)
    lines = [
        "",
        "## Speed",
        "",
        f"Copy of device memory, read and written bytes: {copies}. {met} of {len(timed)} timed workloads meet their "
        f"target, {len(rows) - len(timed)} were not timed. Medians; bytes are those that must move; predicted is the "
        "lower bound from the compiled code at 4.3 TB/s; call is what Python takes to issue one.",
        "",
        "| workload | MB | us | min-max us | predicted us | GB/s | of copy | target | of a copy of as many bytes "
        "| call us |",
        "|---|--:|--:|--:|--:|--:|--:|---|--:|--:|",
    ]
    for name, row in rows.items():
        size, predicted = f"{row['bytes'] / 1e6:.1f}", _number(row.get("predicted_us"))
        if "ours" not in row:
            lines.append(f"| {name} | {size} | {row.get('error', 'not run')} | | {predicted} | | | | | |")
            continue
        ours = row["ours"]
        target = f"{row['target']:.0%} met" if row["target_met"] else f"**{row['target']:.0%} missed**"
        equal = "" if row["share_of_equal_copy"] is None else f"{row['share_of_equal_copy']:.0%}"
        lines.append(
            f"| {name} | {size} | {_number(ours['median_us'])}{'' if row['method'] == 'graph' else ' (loop)'} "
            f"| {_number(ours['min_us'])}-{_number(ours['max_us'])} | {predicted} | {row['gb_per_s']:.0f} "
            f"| {row['share_of_copy']:.0%} | {target} | {equal} "
            f"| {_number(row['host_us'])} |"
        )
    return lines


def _rivals(result: dict) -> list[str]:
    lines = [
        "",
        "## Against others",
        "",
        "All sampled in turn with ours, in CUDA graphs where they can be (loop: they cannot). Above 1: ours is faster.",
        "",
        "| workload | ours us | other | other us | other / ours |",
        "|---|--:|---|--:|--:|",
    ]
    for name, rivals in result.get("competitors", {}).items():
        for rival, row in rivals.items():
            if "error" in row:
                lines.append(f"| {name} | | {rival} | {row['error']} | |")
                continue
            ratio = f"{row['ratio']:.2f}" if row["ratio"] >= 1 else f"**{row['ratio']:.2f} (ours loses)**"
            how, ours_how = ("" if row[by] == "graph" else " (loop)" for by in ("method", "ours_method"))
            ours, other = _number(row["ours_us"]), _number(row["median_us"])
            lines.append(f"| {name} | {ours}{ours_how} | {rival} | {other}{how} | {ratio} |")
    return lines


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.1f}" if x < 1000 else f"{x:.0f}"
