"""Text and a tokenizer that every machine has: the source code of Python's standard library.

`python recipes/stdlib_text.py` writes `train.jsonl`, `validation.jsonl` (one document per source file) and a byte-level
BPE `tokenizer/`. A second call with the same settings reuses them.
"""

import argparse
import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
SPECIAL_TOKENS = {"eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>", "unk_token": "<unk>"}
HELD_OUT = 50  # every 50th document is validation


def prepare(directory: str | os.PathLike, vocab_size: int = 2048, max_files: int | None = None) -> Path:
    """Write the corpus and its tokenizer into `directory`, unless they are there already.

    Args:
        directory: made if absent; afterwards holds `train.jsonl`, `validation.jsonl` and `tokenizer`.
        vocab_size: of the tokenizer, at least 260 (256 bytes and 4 special tokens).
        max_files: use only the first source files.

    Returns:
        `directory`.

    Raises:
        ValueError: `vocab_size` is too small for a byte-level tokenizer.
    """
    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise ValueError(f"vocab_size={vocab_size}: a byte-level tokenizer needs at least {256 + len(SPECIAL_TOKENS)}")
    directory = Path(directory)
    settings = {"python": platform.python_version(), "vocab_size": vocab_size, "max_files": max_files}
    if is_finished(directory, settings):
        return directory
    documents = read_stdlib(max_files)
    train = [text for index, text in enumerate(documents) if index % HELD_OUT != HELD_OUT - 1]
    validation = documents[HELD_OUT - 1 :: HELD_OUT]
    write_rows(directory / "train.jsonl", [{"text": text} for text in train])
    write_rows(directory / "validation.jsonl", [{"text": text} for text in validation])
    train_tokenizer(train, vocab_size).save_pretrained(directory / "tokenizer")
    finish(directory, settings, {"train": len(train), "validation": len(validation)})
    return directory


def read_stdlib(max_files: int | None = None) -> list[str]:
    """The standard library's modules as text, sorted by path; without tests and installed packages."""
    return [text for _, text in islice(read_modules(), max_files)]


def read_modules() -> Iterator[tuple[str, str]]:
    """Name and text of each module, such as `json.decoder`."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_DIRECTORIES.intersection(parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield ".".join(parts).removesuffix(".__init__"), text


def train_tokenizer(
    texts: list[str], vocab_size: int, special_tokens: dict[str, str] = SPECIAL_TOKENS
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, the same for the same texts. (Training WordPiece gives another one each time.)"""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens.values()),
        initial_alphabet=ByteLevel.alphabet(),  # every byte, so that nothing is ever unknown
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens)


def replace_file(path: Path, text: str) -> None:
    """Replace `path`, whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # several processes may be at it
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a `.jsonl` file, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(json.dumps(row) + "\n" for row in rows))


def is_finished(directory: Path, settings: dict[str, Any]) -> bool:
    """Whether `directory` has a whole data set of these settings; one of others counts as begun from here on."""
    manifest = directory / "manifest.json"
    if manifest.exists() and json.loads(manifest.read_text()).get("settings") == settings:
        return True
    directory.mkdir(parents=True, exist_ok=True)
    manifest.unlink(missing_ok=True)
    return False


def finish(directory: Path, settings: dict[str, Any], rows: dict[str, int]) -> None:
    """Write the manifest, last: a directory without one is not finished."""
    replace_file(directory / "manifest.json", json.dumps({"settings": settings, "rows": rows}))


def prepare_by_flags(prepare: Callable[[str], Path], directory: str, description: str | None) -> None:
    """The script of a small data set: prepare it in the directory that a flag names, and print what is there."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=directory, help="default: %(default)s")
    made = prepare(parser.parse_args().directory)
    for name, rows in json.loads((made / "manifest.json").read_text())["rows"].items():
        print(f"{made / name}: {rows} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default="runs/stdlib_text", help="default: %(default)s")
    parser.add_argument("--vocab_size", type=int, default=2048, help="default: %(default)s")
    args = parser.parse_args()
    print(f"the standard library's source and its tokenizer are in {prepare(args.directory, args.vocab_size)}")


if __name__ == "__main__":
    main()
