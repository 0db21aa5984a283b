"""What N:M and rounding cost an encoder of sentences: its embeddings before and after, and what retrieval finds.

    python recipes/pretrained/encoder.py                                      # MiniLM, which `make evidence` fetches
    python recipes/pretrained/encoder.py --model DIR --calibrate FILE.jsonl --evaluate FILE.jsonl

MiniLM never was quantized, as the SmolLM2-135M of packages was, so rounding has no head start. Embeddings are as
sentence-transformers makes them: the mean of the last hidden states of all tokens, normalised. With a
`SentenceTransformer`, prune `model[0].auto_model` instead: it changes in place. Writes JSON.
"""

import argparse
import json
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from sparse24_kernels import Pattern
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from hf_sparse24 import Sparse24Config, __version__, oneshot, unpatch_model
from hf_sparse24.methods import ONESHOT_METHOD

MATERIAL = Path("runs/pretrained")
RESULT = Path(__file__).resolve().parents[1] / "results" / "pretrained" / "encoder.json"
WAYS: dict[str, dict[str, Any]] = {
    "2:4 by magnitude, nothing else": {"criterion": "magnitude", "reconstruct": None},
    "2:4 by wanda, nothing else": {"criterion": "wanda", "reconstruct": None},
    "2:4 by the default of oneshot": {},
    "16:32 by the default of oneshot": {"pattern": "16:32"},
    "6:8 by the default of oneshot": {"pattern": "6:8"},
}
"""Arguments of `oneshot`, and a pattern other than 2:4; a new way is one line."""
ROUNDED = {"int8 in groups of 128": (8, 128), "int4 in groups of 32": (4, 32), "int3 in groups of 32": (3, 32)}
"""Bits and group of dense weights that are rounded to the nearest."""
NEIGHBOURS = (1, 10)


def sentences(path: Path, most: int) -> list[str]:
    """The first different sentences of 5 to 50 words of a file of {"text": ...} lines."""
    found: dict[str, None] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            text = " ".join(json.loads(line)["text"].split())
            parts = re.split(r"(?<=[.!?])\s+(?=[A-Z\"'])", text)
            found |= dict.fromkeys(part for part in parts if 5 <= len(part.split()) <= 50)
            if len(found) >= most:
                break
    return list(found)[:most]


def encoded(texts: list[str], tokenizer: Any, batch_size: int = 32) -> Iterable[dict[str, Tensor]]:
    """Padded batches as the model takes them."""
    for start in range(0, len(texts), batch_size):
        yield dict(tokenizer(texts[start : start + batch_size], padding=True, truncation=True, return_tensors="pt"))


@torch.no_grad()
def embeddings(model: PreTrainedModel, texts: list[str], tokenizer: Any) -> Tensor:
    """`[texts, hidden]`, of length 1."""
    rows = []
    for batch in encoded(texts, tokenizer):
        mask = batch["attention_mask"][..., None]
        hidden = model(**batch).last_hidden_state * mask
        rows.append(torch.nn.functional.normalize(hidden.sum(1) / mask.sum(1)))
    return torch.cat(rows)


def round_weights(model: PreTrainedModel, bits: int, group: int) -> None:
    """Round the weights of the layers that `oneshot` prunes, with a bf16 scale for each row and group.

    Scales are signed, so that the weight of largest magnitude is the lowest number: Q4_0 of llama.cpp at 4 bits.
    """
    lowest = 2 ** (bits - 1)
    for layer in model.encoder.modules():
        if isinstance(layer, torch.nn.Linear):
            groups = layer.weight.data.unflatten(1, (-1, min(group, layer.in_features)))
            peak = groups.gather(2, groups.abs().argmax(2, keepdim=True))
            scale = (peak / -lowest).bfloat16().float()
            scale = scale.where(scale != 0, torch.ones(()))
            layer.weight.data = ((groups / scale).round().clamp(-lowest, lowest - 1) * scale).flatten(1)


def bits_of_weights(pattern: str, bits: float = 16, group: int | None = None) -> float:
    """Bits of a packed weight: its share of the values and of their scales, and a bit of the mask."""
    kept = Pattern.parse(pattern)
    return kept.n / kept.m * bits + 1 + (16 / group if group else 0)


def compare(dense: Tensor, pruned: Tensor) -> dict[str, float]:
    """The cosine of each sentence's two embeddings, and how many of its nearest other sentences are the same."""
    cosine = (dense * pruned).sum(1)
    result = {"cosine": cosine.mean().item(), "cosine, lowest 5%": cosine.quantile(0.05).item()}
    ranked = [(one @ one.t()).fill_diagonal_(-2).topk(max(NEIGHBOURS)).indices for one in (dense, pruned)]
    for k in NEIGHBOURS:
        ours, theirs = (indices[:, :k] for indices in ranked)
        same = (ours[:, :, None] == theirs[:, None, :]).any(2).float().mean()
        result[f"top-{k} neighbours kept"] = same.item()
    return {name: round(value, 4) for name, value in result.items()}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Prune in every way, compare, and write the results, which are returned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MATERIAL / "MiniLM", help="default: %(default)s")
    parser.add_argument("--calibrate", type=Path, default=MATERIAL / "text/train.jsonl", help="default: %(default)s")
    parser.add_argument(
        "--evaluate", type=Path, default=MATERIAL / "text/validation.jsonl", help="default: %(default)s"
    )
    parser.add_argument("--calibration_sentences", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--sentences", type=int, default=1000, help="to evaluate on; default: %(default)s")
    parser.add_argument("--output", type=Path, default=RESULT, help="default: %(default)s")
    args = parser.parse_args(argv)
    for path in (args.model, args.calibrate, args.evaluate):
        if not path.exists():
            parser.error(f"{path}: not there; `make evidence` makes {MATERIAL}, or name another one")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    seen = sentences(args.calibrate, args.calibration_sentences)
    unseen = [text for text in sentences(args.evaluate, args.sentences) if text not in set(seen)]
    result: dict[str, Any] = {
        "model": args.model.name,
        "versions": {"hf_sparse24": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "sentences": {args.calibrate.name: len(seen), args.evaluate.name: len(unseen)},
    }
    dense = embeddings(AutoModel.from_pretrained(args.model), unseen, tokenizer)

    def found(way: str, bits: float, model: PreTrainedModel, seconds: float | None = None) -> None:
        facts = {"bits a weight": bits, "CPU s": None if seconds is None else round(seconds, 1)}
        result[way] = facts | compare(dense, embeddings(model, unseen, tokenizer))
        print(way, result[way], flush=True)

    for way, (bits, group) in ROUNDED.items():
        model = AutoModel.from_pretrained(args.model)
        round_weights(model, bits, group)
        found(way, bits + 16 / group, model)
    for way, settings in WAYS.items():
        model, start = AutoModel.from_pretrained(args.model), time.process_time()
        pattern = settings.get("pattern", "2:4")
        config = Sparse24Config(method=ONESHOT_METHOD, target_modules="all-linear", pattern=pattern)
        others = {name: value for name, value in settings.items() if name != "pattern"}
        with torch.autocast("cpu", torch.bfloat16):
            oneshot(model, encoded(seen, tokenizer, batch_size=8), config, **others)
        seconds = time.process_time() - start
        found(way, bits_of_weights(pattern), model, seconds)
        if "criterion" not in settings:
            unpatch_model(model)
            round_weights(model, 8, 128)
            found(f"{way}, int8 values", bits_of_weights(pattern, 8, 128), model)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
