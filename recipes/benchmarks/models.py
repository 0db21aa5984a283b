"""Whole models: training runs of the Trainer, and prefill and decode, dense against patched and packed."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from sparse24_kernels.gemm import GemmProblem
from torch import Tensor, nn

from .builds import LLAMA, clock
from .cases import BF16, FP16, draw
from .gemms import Layer
from .modules import Build, Layers, patched
from .sections import NOT_RUN, Row, Run, Section
from .variants import environment

WARM_UP, STEPS, REFRESH_EVERY = 3, 8, 40
GPT2: dict[str, Any] = {"n_embd": 1280, "n_layer": 36, "n_head": 20, "n_positions": 1024}
GPT2 |= {"activation_function": "gelu_pytorch_tanh"}  # what `gelu_new` keeps for its gradient would fill the memory
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
GPT2_350M = GPT2 | {"n_embd": 1024, "n_layer": 24, "n_head": 16}
GPT2_124M = GPT2 | {"n_embd": 768, "n_layer": 12, "n_head": 12}
RUNS = {"Llama 1B": (8, 2048, "LlamaConfig", LLAMA), "GPT-2 774M": (16, 1024, "GPT2Config", GPT2)}
LLAMA_8B = LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4}
RUNS |= {"four layers of Llama 8B": (4, 2048, "LlamaConfig", LLAMA_8B)}
RUNS |= {"GPT-2 124M": (16, 1024, "GPT2Config", GPT2_124M), "GPT-2 350M": (8, 1024, "GPT2Config", GPT2_350M)}
"""Sequences per step and their length; the configuration in Transformers. The last two are of the papers."""


class Training(Section):
    """Tokens per second of whole runs: dense, S-STE and T-SR-STE, each in a separate process with a time limit.

    Random tokens and weights, fp32 masters under autocast to bf16, in rows that say so to fp16; fused AdamW. The steps
    after the warm-up are timed. A mask refresh happens at every 40th step; it is timed apart, and its fortieth added.
    """

    name, groups = "training runs", ("trainer", "models")
    note = "A step of the Trainer with its share of a mask refresh."

    def entries(self) -> list[str]:
        found = [f"{model}{suffix}" for model in RUNS for suffix in ("", ", torch.compile")]
        return found + [f"{model}, fp16" for model in ("GPT-2 124M", "GPT-2 350M")]  # as the papers train them

    def problems(self, entry: str) -> list[GemmProblem]:
        sequences, length, _, sizes = RUNS[entry.split(",")[0]]
        hidden = sizes.get("hidden_size") or sizes["n_embd"]
        inner, dtype = sizes.get("intermediate_size", 4 * hidden), FP16 if "fp16" in entry else BF16
        mlp = Layer(entry, inner, hidden, sequences * length, dtype=dtype)  # MLPs are what becomes sparse
        return [problem for layer in mlp.pair() for problem in layer.problems().values()]

    def goals(self, entry: str) -> dict[str, float]:
        return {"t-sr-ste": 1.25, "s-ste": 1.25} if "1B" in entry else {}

    def measure(self, run: Run, entry: str) -> Row:
        methods = ("dense", "t-sr-ste", "s-ste")
        return in_processes(run, self.name, entry, methods, train, 180 if "compile" in entry else 75)


def in_processes(run: Run, section: str, entry: str, ways: Sequence[str], call: Callable[..., Any], limit: int) -> Row:
    """A row whose ways are run by `call(entry, way)`, each in a separate process with a time limit."""
    row: Row = {"times": {}, "facts": {}}
    run.result["sections"][section]["rows"][entry] = row  # each run is kept as soon as it is done
    for way in ways:
        if run.left() < 35:
            row["times"][way] = {"error": NOT_RUN}
            continue
        run.machine.forget()  # the process needs the memory
        try:
            found = in_process(call.__name__, entry, way, min(limit, run.left(reserve=5)))
        except (subprocess.SubprocessError, ValueError) as error:
            row["times"][way] = {"error": run.note(error, f"{way}\n{getattr(error, 'stderr', '')}")}
            continue
        row["times"][way] = {"us": found.pop("step_us")}
        row["facts"] |= {f"{way}: {fact}": value for fact, value in found.items()}
        run.write()
    return row


def in_process(call: str, entry: str, way: str, seconds: float) -> dict[str, Any]:
    """What `call(entry, way)` of this module returns, run in a separate process.

    Raises:
        SubprocessError: it fails, or takes longer than `seconds`.
    """
    command = [sys.executable, "-P", "-m", "recipes.benchmarks.models", call, entry, way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True, env=environment())
    return json.loads(done.stdout.splitlines()[-1])


def now() -> float:
    """Once the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def train(entry: str, method: str) -> dict[str, Any]:
    """What the child process does: train, and time the steps after the warm-up."""
    import transformers

    from hf_sparse24 import Sparse24Config, Sparse24Trainer, sparse_weights

    sequences, length, kind, sizes = RUNS[entry.split(",")[0]]
    on_gpu, times = torch.cuda.is_available(), []

    class Clock(transformers.TrainerCallback):
        """Waits for the device twice in the run, not in every step."""

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (WARM_UP, WARM_UP + STEPS):
                times.append(now())

    transformers.set_seed(0)
    config = getattr(transformers, kind)(**sizes, use_cache=False)
    with torch.device("cuda" if on_gpu else "cpu"):  # where it is used: a billion random numbers take a CPU too long
        model = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(config.vocab_size, (sequences * (WARM_UP + STEPS), length))
    dataset = [{"input_ids": sequence, "labels": sequence} for sequence in tokens]
    shared: dict[str, Any] = {"model": model, "callbacks": [Clock()], "train_dataset": dataset}
    settings: dict[str, Any] = {"max_steps": WARM_UP + STEPS, "per_device_train_batch_size": sequences}
    settings["fp16" if "fp16" in entry else "bf16"] = True
    settings |= {"optim": "adamw_torch_fused" if on_gpu else "adamw_torch", "torch_compile": "compile" in entry}
    # Nothing is measured or printed in between.
    settings |= {"logging_steps": 10**6, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    settings |= {"use_cpu": not on_gpu, "dataloader_pin_memory": on_gpu}
    trainer = transformers.Trainer
    if method != "dense":
        trainer = Sparse24Trainer
        tail: dict[str, Any] = {"dense_tail": 0} if method == "t-sr-ste" else {}  # a whole run's last sixth
        shared["sparse24_config"] = Sparse24Config(method=method, **tail)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(output_dir=folder, **settings)
        loss = trainer(**shared, args=arguments).train().training_loss
    step, refresh = (times[1] - times[0]) / STEPS, 0.0
    peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None
    for _ in range(2 if method == "t-sr-ste" else 0):  # the second time counts
        start = now()
        for weight in sparse_weights(model).values():
            weight.init_state()
        refresh = now() - start
    step += refresh / REFRESH_EVERY
    rates = {"tokens per s": sequences * length / step, "mask refresh, ms": refresh * 1e3}
    return {"step_us": step * 1e6, **rates, "loss": loss, "peak GB": peak}


SIZES = LLAMA_8B | {"vocab_size": 1024}
CONTEXT = 128


class Decoder(nn.Module):
    """The decoder layers; the same weights each time. Decoding appends to a cache of `CONTEXT`, and takes it off."""

    def __init__(self, entry: Layer, device: torch.device):
        from transformers import DynamicCache, LlamaConfig, LlamaModel

        super().__init__()
        self.cache: Any = None
        self.position, self.size = None, (1, entry.tokens, entry.inputs)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(0)
            self.model: Any = LlamaModel(LlamaConfig(**SIZES, max_position_embeddings=16384)).eval().to(BF16)
        if entry.name == "decode":
            self.size, cache = (entry.tokens, 1, entry.inputs), DynamicCache(config=self.model.config)
            with torch.no_grad():
                start = draw(device, (entry.tokens, CONTEXT, entry.inputs), BF16)
                self.model(inputs_embeds=start, past_key_values=cache, use_cache=True)
            self.cache, self.position = cache, torch.full((entry.tokens, 1), CONTEXT, device=device)

    def forward(self, x: Tensor) -> Tensor:
        # Put back rather than cropped: a captured graph goes on reading these, so they must live as long as it.
        kept = [(layer.keys, layer.values) for layer in self.cache.layers] if self.position is not None else []
        settings = {"past_key_values": self.cache, "position_ids": self.position, "use_cache": True}
        state = self.model(inputs_embeds=x.view(self.size), **settings)
        for i, (keys, values) in enumerate(kept):
            self.cache.layers[i].keys, self.cache.layers[i].values = keys, values
        return state.last_hidden_state


class Inference(Layers):
    """Llama 8B's decoder layers in eval mode without gradients.

    Four layers stand for the thirty-two: they all cost the same. Their weights are 3.5 GB in bf16, so decoding reads
    them from device memory, as a whole model would.
    """

    name, groups = "inference", ("inference", "models")
    note = (
        "Four decoder layers of Llama 8B. Packed: weights in packed form alone; auto: a "
        "patched model as it comes out of training, which prunes its weights in every forward."
    )

    def entries(self) -> list[Layer]:
        sizes = (("prefill", 8192), ("decode", 64), ("prefill", 1024), ("decode", 1), ("decode", 16), ("decode", 256))
        hidden = SIZES["hidden_size"]
        return [Layer(name, hidden, hidden, tokens, training=False) for name, tokens in sizes]

    def problems(self, entry: Layer) -> list[GemmProblem]:
        hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
        narrow = hidden * SIZES["num_key_value_heads"] // SIZES["num_attention_heads"]
        sizes = ((inner, hidden), (hidden, inner), (hidden, hidden), (narrow, hidden))
        return [Layer("", *size, entry.tokens).problems()["output"] for size in sizes]

    def ways(self, entry: Layer, device: torch.device) -> dict[str, Build]:
        build = partial(Decoder, entry, device)
        packed = partial(patched, build, "s-ste", "auto", "packed")
        return {"dense": build, "packed": packed, "auto": partial(patched, build, "s-ste", "auto")}


PROMPT, NEW = 512, 128


class Generation(Section):
    """`generate` of a whole model of random weights in bf16, each way in a separate process.

    Entries are the number of sequences, and "static": a static cache, with which Transformers compiles the decoding
    step on a GPU. Without it, launching kernels from Python takes longer than running them.
    """

    name, groups = "generation", ("inference", "models")
    note = (
        f"Llama 1B, prompts of {PROMPT} tokens, {NEW} new ones. Times: of a decoding step. "
        "Patched: as it comes out of training; packed: weights in packed form alone."
    )
    ways = ("dense", "packed", "patched")

    def entries(self) -> list[str]:
        return ["1 sequence, static", "1 sequence", "16 sequences, static"]

    def goals(self, entry: str) -> dict[str, float]:
        return {"packed": 1.2} if "static" in entry else {}

    def measure(self, run: Run, entry: str) -> Row:
        return in_processes(run, self.name, entry, self.ways, generate, 150 if "static" in entry else 60)


def generate(entry: str, way: str) -> dict[str, Any]:
    """What the child process does: generate twice, and time the second."""
    import transformers

    from hf_sparse24 import Sparse24Config, pack_model, patch_model

    times: list[float] = []
    on_gpu = torch.cuda.is_available()
    transformers.set_seed(0)
    _, _, kind, sizes = RUNS["Llama 1B"]
    with torch.device("cuda" if on_gpu else "cpu"):
        config = getattr(transformers, kind)(**sizes, eos_token_id=None)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16).eval()
        prompt = torch.randint(config.vocab_size, (int(entry.split()[0]), PROMPT))
    if way != "dense":
        patch_model(model, Sparse24Config(method="s-ste", target_modules="all-linear"))
    if way == "packed":
        pack_model(model)
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "stopping_criteria": [clock(times, now)]}
    settings |= {"cache_implementation": "static"} if "static" in entry else {}
    for _ in range(2):  # the first one compiles
        times[:] = [now()]
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    prefill, decode = times[1] - times[0], (times[-1] - times[1]) / (len(times) - 2)
    rates = {"prefill, tokens per s": prompt.numel() / prefill, "decode, tokens per s": len(prompt) / decode}
    peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None
    return {"step_us": decode * 1e6, **rates, "weights GB": weights / 1e9, "peak GB": peak}


if __name__ == "__main__":
    print("\n" + json.dumps({"train": train, "generate": generate}[sys.argv[1]](*sys.argv[2:])))
