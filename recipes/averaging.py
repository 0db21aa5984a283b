"""What is left of 2:4, and of the quality, when two sparse models are averaged.

    python recipes/averaging.py        a few minutes on a CPU; writes recipes/results/averaging.json

The models are Llamas of 0.46M parameters on the bytes of Python's standard library. Each pair is averaged weight by
weight, and the average is made 2:4 again in two ways. Losses are nats per byte on held-out text.
"""

import argparse
import copy
import json
from collections.abc import Iterator
from pathlib import Path

import stdlib_text
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_sparse24 import Sparse24Config, Sparse24Controller, oneshot, patch_model, sparse_run, unpatch_model
from hf_sparse24.version import __version__

OUTPUT = Path(__file__).with_name("results") / "averaging.json"
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
S_STE = Sparse24Config(method="s-ste", target_modules="all-linear")
KEPT = Sparse24Config(method="fixed-mask", target_modules="all-linear")


def new_model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, initializer_range=0.08, **SIZES))


def batches(text: Tensor, count: int, seed: int, rows: int = 16) -> list[Tensor]:
    starts = torch.randint(len(text) - 96, (count, rows), generator=torch.Generator().manual_seed(seed))
    return [torch.stack([text[start : start + 96] for start in row]) for row in starts.tolist()]


def train(model: PreTrainedModel, data: list[Tensor], rate: float = 4e-3) -> PreTrainedModel:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=len(data), pct_start=0.2)
    if sparse_run(model) is not None:
        Sparse24Controller(model, optimizer, total_steps=len(data))
    for batch in data:
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def pairs(text: Tensor, steps: int) -> Iterator[tuple[str, list[PreTrainedModel]]]:
    """What two models share, and the models with plain weights, zeros and all."""
    for shared, starts in {"nothing": (0, 1), "start": (0, 0)}.items():
        models = [new_model(start) for start in starts]
        for seed, model in enumerate(models):
            patch_model(model, S_STE)
            train(model, batches(text, steps, seed))
        yield shared, [unpatch_model(model) for model in models]
    dense = train(new_model(0), batches(text, steps, 0))
    models = [copy.deepcopy(dense) for _ in range(2)]
    for seed, model in enumerate(models):
        oneshot(model, batches(text, 32, 10 + seed, 4), KEPT)
    trained = [train(copy.deepcopy(models[0]), batches(text, steps // 2, 20 + seed), 1e-3) for seed in range(2)]
    yield "dense model", [unpatch_model(model) for model in models]
    yield "mask", [unpatch_model(model) for model in trained]


@torch.no_grad()
def average(models: list[PreTrainedModel]) -> PreTrainedModel:
    mean = copy.deepcopy(models[0])
    for ours, other in zip(mean.parameters(), models[1].parameters()):
        ours.lerp_(other, 0.5)
    return mean


def measure(models: list[PreTrainedModel], text: Tensor, held_out: Tensor) -> dict[str, float]:
    def loss(model: PreTrainedModel) -> float:
        with torch.no_grad():
            return model.eval()(held_out, labels=held_out).loss.item()

    mean = average(models)
    weights = [layer.weight for layer in mean.model.layers.modules() if isinstance(layer, torch.nn.Linear)]
    zeros = sum((weight == 0).sum().item() for weight in weights) / sum(weight.numel() for weight in weights)
    found = {"zeros": zeros, "first": loss(models[0]), "second": loss(models[1]), "average": loss(mean)}
    data = batches(text, 32, 30, 4)
    ways = {"magnitude": {"criterion": "magnitude", "reconstruct": None}, "oneshot": {}}
    for way, options in ways.items():
        again = copy.deepcopy(mean)
        oneshot(again, data, KEPT, **options)
        found[way] = loss(again)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of training; default: %(default)s")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the JSON file that gets the results")
    options = parser.parse_args(argv)
    documents = stdlib_text.read_stdlib()
    train_text, held_out = (
        torch.frombuffer(bytearray("".join(part).encode()), dtype=torch.uint8).long()
        for part in (documents[::2], documents[1::50])
    )
    held_out = held_out[: len(held_out) // 96 * 96].view(-1, 96)
    held_out = held_out[:: len(held_out) // 64][:64]  # of all documents
    rows = {shared: measure(models, train_text, held_out) for shared, models in pairs(train_text, options.steps)}
    made = {"steps": options.steps, "device": "cpu", "hf_sparse24": __version__, "torch": torch.__version__}
    stdlib_text.replace_file(options.output, json.dumps(made | {"rows": rows}, indent=2) + "\n")
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
