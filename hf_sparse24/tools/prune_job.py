"""PruneJob: the arguments of `hf-sparse24 prune`, checked before anything takes time, and the text, divided."""

import argparse
import hashlib
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

from ..checkpoints.manifest import MANIFEST
from ..config import Sparse24Config
from ..hub.card import CARD, read_card
from ..methods import ONESHOT_METHOD
from ..packed_format import check_values
from ..patching.packing import check_packable
from ..patching.report import shown_count
from ..patching.surgery import patch_model
from .models import AUTOS, check_destination, local_files, read_model

# Defaults. Tokens of a sequence, to prune by, and to train on by the device; and sequences of a step.
BLOCK, CALIBRATION, TRAINING, BATCH_SIZE = 256, 24_576, {"cpu": 300_000, "cuda": 3_000_000}, {"cpu": 2, "cuda": 8}
OWN, MOST_PASSES = 3, 4  # how many times the calibration tokens the model writes, and a short text is trained on
LARGE = 1_000_000_000  # parameters, above which a CPU prunes only
LEAST, MEASURED = 8, 128  # blocks that a text must have, and that are measured at most
AT_ONCE = 1_000_000  # characters that are tokenized together


class PruneJob:
    """A checked run: it raises early, as ValueError or OSError, what would fail late.

    Attributes:
        config: what the model is patched with.
        kind: `"causal"`, `"masked"`, or `"encoder"` for a model that predicts no tokens.
        dtype: of the weights as they are stored.
        source: the folder of the model's files.
        trust: the argument of each `from_pretrained` that says whether code which lies with the model is run.
        text: a hash of it.
        calibration, training, held_out: blocks of it, `[blocks, tokens]`.
        own, steps: blocks that the dense model writes, and steps of training.
        teacher_weight: share of the dense model's predictions in the loss of the training.
        tokens: numbers of tokens as text, by what they are for.
        skipped: groups of layers that stay dense, and why.
        work: the folder of what is finished.
    """

    def __init__(self, options: argparse.Namespace):
        check_destination(options.output)
        check_values(options.values, options.format)
        self.options, name, output = options, options.model, Path(options.output)
        self.work = output.absolute().with_name(f"{output.absolute().name}-work")
        if (output / MANIFEST).exists() and not (self.work.exists() or options.overwrite):
            raise ValueError(f"{output} holds a finished export: name another output, or give --overwrite")
        self.trust = {"trust_remote_code": options.trust_remote_code}
        self.source = local_files(name, ["config.json", MANIFEST, *["*.py"] * options.trust_remote_code])
        empty, own = read_model(self.source, options.trust_remote_code)
        if own or (self.source / MANIFEST).exists():
            raise ValueError(f"{name} is sparse or quantized already: give a dense model")
        if torch.cuda.device_count() > 1:  # Trainer would take them all
            raise ValueError("prune uses one GPU, and there are several: set CUDA_VISIBLE_DEVICES=0")
        self.cls: Any = type(empty)
        config, cls = empty.config, self.cls.__name__
        is_whole = config.get_text_config() is config and self.cls.main_input_name == "input_ids"
        if config.is_encoder_decoder or not is_whole:
            raise ValueError(f"{name} is a {cls}, which takes more than text: prune it in Python, by oneshot")
        self.kind = "causal" if cls in CAUSAL.values() else "masked" if cls in MASKED.values() else "encoder"
        if self.cls._auto_class in AUTOS:  # its code lies with the model
            self.kind = AUTOS[self.cls._auto_class]
        for option, fits in (("own_tokens", self.kind == "causal"), ("tokens", self.kind != "encoder")):
            if getattr(options, option) and not fits:
                raise ValueError(f"--{option.replace('_', '-')} is not for {name}, a {cls}: leave it out")
        self.tokenizer = _tokenizer(name, self.kind, self.trust)
        self.config = Sparse24Config(method=ONESHOT_METHOD, pattern=options.pattern, target_modules="all-linear")
        patched = patch_model(empty, self.config)
        self.skipped = [f"{row.group}: {row.skipped}" for row in patched.rows if row.skipped]
        if options.format == "packed":
            check_packable(empty)
        read_card(output / CARD, str(output / CARD))
        self.dtype, self.parameters = empty.dtype, sum(parameter.numel() for parameter in empty.parameters())
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.batch_size, self.is_slow = BATCH_SIZE[self.device], self.device == "cpu" and self.parameters > LARGE
        # 2e-4 was measured with 135 million parameters; with 8 billion it is 2.6e-5.
        self.learning_rate = float(f"{min(2e-3, 2e-4 * math.sqrt(135e6 / self.parameters)):.1e}")
        documents = read_documents(options.text, (output.absolute(), self.work))
        self.text = hashlib.sha256("\0".join(documents).encode()).hexdigest()
        positions = getattr(config, "max_position_embeddings", None) or BLOCK
        self.tokens = self._divide(documents, min(BLOCK, positions, self.tokenizer.model_max_length))
        if torch.cat([self.calibration, self.held_out, self.training]).max() >= config.vocab_size:
            raise ValueError(f"{name} has a tokenizer of more tokens than its vocab_size={config.vocab_size}")

    def _divide(self, documents: list[str], length: int) -> dict[str, str]:
        """Divide the text among pruning, training and measuring; return `tokens`."""
        options = self.options
        default = 0 if self.is_slow or self.kind == "encoder" else TRAINING[self.device]
        tokens = default if options.tokens is None else options.tokens
        count, training = (math.ceil(number / length) for number in (options.calibration_tokens or CALIBRATION, tokens))
        # As many as hold MEASURED out, so that what is held out depends on the text and the seed alone.
        most = max(count + training + MEASURED, 20 * MEASURED)
        blocks = make_blocks(documents, self.tokenizer, length, most, options.seed)
        found, held_out = f"the text has {len(blocks) * length:,} tokens", min(MEASURED, math.ceil(len(blocks) / 20))
        if len(blocks) < LEAST:
            needed = f"at least {LEAST * length:,} are needed, so give more"
            raise ValueError(f"{found} in whole blocks of {length}: {needed}")
        self.held_out, blocks = blocks[:held_out], blocks[held_out:]
        used = min(len(blocks), count + training)
        limit = used - bool(training)
        if options.calibration_tokens and count > limit:
            raise ValueError(f"--calibration-tokens {options.calibration_tokens}: {found}, {limit * length:,} for this")
        if not options.calibration_tokens:
            count = min(count, used // 2 if training else used)
        self.calibration, self.training = blocks[:count], blocks[count:used]
        there = self.training.numel()
        if options.tokens is None:
            tokens = min(tokens, MOST_PASSES * there)
        # Up to 100,000 tokens a teacher at 1/3 was better than at 2/3. With 300,000, 2/3 alone was tried.
        self.teacher_weight = 1 / 3 if tokens <= 100_000 else 2 / 3
        self.steps = math.ceil(tokens / (length * self.batch_size))
        own = OWN * self.calibration.numel() if options.own_tokens is None else options.own_tokens
        self.own = math.ceil(own / length) if self.kind == "causal" else 0
        total = self.steps * self.batch_size * length
        again = f": {there:,}, {total / there:.1f} times" if total > there else ""
        return {
            "calibration tokens": f"{self.calibration.numel():,} of the text",
            "own tokens": f"{self.own * length:,} that the dense model writes from nothing",
            "training tokens": f"{total:,} of the text{again}",
            "held-out tokens": f"{self.held_out.numel():,} of the text",
        }

    def __str__(self) -> str:
        lines = [f"{self.cls.__name__} with {shown_count(self.parameters)} parameters, on {self.device}"]
        lines += [f"stays dense: {layer}" for layer in self.skipped]
        lines += [f"{name}: {number}" for name, number in self.tokens.items()]
        memory, disk = (self.parameters * size / 1e9 for size in ((18, 28) if self.steps else (6, 8)))
        lines.append(f"memory: {memory:.1f} GB, and activations; disk: {disk:.1f} GB, besides the export")
        lines.append(f"{self.work} keeps what is finished: after Ctrl-C the same command goes on")
        if self.is_slow:
            lines.append("this is a large model for a CPU: pruning takes hours, and training (--tokens) days")
        return "\n".join(lines)


def _tokenizer(model: str, kind: str, trust: dict[str, bool]) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, **trust)
    except (OSError, ValueError) as error:
        raise ValueError(f"{model} has no tokenizer that can be read: {str(error).splitlines()[0]}") from error
    has_words = tokenizer.is_fast and len(tokenizer) > len(tokenizer.all_special_tokens)  # not where no file is
    found = {"tokenizer.json": has_words, "eos_token or sep_token": tokenizer.eos_token or tokenizer.sep_token}
    found |= {"mask_token": kind != "masked" or tokenizer.mask_token}
    missing = [name for name, value in found.items() if not value]
    if missing:
        raise ValueError(f"{model} has no tokenizer with {missing[0]}")
    return tokenizer


def read_documents(paths: Sequence[str], without: Sequence[Path]) -> list[str]:
    """The texts of files: one of each, or one of each line `{"text": ...}` of a .jsonl file. Those in the folders
    `without` are left out. ValueError: there is none, or it cannot be read as such."""
    documents: list[str] = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"--text {path}: there is no such file or directory")
        inside = [file for kind in ("*.txt", "*.jsonl") for file in path.rglob(kind) if file.is_file()]
        inside = [file for file in inside if not set(file.absolute().parents) & set(without)]
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


def make_blocks(documents: list[str], tokenizer: PreTrainedTokenizerBase, length: int, most: int, seed: int) -> Tensor:
    """At most `most` blocks `[blocks, length]` of documents in random order, with the tokenizer's special tokens.

    A token that ends a text is between documents. What fills no block is left out.
    """
    end = tokenizer.eos_token or tokenizer.sep_token
    text = "".join(document + end for document in random.Random(seed).sample(documents, len(documents)))
    cut = {"truncation": True, "max_length": length, "return_overflowing_tokens": True, "verbose": False}
    blocks = torch.empty(0, length, dtype=torch.long, device="cpu")
    for start in range(0, len(text), AT_ONCE):
        found = tokenizer([text[start : start + AT_ONCE]], **cut)["input_ids"]
        whole = [ids for ids in found if len(ids) == length]
        blocks = torch.cat([blocks, torch.tensor(whole, dtype=torch.long, device="cpu").view(-1, length)])
        if len(blocks) >= most:
            break
    return blocks[:most]
