"""Sparse24Seq2SeqTrainer: a Seq2SeqTrainer that patches its model and runs its sparsity."""

from transformers import Seq2SeqTrainer

from .trainer import Sparse24Trainer


class Sparse24Seq2SeqTrainer(Sparse24Trainer, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` for 2:4 sparse training of encoder-decoder models, as of translation or speech.

    With `predict_with_generate=True` of its `Seq2SeqTrainingArguments` it evaluates what the sparse model generates.

    Args:
        model: as for `Seq2SeqTrainer`; all arguments are those of `Sparse24Trainer`.

    Examples:
        >>> from transformers import MarianConfig, MarianMTModel, Seq2SeqTrainingArguments
        >>> sizes = {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 99, "pad_token_id": 98}
        >>> model = MarianMTModel(MarianConfig(**sizes, decoder_start_token_id=98, encoder_layers=1, decoder_layers=1))
        >>> data = [{"input_ids": [5, 6, 0], "labels": [6, 5, 0]}] * 4
        >>> generating = {"predict_with_generate": True, "generation_max_length": 6}
        >>> args = Seq2SeqTrainingArguments("out", max_steps=2, report_to="none", **generating)
        >>> trainer = Sparse24Seq2SeqTrainer(model, args, train_dataset=data)
        >>> output = trainer.train()
        >>> len(trainer.predict(data).predictions)
        4
    """
