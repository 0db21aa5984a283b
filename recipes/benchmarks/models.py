"""Whole models: training runs of the Trainer, and prefill and decode, dense against patched."""

import tempfile
import time
from functools import partial
from typing import Any

import torch
from benchmarks import gate
from benchmarks.gemms import Layer, mlp
from benchmarks.run import NOT_RUN, Row, Run, Section, write
from kernel_cases import BF16, draw
from sparse24_kernels import GemmProblem
from torch import Tensor, nn

from .modules import Build, Layers, patched

WARM_UP, STEPS, REFRESH_EVERY = 3, 8, 40
GPT2 = {"n_embd": 1280, "n_layer": 36, "n_head": 20, "n_positions": 1024}
# The layers of Llama 3.2 1B with a vocabulary of 32000: 1.1B parameters.
LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 2048}
RUNS = {"Llama 1B": (8, 2048, "LlamaConfig", LLAMA), "GPT-2 774M": (16, 1024, "GPT2Config", GPT2)}
"""Sequences per step and their length; the configuration in Transformers."""


class Training(Section):
    """Tokens per second of whole runs: dense, S-STE and T-SR-STE, each in a process of its own with a time limit.

    Random tokens and weights, fp32 masters under bf16 autocast, fused AdamW. The steps after the warm-up are timed. A
    mask refresh happens at every 40th step; it is timed apart, and its fortieth added.
    """

    name, groups, share, base = "training runs", ("trainer", "models"), 12, "dense"
    note = "A step of the Trainer with its share of a mask refresh. In brackets: times dense."

    def entries(self) -> list[str]:
        return [f"{model}{suffix}" for model in RUNS for suffix in ("", ", torch.compile")]

    def problems(self, entry: str) -> list[GemmProblem]:
        model = entry.split(",")[0]
        layers = mlp(model, RUNS[model][0] * RUNS[model][1])  # its MLPs are what becomes sparse
        return [problem for layer in layers for problem in layer.problems().values()]

    def goals(self, entry: str) -> dict[str, float]:
        return {"t-sr-ste": 1.25, "s-ste": 1.25} if "1B" in entry else {}

    def measure(self, run: Run, entry: str) -> Row:
        row: Row = {"times": {}, "facts": {}}
        run.result["sections"][self.name]["rows"][entry] = row  # each run is kept as soon as it is done
        for method in ("dense", "t-sr-ste", "s-ste"):
            if run.left() < 35:
                row["times"][method] = {"error": NOT_RUN}
                continue
            run.machine.forget()  # the process needs the memory
            seconds = min(180 if "compile" in entry else 75, run.left(reserve=5))
            with gate.Child(gate.WORKER) as child:
                found, error = gate.call(child, f"{__name__}:train", entry, method, seconds=seconds)
            row["times"][method] = {"error": error} if error else {"us": found.pop("step_us"), "how": "run"}
            row["facts"] |= {f"{method}: {fact}": value for fact, value in (found or {}).items()}
            write(run.result, run.path)
        return row


def train(entry: str, method: str) -> dict[str, Any]:
    """What the child process does: train, and time the steps after the warm-up."""
    import transformers

    from hf_sparse24 import Sparse24Config, Sparse24Trainer
    from hf_sparse24.weight import sparse_weights

    sequences, length, kind, sizes = RUNS[entry.split(",")[0]]
    on_gpu, times = torch.cuda.is_available(), []

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

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
    settings: dict[str, Any] = {"max_steps": WARM_UP + STEPS, "per_device_train_batch_size": sequences, "bf16": True}
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


SIZES: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "vocab_size": 1024}
SIZES |= {"num_attention_heads": 32, "num_key_value_heads": 8}
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

    name, groups, share = "inference", ("inference", "models"), 5
    note = (
        "Four decoder layers of Llama 8B. In brackets: times dense. Sparse: compressed weights alone; auto: a patched "
        "model as it comes out of training, which prunes its weights in every forward."
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
        sparse = partial(patched, build, "s-ste", "cusparselt", "dropped")
        return {"dense": build, "sparse": sparse, "auto": partial(patched, build, "s-ste", "auto")}
