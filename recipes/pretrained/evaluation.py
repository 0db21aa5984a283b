"""What a model predicts on held-out documents, document by document, next to what the dense model predicts.

The sums of each document are kept, so that ranges over documents can be taken afterwards without the model.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

LENGTH = 512
"""Tokens of a document; longer ones are cut, shorter ones joined."""

BATCH = 4

PROMPTS = (
    "The old man opened the letter, and",
    "In the winter of that year,",
    [{"role": "user", "content": "What is the capital of France, and what is it known for?"}],
    [{"role": "user", "content": "Give me three tips for sleeping better."}],
)
"""What the samples continue or answer."""


def read_documents(path: Path, tokenizer: Any, most: int) -> Tensor:
    """The first `LENGTH` tokens of each document, of several where one is shorter: `[at most most, LENGTH]`.

    Raises:
        ValueError: the text is shorter than that.
    """
    rows: list[list[int]] = []
    row: list[int] = []
    with path.open() as lines:
        for line in lines:
            row += [*tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            if len(row) >= LENGTH:
                rows.append(row[:LENGTH])
                row = []
            if len(rows) == most:
                break
    if not rows:
        raise ValueError(f"{path}: has less than {LENGTH} tokens")
    return torch.tensor(rows)


class Evaluation:
    """The documents of one corpus, and what the dense model predicts there, which is computed once.

    Args:
        documents: `[documents, LENGTH]`.
        dense: a causal language model with a linear output embedding.
        autocast: whether models compute in bf16; otherwise in the dtype of their weights.
    """

    def __init__(self, documents: Tensor, dense: Any, tokenizer: Any, autocast: bool = True):
        self.documents, self.head, self.autocast = documents, dense.get_output_embeddings(), autocast
        self.bytes = [len(tokenizer.decode(row[1:]).encode()) for row in documents]
        with _inference(self.autocast):
            self.states = [dense.model(input_ids=batch).last_hidden_state for batch in documents.split(BATCH)]

    def run(self, model: nn.Module) -> dict[str, list[float]]:
        """Sums over each document's predictions, in lists by document.

        Keys: `nats`, cross entropy; `bytes` of the predicted text; `kl`, of the model's from the dense model's
        predictions; `agreement`, how often the two predict the same token; `tokens` predicted.
        """
        found: dict[str, list[float]] = {"bytes": self.bytes, "nats": [], "kl": [], "agreement": [], "tokens": []}
        mode = model.training
        model.eval()
        for batch, states in zip(self.documents.split(BATCH), self.states):
            with _inference(self.autocast):
                ours, theirs = model(input_ids=batch).logits, self.head(states)
            for row, own, other in zip(batch, ours[:, :-1].float(), theirs[:, :-1].float()):
                found["nats"].append(cross_entropy(own, row[1:], reduction="sum").item())
                kl = kl_div(own.log_softmax(-1), other.log_softmax(-1), reduction="sum", log_target=True)
                found["kl"].append(kl.item())
                found["agreement"].append((own.argmax(-1) == other.argmax(-1)).sum().item())
                found["tokens"].append(len(row) - 1)
        model.train(mode)
        return {name: [round(value, 3) for value in values] for name, values in found.items()}


@contextmanager
def _inference(autocast: bool) -> Iterator[None]:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        yield


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
