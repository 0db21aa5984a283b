"""Where the figures of the README and the guides come from.

- `figures` computes each one from the committed result files.
- `STATED` has templates. Filled with the figures, each stands on its page word for word.
- `FIXED` has those that no result changes: they follow from a format or a rule, or others published them.
"""

import json
import math
import statistics
from pathlib import Path

import frontier_page
import gpu_page
import methods_runs
import pretrained_page as smollm2
import scaling_page

CORPORA = {"": "validation", "_wikipedia": "unseen_wikipedia", "_documentation": "unseen_documentation"}
ONE_SHOT = {
    "dense": "dense",
    "oneshot": "oneshot",
    "sparsegpt": "ours, sparsegpt alone",
    "llm_compressor": "llm-compressor, sparsegpt",
    "llm_compressor_own": "llm-compressor, sparsegpt, own text",
    "modelopt": "modelopt, sparsegpt",
}
WAYS = {"dense": "dense bf16", "packed": "2:4 bf16", "int8": "16:32 int8"}
WAYS |= {name: f"llama.cpp {name}" for name in ("F16", "Q8_0", "Q4_K_M")}
WAYS |= {name: f"OpenVINO {name}" for name in ("INT8", "INT4")}


def figures(results: Path) -> dict[str, float]:
    """Every figure by its name in `STATED`, from the result files in a folder."""
    runs = [json.loads(path.read_text()) for path in sorted((results / "pretrained/runs").glob("*.json"))]
    return (
        _one_shot(runs)
        | _trained(runs)
        | _decoding(results)
        | _methods(results)
        | _by_size(results)
        | _step_times(results)
        | _sparse_steps(results)
        | _packed_master(results)
        | _served(results)
        | _averaged(results)
        | _on_gpu(results / "gpu")
    )


def _one_shot(runs: list[smollm2.Run]) -> dict[str, float]:
    found = {}
    for name, variant in ONE_SHOT.items():
        (run,) = (run for run in smollm2.at(runs, 0) if run["variant"] == variant)
        found |= {f"{name}{end}": smollm2.perplexity(run, corpus) for end, corpus in CORPORA.items()}
        found |= {f"{name}_cpu": run["cost"].get("cpu_s", 0.0)}
    (wide,) = (run for run in smollm2.at(runs, 0) if run["variant"] == "oneshot 16:32")
    found |= {f"oneshot_16_32{end}": smollm2.perplexity(wide, corpus) for end, corpus in CORPORA.items()}
    found |= {"oneshot_16_32_cpu": wide["cost"]["cpu_s"]}
    for name in ("oneshot", "oneshot_16_32", "sparsegpt", "llm_compressor", "modelopt"):
        found |= {f"{name}{end}_x": found[f"{name}{end}"] / found[f"dense{end}"] for end in CORPORA}
    found["oneshot_cpu_x"] = (found["oneshot_cpu"] + WRITING) / found["sparsegpt_cpu"]
    return found


TRAINED = {"labels": "fixed-mask", "teacher": "fixed-mask, teacher", "light": "fixed-mask, teacher at 1/3"}
TRAINED |= {"dense": "dense"}
WRITING = 520
"""CPU seconds in which the dense model wrote text for `oneshot`. No result file has it: recipes/LOG.md, 2026-11-23."""


def _trained(runs: list[smollm2.Run]) -> dict[str, float]:
    """Perplexities after training, and of moving masks over the kept one that had the same tokens, teacher and seed."""
    found = {}
    found["s_ste_from_dense"] = smollm2.perplexity(smollm2.best_rate(runs, "s-ste from dense", 30_000), "validation")
    for name, variant in TRAINED.items():
        for tokens in (30_000, 100_000, 300_000):
            if (run := smollm2.best_rate(runs, variant, tokens)) is None:
                continue
            found[f"{name}_{tokens}_cpu"] = run["cost"]["cpu_s"]
            found |= {f"{name}_{tokens}{end}": smollm2.perplexity(run, corpus) for end, corpus in CORPORA.items()}
    ratios = []
    for run in runs:
        moving = run["variant"].removesuffix(", teacher")
        light = moving == "cast"  # published with a lighter teacher, and so compared with that
        if run["tokens"] and moving in ("sr-ste", "s-ste", "slope", "ast", "cast"):
            control = "fixed-mask, teacher" + " at 1/3" * light
            pair = [smollm2.best_rate(runs, name, run["tokens"], run["seed"]) for name in (run["variant"], control)]
            if pair[0] is run:
                ratios += [smollm2.perplexity(run, c) / smollm2.perplexity(pair[1], c) for c in smollm2.SHORT]
    gain = math.ceil(100 * (1 - min(ratios)))
    return found | {"moving_low": min(ratios), "moving_high": max(ratios), "moving_gain": gain}


def _decoding(results: Path) -> dict[str, float]:
    """Tokens per second by two threads, and perplexity over dense, of rows of the frontier."""
    found = {}
    for model, name in {"small": frontier_page.MODEL, "large": frontier_page.LARGE}.items():
        rows = frontier_page.read(results / "frontier", name)
        speeds = {short: -frontier_page.AXES["speed, two threads"](rows[row]) for short, row in WAYS.items()}
        found |= {f"{model}_{short}": speed for short, speed in speeds.items()}
        for short in ("packed", "F16"):
            found[f"{model}_{short}_x_dense"] = rows[WAYS[short]]["speed"]["2"]["over dense bf16"][1]
        found[f"{model}_packed_x_F16"] = speeds["packed"] / speeds["F16"]
        if model == "small":
            for short, row in WAYS.items():
                found[f"{short}_x"] = float(frontier_page.perplexity(rows, rows[row], "validation"))
                found[f"{short}_mb"] = rows[row]["bytes"] / 1e6
                found[f"{short}_kl"] = frontier_page.kl(rows[row]) or 0.0
    return found


def _methods(results: Path) -> dict[str, float]:
    runs = methods_runs.read_runs(results / "methods")
    dense = methods_runs.best_runs(runs, "dense")
    found: dict[str, float] = {"dense_loss": statistics.mean(run["eval_loss"] for run in dense.values())}
    for method in ("fixed-mask", "s-ste", "t-sr-ste", "sr-ste", "step", "slope"):
        best = methods_runs.best_runs(runs, method)
        name = method.replace("-", "_")
        found[f"{name}_over"] = statistics.mean(methods_runs.gaps(dense, best))
        found[f"{name}_loss"] = statistics.mean(run["eval_loss"] for run in best.values())
        flips = dict(zip(best[0]["steps"], best[0].get("flip_rate", [])))
        found |= {f"{name}_flips_{step}": 100 * rate for step, rate in flips.items() if rate is not None}
    return found


def _by_size(results: Path) -> dict[str, float]:
    """The mean gap of `s-ste`, the smallest model first."""
    runs = scaling_page.read(results / "scaling")
    gaps = [scaling_page.gaps(runs, size, "s-ste") for size in scaling_page.sizes(runs)]
    return {f"gap_{number}": statistics.mean(found) for number, found in enumerate(gaps)}


def _on_gpu(folder: Path) -> dict[str, float]:
    gains, step = gpu_page.gains_of_large(folder), gpu_page.steps(folder)
    host = gpu_page.read(folder, "first_run")["host, us"]["8192 tokens: our operator"] / 1e3
    times = [row["times"] for name, row in gpu_page.gemm_rows(folder).items() if "8B MLP" in name and ", 8192" in name]
    found = {"gemm_low": min(gains), "gemm_high": max(gains), "host_ms": host}
    first = gpu_page.read(folder, "first_run")
    weight = first["forms of a weight 14336x4096 in fp32, us"]
    found |= {"compressed_low": weight["s-ste: compressed"], "compressed_high": weight["mask: compressed both ways"]}
    found |= {"cuslt_ms": first[gpu_page.COMPRESSED]["14336x4096"] / 1e3}
    found |= {"gemm": statistics.median(each["dense"]["us"] / each["sparse"]["us"] for each in times)}
    found |= {"gemm_saves_ms": statistics.median(each["dense"]["us"] - each["sparse"]["us"] for each in times) / 1e3}
    found |= {"all_layers": 3 / (2 / found["gemm"] + 1)}
    return found | {"gpu_step_low": step["dense"] / step["t-sr-ste"], "gpu_step_high": step["dense"] / step["s-ste"]}


def _step_times(results: Path) -> dict[str, float]:
    rows = json.loads((results / "cpu_step_time.json").read_text())["sections"]["pruning"]["rows"]
    found, ratios = {}, {}
    for name, model in {"gpt2": "gpt2-124m", "llama": "llama-quickstart"}.items():
        (facts,) = (row["facts"] for key, row in rows.items() if key.startswith(model))
        ratios[name] = {fact.split()[0]: 1 / x[1] for fact, x in facts.items() if fact.endswith(" over dense")}
        found |= {f"step_{name}_low": min(ratios[name].values()), f"step_{name}_high": max(ratios[name].values())}
    found["step_gpt2_fixed_mask"] = ratios["gpt2"]["fixed-mask"]
    s_ste = [each["s-ste"] for each in ratios.values()]
    return found | {"s_ste_step_low": min(s_ste), "s_ste_step_high": max(s_ste)}


SPARSE = ("t-sr-ste", "s-ste", "fixed-mask")


def _sparse_steps(results: Path) -> dict[str, float]:
    rows = json.loads((results / "cpu_training.json").read_text())["sections"]["training"]["rows"]
    steps = {name: row["facts"] for name, row in rows.items() if row["facts"]["part"] == "steps"}
    sparse = [x[1] for facts in steps.values() for fact, x in facts.items() if fact.split(" over ")[0] in SPARSE]
    found = {"sparse_steps": len(sparse), "sparse_steps_faster": sum(speedup > 1 for speedup in sparse)}
    one = {name: facts for name, facts in steps.items() if name.endswith("1 thread")}
    names = {name: f"{'llama' if 'Llama' in name else 'gpt2'}_{facts['path']}" for name, facts in one.items()}
    found |= {"llama_bf16": next(iter(one.values()))["dense, bf16 over dense"][1]}  # of the best path's first
    return found | {names[name]: facts["t-sr-ste over dense"][1] for name, facts in one.items()}


def _packed_master(results: Path) -> dict[str, float]:
    result = json.loads((results / "packed_master.json").read_text())
    small, found = result["smollm2-135m"], {}
    for name, facts in {"dense": small["kinds"]["dense"], "masked": small["kinds"]["fixed-mask"]}.items():
        found |= {f"{key}_{name}": value for key, value in _megabytes(facts).items()}
    found |= {f"{key}_master": value for key, value in _megabytes(small["kinds"]["packed master"]).items()}
    found |= {f"peak_{name}_x": found[f"peak_{name}"] / found["peak_dense"] for name in ("masked", "master")}
    found["peak_without_aids_x"] = small["without_aids"]["packed_over_dense"]
    times = small["paired"]["over_dense"]
    found |= {"time_masked_x": times["fixed-mask"], "time_master_x": times["packed master"]}
    return found | {"peak_1b": result["1b"]["kinds"]["packed master"]["peak_bytes"] / 1e9}


def _megabytes(facts: dict[str, float]) -> dict[str, float]:
    sizes = {"weights": facts["parameter_bytes"] + facts["buffer_bytes"], "gradients": facts["gradient_bytes"]}
    sizes |= {"moments": facts["optimizer_bytes"], "peak": facts["peak_bytes"]}
    return {key: size / 1e6 for key, size in sizes.items()}


def _served(results: Path) -> dict[str, float]:
    found = {}
    for row in json.loads((results / "vllm_throughput.json").read_text())["rows"]:
        for way, name in {"dense": "dense", "packed": "packed", "packed int8": "int8"}.items():
            start = f"served_{row['requests']}_{name}"
            found[start] = row[f"{way}, tokens per s"]["median"]
            if name != "dense":
                found |= {f"{start}_x_{key}": value for key, value in row[f"{way}, times as fast as dense"].items()}
    return found


def _averaged(results: Path) -> dict[str, float]:
    rows = json.loads((results / "averaging.json").read_text())["rows"]
    found = {f"{shared}_{key}": value for shared, row in rows.items() for key, value in row.items()}
    return {name.replace(" ", "_"): value for name, value in found.items()} | {
        f"{shared.replace(' ', '_')}_zeros": 100 * row["zeros"] for shared, row in rows.items()
    }


def _average(shared: str) -> str:
    losses = " | ".join(f"{{{shared}_{key}:.2f}}" for key in ("average", "magnitude", "oneshot"))
    return f"| {{{shared}_zeros:.1f}} % | {{{shared}_first:.2f}}, {{{shared}_second:.2f}} | {losses} |"


FASTER = (
    "decodes {small_packed_x_dense:.2f} to {large_packed_x_dense:.2f} times as fast as dense PyTorch, which is slow: "
    "llama.cpp's F16 is {large_F16_x_dense:.1f} to {small_F16_x_dense:.1f} times as fast as it, and packed 2:4 "
    "{small_packed_x_F16:.1f} to {large_packed_x_F16:.1f} times as fast as F16"
)
"""The one answer to "is it faster?", on every page that gives one."""
STEPS = "in {sparse_steps_faster} of {sparse_steps} cases"


def _flips(method: str, unit: str = "", digits: int = 2) -> str:
    cells = [f"{{{method.replace('-', '_')}_flips_{step}:.{digits}f}}" for step in (200, 400, 1000, 2000, 3000)]
    return f"| `{method}`{unit} | {' | '.join(cells)} |"


GEMM = "On an H100 a GEMM of Llama 8B's MLPs is {gemm:.1f} times as fast"

STATED: dict[str, list[str]] = {
    "README.md": [
        FASTER,
        "{gemm_low:.2f} to {gemm_high:.2f} times as fast as dense; a training step was slower than dense, "
        "{gpu_step_low:.2f} to {gpu_step_high:.2f}",
        "written in one pass: {compressed_low:.0f} to {compressed_high:.0f} us for a weight of Llama 8B, where "
        "cuSPARSELt takes {cuslt_ms:.1f} ms",
        "perplexity {oneshot_x:.2f} times the dense model's",
        "perplexity over dense {oneshot_x:.2f} at 2:4, {oneshot_16_32_x:.2f} at 16:32; SparseGPT by llm-compressor "
        "{llm_compressor_x:.2f}. On Wikipedia, unlike the text it was pruned by: {oneshot_wikipedia_x:.2f}, "
        "{oneshot_16_32_wikipedia_x:.2f} and {llm_compressor_wikipedia_x:.2f}",
        "[{s_ste_over:.2f} nats](docs/measured/methods.md) over dense",
        "ends {s_ste_over:.2f} nats over dense; on another text {gap_0:.2f} (0.46M parameters), {gap_1:.2f} (1.6M), "
        "{gap_2:.2f} (3M)",
        "[{llama_avx512_bf16:.2f} times](docs/measured/costs.md) as fast as dense",
        "Llama of 4 layers {llama_avx512_bf16:.2f} times as fast as dense, of GPT-2 124M {gpt2_avx512_bf16:.2f}",
        "with AVX2 {llama_avx2:.2f} and {gpt2_avx2:.2f}",
        "dense bf16 is {llama_bf16:.1f} times as fast as dense fp32",
        "| dense, PyTorch bf16 | {dense_mb:.0f} | 1.00 | {small_dense:.0f} | {large_dense:.1f} |",
        "| 2:4 packed, bf16 | {packed_mb:.0f} | {oneshot_x:.2f} | {small_packed:.0f} | {large_packed:.1f} |",
        "| 16:32 packed, int8 values | {int8_mb:.0f} | {int8_x:.2f} | {small_int8:.0f} | {large_int8:.1f} |",
        "| llama.cpp Q8_0 | {Q8_0_mb:.0f} | {Q8_0_x:.2f} | {small_Q8_0:.0f} | {large_Q8_0:.1f} |",
        "| llama.cpp Q4_K_M | {Q4_K_M_mb:.0f} | {Q4_K_M_x:.2f} | {small_Q4_K_M:.0f} | {large_Q4_K_M:.1f} |",
        "takes {oneshot_cpu_x:.0f} times SparseGPT's CPU time",
        "no method gains more than {moving_gain} % over one kept mask",
        "is {moving_low:.2f} to {moving_high:.2f} times that of `fixed-mask`",
    ],
    "docs/guides/tuning.md": [
        "large GEMMs of 0.8.0 were {gemm:.1f} times as fast as dense",
        "The host of [our H100](../measured/gpu.md) takes {host_ms:.1f} ms to start a sparse GEMM",
    ],
    "docs/start/limits.md": ["Large GEMMs were {gemm:.1f} times as fast as dense"],
    "docs/index.md": [FASTER, STEPS],
    "docs/comparison.md": [
        *(f"{{{way}_x:.2f}} | {{{way}_cpu:,.0f}} |" for way in ("oneshot", "sparsegpt", "llm_compressor", "modelopt")),
        *(
            f"{{small_{way}:.0f}} | {{{way}_kl:.3f}} | {{large_{way}:.1f}} |"
            for way in ("dense", "packed", "int8", "F16", "Q8_0", "Q4_K_M", "INT8", "INT4")
        ),
        "vLLM decodes {served_1_dense:.1f} tokens per second dense and {served_1_packed:.1f} packed",
    ],
    "docs/faq.md": [FASTER, STEPS, GEMM],
    "docs/start/does_it_help.md": [
        "| {all_layers:.2f} | all linear layers, where two of three GEMMs are sparse (`s-ste`)",
        "| 3 / (2 / {gemm:.2f} + 1); {gemm:.2f} is",
        "GEMMs of Llama 8B's MLPs are {gemm:.1f} times as fast, and a step of the Trainer was {gpu_step_low:.2f} to "
        "{gpu_step_high:.2f} times as fast as dense",
        FASTER,
        STEPS,
        "{served_1_packed_x_median:.2f} times with one request at a time and {served_16_packed_x_median:.2f} with 16",
        "| Llama of 0.46M, from scratch, validation loss | {dense_loss:.2f} | {s_ste_loss:.2f} |",
        "| SmolLM2-135M, perplexity | {dense:.1f} | {oneshot:.1f} |",
        "takes {step_gpt2_low:.2f} to {step_gpt2_high:.2f} times the dense step for GPT-2 124M, and "
        "{step_llama_low:.2f} to {step_llama_high:.2f} times for a small Llama",
        "`fixed-mask` took {peak_masked_x:.2f} times the",
        "{time_masked_x:.2f} times at 64 tokens of SmolLM2-135M's shape",
    ],
    "docs/guides/oneshot.md": [
        "perplexity {oneshot:.1f} on text like the given and {oneshot_documentation:.1f} on a technical manual (dense: "
        "{dense:.1f} and {dense_documentation:.1f}), with 98,304 tokens, 3 passes and {oneshot_cpu:,.0f} CPU seconds",
        "took {sparsegpt_cpu:.0f} CPU seconds and left {sparsegpt:.1f} and {sparsegpt_documentation:.1f}",
        "{labels_30000:.1f} by labels alone, {teacher_30000:.1f} with this teacher, and {light_30000:.1f} with",
        "left {teacher_100000:.1f} with this teacher and {light_100000:.1f} with 1/3",
        "({labels_300000:.1f} and {teacher_300000:.1f})",
        "{teacher_300000_wikipedia:.1f} against {labels_300000_wikipedia:.1f}",
    ],
    "docs/start/which_way.md": [
        "perplexity {oneshot_16_32:.1f} at 16:32, {oneshot:.1f} at 2:4, {dense:.1f} dense. Pruning took "
        "{oneshot_16_32_cpu:,.0f} CPU seconds at 16:32 and {oneshot_cpu:,.0f} at 2:4",
        "perplexity {dense:.1f} becomes {oneshot:.1f}, in {oneshot_cpu:,.0f} CPU seconds and 520 to write text; "
        "`reconstruct=None` leaves {sparsegpt:.1f} in {sparsegpt_cpu:.0f}",
        "bring {oneshot:.1f} down to {teacher_300000:.1f}, in {teacher_300000_cpu:,.0f} CPU seconds (the dense model, "
        "trained on them too: {dense_300000:.1f})",
        "{s_ste_over:.2f} nats over dense",
        "On a CPU a step takes {s_ste_step_low:.2f} to {s_ste_step_high:.2f} times a dense one",
        "{t_sr_ste_over:.2f} nats over dense by the default decay",
        "left, after {oneshot_cpu:,.0f} CPU seconds and 520 to write text",
        "by `s-ste` from the dense weights was {s_ste_from_dense:.0f}, and {labels_30000:.1f} by `fixed-mask`",
    ],
    "docs/guides/averaging.md": [_average(shared) for shared in ("nothing", "start", "dense_model", "mask")],
    "docs/guides/logs.md": [_flips("s-ste"), _flips("sr-ste"), _flips("t-sr-ste", ", per refresh", 1)],
    "docs/guides/packed_master.md": [
        "| weights and masks, MB | {weights_dense:.0f} | {weights_masked:.0f} | {weights_master:.0f} |",
        "| gradients, MB | {gradients_dense:.0f} | {gradients_masked:.0f} | {gradients_master:.0f} |",
        "| AdamW's moments, MB | {moments_dense:,.0f} | {moments_masked:,.0f} | {moments_master:.0f} |",
        "| peak memory of the process, MB | {peak_dense:,.0f} | {peak_masked:,.0f} | {peak_master:,.0f} |",
        "| peak over dense | 1 | {peak_masked_x:.2f} | {peak_master_x:.3f} |",
        "| CPU time of a step over dense, median of 6 turns | 1 | {time_masked_x:.2f} | {time_master_x:.2f} |",
        "peak was {peak_without_aids_x:.2f} of dense training's",
        "took two steps in {peak_1b:.1f} GB at its peak",
        "at 1,024 tokens `fixed-mask` took [{step_gpt2_fixed_mask:.2f} times](../measured/costs.md)",
    ],
    "docs/guides/serving.md": [
        f"| {requests} | {{served_{requests}_dense:.1f}} | "
        + " | ".join(
            f"{{served_{requests}_{way}:.1f}}, {{served_{requests}_{way}_x_median:.2f}} times "
            f"({{served_{requests}_{way}_x_min:.2f}} to {{served_{requests}_{way}_x_max:.2f}})"
            for way in ("packed", "int8")
        )
        for requests in (1, 4, 16)
    ],
    "docs/concepts/index.md": ["`s-ste` ends {s_ste_over:.2f} nats over dense in the mean of three seeds"],
    "docs/methods/index.md": [
        "no method gains more than {moving_gain} % over one kept mask",
        "is {moving_low:.2f} to {moving_high:.2f} times that of `fixed-mask`",
        "`s-ste` and `slope` end {s_ste_over:.2f} nats over dense, `fixed-mask` {fixed_mask_over:.2f} and `t-sr-ste` "
        "{t_sr_ste_over:.2f}",
        "`s-ste` and `slope` end {slope_over:.2f} nats over dense",
    ],
}

FIXED = [
    "compute capability 8.0",
    "by bytes alone its GEMM is 1.78 times as fast, and 3.1 times with int8 values",  # 16/9, and 1 / (5/16 + 1/128)
    "a dense one alone are 17.6 GB",  # 1.1B parameters of 16 bytes
    "0.745 (rows) or 0.703 (transposable masks) for new weights",  # of Gaussian weights
    "falls from 1.5 to 0 as the decay grows; 2 lies between 0.60 and 0.95",  # a toy layer, drawn by docs/figures
    "flip 0.60 to 0.95 times as often",  # the rule of arXiv 2404.01847, which the code applies
    "the sparse loss is more than 0.5 higher",
    "1 bit a weight, 41 GB for 405B",
    "at least 2 % faster",
    "where 1.02 is required",
    "trained on up to 4 times",  # these are of hf_sparse24/tools/prune_job.py
    "| 18 GB and 28 GB with training, 6 GB and 8 GB without",
    "about 20 seconds for each",
    "some ten seconds",
    "(80 GB)",
    "cut at 5 GB",
    # of others, with a link on the page
    "With sparse weights alone, published training is 1.06",
    "to 1.25 times ([OPT-33B]",
    "| 1.5 to 1.6 | one GEMM",
    "from 2048 tokens on; 0.87 at up to 128 tokens",
    "| 1.06 | end to end, ViT-L",
    "| 1.25 | end to end, OPT-33B",
    "| 1.4 to 1.7 | end to end",
    "| 5.12 | 10.42 | SparseGPT",
    "| 5.12 | 6.72 | MaskLLM",
    "63.19 points on the Open LLM average dense and 62.16",
]
