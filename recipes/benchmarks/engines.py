"""Engines of the frontier, each in a process of the Python that has it: decoding speed, and logits of given tokens.

    PYTHON -m recipes.benchmarks.engines ENGINE PATH          # answers requests, see variants.py
    PYTHON -m recipes.benchmarks.engines make KIND FROM TO    # makes a quantized file of llama.cpp

It imports little: llama.cpp has an environment without torch or hf_sparse24.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .variants import Loaded, serve

CONTEXT, DECODED = 1024, 128
"""Tokens that fit a cache; in Transformers, where attention reads all of a static cache, those of decoding alone."""


def answers(feed: Callable[[list[int], int, int], np.ndarray], vocabulary: int) -> Callable[..., dict[str, float]]:
    """The answers: seconds to the first greedy token and per later one, or the logits of `ids`, written to `file`.

    Args:
        feed: from tokens, how many are in the cache (none: a sequence starts) and threads to logits of each token.
    """

    def respond(threads: int, prompt: int = 0, new: int = 0, ids: Any = None, file: str = "") -> dict[str, float]:
        if ids is not None:
            np.save(file, feed(ids, 0, threads).astype(np.float32))
            return {}
        if prompt == 0:
            return {}
        tokens, start = np.random.default_rng(0).integers(3, vocabulary, prompt).tolist(), time.perf_counter()
        token = int(feed(tokens, 0, threads)[-1].argmax())
        first = time.perf_counter()
        for past in range(prompt, prompt + new):
            token = int(feed([token], past, threads)[-1].argmax())
        return {"first": first - start, "step": (time.perf_counter() - first) / max(1, new)}

    return respond


def load_transformers(folder: str) -> Loaded:
    """Transformers with hf_sparse24: a static cache, and steps of one token by `torch.compile`."""
    import torch
    import transformers

    import hf_sparse24  # noqa: F401 (reads packed models)

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder.removesuffix(":int8"), dtype="auto").eval()
    if folder.endswith(":int8"):
        round_to_int8(model)
    cache = transformers.StaticCache(config=model.config, max_cache_len=DECODED)
    step = torch.compile(model.forward, fullgraph=True)

    @torch.inference_mode()
    def feed(ids: list[int], past: int, threads: int) -> np.ndarray:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if len(ids) > DECODED:
            return model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
        if past == 0:
            cache.reset()
        places = torch.arange(past, past + len(ids))
        call = step if len(ids) == 1 else model
        found = call(torch.tensor([ids]), position_ids=places[None], past_key_values=cache, use_cache=True)
        return found.logits[0].float().numpy()

    held = {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}
    system = f"torch {torch.__version__}, Transformers {transformers.__version__}"
    return answers(feed, model.config.vocab_size), {"bytes": sum(held.values()), "system": system}


def round_to_int8(model: Any) -> None:
    """Let the linear layers of the blocks have int8 weights with a scale a row, by torch's own operator."""
    import torch

    class Int8(torch.nn.Module):
        def __init__(self, weight: torch.Tensor):
            super().__init__()
            scale = weight.float().abs().amax(1) / 127
            self.register_buffer("weight", (weight.float() / scale[:, None]).round().to(torch.int8))
            self.register_buffer("scale", scale.to(weight.dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch._weight_int8pack_mm(x.flatten(0, -2), self.weight, self.scale).unflatten(0, x.shape[:-1])

    for name, layer in list(model.model.layers.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            parent, _, leaf = name.rpartition(".")
            setattr(model.model.layers.get_submodule(parent), leaf, Int8(layer.weight.data))


def load_llama_cpp(file: str) -> Loaded:
    import llama_cpp

    model = llama_cpp.Llama(file, n_ctx=CONTEXT, logits_all=True, verbose=False)

    def feed(ids: list[int], past: int, threads: int) -> np.ndarray:
        llama_cpp.llama_set_n_threads(model.ctx, threads, threads)
        model.n_tokens = past  # what is behind is removed from its cache
        model.eval(ids)
        return model.scores[past : past + len(ids)]

    system = f"llama-cpp-python {llama_cpp.__version__}: {llama_cpp.llama_print_system_info().decode().strip(' |')}"
    return answers(feed, model.n_vocab()), {"bytes": llama_cpp.llama_model_size(model.model), "system": system}


def make(kind: str, source: str, target: str) -> None:
    """Make a quantized GGUF file of an F16 one."""
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), 1
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), settings):
        raise RuntimeError(f"{source}: llama.cpp could not make {kind} of it")


ENGINES = {"transformers": load_transformers, "llama.cpp": load_llama_cpp}

if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(*sys.argv[2:])
    else:
        serve(partial(ENGINES[sys.argv[1]], *sys.argv[2:]))
