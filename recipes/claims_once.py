"""The runs of `claims.py` that are no single training of the small Llama: pruning a trained model once, fine-tuning a
pruned one, the descent of a larger one, and images."""

import copy
import json
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import compare_methods
import image_classification
import tiny_images
import tiny_tasks
import torch
import train
from analysis import SETTINGS, batches
from analysis import measure as measure_descent
from arguments import parse_arguments
from sparse24_kernels import mvue, nm_mask, nm_prune, transposable_mask
from sparse24_kernels.transposable import SOLVERS
from text_data import make_datasets
from torch import Tensor, nn
from transformers import Trainer

from hf_sparse24 import Sparse24Config, Sparse24Controller, patch_model, sparse_weights, unpatch_model
from hf_sparse24.metrics import kept_magnitude
from hf_sparse24.pruning.layerwise import least_squares, ridge

RECIPES = Path(__file__).resolve().parent
STEPS = 600
HALVES = ("1:2", "2:4", "4:8")
LARGER = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
LARGER |= {"num_key_value_heads": 4, "max_position_embeddings": 128}
"""A Llama of 1.6M parameters, for the descent that `analysis.py` measures at 0.46M."""


def measure_oneshot(seed: int, data: str, *, steps: int = 2 * STEPS, retraining: int = 100) -> dict[str, Any]:
    """Train a dense model, and keep half of its MLPs by each mask, once: the validation loss at once, after AdaPrune,
    and after that and training with the kept mask. `from unstructured` starts from a model that has trained with half
    of its weights pruned unstructured, and has no training afterwards.

    AdaPrune here is the least-squares optimum for the inputs that each layer has in the model before; theirs takes
    1,000 steps of Adam.
    """
    watches: list[Trainer] = []
    dense = compare_methods.run("dense", compare_methods.rate_of("dense"), seed, data, steps, watch=watches.append)
    model, blocks = watches[0].model.eval(), watches[0].train_dataset
    held_out = list(batches(watches[0].eval_dataset, 32, None, 7))
    calibration = list(batches(blocks, 8, 100 + seed, 32))
    training = list(batches(blocks, 8, 200 + seed, retraining))
    retrained = _retrained(copy.deepcopy(model), training, held_out)
    rows: dict[str, Any] = {"dense": {"loss": loss_of(model, held_out), "retrained": retrained}}
    grams = _grams(model, calibration)
    for kind in ("unstructured", *HALVES, *(f"{half} transposable" for half in HALVES), "8:16"):
        rows[kind], adapted, masks = _pruned(model, kind, grams, held_out)
        trained = copy.deepcopy(adapted)
        rows[kind]["retrained"] = _retrained(trained, training, held_out, masks)
        if kind == "unstructured":
            sparse, sparse_grams = trained, _grams(trained.eval(), calibration)
    for kind in (*HALVES, "8:16", "4:8 transposable"):
        rows[f"from unstructured, {kind}"] = _pruned(sparse, kind, sparse_grams, held_out)[0]
    return {"seed": seed, "rows": rows, "dense_steps": steps, "retraining": retraining} | {
        key: dense[key] for key in ("learning_rate", "parameters", "tokens", "versions", "device")
    }


def _mlps(model: nn.Module) -> dict[str, nn.Linear]:
    found = model.named_modules()
    return {name: module for name, module in found if ".mlp." in name and isinstance(module, nn.Linear)}


@torch.no_grad()
def _grams(model: nn.Module, calibration: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """`X^T X` of the inputs of each MLP layer."""
    found: dict[str, Tensor] = {}

    def add(module: nn.Module, inputs: tuple[Tensor], name: str) -> None:
        x = inputs[0].flatten(0, 1)
        found[name] = found.get(name, 0) + x.t() @ x

    hooks = [layer.register_forward_pre_hook(partial(add, name=name)) for name, layer in _mlps(model).items()]
    for batch in calibration:
        model(**batch)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def _pruned(model: nn.Module, kind: str, grams: dict[str, Tensor], held_out: Any) -> tuple[dict, nn.Module, dict]:
    """Share of the L1 norm that magnitude keeps, loss at once and after AdaPrune; the model after it; its masks."""
    pruned, adapted = copy.deepcopy(model), copy.deepcopy(model)
    masks, kept = {}, 0.0
    for name, layer in _mlps(model).items():
        weight = layer.weight
        if kind == "unstructured":
            mask = weight.abs() > weight.abs().flatten().kthvalue(weight.numel() // 2).values
        else:
            n, m = map(int, kind.split()[0].split(":"))
            mask = transposable_mask(weight, n, m) if "transposable" in kind else nm_mask(weight, n, m)
        masks[f"{name}.weight"] = mask
        kept += (weight * mask).abs().sum().item() / weight.abs().sum().item() / len(grams)
        pruned.get_submodule(name).weight.mul_(mask)
        penalty = torch.full_like(grams[name][0], ridge(grams[name], 0.01))
        values = least_squares(weight, mask, grams[name], penalty, weight * mask, tolerance=1e-4)
        adapted.get_submodule(name).weight.copy_(values)
    row = {"kept": short(kept), "loss": loss_of(pruned, held_out), "adaprune": loss_of(adapted, held_out)}
    return row, adapted, masks


def _retrained(
    model: nn.Module, training: list[Any], held_out: list[Any], masks: dict[str, Tensor] | None = None
) -> float:
    """Loss after a few steps of AdamW with what is zero kept zero, by the model's method or by `masks`."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(training))
    if sparse_weights(model):
        Sparse24Controller(model, optimizer, len(training))
    for batch in training:
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        for name, mask in (masks or {}).items():
            model.get_parameter(name).data.mul_(mask)
    return loss_of(model, held_out)


def measure_finetuning(seed: int, data: str, *, steps: int = STEPS, retraining: int = 150) -> dict[str, Any]:
    """Pre-train by the soft and by the hard threshold, then fine-tune each on other text by either, and by a mask that
    stays. The other text is what `tiny_tasks.py` writes as contexts of questions: sentences about functions."""
    tasks = tiny_tasks.prepare(Path(data).parent / "tiny_tasks") / "squad"
    flags = {"dataset": tasks / "train.jsonl", "validation_file": tasks / "validation.jsonl"}
    flags |= {"text_column": "context", "tokenizer_name": f"{data}/tokenizer", "output_dir": data}
    argv = [f"{RECIPES}/methods.yaml", *(f"--{key}={value}" for key, value in flags.items())]
    rows: dict[str, Any] = {}
    for before in ("s-ste", "ste"):
        watches: list[Trainer] = []
        made = compare_methods.run(before, compare_methods.rate_of("s-ste"), seed, data, steps, watch=watches.append)
        tokenizer = watches[0].processing_class
        data_args = parse_arguments(train.ARGUMENTS, argv)[2]
        blocks, validation = make_datasets(data_args, tokenizer, seed)
        training = list(batches(blocks, 8, seed, retraining))
        held_out = list(batches(validation, 32, None, len(validation) // 32))
        checkpoint = watches[0].model
        exported = unpatch_model(copy.deepcopy(checkpoint))
        row = {"pre-training": made["eval_loss"], "before": loss_of(exported, held_out)}
        for after in ("s-ste", "ste", "fixed-mask"):
            model = copy.deepcopy(exported if after != before else checkpoint)
            if after != before:
                patch_model(model, Sparse24Config(method=after, target_modules="mlp"))
            row[after] = _retrained(model, training, held_out)
        rows[before] = row
    return {"seed": seed, "rows": rows, "retraining": retraining} | {
        key: made[key] for key in ("parameters", "tokens", "versions", "device")
    }


def measure_kernels(seed: int, data: str, *, size: int = 512, draws: int = 200) -> dict[str, Any]:
    """How much of the L1 norm of Gaussian weights the solvers of transposable masks keep, and in what time; and the
    mean squared error and the bias of pruned Gaussian blocks, relative to their squares."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(size, size, generator=generator)
    solvers: dict[str, Any] = {}
    for pattern, solver in product(("2:4", "4:8"), ("rows", *SOLVERS)):
        n, m = map(int, pattern.split(":"))
        start = time.perf_counter()
        mask = nm_mask(weight, n, m) if solver == "rows" else transposable_mask(weight, n, m, solver)
        seconds = time.perf_counter() - start
        solvers[f"{pattern} {solver}"] = {"kept": short(kept_magnitude(weight, mask)), "ms": short(1000 * seconds)}
    ways = {"mvue": (2, 4, "exact"), "mvue-approx": (2, 4, "approx"), "mvue-1:2": (1, 2, "exact")}
    estimates: dict[str, Any] = {"greedy": {"error": _relative(nm_prune(weight) - weight, weight)}}
    for name, (n, m, estimator) in ways.items():
        drawn = [mvue(weight, n, m, 1, estimator, key=torch.tensor(draw)) for draw in range(draws)]
        errors = [_relative(one - weight, weight) for one in drawn]
        bias = _relative(sum(drawn) / draws - weight, weight)
        estimates[name] = {"error": short(sum(errors) / draws), "error of the mean": bias, "draws": draws}
    return {"seed": seed, "size": size, "solvers": solvers, "estimates": estimates, "torch": torch.__version__}


def _relative(error: Tensor, of: Tensor) -> float:
    return short((error.square().sum() / of.square().sum()).item())


def measure_larger(variant: str, seed: int, data: str) -> dict[str, Any]:
    """What `analysis.py` measures, of a larger Llama in fewer steps."""
    settings = SETTINGS | {"steps": STEPS // 2, "more": {"config_overrides": json.dumps(LARGER)}}
    return measure_descent(variant, seed, data, **settings) | {"settings": settings, "torch": torch.__version__}


def measure_images(method: str, settings: dict[str, Any], seed: int, data: str, *, epochs: int = 20) -> dict[str, Any]:
    """Accuracy of the tiny vision transformer of `pretrain/deit-toy.yaml` on handwritten digits."""
    images = tiny_images.prepare(Path(data).parent / "tiny_images")
    with tempfile.TemporaryDirectory() as output:
        flags = {"dataset": images, "image_processor_name": images / "processor", "output_dir": output, "seed": seed}
        flags |= {"method": method, "sparse24": json.dumps(settings), "num_train_epochs": epochs}
        files = [f"{RECIPES}/pretrain/deit-{size}.yaml" for size in ("tiny", "toy")]
        trainer = image_classification.main([*files, *(f"--{key}={value}" for key, value in flags.items())])
        logs = trainer.state.log_history
    return {
        "accuracy": next(log["eval_accuracy"] for log in reversed(logs) if "eval_accuracy" in log),
        "eval_loss": next(short(log["eval_loss"], 6) for log in reversed(logs) if "eval_loss" in log),
        "steps": trainer.state.global_step,
        "method": method,
        "settings": settings,
        "seed": seed,
        "parameters": trainer.model.num_parameters(),
        "torch": torch.__version__,
    }


@torch.no_grad()
def loss_of(model: nn.Module, held_out: list[dict[str, Tensor]]) -> float:
    model.eval()
    return short(sum(model(**batch).loss.item() for batch in held_out) / len(held_out), 6)


def short(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")
