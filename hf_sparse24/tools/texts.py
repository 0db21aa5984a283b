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
            documents += filter(str.strip, _texts(file))
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
                found = json.loads(line)["text"]
                yield found.encode().decode()  # no halves of surrogate pairs, which no tokenizer takes
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ValueError(f'--text {file}: line {number} is no {{"text": "..."}}') from None


def make_blocks(documents: list[str], tokenizer: Any, length: int, most: int, seed: int) -> Tensor:
    """At most `most` blocks `[blocks, length]` of documents in random order, with the tokenizer's special tokens.

    A token that ends a text is between documents. What fills no block is left out.
    """
    end = tokenizer.eos_token or tokenizer.sep_token
    text = "".join(document + end for document in random.Random(seed).sample(documents, len(documents)))
    cut = {"truncation": True, "max_length": length, "return_overflowing_tokens": True, "verbose": False}
    blocks = torch.empty(0, length, dtype=torch.long)
    for start in range(0, len(text), _AT_ONCE):
        found = tokenizer([text[start : start + _AT_ONCE]], **cut)["input_ids"]
        whole = [ids for ids in found if len(ids) == length]
        blocks = torch.cat([blocks, torch.tensor(whole, dtype=torch.long).view(-1, length)])
        if len(blocks) >= most:
            break
    return blocks[:most]
