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
        cells = [[name, goal["what"], f"{goal['ratio']:.3f}", f"{goal['target']:g}"] for name, goal in missed]
        lines += ["", *_table("missed | goal | >measured | >wanted", cells)]
    if not_run:
        lines += ["", f"Not reached in the time ({len(not_run)}): {'; '.join(not_run)}."]
    return lines


def _table(heads: str, rows: list[list[str]]) -> list[str]:
    """Rows of cells, short ones filled up. Heads stand between bars; ">" before one aligns its column to the right."""
    names = [head.strip() for head in heads.split("|")]
    lines = [_line([name.removeprefix(">") for name in names])]
    lines.append("|" + "".join("--:|" if name.startswith(">") else "---|" for name in names))
    return lines + [_line(row + [""] * (len(names) - len(row))) for row in rows]


def _line(cells: list[str]) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


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
    ]
    cells = []
    for name, row in rows.items():
        if "error" in row:
            cells.append([name, row["error"]])
            continue
        for product, found in row["products"].items():
            dense = row["times"].get(f"{product} dense", {})
            rate = f"{row['flops'] / dense['median_us'] / 1e6:.0f}" if "median_us" in dense else dense.get("error", "")
            ratios = [_ratio(found[key]) for key in ("sparse", "packed_too", "default_algorithm")]
            auto = f"{found['auto']} {_ratio(found['auto_ratio'])}"
            cells.append([name, product, _us(dense), rate, *ratios, auto, row["clocks"] or ""])
    heads = "layer | product | >dense us | >TFLOP/s | >sparse | >packing | >default | auto | clocks"
    return [*lines, *_table(heads, cells), *_layers(rows), *_parts(rows), *_errors(rows)]


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
    ]
    cells = []
    for name, row in done.items():
        goals = _verdicts([goal for goal in row["goals"] if goal["what"].startswith(("layer", "forward"))])
        cells.append([name, _us(row["times"].get("layer dense", {})), *map(_ratio, row["layer"].values()), goals])
    heads = " | ".join(["layer", ">dense us", *(f">{way}" for way in ways), "goals"])
    return lines + _table(heads, cells) if done else []


def _parts(rows: dict) -> list[str]:
    """Where the time of packing goes."""
    done = {name: row for name, row in rows.items() if row.get("times")}
    parts = [key for key in next(iter(done.values()))["times"] if key.startswith("part: ")] if done else []
    if not parts:
        return []
    lines = [
        "",
        "### What packing consists of, us",
        "",
        "Compressed by: the kernel that prunes, where the library's layout was found out, or the library.",
        "",
    ]
    cells = []
    for name, row in done.items():
        writers = ", ".join(f"{what} {who}" for what, who in row["compressed_by"].items())
        cells.append([name, writers, *(_us(row["times"].get(part, {})) for part in parts)])
    heads = " | ".join(["layer", "compressed by", *(f">{part.removeprefix('part: ')}" for part in parts)])
    return lines + _table(heads, cells)


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
    ]
    cells = []
    for name, row in rows.items():
        if "error" in row:
            cells.append([name, row["error"]])
            continue
        us = [_us(row["times"].get(way, {})) for way in (row["best"], "dense", "cuSPARSELt")]
        ratios = [_ratio(row["times_dense"]), _ratio(row["verdict"]["ratio"])]
        cells.append([name, row["best"] or "none", *us, *ratios, row["clocks"] or ""])
    heads = "layer | tiling | >us | >dense us | >cuSPARSELt us | >times dense | >times cuSPARSELt | clocks"
    return [*lines, *_table(heads, cells), *_errors(rows)]


def _blocks(rows: dict) -> list[str]:
    if not rows:
        return []
    lines = ["", "## MLP blocks", ""]
    lines += [
        "Training is forward and backward, with weights pruned and packed in every call; forward is inference with "
        "packed weights. Distance: of the output from dense math; pruned weights have some, wrong ones over 1.",
        "",
    ]
    cells = []
    for name, row in rows.items():
        if "error" in row:
            cells.append([name, "", row["error"]])
            continue
        for table in ("training", "forward"):
            for way, times in row[table]["rows"].items():
                distance = "" if times["distance_to_dense"] is None else f"{times['distance_to_dense']:.2f}"
                goals = _verdicts([goal for goal in row["goals"] if goal["what"].startswith(f"{table}, {way}: ")])
                cells.append([name, table, way, _us(times), _ratio(times["speed_up"]), distance, goals])
    return lines + _table("block | | way | >us | >times dense | >distance | goals", cells)


def _runs(rows: dict) -> list[str]:
    if not rows:
        return []
    cells = []
    for name, row in rows.items():
        if "error" in row:
            cells.append([name, *[""] * 6, row["error"]])
            continue
        goals, step = _verdicts(row.get("goals", [])), f"{row['step_s'] * 1e3:.1f}"
        rates = [f"{row['tokens_per_s']:.0f}", _ratio(row.get("speed_up")), goals]
        cells.append([name, *rates, _gigabytes(row["peak_bytes"]), step, f"{row['loss']:.3f}", row["clocks"] or ""])
    heads = "run | >tokens per s | >times dense | goal | >peak GB | >step ms | >loss | "
    return ["", "## Training runs", "", *_table(heads, cells)]


def _inference(found: dict) -> list[str]:
    if not found:
        return []
    lines = ["", "## Inference", "", "Four decoder layers of Llama 8B, eval mode, no gradients.", ""]
    lines += [f"- {way}: {row['error']}" for way, row in found["memory"].items()]
    cells = []
    for name, row in found["rows"].items():
        if "error" in row:
            cells.append([name, row["error"]])
            continue
        for way, times in row["rows"].items():
            goals = _verdicts(row["goals"]) if way == "auto" else ""
            cells.append([name, way, _us(times), _ratio(times["speed_up"]), _gigabytes(times["peak_bytes"]), goals])
    return lines + _table("workload | way | >us | >times dense | >peak GB | goals", cells)


def _tuning(rows: dict) -> list[str]:
    if not rows:
        return []
    cells = []
    for name, row in rows.items():
        times = [_us({"median_us": row[key]} if row[key] is not None else {}) for key in ("sparse_us", "dense_us")]
        algorithm = "" if row["algorithm"] is None else "/".join(map(str, row["algorithm"]))
        cells.append([name, row["backend"], algorithm, *times, row["reason"]])
    heads = "product | runs | algorithm | >sparse us | >dense us | why"
    return ["", "## What the tuner says", "", *_table(heads, cells)]


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
