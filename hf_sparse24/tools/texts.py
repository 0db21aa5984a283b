"""Texts in files, and blocks of token ids made of them."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_AT_ONCE = 1_000_000  # characters that are tokenized together


def read_documents(paths: Sequence[str]) -> list[str]:
    """The texts of files: one of each, or one of each line `{"text": ...}` of a .jsonl file.

    Raises:
        ValueError: no text in them, bytes that are no UTF-8, or a line without the field.
        OSError: a file that cannot be read.
    """
    documents: list[str] = []
    for path in map(Path, paths):
        inside = (file for kind in ("*.txt", "*.jsonl") for file in path.rglob(kind) if file.is_file())
        for file in sorted(inside) if path.is_dir() else [path]:
            documents += (text for text in _texts(file) if text.strip())
    if not documents:
        raise ValueError(f"--text {' '.join(paths)}: no text is there (of a directory, .txt and .jsonl files are read)")
    return documents


def _texts(file: Path) -> Iterator[str]:
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {file}: is no text in UTF-8, see byte {error.start}") from None
    if "\0" in text:
        raise ValueError(f"--text {file}: is no text, it has zero bytes")
    if file.suffix not in (".json", ".jsonl"):
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.strip():
                yield (
                    json.loads(line)["text"].encode().decode()
                )  # no halves of surrogate pairs, which no tokenizer takes
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ValueError(f'--text {file}: line {number} is no {{"text": "..."}}') from None


def make_blocks(documents: list[str], tokenizer: Any, length: int, most: int, seed: int) -> Tensor:
    """At most `most` blocks `[blocks, length]` of documents in random order, with the tokenizer's special tokens.

    A token that ends a text is between documents. What fills no block is left out.
    """
    end = tokenizer.eos_token or tokenizer.sep_token
    blocks, waiting = [torch.empty(0, length, dtype=torch.long)], ""
    for i, text in enumerate(order := random.Random(seed).sample(documents, len(documents)), 1):
        waiting += text + end
        if len(waiting) > _AT_ONCE or i == len(order):
            cut = {"truncation": True, "max_length": length, "return_overflowing_tokens": True, "verbose": False}
            found = tokenizer([waiting], **cut)["input_ids"]
            blocks.append(torch.tensor([ids for ids in found if len(ids) == length]).view(-1, length))
            waiting = ""
        if sum(map(len, blocks)) >= most:
            break
    return torch.cat(blocks).long()[:most]
