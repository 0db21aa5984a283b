"""From text files or a Hub dataset to blocks of tokens; what `train.py` reads its data with."""

import glob
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from arguments import UsageError
from optional import require
from transformers import PreTrainedTokenizerBase

datasets = require("datasets", "recipes")

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}  # any other file is text, one document per file


@dataclass
class DataArguments:
    dataset: str | None = field(
        default=None,
        metadata={
            "help": "Text, .json(l) or .parquet files (one, a directory, a glob pattern), or a dataset of the Hub. A "
            "text file is one document; one that does not fit in memory belongs into .jsonl."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    train_split: str = field(
        default="train", metadata={"help": "Split to train on: of a Hub dataset, or the local file of that name."}
    )
    validation_file: str | None = field(default=None, metadata={"help": "Files to evaluate on, as for dataset."})
    validation_split: str | None = field(
        default=None, metadata={"help": "A fraction of dataset to hold out, as 0.05, or a split, as train_split."}
    )
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    block_size: int = field(default=512, metadata={"help": "Tokens per training sequence."})
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of tokens to predict, objective masked."})
    max_samples: int | None = field(default=None, metadata={"help": "Read this many documents of each split at most."})
    max_validation_samples: int | None = field(default=None, metadata={"help": "The same, of validation data alone."})
    streaming: bool = field(default=False, metadata={"help": "Read while training; needs max_steps."})
    num_proc: int | None = field(default=None, metadata={"help": "Processes that tokenize."})

    def __post_init__(self):
        if self.dataset is None:
            raise UsageError("dataset is missing: files, a directory, a glob pattern, or a dataset of the Hub")
        if self.block_size < 2:
            raise UsageError(f"block_size={self.block_size}: must be at least 2")
        if self.validation_file is not None and self.validation_split is not None:
            raise UsageError("both of validation_file and validation_split given; give one")
        if self.held_out is not None and not 0 < self.held_out < 1:
            raise UsageError(f"validation_split={self.validation_split!r}: a fraction must be between 0 and 1")
        if self.held_out is not None and self.max_validation_samples is not None:
            raise UsageError("max_validation_samples is for validation_file and for a split by its name")
        if self.held_out is not None and self.streaming:
            raise UsageError(
                f"validation_split={self.validation_split!r}: a stream has no length to take a fraction of; "
                f"give validation_file, the name of a split, or --streaming false"
            )

    @property
    def held_out(self) -> float | None:
        """`validation_split` where it is a fraction."""
        try:
            return float(self.validation_split)
        except (TypeError, ValueError):
            return None


def load_text(source: str, args: DataArguments, split: str = "train") -> datasets.Dataset | datasets.IterableDataset:
    """Documents of a split of a Hub dataset; or from local files, from that of the split's name where there is one."""
    files = find_files(source)
    named = [file for file in files if Path(file).stem == split]
    if files and not named and split != "train":
        way = "give a fraction, as 0.05, or validation_file"
        raise UsageError(f"split {split!r}: {source} has no file of that name; {way}")
    files = named or files
    if files:
        if not any(Path(file).stat().st_size for file in files):
            raise UsageError(f"{source}: empty, there is no text in it")
        kinds = {FORMATS.get(Path(file).suffix, "text") for file in files}
        if len(kinds) > 1:
            raise UsageError(
                f"{source}: holds files of several kinds ({', '.join(sorted(kinds))}); name one with a glob"
            )
        kind = kinds.pop()
        options = {"sample_by": "document"} if kind == "text" else {}
        dataset = datasets.load_dataset(kind, data_files=files, split="train", streaming=args.streaming, **options)
    else:
        dataset = datasets.load_dataset(source, args.dataset_config, split=split, streaming=args.streaming)
    if args.max_samples is not None:
        dataset = dataset.take(args.max_samples)
    first = next(iter(dataset), None)
    if first is None:
        raise UsageError(f"{source}: no documents in it")
    if args.text_column not in first:
        raise UsageError(f"text_column={args.text_column!r}: {source} has the columns {sorted(first)}")
    return dataset


def find_files(source: str) -> list[str]:
    """The files that `source` means, sorted; none if it can only be the name of a dataset on the Hub."""
    path = Path(source)
    if path.is_file():
        return [source]
    pattern = f"{glob.escape(source)}/**/*" if path.is_dir() else source
    files = sorted(file for file in glob.glob(pattern, recursive=True) if Path(file).is_file())
    looks_like_hub = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source) and path.suffix not in {".txt", *FORMATS}
    if not files and (path.is_dir() or not looks_like_hub):
        raise UsageError(f"{source}: no such file, no file in it, or no file that matches")
    return files


def pack(documents: Iterable[list[int]], separator: int, block_size: int) -> Iterator[list[int]]:
    """Cut token lists, each closed by `separator`, into blocks of `block_size`; what is left at the end is dropped."""
    buffer = []
    for tokens in documents:
        if not tokens:
            continue
        buffer += [*tokens, separator]
        whole = len(buffer) // block_size * block_size
        yield from (buffer[i : i + block_size] for i in range(0, whole, block_size))
        buffer = buffer[whole:]


def make_blocks(
    documents: datasets.Dataset | datasets.IterableDataset, tokenizer: PreTrainedTokenizerBase, args: DataArguments
):
    """Tokenize `documents` and pack them: a dataset of `input_ids` of `block_size` tokens each."""
    separator = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if separator is None:
        raise UsageError("the tokenizer has no eos_token (and no sep_token) to put between documents; give it one")

    column = args.text_column  # all that `tokenize` depends on, so that its cache serves other block sizes as well

    def tokenize(batch):
        texts = [text or "" for text in batch[column]]
        return {"tokens": tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]}

    parallel = {} if args.streaming else {"num_proc": args.num_proc, "desc": "Tokenizing"}
    tokenized = documents.map(tokenize, batched=True, remove_columns=list(next(iter(documents))), **parallel)
    total = 0
    for row in tokenized:
        total += len(row["tokens"]) + 1 if row["tokens"] else 0  # as `pack` counts them
        if total >= args.block_size:
            break
    else:
        raise UsageError(f"the text has {total} tokens, less than one block; give more, or a block_size up to {total}")

    def blocks(tokenized):
        documents = (row["tokens"] for row in tokenized)
        yield from ({"input_ids": block} for block in pack(documents, separator, args.block_size))

    kind = datasets.IterableDataset if args.streaming else datasets.Dataset
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    return kind.from_generator(blocks, features=features, gen_kwargs={"tokenized": tokenized})


def make_datasets(args: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int):
    """Training and validation blocks; the second is None if no validation data is asked for."""
    documents = load_text(args.dataset, args, args.train_split)
    # Sorted files are no random sample: shuffled before the tail is held out, or before a stream is read in order.
    train = make_blocks(documents.shuffle(seed=seed), tokenizer, args)
    if args.held_out is not None:
        cut = len(train) - math.ceil(len(train) * args.held_out)
        if cut == 0:
            raise UsageError(
                f"validation_split={args.validation_split}: leaves nothing of {len(train)} blocks to train on"
            )
        return train.select(range(cut)), train.select(range(cut, len(train)))
    if args.validation_file is None and args.validation_split is None:
        return train, None
    most = args.max_validation_samples or args.max_samples
    source, split = args.validation_file or args.dataset, args.validation_split or "train"
    held_out = load_text(source, replace(args, max_samples=most), split)
    return train, make_blocks(held_out, tokenizer, args)
