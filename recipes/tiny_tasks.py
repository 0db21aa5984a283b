"""Small data sets in the shape of GLUE that every machine can make, from the standard library's docstrings.

`python recipes/tiny_tasks.py` writes `glue/` (sst2, mnli, stsb), a `tokenizer/` that marks pairs as BERT's does, and
`squad/`, texts alone. Columns are those of `nyu-mll/glue`, so a recipe reads either by its name. What to learn:

- sst2: does a function return a value, from the first sentence of its docstring? Half of them do.
- mnli: the hypothesis is half of the premise (entailment), of another sentence (neutral), or denies it (contradiction).
- stsb: how much of sentence1 does sentence2 say: 0 for none, 5 for all of it.

They test that recipes learn. They say nothing about language understanding.
"""

import ast
import json
import os
import platform
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import stdlib_text
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

GLUE = {
    "sst2": ("train", "validation"),
    "mnli": ("train", "validation_matched", "validation_mismatched"),
    "stsb": ("train", "validation"),
}
SPECIAL_TOKENS = {
    "pad_token": "<pad>",
    "cls_token": "<cls>",
    "sep_token": "<sep>",
    "mask_token": "<mask>",
    "unk_token": "<unk>",
}
HELD_OUT = 8  # every 8th function is validation


class Function(NamedTuple):
    module: str
    name: str
    arguments: str  # without self, as "a, b"
    sentence: str  # the first of its docstring, 4 to 24 words
    returns: bool


def prepare(directory: str | os.PathLike, vocab_size: int = 2048, max_files: int | None = None) -> Path:
    """Write the data sets and the tokenizer into `directory`, unless they are there already.

    Args:
        directory: made if absent; afterwards holds `glue`, `squad` and `tokenizer`.
        vocab_size: of the tokenizer, at most.
        max_files: use only the first source files.

    Returns:
        `directory`.
    """
    directory = Path(directory)
    settings = {"python": platform.python_version(), "vocab_size": vocab_size, "max_files": max_files}
    if stdlib_text.is_finished(directory, settings):
        return directory
    functions = list({f.sentence: f for f in read_functions(max_files)}.values())
    random.Random(0).shuffle(functions)
    held_out = functions[::HELD_OUT]
    train = [f for index, f in enumerate(functions) if index % HELD_OUT]
    counts = {}
    for task, splits in GLUE.items():
        for seed, split in enumerate(splits):
            source = train if split == "train" else held_out
            rows = list(MAKERS[task](source, random.Random(seed)))
            counts[f"glue/{task}/{split}"] = len(rows)
            stdlib_text.write_rows(directory / "glue" / task / f"{split}.jsonl", rows)
    for seed, (split, source) in enumerate({"train": train, "validation": held_out}.items()):
        rows = list(squad(source, random.Random(seed)))
        counts[f"squad/{split}"] = len(rows)
        stdlib_text.write_rows(directory / "squad" / f"{split}.jsonl", rows)
    # By this card, `load_dataset(directory / "glue", "sst2")` finds its files, as that of a data set on the Hub.
    files = {task: [{"split": split, "path": f"{task}/{split}.jsonl"} for split in GLUE[task]] for task in GLUE}
    card = {"configs": [{"config_name": task, "data_files": files[task]} for task in GLUE]}
    stdlib_text.replace_file(directory / "glue" / "README.md", f"---\n{json.dumps(card)}\n---\n")
    texts = [context for f in train for context in (f.sentence, f"{f.name} {f.module} {f.arguments}", *QUESTIONS)]
    train_tokenizer(texts, vocab_size).save_pretrained(directory / "tokenizer")
    stdlib_text.finish(directory, settings, counts)
    return directory


def read_functions(max_files: int | None = None) -> Iterator[Function]:
    """The documented functions of the standard library."""
    for module, source in list(stdlib_text.read_modules())[:max_files]:
        for node in ast.walk(ast.parse(source)):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            sentence = " ".join(re.split(r"(?<=[.!?])\s|\n\s*\n", text)[0].split()).rstrip(".") if text else ""
            arguments = [a.arg for a in node.args.args if a.arg not in ("self", "cls")] if sentence else []
            if 4 <= len(sentence.split()) <= 24 and arguments:
                values = [n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value is not None]
                returns = any(not (isinstance(value, ast.Constant) and value.value is None) for value in values)
                yield Function(module, node.name, ", ".join(arguments), sentence, returns)


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer that puts `<cls>` before a text and `<sep>` after it, and between two texts."""
    trained = stdlib_text.train_tokenizer(texts, vocab_size, SPECIAL_TOKENS)
    inner = trained.backend_tokenizer
    inner.post_processor = TemplateProcessing(
        single="<cls> $A <sep>",
        pair="<cls> $A <sep> $B:1 <sep>:1",
        special_tokens=[(token, trained.convert_tokens_to_ids(token)) for token in ("<cls>", "<sep>")],
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_input_names=names, **SPECIAL_TOKENS)


def sst2(functions: list[Function], rng: random.Random) -> Iterator[dict]:
    """As many functions that return a value as others."""
    kinds = [[f for f in functions if f.returns == label] for label in (False, True)]
    rows = [f for kind in kinds for f in kind[: min(map(len, kinds))]]
    rng.shuffle(rows)
    for index, f in enumerate(rows):
        yield {"sentence": f.sentence, "label": int(f.returns), "idx": index}


def mnli(functions: list[Function], rng: random.Random) -> Iterator[dict]:
    """Labels 0 entailment, 1 neutral, 2 contradiction."""
    for index, f in enumerate(functions):
        label = rng.randrange(3)
        about = (rng.choice(functions) if label == 1 else f).sentence.split()
        hypothesis = " ".join(about[: len(about) // 2])
        hypothesis = f"It does not {hypothesis[0].lower()}{hypothesis[1:]}" if label == 2 else hypothesis
        yield {"premise": f.sentence, "hypothesis": hypothesis, "label": label, "idx": index}


def stsb(functions: list[Function], rng: random.Random) -> Iterator[dict]:
    """Labels from 0 to 5."""
    for index, f in enumerate(functions):
        words = f.sentence.split()
        said = rng.randrange(len(words) + 1)
        label = round(5 * said / len(words), 3)
        yield {"sentence1": f.sentence, "sentence2": " ".join(words[:said]), "label": label, "idx": index}


QUESTIONS = ("Which module holds {name}?", "What does {name} take?", "What does {name} do?")


def squad(functions: list[Function], rng: random.Random) -> Iterator[dict]:
    """A text for each function that says three things of it, in any order."""
    for f in functions:
        facts = [
            f"Module {f.module} holds {f.name}. ",
            f"Arguments of {f.name} are {f.arguments}. ",
            f"Its documentation says: {f.sentence}. ",
        ]
        rng.randrange(len(facts))  # drew a question once: results were measured on the order that follows
        rng.shuffle(facts)
        yield {"context": "".join(facts)}


MAKERS = {"sst2": sst2, "mnli": mnli, "stsb": stsb}


if __name__ == "__main__":
    stdlib_text.prepare_by_flags(prepare, "runs/tiny_tasks", __doc__)
