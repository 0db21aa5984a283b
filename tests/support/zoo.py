"""Tiny models with random weights, one per architecture that the library is tested on."""

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    PreTrainedModel,
)

VOCAB = 96
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_BERT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, **_IDS,
}  # fmt: skip
_LLAMA = {**_BERT, "num_key_value_heads": 2, "head_dim": 8}

CAUSAL = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **_IDS},
    "gpt_neox": {**_BERT},
    "opt": {
        "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "word_embed_proj_dim": 32, **_IDS,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, **_IDS},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **_IDS},
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma2": _LLAMA,
    "phi3": _LLAMA,
    "olmo2": _LLAMA,
}  # fmt: skip
MASKED = {
    "bert": _BERT,
    "roberta": _BERT,
    "albert": {**_BERT, "embedding_size": 16},
    "distilbert": {
        "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
    },
    "electra": {**_BERT, "embedding_size": 16},
    "deberta-v2": {
        **_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
    },
    "modernbert": {**_BERT, "cls_token_id": 1, "sep_token_id": 2},
}  # fmt: skip
_MOE = {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MOE = {
    "mixtral": {**_LLAMA, "num_local_experts": 2},
    "qwen2_moe": {**_LLAMA, "num_experts": 2, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 32},
    "qwen3_moe": _MOE,
    "olmoe": _MOE,
    "gpt_oss": {**_MOE, "num_local_experts": 4},
    "deepseek_v3": {
        **_MOE, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
    "llama4_text": {
        **_LLAMA, "num_local_experts": 4, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 1,
        "attn_temperature_tuning": False,
    },
    "jetmoe": {**_LLAMA, "num_local_experts": 4, "kv_channels": 8},
    "granitemoe": {**_LLAMA, "num_local_experts": 4},
}  # fmt: skip
# Other decoders that the same fields build.
OTHERS = {
    name: {**_LLAMA, "rotary_dim": 4}  # which GPT-J and CodeGen have
    for name in (
        "apertus", "arcee", "biogpt", "codegen", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma3_text",
        "glm", "glm4", "gpt_bigcode", "gptj", "granite", "helium", "ministral", "mpt", "nemotron", "olmo", "olmo3",
        "persimmon", "phi", "seed_oss", "smollm3", "stablelm", "starcoder2", "xglm",
    )
}  # fmt: skip
STATE_SPACES = {"mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 16, "time_step_rank": 8}}
CONVOLUTIONAL = {"resnet": {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}}
_ALL = CAUSAL | MASKED | MOE | OTHERS | STATE_SPACES | CONVOLUTIONAL
NAMES = [*CAUSAL, *MASKED]


def build(name: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A model of two blocks, a few thousand weights, no dropout, in train mode."""
    config = AutoConfig.for_model(name, **{"vocab_size": VOCAB, **_ALL[name], **overrides})
    fields = ["dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "resid_pdrop", "embd_pdrop"]
    for field in [*fields, "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"]:
        if hasattr(config, field):
            setattr(config, field, 0.0)
    torch.manual_seed(seed)
    model = auto_class(name).from_config(config)
    return model.train()


def kept_bytes(weight) -> int:
    """What the encodings of a sparse weight hold in memory."""
    return sum(tensor.nbytes for tensor in weight.encodings._kept.tensors.values())


def auto_class(name: str):
    if name in CONVOLUTIONAL:
        return AutoModelForImageClassification
    return AutoModelForMaskedLM if name in MASKED else AutoModelForCausalLM


def batch(seed: int = 0, rows: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}
