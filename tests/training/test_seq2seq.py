"""Sparse24Seq2SeqTrainer: a tiny Marian model trains, evaluates what it generates, and is saved."""

import pytest
import torch
from datasets import Dataset
from training_runs import arguments, weights
from transformers import AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel, Seq2SeqTrainingArguments

from hf_sparse24 import Sparse24Config, Sparse24Seq2SeqTrainer, sparse_weights

PAD, EOS, LENGTH = 31, 0, 6


def build() -> MarianMTModel:
    ids = {"pad_token_id": PAD, "decoder_start_token_id": PAD, "eos_token_id": EOS, "forced_eos_token_id": EOS}
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    torch.manual_seed(0)
    return MarianMTModel(MarianConfig(vocab_size=32, d_model=16, max_position_embeddings=16, **ids, **sizes, **heads))


def copies(rows: int = 16) -> Dataset:
    """Sequences of five tokens and eos; the target is the source."""
    tokens = torch.randint(1, 30, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens[:, -1] = EOS
    return Dataset.from_dict({"input_ids": tokens.tolist(), "labels": tokens.tolist()})


@pytest.mark.parametrize("method", ["s-ste", "step"])
def test_trains_evaluates_what_the_model_generates_and_saves_it(tmp_path, method):
    generation = {"predict_with_generate": True, "generation_max_length": LENGTH}
    run = Sparse24Seq2SeqTrainer(
        build(),
        arguments(tmp_path, Seq2SeqTrainingArguments, learning_rate=1e-2, **generation),
        train_dataset=copies(),
        eval_dataset=copies(4),
        compute_metrics=lambda prediction: {"generated": prediction.predictions.tolist()},
        sparse24_config=Sparse24Config(method=method),
    )
    assert len(run.patch_report.patched) == 4  # fc1 and fc2 of an encoder's and a decoder's block
    before = weights(run.model)
    run.train()
    assert not torch.equal(before, weights(run.model)) and "sparse_phase" in run.state.log_history[0]
    metrics = run.evaluate()
    run.model.eval()
    inputs = torch.tensor(copies(4)["input_ids"])
    generated = run.model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), max_length=LENGTH)
    length = generated.shape[1]
    assert [row[:length] for row in metrics["eval_generated"]] == generated.tolist()
    assert {token for row in metrics["eval_generated"] for token in row[length:]} <= {PAD}
    run.save_model()
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert len(sparse_weights(again)) == 4
    batch = {name: torch.tensor(column) for name, column in copies(4)[:].items()}
    assert torch.equal(again.eval()(**batch).logits, run.model(**batch).logits)
