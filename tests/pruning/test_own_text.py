"""Text that a model writes by itself, to be pruned by."""

import pytest
import torch
import zoo

from hf_sparse24 import own_text
from hf_sparse24.pruning import own_text as module


class Tokenizer:
    """With what `own_text` reads of one."""

    def __init__(self, bos: int | None = None, eos: int | None = None, **vocab: int):
        self.bos_token_id, self.eos_token_id, self._vocab = bos, eos, vocab

    def get_vocab(self) -> dict[str, int]:
        return self._vocab


def test_it_is_sampled_from_the_models_predictions(monkeypatch):
    """First tokens are as frequent as the model expects; modes and the random numbers stay as they were."""
    monkeypatch.setattr(module, "BATCH", 600)
    model = zoo.build("llama", initializer_range=0.3, vocab_size=5, eos_token_id=3).train()
    frozen = model.model.layers[0].eval()
    before = torch.get_rng_state()
    found = own_text(model, Tokenizer(eos=3), 2000, 2, seed=1)
    assert model.training and model.model.layers[1].training and not any(m.training for m in frozen.modules())
    assert found.shape == (2000, 2) and torch.equal(torch.get_rng_state(), before)
    logits = model.eval()(torch.tensor([[3]])).logits[0, -1]
    logits[3] = -torch.inf  # a text that ends would be shorter than the others
    expected = logits.softmax(-1)
    assert (expected > 0.05).sum() >= 3  # or it tells nothing
    torch.testing.assert_close(found[:, 0].bincount(minlength=5) / 2000, expected, atol=0.04, rtol=0)
    assert torch.equal(found, own_text(model, Tokenizer(eos=3), 2000, 2, seed=1))
    assert not torch.equal(found, own_text(model, Tokenizer(eos=3), 2000, 2, seed=2))


def test_what_a_models_generation_config_asks_for_has_no_part():
    model = zoo.build("llama", initializer_range=0.3, vocab_size=5, eos_token_id=3)
    expected = own_text(model, Tokenizer(eos=3), 4, 8)
    asked = {"repetition_penalty": 5.0, "num_beams": 2, "num_return_sequences": 2, "no_repeat_ngram_size": 2}
    model.generation_config.update(**asked)
    assert torch.equal(own_text(model, Tokenizer(eos=3), 4, 8), expected)
    assert model.generation_config.repetition_penalty == 5.0


def test_a_text_starts_where_documents_do(monkeypatch):
    model, starts = zoo.build("llama"), []
    monkeypatch.setattr(model, "generate", lambda ids, **_: starts.append(ids[0, 0].item()) or ids.repeat(1, 2))
    for tokenizer in (Tokenizer(1, 2, **{"<|endoftext|>": 0}), Tokenizer(1, 2), Tokenizer(None, 2)):
        own_text(model, tokenizer, 1, 1)
    assert starts == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((Tokenizer(1), 0, 4), "count=0: must be at least 1"),
        ((Tokenizer(1), 4, 0), "length=0: must be at least 1"),
        ((Tokenizer(), 4, 4), "neither <|endoftext|> nor a bos_token or eos_token"),
    ],
)
def test_refusals(arguments, expected):
    with pytest.raises(ValueError) as error:
        own_text(zoo.build("llama"), *arguments)
    assert expected in str(error.value)
