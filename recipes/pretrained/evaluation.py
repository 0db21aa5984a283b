"""What a model predicts on held-out documents, document by document, beside what the dense model predicts.

The sums of each document are kept, so that ranges over documents can be taken afterwards without the model.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

LENGTH = 512
"""Tokens of a document; shorter documents are left out, longer ones are cut."""

BATCH = 4

PROMPTS = (
    "The old man opened the letter, and",
    "In the winter of that year,",
    [{"role": "user", "content": "What is the capital of France, and what is it known for?"}],
    [{"role": "user", "content": "Give me three tips for sleeping better."}],
)
"""What the samples continue or answer."""


def read_documents(path: Path, tokenizer: Any, most: int) -> Tensor:
    """The first `LENGTH` tokens of the first documents that have as many: `[at most most, LENGTH]`.

    Raises:
        ValueError: no document is long enough.
    """
    rows: list[list[int]] = []
    with path.open() as lines:
        for line in lines:
            tokens = tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"]
            rows += [tokens[:LENGTH]] * (len(tokens) >= LENGTH)
            if len(rows) == most:
                break
    if not rows:
        raise ValueError(f"{path}: no document has {LENGTH} tokens")
    return torch.tensor(rows)


def evaluate(model: nn.Module, dense: nn.Module, documents: Tensor, tokenizer: Any) -> dict[str, list[float]]:
    """Sums over each document's predictions, in lists by document.

    Keys: `nats`, cross entropy; `bytes` of the predicted text; `kl`, of the model's from the dense model's
    predictions; `agreement`, how often the two predict the same token; `tokens` predicted.
    """
    found: dict[str, list[float]] = {name: [] for name in ("nats", "bytes", "kl", "agreement", "tokens")}
    for batch in documents.split(BATCH):
        ours, theirs = _logits(model, batch), _logits(dense, batch)
        for row, own, other in zip(batch, ours, theirs):
            found["nats"].append(cross_entropy(own, row[1:], reduction="sum").item())
            found["bytes"].append(len(tokenizer.decode(row[1:]).encode()))
            found["kl"].append(
                kl_div(own.log_softmax(-1), other.log_softmax(-1), reduction="sum", log_target=True).item()
            )
            found["agreement"].append((own.argmax(-1) == other.argmax(-1)).sum().item())
            found["tokens"].append(len(row) - 1)
    return {name: [round(value, 3) for value in values] for name, values in found.items()}


@torch.no_grad()
def _logits(model: nn.Module, batch: Tensor) -> Tensor:
    """fp32 logits `[batch, LENGTH - 1, vocabulary]` that predict the tokens from the second on."""
    mode = model.training
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.eval()(input_ids=batch).logits
    model.train(mode)
    return logits[:, :-1].float()


@torch.no_grad()
def samples(model: Any, tokenizer: Any, new: int = 40) -> list[str]:
    """Greedy continuations of `PROMPTS`, without the prompts."""
    texts = []
    for prompt in PROMPTS:
        if isinstance(prompt, str):
            inputs = tokenizer(prompt, return_tensors="pt")
        else:
            inputs = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        output = model.eval().generate(**inputs, max_new_tokens=new, do_sample=False, pad_token_id=0)
        texts.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts
