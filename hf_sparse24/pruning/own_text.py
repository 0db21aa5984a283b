"""own_text: text that a model writes from nothing, to prune it by."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..progress import Progress, get_logger
from .calibration import evaluating

logger = get_logger(__name__)

# Between the documents that most models learned from; instruction tuning gives many another `bos_token`.
SEPARATOR = "<|endoftext|>"
BATCH = 32  # sequences that are written at a time: a bound on memory


@torch.no_grad()
def own_text(model: Any, tokenizer: PreTrainedTokenizerBase, count: int, length: int, seed: int = 0) -> Tensor:
    """Text that a language model writes from nothing, to be given to `oneshot`.

    A model that is pruned by a few kinds of text forgets the others first; its own text has all kinds that it learned.
    docs/measured/pretrained.md measures it. The idea is that of data-free quantization (LLM-QAT, arXiv 2305.17888); our
    deviation: a sequence starts where documents do, and every token is sampled.

    Args:
        model: a causal language model of Transformers, best in bf16; not pruned yet.
        tokenizer: the model's.
        count: sequences; three times as many tokens as there are of other text did well.
        length: tokens of each, at least 1, and at most as many as the model has positions.
        seed: of the sampling, at temperature 1 among all tokens. Other random numbers stay as they are.

    Returns:
        Token ids, `[count, length]`, int64, on the CPU.

    Raises:
        ValueError: a `count` or `length` below 1; a tokenizer without a token that starts or ends a text.
    """
    for name, value in (("count", count), ("length", length)):
        if value < 1:
            raise ValueError(f"{name}={value!r}: must be at least 1")
    starts = (tokenizer.get_vocab().get(SEPARATOR), tokenizer.bos_token_id, tokenizer.eos_token_id)
    start = next((token for token in starts if token is not None), None)
    if start is None:
        raise ValueError(f"the tokenizer has neither {SEPARATOR} nor a bos_token or eos_token to start a text with")
    sampling: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": start}
    sampling |= {"min_new_tokens": length, "max_new_tokens": length}
    own, found = model.generation_config, []
    progress = Progress("writing text", count, "sequence", logger.info)
    try:
        # From the model's own one, `generate` takes what it is not given: a repetition penalty, a number of beams.
        model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id)
        with torch.random.fork_rng(), evaluating(model), progress:
            torch.manual_seed(seed)
            for begin in torch.full((count, 1), start, device=model.device).split(BATCH):
                found.append(model.generate(begin, attention_mask=torch.ones_like(begin), **sampling)[:, 1:].cpu())
                progress.update(len(begin))
    finally:
        model.generation_config = own
    return torch.cat(found)
