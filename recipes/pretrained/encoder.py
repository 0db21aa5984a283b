"""What 2:4 costs an encoder of sentences: its embeddings before and after `oneshot`, and what retrieval finds by them.

    python recipes/pretrained/encoder.py                                      # MiniLM, which `make evidence` fetches
    python recipes/pretrained/encoder.py --model DIR --calibrate FILE.jsonl --evaluate FILE.jsonl

Embeddings are as sentence-transformers makes them: the mean of the last hidden states of all tokens, normalised. With
a `SentenceTransformer`, prune `model[0].auto_model` instead: it changes in place. Writes JSON.
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
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from hf_sparse24 import Sparse24Config, __version__, oneshot
from hf_sparse24.methods import ONESHOT_METHOD

MATERIAL = Path("runs/pretrained")
RESULT = Path(__file__).resolve().parents[1] / "results" / "pretrained" / "encoder.json"
WAYS: dict[str, dict[str, Any]] = {
    "magnitude, nothing else": {"criterion": "magnitude", "reconstruct": None},
    "wanda, nothing else": {"criterion": "wanda", "reconstruct": None},
    "the default of oneshot": {},
}
"""Arguments of `oneshot`; a new way is one line."""
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
    for way, settings in WAYS.items():
        model, start = AutoModel.from_pretrained(args.model), time.process_time()
        config = Sparse24Config(method=ONESHOT_METHOD, target_modules="all-linear")
        with torch.autocast("cpu", torch.bfloat16):
            report = oneshot(model, encoded(seen, tokenizer, batch_size=8), config, **settings)
        seconds = round(time.process_time() - start, 1)
        result["zero"] = round(report.patch.sparse_share, 4)
        result[way] = {"CPU s": seconds} | compare(dense, embeddings(model, unseen, tokenizer))
        print(way, result[way], flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
