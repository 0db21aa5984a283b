"""Tokens per second of whole training runs: the Trainer with dense weights, with S-STE, and with T-SR-STE.

Each configuration runs in a process of its own with a time limit, so that one that runs out of memory or hangs costs
only itself. Random tokens, random weights, fp32 masters under bf16 autocast, fused AdamW: an ordinary run, of which
the steps after the warm-up are timed, from one synchronization to the other. A mask search falls on every 40th step; it
is timed apart and its fortieth added.

    python kernels/benchmarks/trainer.py CONFIGURATION    one of them (JSON); prints its result
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

# ruff: noqa: E402 (imports come after the path that they need)
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]

import torch
from report import clean
from shapes import Cell, mlp_layers
from side_by_side import NOT_RUN, judged, tune_first
from sparse24_kernels.cusparselt import Problem
from timing import describe
from torch import nn

TARGET = 1.25
"""Times dense, at about a billion parameters."""

TUNING = 0.3
SEARCH_EVERY = 40
MARK = "result: "
SECONDS = {False: 75, True: 180}
"""For one process, without and with torch.compile."""


def gpt2():
    """774M parameters, 1024 positions."""
    from transformers import GPT2Config

    return GPT2Config(n_embd=1280, n_layer=36, n_head=20, n_positions=1024)


def llama():
    """1.1B parameters: the layers of Llama 3.2 1B with a vocabulary of 32000."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=2048,
    )


@dataclass(frozen=True)
class Model:
    config: object
    length: int
    sequences: int  # per step
    parameters: int  # of linear layers, for the prediction
    hidden: int
    intermediate: int


MODELS = {
    "Llama 1B": Model(llama, 2048, 8, 1_038_000_000, 2048, 8192),
    "GPT-2 774M": Model(gpt2, 1024, 16, 772_000_000, 1280, 5120),
}


@dataclass(frozen=True)
class Configuration:
    model: str
    method: str  # "dense", or one of METHODS
    compile: bool
    warm_up: int = 3
    steps: int = 8

    def __str__(self) -> str:
        return f"{self.model} {self.method}{', torch.compile' if self.compile else ''}"

    @property
    def flops(self) -> int:
        """Of a step's linear layers, done densely."""
        model = MODELS[self.model]
        return 6 * model.parameters * model.length * model.sequences


def configurations() -> list[Configuration]:
    """What matters most first; dense and sparse next to each other."""
    methods = ("dense", "t-sr-ste", "s-ste")
    return [Configuration(m, method, c) for m in MODELS for c in (False, True) for method in methods]


def problems(model: Model) -> list[Problem]:
    """The products of its MLPs, which are what becomes sparse."""
    tokens = model.length * model.sequences
    layers = mlp_layers("", model.hidden, model.intermediate)
    return [problem for layer in layers for problem in Cell(layer, tokens).problems().values()]


def section(run) -> None:
    """Tune a model's products, then its configurations, as far as the time goes."""
    result = run.result.setdefault("trainer", {})
    todo = [configuration for configuration in configurations() if run.options.only in str(configuration)]
    for configuration in todo:
        result[str(configuration)] = {"flops": configuration.flops, "error": NOT_RUN}
    tuned = set()
    for configuration in todo:
        # Less than a run takes, and a dense one is of no use without a sparse one.
        if run.left(reserve=70 if configuration.method == "dense" else 35) < 0:
            break
        if configuration.model not in tuned:
            tuned.add(configuration.model)
            tune_first(run, problems(MODELS[configuration.model]), TUNING * run.left())
            run.machine.forget()  # the processes need the memory
        seconds = min(SECONDS[configuration.compile], run.left(reserve=5))
        row = spawn(configuration, seconds) | {"clocks": run.machine.clocks()}
        result[str(configuration)] = {"flops": configuration.flops} | row
        compare(result)
        run.write()


def compare(result: dict) -> None:
    """Every sparse run against the dense one of the same model, compiled or not."""
    for configuration in configurations():
        row = result.get(str(configuration), {})
        dense = result.get(str(Configuration(configuration.model, "dense", configuration.compile)), {})
        if configuration.method != "dense" and "tokens_per_s" in row and "tokens_per_s" in dense:
            row["speed_up"] = row["tokens_per_s"] / dense["tokens_per_s"]
            row["goals"] = [judged("end to end", row["speed_up"], TARGET)] if configuration.model == "Llama 1B" else []


def spawn(configuration: Configuration, seconds: float) -> dict:
    return in_process(HERE / "trainer.py", asdict(configuration), seconds)


def in_process(script: Path, argument, seconds: float) -> dict:
    """Run a script of ours: the result that it prints, or an error; every process that it started is ended with it."""
    paths = os.pathsep.join([str(ROOT), str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(script), json.dumps(argument)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": paths}, start_new_session=True
        )
        try:
            code = process.wait(seconds)
            why = f"its process ended with {code}"
        except subprocess.TimeoutExpired:
            why = f"not done after {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        lines = log.read().strip().splitlines() or [""]
    marked = [line for line in lines if line.startswith(MARK)]
    if marked:
        return json.loads(marked[-1].removeprefix(MARK))
    return {"error": clean(f"{why}: {lines[-1][:200]}")}


class RandomTokens(torch.utils.data.Dataset):
    """As many sequences as are asked for, in memory."""

    def __init__(self, sequences: int, length: int, vocabulary: int):
        self.tokens = torch.randint(vocabulary, (sequences, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def measure(configuration: Configuration, device: torch.device, folder: str) -> dict:
    """Train, and time the steps after the warm-up."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

    from hf_sparse24 import Sparse24Config, Sparse24Trainer

    size, on_gpu = MODELS[configuration.model], device.type == "cuda"
    steps = configuration.warm_up + configuration.steps
    times: list[float] = []

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    class Clock(TrainerCallback):
        """Waits for the device twice in the run, not in every step."""

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (configuration.warm_up, steps):
                times.append(now())
                if on_gpu and state.global_step == configuration.warm_up:
                    torch.cuda.reset_peak_memory_stats()

    set_seed(0)
    model_config = size.config()
    model_config.use_cache = False
    with device:  # made where it is used: a billion random numbers take a CPU too long
        model = AutoModelForCausalLM.from_config(model_config)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=size.sequences,
        bf16=True,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        torch_compile=configuration.compile,
        logging_strategy="steps",
        logging_steps=10**6,  # nothing is measured or printed in between
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
    )
    dataset = RandomTokens(size.sequences * steps, size.length, model_config.vocab_size)
    shared = {"model": model, "args": arguments, "train_dataset": dataset, "callbacks": [Clock()]}
    if configuration.method == "dense":
        trainer = Trainer(**shared)
    else:
        tail = {"dense_tail": 0} if configuration.method == "t-sr-ste" else {}  # a whole run's last sixth
        trainer = Sparse24Trainer(**shared, sparse24_config=Sparse24Config(method=configuration.method, **tail))
    loss = trainer.train().training_loss
    step, search = (times[1] - times[0]) / configuration.steps, 0.0
    if configuration.method == "t-sr-ste":
        search = seconds_to_search(model, now)
    return {
        "tokens_per_s": size.sequences * size.length / (step + search / SEARCH_EVERY),
        "step_s": step,
        "search_s": search,
        "loss": loss,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def seconds_to_search(model: nn.Module, now) -> float:
    """All masks anew, the second time round."""
    from hf_sparse24.patching import sparse_layers

    for _ in range(2):
        start = now()
        for layer in sparse_layers(model).values():
            layer.init_state()
        seconds = now() - start
    return seconds


def main() -> None:
    configuration = Configuration(**json.loads(sys.argv[1]))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = measure(configuration, device, folder)
        except Exception as error:
            result = {"error": clean(describe(error))}
    print("\n" + MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
