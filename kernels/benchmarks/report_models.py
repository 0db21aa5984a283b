"""The part of the page that has products, blocks, training runs and inference."""


def page(result: dict) -> list[str]:
    """What has been measured so far; sections that were not chosen leave nothing."""
    return [
        *_goals(result),
        *_products(result.get("products", {})),
        *_tilelang(result.get("tilelang", {})),
        *_blocks(result.get("mlps", {})),
        *_runs(result.get("trainer", {})),
        *_inference(result.get("inference", {})),
        *_tuning(result.get("tuning", {})),
    ]


def _rows(result: dict):
    """Every row of every section, with its name."""
    for section in ("products", "mlps", "trainer"):
        yield from result.get(section, {}).items()
    yield from result.get("inference", {}).get("rows", {}).items()


def _goals(result: dict) -> list[str]:
    rows = list(_rows(result))
    judged = [goal for _, row in rows for goal in row.get("goals", []) if goal["met"] is not None]
    missed = [(name, goal) for name, row in rows for goal in row.get("goals", []) if goal["met"] is False]
    not_run = [name for name, row in rows if str(row.get("error", "")).startswith("not run")]
    lines = ["", "## Goals", "", f"{len(judged) - len(missed)} of {len(judged)} judged goals are met."]
    if missed:
        lines += ["", "| missed | goal | measured | wanted |", "|---|---|--:|--:|"]
        lines += [f"| {name} | {goal['what']} | {goal['ratio']:.3f} | {goal['target']:g} |" for name, goal in missed]
    if not_run:
        lines += ["", f"Not reached in the time ({len(not_run)}): {'; '.join(not_run)}."]
    return lines


def _products(rows: dict) -> list[str]:
    if not rows:
        return []
    lines = [
        "",
        "## Products",
        "",
        "Times dense, above 1: sparse is faster. Sparse: operands packed already; packing: pruned and compressed in "
        "the same call; default: by the library's default algorithm, without tuning; auto: what it takes.",
        "",
        "| layer | product | dense us | TFLOP/s | sparse | packing | default | auto | clocks |",
        "|---|---|--:|--:|--:|--:|--:|---|---|",
    ]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | | | | | | |")
            continue
        for product, found in row["products"].items():
            dense = row["times"].get(f"{product} dense", {})
            rate = f"{row['flops'] / dense['median_us'] / 1e6:.0f}" if "median_us" in dense else dense.get("error", "")
            cells = [_ratio(found[key]) for key in ("sparse", "packed_too", "default_algorithm")]
            lines.append(
                f"| {name} | {product} | {_us(dense)} | {rate} | {' | '.join(cells)} "
                f"| {found['auto']} {_ratio(found['auto_ratio'])} | {row['clocks'] or ''} |"
            )
    return [*lines, *_layers(rows), *_parts(rows), *_errors(rows)]


def _layers(rows: dict) -> list[str]:
    """Whole layers; every column but the first is a ratio."""
    done = {name: row for name, row in rows.items() if row.get("layer")}
    ways = list(next(iter(done.values()))["layer"]) if done else []
    lines = [
        "",
        "### Linear layers, forward and backward",
        "",
        "Times dense. Kept: operands of an earlier micro-batch; made, auto: pruned and compressed in every call.",
        "",
        f"| layer | dense us | {' | '.join(ways)} | goals |",
        f"|---|--:|{'--:|' * len(ways)}---|",
    ]
    for name, row in done.items():
        ratios = " | ".join(_ratio(x) for x in row["layer"].values())
        goals = _verdicts([goal for goal in row["goals"] if goal["what"].startswith(("layer", "forward"))])
        lines.append(f"| {name} | {_us(row['times'].get('layer dense', {}))} | {ratios} | {goals} |")
    return lines if done else []


def _parts(rows: dict) -> list[str]:
    """Where the time of packing goes."""
    done = {name: row for name, row in rows.items() if row.get("times")}
    parts = [key for key in next(iter(done.values()))["times"] if key.startswith("part: ")] if done else []
    if not parts:
        return []
    heads = " | ".join(part.removeprefix("part: ") for part in parts)
    lines = [
        "",
        "### What packing consists of, us",
        "",
        "Compressed by: the kernel that prunes, where the library's layout was found out, or the library.",
        "",
        f"| layer | compressed by | {heads} |",
        f"|---|---|{'--:|' * len(parts)}",
    ]
    for name, row in done.items():
        writers = ", ".join(f"{what} {who}" for what, who in row["compressed_by"].items())
        lines.append(f"| {name} | {writers} | {' | '.join(_us(row['times'].get(part, {})) for part in parts)} |")
    return lines


def _errors(rows: dict) -> list[str]:
    found = [
        f"- {name}, {way}: {times['error']}"
        for name, row in rows.items()
        for way, times in row.get("times", {}).items()
        if "error" in times
    ]
    return ["", "### Not timed", "", *found] if found else []


def _tilelang(found: dict) -> list[str]:
    """What decides whether TileLang gets a backend."""
    if not found:
        return []
    lines, rows = ["", "## TileLang's `gemm_sp`", ""], found["rows"]
    if found["why_not"]:
        return [*lines, f"Not measured: {found['why_not']}."]
    verdicts = [row["verdict"] for row in rows.values() if row.get("verdict", {}).get("met") is not None]
    won = sum(verdict["met"] for verdict in verdicts)
    lines += [
        f"The output product in bf16 without bias, operands packed already, its fastest tiling. At {won} of "
        f"{len(verdicts)} layers measured it is {found['wanted']:g} times as fast as cuSPARSELt or more.",
        "",
        "| layer | tiling | us | dense us | cuSPARSELt us | times dense | times cuSPARSELt | clocks |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | | | | | |")
            continue
        us = " | ".join(_us(row["times"].get(way, {})) for way in (row["best"], "dense", "cuSPARSELt"))
        ratios = " | ".join(map(_ratio, (row["times_dense"], row["verdict"]["ratio"])))
        lines.append(f"| {name} | {row['best'] or 'none'} | {us} | {ratios} | {row['clocks'] or ''} |")
    return [*lines, *_errors(rows)]


def _blocks(rows: dict) -> list[str]:
    if not rows:
        return []
    lines = ["", "## MLP blocks", ""]
    lines += [
        "Training is forward and backward, with weights pruned and packed in every call; forward is inference with "
        "packed weights. Distance: of the output from dense math; pruned weights have some, wrong ones over 1.",
        "",
        "| block | | way | us | times dense | distance | goals |",
        "|---|---|---|--:|--:|--:|---|",
    ]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name} | | {row['error']} | | | | |")
            continue
        for table in ("training", "forward"):
            for way, times in row[table]["rows"].items():
                distance = "" if times["distance_to_dense"] is None else f"{times['distance_to_dense']:.2f}"
                goals = [goal for goal in row["goals"] if goal["what"].startswith(f"{table}, {way}: ")]
                lines.append(
                    f"| {name} | {table} | {way} | {_us(times)} | {_ratio(times['speed_up'])} | {distance} "
                    f"| {_verdicts(goals)} |"
                )
    return lines


def _runs(rows: dict) -> list[str]:
    if not rows:
        return []
    lines = ["", "## Training runs", "", "| run | tokens per s | times dense | goal | peak GB | step ms | loss | |"]
    lines += ["|---|--:|--:|---|--:|--:|--:|---|"]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name} | | | | | | | {row['error']} |")
            continue
        goals = _verdicts(row.get("goals", []))
        lines.append(
            f"| {name} | {row['tokens_per_s']:.0f} | {_ratio(row.get('speed_up'))} | {goals} "
            f"| {_gigabytes(row['peak_bytes'])} | {row['step_s'] * 1e3:.1f} | {row['loss']:.3f} "
            f"| {row['clocks'] or ''} |"
        )
    return lines


def _inference(found: dict) -> list[str]:
    if not found:
        return []
    lines = ["", "## Inference", "", "Four decoder layers of Llama 8B, eval mode, no gradients.", ""]
    lines += [f"- {way}: {row['error']}" for way, row in found["memory"].items()]
    lines += ["| workload | way | us | times dense | peak GB | goals |", "|---|---|--:|--:|--:|---|"]
    for name, row in found["rows"].items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | | | |")
            continue
        for way, times in row["rows"].items():
            goals = _verdicts(row["goals"]) if way == "auto" else ""
            lines.append(
                f"| {name} | {way} | {_us(times)} | {_ratio(times['speed_up'])} | {_gigabytes(times['peak_bytes'])} "
                f"| {goals} |"
            )
    return lines


def _tuning(rows: dict) -> list[str]:
    if not rows:
        return []
    lines = ["", "## What the tuner says", "", "| product | runs | algorithm | sparse us | dense us | why |"]
    lines += ["|---|---|---|--:|--:|---|"]
    for name, row in rows.items():
        times = [_us({"median_us": row[key]} if row[key] is not None else {}) for key in ("sparse_us", "dense_us")]
        algorithm = "" if row["algorithm"] is None else "/".join(map(str, row["algorithm"]))
        lines.append(f"| {name} | {row['backend']} | {algorithm} | {' | '.join(times)} | {row['reason']} |")
    return lines


def _verdicts(goals: list[dict]) -> str:
    words = {True: "met", False: "**missed**", None: "not measured"}
    return "; ".join(f"{goal['what'].rpartition(': ')[2]} {goal['target']:g} {words[goal['met']]}" for goal in goals)


def _us(row: dict) -> str:
    if "median_us" not in row:
        return row.get("error", "")
    loop = "" if row.get("method", "graph") == "graph" else " (loop)"
    return f"{row['median_us']:.1f}{loop}"


def _ratio(x: float | None) -> str:
    return "" if x is None else f"{x:.2f}"


def _gigabytes(x: int | None) -> str:
    return "" if x is None else f"{x / 1e9:.2f}"
