"""Perplexity of SmolLM2-135M, pruned 2:4 in one pass, with int8 values beside bf16 ones.

By default on two texts of the package gensim (`pip install --no-deps gensim`), which is not imported: articles of
Wikipedia, whose first part also calibrates the pruning, and news, which nothing saw. Few tokens at a time run the
kernels that generate text, which may round activations, too; a whole block at a time runs those of prompts.
"""

import math
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from benchmarks.run import Row, Run, Section
from torch import Tensor
from torch.nn.functional import cross_entropy

from hf_sparse24.methods import ONESHOT_METHOD

from ..pretrained.texts import DUMP, articles
from .cpu_models import FORMATS, SMOLLM2, build, smollm2

NEWS = "lee_background.cor"
WAYS = {way: ("float", settings) for way, settings in FORMATS.items()}
WAYS["int8 by oneshot"] = ("int8", FORMATS["packed int8"])
INT8 = ("packed int8", "int8 by oneshot")
"""What `oneshot` rounds to, and the settings of the export, which rounds to nearest."""

ALLOWED = 1.005
"""A goal: at most so many times the perplexity of bf16 values."""


def gensim_texts() -> dict[str, str]:
    """Two texts of the package gensim.

    Raises:
        RuntimeError: it is not installed.
    """
    found = find_spec("gensim")
    if found is None:
        raise RuntimeError("the texts come from a package: pip install --no-deps gensim, or name files with --texts")
    folder = Path(found.submodule_search_locations[0]) / "test" / "test_data"
    return {"Wikipedia": "\n\n".join(articles((folder / DUMP).read_bytes())), "news": (folder / NEWS).read_text()}


def encode(text: str, quick: bool) -> Tensor:
    if quick:
        return torch.tensor(list(text.encode()))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2().parent, gguf_file=smollm2().name)
    return torch.tensor(tokenizer(text)["input_ids"])


@torch.no_grad()
def losses(model: Any, blocks: Tensor, chunk: int) -> list[float]:
    """The loss of each block in nats per token, of so many tokens at a time."""
    found = []
    for ids in blocks:
        cache, logits = None, []
        for part in ids[None].split(chunk, 1):
            output = model(part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits[0].float())
        found.append(cross_entropy(torch.cat(logits)[:-1], ids[1:]).item())
    return found


class Perplexity(Section):
    name = "perplexity"
    note = (
        f"{SMOLLM2}-Instruct (dequantized from Q4_1), all linear layers pruned 2:4 by SparseGPT on Wikipedia, exported "
        "in bf16. Int8 values are rounded to nearest by the export, or by oneshot for the layer's output. Over packed: "
        "the mean difference of the losses of blocks, with its standard error."
    )

    def __init__(self, quick: bool, files: list[Path] | None, folder: Path):
        self.quick, self.folder = quick, folder
        self.length, self.blocks, self.calibration = (32, 3, 4) if quick else (512, 32, 48)
        if quick:
            texts = {"this file": Path(__file__).read_text(), "another": Path(__file__).with_name("cpu.py").read_text()}
        else:
            texts = {path.name: path.read_text() for path in files} if files else gensim_texts()
            smollm2()
        self.texts, self.tokens = texts, {}
        self.found: dict[tuple[str, str], tuple[list[float], float]] = {}

    def entries(self) -> list[str]:
        return [f"{name}, {n} tokens at a time" for name in self.texts for n in (16, self.length)]

    def cut(self, text: str) -> tuple[Tensor, Tensor]:
        """The blocks for calibration, from the beginning, and for evaluation, which follow them."""
        if text not in self.tokens:
            self.tokens[text] = encode(self.texts[text], self.quick)
        count = self.calibration + self.blocks
        rows = self.tokens[text][: count * self.length]
        if len(rows) < count * self.length:
            raise ValueError(f"{text}: {count * self.length} tokens are needed, it has {len(rows)}: name a longer text")
        return rows.view(count, self.length).split([self.calibration, self.blocks])

    def exports(self) -> dict[str, Path]:
        """Exports of the pruned model; made unless all are there."""
        from hf_sparse24 import Sparse24Config, export_model, oneshot

        name = "tiny Llama" if self.quick else SMOLLM2
        paths = {way: self.folder / f"{name} pruned {way}".replace(" ", "-") for way in WAYS}
        if all((path / "config.json").exists() for path in paths.values()):
            return paths
        calibration = self.cut(next(iter(self.texts)))[0].split(4)
        for values in ("float", "int8"):
            model = build(name).bfloat16()
            config = Sparse24Config(method=ONESHOT_METHOD, target_modules="all-linear")
            oneshot(model, calibration, config, criterion="sparsegpt", reconstruct=None, values=values)
            for way, (rounded, settings) in WAYS.items():
                if rounded == values:
                    export_model(model, paths[way], **settings)
        return paths

    def measure(self, run: Run, entry: str) -> Row:
        from transformers import AutoModelForCausalLM

        text, chunk = entry.rsplit(", ", 1)[0], int(entry.rsplit(", ", 1)[1].split()[0])
        times, facts, found = {}, {}, {}
        for way, path in self.exports().items():
            model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
            blocks, start = self.cut(text)[1], time.perf_counter()
            found[way] = losses(model, blocks, chunk)
            times[way] = {"us": (time.perf_counter() - start) / blocks.numel() * 1e6}
            facts[f"{way}, perplexity"] = math.exp(statistics.mean(found[way]))
            facts[f"{way}, blocks of {self.length} tokens"] = len(blocks)
        for way in INT8:
            differences = [int8 - bf16 for int8, bf16 in zip(found[way], found["packed"])]
            mean, error = statistics.mean(differences), statistics.stdev(differences) / len(differences) ** 0.5
            facts |= {f"{way} over packed": math.exp(mean), f"{way}, standard error": error}
            print(f"{way}: {math.exp(mean):.5f} of the perplexity of packed, standard error {error:.5f}", flush=True)
        return {"times": times, "facts": facts | {"allowed": ALLOWED}}
