"""Sparse24Seq2SeqTrainer: a tiny Marian model trains, evaluates what it generates, is saved and resumes."""

import pytest
import torch
from datasets import Dataset
from training_runs import weights
from transformers import AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel, Seq2SeqTrainingArguments

from hf_sparse24 import Sparse24Config, Sparse24Seq2SeqTrainer, sparse_weights
from hf_sparse24.metrics import is_nm_sparse

PAD, EOS, LENGTH = 31, 0, 6
SAVING = {"save_strategy": "steps", "save_steps": 2}


def build() -> MarianMTModel:
    """A model whose dropout draws random numbers, which a resumed run must draw again."""
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


def trainer(directory, method="s-ste", **settings) -> Sparse24Seq2SeqTrainer:
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
    args = Seq2SeqTrainingArguments(
        str(directory),
        predict_with_generate=True,
        generation_max_length=LENGTH,
        per_device_train_batch_size=4,
        **{"max_steps": 4, "save_strategy": "no", "learning_rate": 1e-2, **quiet, **settings},
    )

    return Sparse24Seq2SeqTrainer(
        build(),
        args,
        train_dataset=copies(),
        eval_dataset=copies(4),
        compute_metrics=lambda prediction: {"generated": prediction.predictions.tolist()},
        sparse24_config=Sparse24Config(method=method),
    )


@pytest.mark.parametrize("method", ["s-ste", "t-sr-ste", "step"])
def test_trains_and_evaluates_what_the_model_generates(tmp_path, method):
    run = trainer(tmp_path, method)
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


def test_saves_what_from_pretrained_reads(tmp_path):
    run = trainer(tmp_path)
    run.train()
    run.save_model()
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert len(sparse_weights(again)) == 4
    assert is_nm_sparse(again.model.decoder.layers[0].fc2.sparse_weight())
    batch = {name: torch.tensor(column) for name, column in copies(4)[:].items()}
    run.model.eval()
    assert torch.equal(again.eval()(**batch).logits, run.model(**batch).logits)


@pytest.mark.parametrize("method", ["s-ste", "t-sr-ste", "step"])
def test_resumes_bit_equal(tmp_path, method):
    whole = trainer(tmp_path, method, **SAVING)
    whole.train()
    resumed = trainer(tmp_path, method, **SAVING)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert torch.equal(weights(whole.model), weights(resumed.model))
