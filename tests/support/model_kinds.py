"""Tiny models of other kinds than language models that only decode or only encode, and batches for them."""

from typing import Any, NamedTuple

import torch
import transformers
import zoo
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
VISION = TOWER | {"image_size": 16, "patch_size": 8}
_CLIP = {
    "text_config": TOWER | {"vocab_size": zoo.VOCAB, "max_position_embeddings": 64, **zoo._IDS},
    "vision_config": VISION,
    "projection_dim": 16,
}
_TWO_STACKS = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "vocab_size": zoo.VOCAB,
    "dropout": 0.0, "decoder_start_token_id": 1, "forced_eos_token_id": None, **zoo._IDS,
}  # fmt: skip
_T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "vocab_size": zoo.VOCAB, "decoder_start_token_id": 1, **zoo._IDS,
}  # fmt: skip
_WHISPER = _TWO_STACKS | {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32}


class Kind(NamedTuple):
    """A model class with a config, and what its batches hold: `images`, `text`, `pairs` of both, `audio`."""

    model_class: str
    model_type: str
    inputs: str
    labels: str | None
    config: dict[str, Any]


KINDS = {
    "vit": Kind("ViTForImageClassification", "vit", "images", "classes", VISION | {"num_labels": 4}),
    "deit": Kind("DeiTForImageClassification", "deit", "images", "classes", VISION | {"num_labels": 4}),
    "clip": Kind("CLIPModel", "clip", "pairs", None, _CLIP),
    "clip-vision": Kind("CLIPVisionModel", "clip_vision_model", "images", None, VISION),
    "clip-classifier": Kind("CLIPForImageClassification", "clip", "images", "classes", _CLIP | {"num_labels": 4}),
    "t5": Kind("T5ForConditionalGeneration", "t5", "text", "tokens", _T5),
    "bart": Kind("BartForConditionalGeneration", "bart", "text", "tokens", _TWO_STACKS),
    "marian": Kind("MarianMTModel", "marian", "text", "tokens", _TWO_STACKS),
    "whisper": Kind("WhisperForConditionalGeneration", "whisper", "audio", "tokens", _WHISPER),
}


def build(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model of two blocks a stack, without dropout, in train mode."""
    kind = KINDS[name]
    config = AutoConfig.for_model(kind.model_type, **kind.config | overrides)
    torch.manual_seed(seed)
    return getattr(transformers, kind.model_class)(config).train()


def rows(name: str, count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Examples for a model, without the dimension of the batch."""
    kind, generator = KINDS[name], torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        row: dict[str, Tensor] = {}
        if kind.inputs in ("images", "pairs"):
            row["pixel_values"] = torch.randn(3, 16, 16, generator=generator)
        if kind.inputs in ("text", "pairs"):
            row["input_ids"] = torch.randint(3, zoo.VOCAB, (12,), generator=generator)
        if kind.inputs == "audio":
            row["input_features"] = torch.randn(8, 16, generator=generator)
        if kind.labels == "classes":
            row["labels"] = torch.randint(4, (), generator=generator)
        elif kind.labels == "tokens":
            row["labels"] = torch.randint(3, zoo.VOCAB, (8,), generator=generator)
        found.append(row)
    return found


def collate(examples: list[dict[str, Tensor]]) -> dict[str, Any]:
    """A batch of rows, as collators make it: CLIP's says by a bool that the loss is wanted."""
    batch: dict[str, Any] = {key: torch.stack([row[key] for row in examples]) for key in examples[0]}
    return batch | {"return_loss": True} if {"input_ids", "pixel_values"} <= batch.keys() else batch


def batch(name: str, count: int = 4, seed: int = 0) -> dict[str, Any]:
    """A batch for a model."""
    return collate(rows(name, count, seed))


def outputs(model: PreTrainedModel, name: str) -> Tensor:
    """What a model computes in eval mode of a batch that no test trains on."""
    with torch.no_grad():
        found = model.eval()(**batch(name, count=32, seed=9))
    return next(found[key] for key in ("logits", "logits_per_image", "pooler_output") if key in found)
