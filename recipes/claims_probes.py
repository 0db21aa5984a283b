"""What runs of `claims.yaml` do with the model that they have trained: `probe` names a function of this file."""

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import text_data
import tiny_tasks
import torch
import train
from sparse24_kernels import nm_mask, transposable_mask
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Trainer

from hf_sparse24 import Sparse24Config, Sparse24Controller, patch_model, sparse_weights, unpatch_model
from hf_sparse24.run import patched_config

Batch = dict[str, Tensor]
PATTERNS = ("1:2", "2:4", "4:8", "8:16", "4:8 transposable")
FINE_TUNING = (1e-3, 2e-3, 4e-3, 8e-3)
"""Learning rates."""


def batches(rows: Any, size: int, seed: int | None = None) -> Iterator[Batch]:
    """Batches of the rows: once in their own order, or without end in orders drawn by a seed. The rest is left out."""
    generator = torch.Generator().manual_seed(seed or 0)
    for _ in [0] if seed is None else itertools.count():
        order = range(len(rows)) if seed is None else torch.randperm(len(rows), generator=generator).tolist()
        for start in range(0, len(rows) - size + 1, size):
            yield train.collate_causal([rows[i] for i in order[start : start + size]])


@torch.no_grad()
def loss_of(model: nn.Module, held_out: list[Batch], weights: dict[str, Tensor] | None = None) -> float:
    """Nats per token of a model, or with other weights."""
    losses = [functional_call(model.eval(), weights or {}, kwargs=batch).loss.item() for batch in held_out]
    return sum(losses) / len(losses)


def linear_piece(weight: Any) -> Callable[[Tensor], Tensor]:
    """The linear map that pruning is around a weight: its mask, and of the soft threshold also which weight of a group
    gives the threshold, and the signs."""
    mask, scale = weight.mask(), weight.state.get("scale")
    if scale is None:
        return lambda other: other * mask
    groups = weight.master.detach().unflatten(-1, (-1, 4))
    second = groups.abs().argsort(-1)[..., 1:2]
    signs = groups.sign() * groups.gather(-1, second).sign()

    def soft(other: Tensor) -> Tensor:
        values = other.unflatten(-1, (-1, 4))
        return scale * (values - signs * values.gather(-1, second)).flatten(-2) * mask

    return soft


def descent(trainer: Trainer, seed: int, *, steps: int = 150, micro_batches: int = 64) -> dict[str, Any]:
    """Go on training at the last learning rate, with batches of 64 times as many tokens, and say what each step did to
    the loss of other text.

    `held` is what a step gained with the masks of before it (S-STE's thresholds too), `gained` with those of after it,
    `predicted` the gradient times the step. On its own batch a step descends by design.
    """
    model, old = trainer.model, trainer.optimizer.optimizer
    twin = unpatch_model(copy.deepcopy(model)) if sparse_weights(model) else copy.deepcopy(model)
    held_out = list(batches(trainer.eval_dataset, 58))
    optimizer = torch.optim.AdamW([{**group} for group in old.param_groups])
    optimizer.load_state_dict(old.state_dict())
    if weights := sparse_weights(model):
        Sparse24Controller(model, optimizer, steps, seed=seed, metrics_interval=steps)

    def seen() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All weights as they are, and as the GEMMs see them."""
        plain = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        return plain, plain | {name: weight.pruned().detach().clone() for name, weight in weights.items()}

    def masks() -> Tensor:
        return torch.cat([w.mask().flatten() for w in weights.values()] or [torch.zeros(1, dtype=torch.bool)])

    text = batches(trainer.train_dataset, trainer.args.train_batch_size, 1000 + seed)
    start, points = loss_of(twin, held_out, seen()[1]), []
    for _ in range(steps):
        model.train()
        for _ in range(micro_batches):
            (model(**next(text)).loss / micro_batches).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        before, pieces, old_masks = seen()[0], {name: linear_piece(w) for name, w in weights.items()}, masks()
        nn.utils.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        after, pruned = seen()
        end = loss_of(twin, held_out, pruned)
        flips = (old_masks ^ masks()).float().mean().item()
        held = loss_of(twin, held_out, after | {name: piece(after[name]) for name, piece in pieces.items()})
        predicted = sum(((before[name] - after[name]) * g).sum().item() for name, g in gradients.items())
        points.append({"gained": start - end, "held": start - held, "predicted": predicted, "flips": flips})
        start = end
    return {key: [float(f"{point[key]:.4g}") for point in points] for key in points[0]} | _summary(points)


def _summary(points: list[dict[str, float]]) -> dict[str, float]:
    columns = {key: torch.tensor([point[key] for point in points], dtype=torch.float64) for key in points[0]}
    gained, held = columns["gained"], columns["held"]
    flipped = columns["flips"] > 0
    return {
        "ascents by flips": ((held > 0) & (gained < 0)).double().mean().item(),
        "ascents": (gained < 0).double().mean().item(),
        "correlation": torch.corrcoef(torch.stack([columns["predicted"], gained]))[0, 1].item(),
        "gain of flips": (gained - held)[flipped].mean().item() if flipped.any() else 0.0,
        "gain of a step": gained.mean().item(),
        "mean flips": columns["flips"].mean().item(),
    }


def trained(model: nn.Module, text: Iterator[Batch], rate: float, steps: int, masks: dict[str, Tensor]) -> nn.Module:
    """A copy of a model after more steps of AdamW. Masks hold weights that no method holds."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    if sparse_weights(model):
        Sparse24Controller(model, optimizer, steps, metrics_interval=steps)
    for batch, _ in zip(text, range(steps)):
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        for name, mask in masks.items():
            model.get_parameter(name).data.mul_(mask)
    return model


def unstructured(trainer: Trainer, seed: int, *, steps: int = 100) -> dict[str, Any]:
    """Prune half of the MLPs' weights unstructured, train, and go on to N:M: loss at once and after more training."""
    held_out = list(batches(trainer.eval_dataset, 58))
    text = partial(batches, trainer.train_dataset, trainer.args.train_batch_size)
    names = [name for name, _ in trainer.model.named_parameters() if ".mlp." in name]

    def pruned(model: nn.Module, kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
        model, masks = copy.deepcopy(model), {}
        for name in names:
            weight = model.get_parameter(name).data
            n, m = (int(part) for part in kind.split()[0].split(":")) if ":" in kind else (1, 2)
            if kind == "unstructured":
                masks[name] = weight.abs() > weight.abs().flatten().kthvalue(weight.numel() // 2).values
            else:
                masks[name] = transposable_mask(weight, n, m) if "transposable" in kind else nm_mask(weight, n, m)
            weight.mul_(masks[name])
        return model, masks

    def further(model: nn.Module, masks: dict[str, Tensor], seed: int) -> nn.Module:
        return trained(model, text(seed), 1e-3, steps, masks)

    sparse = further(*pruned(trainer.model, "unstructured"), seed=2000 + seed)
    masks = {name: sparse.get_parameter(name).data != 0 for name in names}
    start, control = loss_of(sparse, held_out), loss_of(further(sparse, masks, 3000 + seed), held_out)
    found = {}
    for kind in PATTERNS:
        model, masks = pruned(sparse, kind)
        after = loss_of(further(model, masks, 3000 + seed), held_out)
        found[kind] = {"at once": loss_of(model, held_out) - start, "trained": after - control}
    return {"over unstructured": found, "losses": {"unstructured": start, "trained": control}}


def fine_tuned(trainer: Trainer, seed: int, *, steps: int = 150) -> dict[str, Any]:
    """Fine-tune on other text, sentences about functions, by the model's method and by others at several rates."""
    with tempfile.TemporaryDirectory() as folder:
        files = tiny_tasks.prepare(folder) / "squad"
        arguments = text_data.DataArguments(f"{files}/train.jsonl", validation_file=f"{files}/validation.jsonl")
        arguments.text_column, arguments.block_size = "context", trainer.model.config.max_position_embeddings
        training, validation = text_data.make_datasets(arguments, trainer.processing_class, seed)
    held_out, own = list(batches(validation, 32)), patched_config(trainer.model).method
    text = partial(batches, training, 8, seed)
    losses: dict[str, dict[float, float]] = {}
    for method in ("s-ste", "ste", "fixed-mask"):
        model = trainer.model
        if method != own:
            model = unpatch_model(copy.deepcopy(model))
            patch_model(model, Sparse24Config(method=method, target_modules="mlp"))
        losses[method] = {rate: loss_of(trained(model, text(), rate, steps, {}), held_out) for rate in FINE_TUNING}
    return {"losses": losses}


PROBES: dict[str, Callable[[Trainer, int], dict[str, Any]]] = {
    probe.__name__: probe for probe in (descent, unstructured, fine_tuned)
}
