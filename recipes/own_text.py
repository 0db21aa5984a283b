"""Text that a model writes from nothing: what it learned, of all kinds, where nobody has the data that it learned from.

A model that is pruned and trained by a few kinds of text forgets the others first. Its own text holds them: it makes
little sense, as samples at temperature 1 do, but the teacher's predictions on it are what must be kept.
"""

from typing import Any

import torch
from torch import Tensor

SEPARATOR = "<|endoftext|>"
"""Before each document in the pre-training of most models; instruction tuning gives many another `bos_token`."""

BATCH = 64
"""Sequences that are written at a time: a bound on memory."""


@torch.no_grad()
def own_text(model: Any, tokenizer: Any, count: int, length: int, seed: int) -> Tensor:
    """Sequences of token ids, `[count, length]`, sampled one token after the other at temperature 1 without an end."""
    start = tokenizer.get_vocab().get(SEPARATOR, tokenizer.bos_token_id)
    start = tokenizer.eos_token_id if start is None else start
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": start}
    found = []
    for begin in torch.full((count, 1), start, device=model.device).split(BATCH):
        mask = torch.ones_like(begin)
        ids = model.generate(begin, attention_mask=mask, min_new_tokens=length, max_new_tokens=length, **sampling)
        found.append(ids[:, 1:])
    return torch.cat(found)
