"""SmolLM2-135M made sparse in every way, for several numbers of training tokens: a JSON a run in `results/pretrained/`.

    make evidence                                            # the material, all runs that are missing, then the page
    python recipes/pretrained/measure.py --only dense fixed-mask --tokens 30000

A run that has its JSON is not repeated, so the work can be cut into pieces, and several processes can share it. Seed 0
finds each variant's learning rate at the smallest number of tokens: it goes up or down `RATES` from `START` until the
best has a worse one on either side. Larger budgets and other seeds take the best.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from evaluation import Evaluation, read_documents, samples
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed

import hf_sparse24_command
from hf_sparse24 import DistillationConfig, Sparse24Config, Sparse24Trainer, export_model, oneshot, patch_model
from hf_sparse24.progress import Progress
from hf_sparse24.pruning import calibration, replay

sys.path.insert(0, str(Path(__file__).parents[1]))
import methods.ast  # noqa: F401  registers a method outside the package
from methods_runs import best_rate, next_rate
from running import run as run_script
from running import versions
from stdlib_text import replace_file

RECIPES = Path(__file__).resolve().parents[1]
RESULTS = RECIPES / "results" / "pretrained" / "runs"
MATERIAL = Path("runs/pretrained")
CORPORA = ("validation", "validation_chat", "unseen_wikipedia", "unseen_documentation")
DOCUMENTS = 16
"""Of each corpus, all of the same length."""

PATTERNS = ("2:4", "16:32", "8:16", "6:8")
"""What `oneshot` prunes to."""

APART = "oneshot, attention and MLP apart"
OTHERS = [APART, "oneshot at 0.005", "oneshot at 0.02"]
"""And by other parts than whole blocks, or other learning rates than its default of 0.01, where all variants run."""

TOKENS = (30_000, 100_000, 300_000)
RATES = (1.6e-3, 8e-4, 4e-4, 2e-4, 1e-4, 5e-5, 2.5e-5)
START = 2e-4
BLOCK, BATCH = 256, 2
"""Tokens of a training sequence, and sequences of a step unless the variant has others."""

CALIBRATION, OWN, CALIBRATION_LENGTH = 96, 288, 256
"""Sequences to prune by, given ones and those that the dense model writes, and their tokens: 24,576 and 73,728 tokens.

Each is a batch, so that blocks train in many steps.
"""


@dataclass(frozen=True)
class Variant:
    """A way to a model that is sparse in every linear layer.

    Attributes:
        method: as in `Sparse24Config`; None trains a dense model, the control.
        pruned: whether it starts from the model that `oneshot` pruned, and not from the dense one.
        teacher: whether it learns the dense model's predictions.
        distillation: how much they count; None for the default.
        lora: whether an adapter is trained, and merged under the mask.
        settings: of the method.
        pattern: N:M of the weights.
        passes: over the tokens that `oneshot` prunes by, to train on after SparseGPT, as many as `oneshot` takes. 0: it
            trains on the training text, from what `oneshot` pruned.
        batch: sequences of a step.
    """

    method: str | None
    pruned: bool = True
    teacher: bool = False
    distillation: DistillationConfig | None = None
    lora: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    pattern: str = PATTERNS[0]
    passes: int = 0
    batch: int = BATCH

    def start(self, material: "Material") -> Path:
        """The folder of the model that it trains."""
        if not self.pruned:
            return material.source
        options = {"with_own": False, "reconstruct": None} if self.passes else {}
        return material.pruned(pattern=self.pattern, **options)


NO_TAIL = {"dense_tail": 0}  # a tail would leave the model dense
# Results of `cast` stay in `results/pretrained`: the code of commit 49d34cb made them.
LIGHT = DistillationConfig(weight=1 / 3, temperature=1.0)
VARIANTS = {
    "dense": Variant(None, pruned=False),
    "fixed-mask": Variant("fixed-mask"),
    "fixed-mask, teacher": Variant("fixed-mask", teacher=True),
    # With the weights of CAST's paper: labels count more, which alone helps on text of the kinds that training has.
    "fixed-mask, teacher at 1/3": Variant("fixed-mask", teacher=True, distillation=LIGHT),
    "fixed-mask 16:32": Variant("fixed-mask", pattern="16:32"),
    "fixed-mask 16:32, teacher at 1/3": Variant("fixed-mask", teacher=True, distillation=LIGHT, pattern="16:32"),
    "lora": Variant("fixed-mask", lora=True),
    "lora, teacher": Variant("fixed-mask", teacher=True, lora=True),
    "sr-ste, teacher": Variant("sr-ste", teacher=True),
    "s-ste, teacher": Variant("s-ste", teacher=True),
    "s-ste from dense": Variant("s-ste", pruned=False),
    "s-ste from dense, teacher": Variant("s-ste", pruned=False, teacher=True),
    "sr-ste from dense": Variant("sr-ste", pruned=False),
    "sr-ste from dense, teacher": Variant("sr-ste", pruned=False, teacher=True),
    "slope, teacher": Variant("slope", teacher=True),
    "ast, teacher": Variant("ast", teacher=True),
    "ast from dense, teacher": Variant("ast", pruned=False, teacher=True),
    "t-sr-ste from dense": Variant("t-sr-ste", pruned=False, settings=NO_TAIL),
    "t-sr-ste from dense, teacher": Variant("t-sr-ste", pruned=False, teacher=True, settings=NO_TAIL),
    "sparsegpt, trained as long as oneshot": Variant("fixed-mask", teacher=True, passes=3),
    "sparsegpt, trained as long as oneshot, batches of one": Variant("fixed-mask", teacher=True, passes=3, batch=1),
}

RATE_OF = {
    "fixed-mask": "fixed-mask, teacher",
    "fixed-mask, teacher at 1/3": "fixed-mask, teacher",
    "fixed-mask 16:32, teacher at 1/3": "fixed-mask 16:32",
    "lora": "lora, teacher",
    "slope, teacher": "fixed-mask, teacher",
    "sr-ste, teacher": "fixed-mask, teacher",
    "s-ste, teacher": "fixed-mask, teacher",
    "s-ste from dense, teacher": "s-ste from dense",
    "sr-ste from dense, teacher": "sr-ste from dense",
    "t-sr-ste from dense": "sr-ste from dense",
    "t-sr-ste from dense, teacher": "sr-ste from dense",
}
"""Variants that take the learning rate of another, which trains as many weights from the same start."""


@dataclass
class Material:
    """The model, its tokenizer and the texts, read once."""

    folder: Path

    def __post_init__(self) -> None:
        self.source = self.folder / "SmolLM2-135M"
        self.tokenizer = AutoTokenizer.from_pretrained(self.source)
        self.dense = self.load(self.source).requires_grad_(False)
        self.teacher = self.load(self.source, torch.bfloat16)  # fp32 weights would be cast at every step
        self.corpora = {
            name: Evaluation(read_documents(self.text(name), self.tokenizer, DOCUMENTS), self.dense, self.tokenizer)
            for name in CORPORA
        }

    def load(self, source: Path, dtype: torch.dtype = torch.float32) -> Any:
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()

    def text(self, name: str) -> Path:
        return self.folder / "text" / f"{name}.jsonl"

    def blocks(self, name: str, length: int, most: int) -> list[list[int]]:
        """The first blocks of a text, its documents joined by the end-of-text token."""
        tokens: list[int] = []
        with self.text(name).open() as lines:
            for line in lines:
                tokens += [*self.tokenizer(json.loads(line)["text"])["input_ids"], self.tokenizer.eos_token_id]
                if len(tokens) >= length * most:
                    break
        if len(tokens) < length * most:
            raise ValueError(f"{self.text(name)} has {len(tokens):,} tokens, and {length * most:,} are needed")
        return [tokens[start : start + length] for start in range(0, length * most, length)]

    def calibration(self, with_own: bool) -> list[list[int]]:
        """The blocks to prune by: given text, and text of the model."""
        own = self.blocks("calibration_own", CALIBRATION_LENGTH, OWN) if with_own else []
        return self.blocks("calibration", CALIBRATION_LENGTH, CALIBRATION) + own

    def pruned(self, with_own: bool = True, pattern: str = PATTERNS[0], apart: bool = False, **options: Any) -> Path:
        """The folder of the model that `oneshot` prunes; made unless it is there, and what that cost is next to it.

        Args:
            with_own: whether the model's own text calibrates with the given one.
            pattern: that all linear layers get.
            apart: whether attention and MLP are blocks of their own.
            options: of `oneshot`, where they differ from its defaults.
        """
        changed = [pattern.replace(":", "-")] * (pattern != PATTERNS[0]) + ["given"] * (not with_own)
        changed += ["apart"] * apart + [f"{key}={value}" for key, value in options.items()]
        name = "-".join(["oneshot", *changed])
        path = self.folder / name
        if not (path / "cost.json").exists():
            model = self.load(self.source)
            batches = torch.tensor(self.calibration(with_own)).split(1)
            start = Cost()
            with halves() if apart else nullcontext(), torch.autocast("cpu", torch.bfloat16):
                config = Sparse24Config(method="fixed-mask", pattern=pattern, target_modules="all-linear")
                report = oneshot(model, batches, config, **options)
            print(report, flush=True)
            export_model(model, path)
            replace_file(path / "cost.json", json.dumps(start.spent()))
        return path

    def evaluate(self, model: Any, with_samples: bool = True) -> dict[str, Any]:
        found = {name: corpus.run(model) for name, corpus in self.corpora.items()}
        return {"corpora": found} | ({"samples": samples(model, self.tokenizer)} if with_samples else {})


@contextmanager
def halves() -> Iterator[None]:
    """Have `oneshot` reconstruct the attention and the MLP of a block each by itself (arXiv 2510.14444)."""
    whole = replay._blocks

    def parts(*args: Any) -> Iterator[tuple[Any, str]]:
        for block, name in whole(*args):
            found = [part for part in ("self_attn", "mlp") if hasattr(block, part)]
            yield from [(block.get_submodule(part), f"{name}.{part}") for part in found] or [(block, name)]

    part_of = patch.object(calibration, "_block_of", lambda model, name: ".".join(name.split(".")[:4]))
    with patch.object(replay, "_blocks", parts), part_of:
        yield


class Cost:
    """What the process spends from here on."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.monotonic(), time.process_time()
        if sys.platform == "linux":
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again

    def spent(self) -> dict[str, float]:
        spent = {"wall_s": time.monotonic() - self.wall, "cpu_s": time.process_time() - self.cpu}
        if sys.platform == "linux":
            kib = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]
            spent["peak_gb"] = int(kib) * 1024 / 1e9
        return {name: round(value, 2) for name, value in spent.items()}


def train(material: Material, variant: Variant, tokens: int, rate: float, seed: int, output: str) -> Trainer:
    """A trainer that has trained."""
    set_seed(seed)
    steps = tokens // (BLOCK * variant.batch)
    blocks = material.calibration(True) if variant.passes else material.blocks("train", BLOCK, steps * variant.batch)
    order = [i for _ in range(variant.passes or 1) for i in torch.randperm(len(blocks)).tolist()]
    model = material.load(variant.start(material))
    arguments = TrainingArguments(
        output,
        max_steps=steps,
        per_device_train_batch_size=variant.batch,
        learning_rate=rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 10),
        weight_decay=0.0,
        bf16=True,
        use_cpu=True,
        seed=seed,
        logging_steps=max(1, steps // 50),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    shared = {"args": arguments, "train_dataset": [{"input_ids": blocks[i], "labels": blocks[i]} for i in order]}
    if variant.method is None:
        trainer = Trainer(model, **shared)
    else:
        config = Sparse24Config(
            method=variant.method, pattern=variant.pattern, target_modules="all-linear", **variant.settings
        )
        patch_model(model, config)
        if variant.lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        teacher = material.teacher if variant.teacher else None
        trainer = Sparse24Trainer(model, **shared, teacher=teacher, distillation=variant.distillation)
    trainer.train()
    return trainer


def run(material: Material, name: str, tokens: int, rate: float, seed: int) -> dict[str, Any]:
    """What the JSON of a run holds."""
    variant = VARIANTS[name]
    variant.start(material)  # which is no cost of this run
    with tempfile.TemporaryDirectory() as output:
        start = Cost()
        trainer = train(material, variant, tokens, rate, seed, output)
        spent = start.spent()
        model = trainer.model.merge_and_unload() if variant.lora else trainer.model
        verified = None
        if variant.method is not None:
            export_model(model, output + "/export")
            verified = hf_sparse24_command.main(["verify", output + "/export"]) == 0
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {
        "variant": name,
        "tokens": tokens,
        "learning_rate": rate,
        "seed": seed,
        "verified": verified,
        "cost": spent,
        "steps": [log["step"] for log in logs],
        "loss": [round(log["loss"], 4) for log in logs],
        "flip_rate": [log.get("flip_rate") for log in logs],
        **material.evaluate(model, tokens > TOKENS[0]),
        **made_by(),
    }


def start_point(material: Material, name: str) -> dict[str, Any]:
    """The JSON of a model that nothing has trained: the dense one, or one that `oneshot` pruned."""
    options = {"learning_rate": float(name.split()[-1])} if " at " in name else {}
    pattern = next((pattern for pattern in PATTERNS if pattern in name), PATTERNS[0])
    path = material.source if name == "dense" else material.pruned(pattern=pattern, apart=name == APART, **options)
    cost = {} if name == "dense" else json.loads((path / "cost.json").read_text())
    found = {"variant": name, "tokens": 0, "learning_rate": 0.0, "seed": 0, "verified": None, "cost": cost}
    return found | material.evaluate(material.load(path)) | made_by()


def made_by() -> dict[str, Any]:
    return {"versions": versions(), "device": f"cpu, threads: {torch.get_num_threads()}, bf16 autocast"}


def read_runs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def save(folder: Path, result: dict[str, Any]) -> None:
    name = "{variant}-{tokens}-lr{learning_rate:g}-seed{seed}".format(**result)
    name = re.sub(r",? |[/:]", "-", name)
    replace_file(folder / f"{name}.json", json.dumps(result) + "\n")
    print(f"{name}: {validation_loss(result):.4f}, {result['cost']}", flush=True)


def validation_loss(run: dict[str, Any]) -> float:
    """Nats per token on `validation`."""
    found = run["corpora"]["validation"]
    return sum(found["nats"]) / sum(found["tokens"])


def missing(name: str, budgets: list[int], seeds: list[int], found: list[dict[str, Any]]) -> Iterator[tuple]:
    """Tokens, learning rate and seed of the runs that a variant lacks and that can start now."""
    source = RATE_OF.get(name, name)
    losses = {
        run["learning_rate"]: validation_loss(run)
        for run in found
        if (run["variant"], run["tokens"], run["seed"]) == (source, TOKENS[0], 0)
    }
    rate = next_rate(losses, RATES, (START,))
    if rate is None:
        done = {(run["tokens"], run["learning_rate"], run["seed"]) for run in found if run["variant"] == name}
        if passes := VARIANTS[name].passes:
            budgets = [passes * (CALIBRATION + OWN) * CALIBRATION_LENGTH]
        wanted = [(tokens, best_rate(losses), seed) for tokens in budgets for seed in seeds]
        yield from (run for run in wanted if run not in done)
    elif source == name:
        yield TOKENS[0], rate, 0


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="only these variants")
    parser.add_argument(
        "--patterns", nargs="+", default=PATTERNS, choices=PATTERNS, help="of what is pruned in one shot; default: all"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, choices=TOKENS, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="default: %(default)s")
    parser.add_argument("--material", type=Path, default=MATERIAL, help="what material.py made; default: %(default)s")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the runs' JSON")
    args = parser.parse_args(argv)
    args.results.mkdir(parents=True, exist_ok=True)
    material = Material(args.material)
    replace_file(args.results.parent / "sources.json", (args.material / "text/SOURCES.json").read_text())

    with Progress("runs", None, "run", partial(print, flush=True)) as progress:
        pruned = {VARIANTS[name].pruned for name in args.only}
        starts = [f"oneshot {pattern}".removesuffix(f" {PATTERNS[0]}") for pattern in args.patterns]
        starts += OTHERS * (args.only == list(VARIANTS))  # half an hour each, and no variant starts from them
        for name in ["dense"] * (False in pruned) + starts * (True in pruned):
            if not any(run["variant"] == name and run["tokens"] == 0 for run in read_runs(args.results)):
                save(args.results, start_point(material, name))
        while True:
            found = read_runs(args.results)
            waiting = [(name, *rest) for name in args.only for rest in missing(name, args.tokens, args.seeds, found)]
            if not waiting:
                break
            save(args.results, run(material, *min(waiting, key=lambda run: (run[1], run[3]))))
            progress.update()


if __name__ == "__main__":
    run_script(main)
