"""Short runs that try what the papers' abstracts claim: one JSON each in `results/claims/`, a page of all verdicts.

    python recipes/claims.py                          # the runs that the results lack, in order
    python recipes/claims.py --only step mvue         # these groups alone
    python recipes/claims.py --only step-1-16-seed0   # one run
    python recipes/claims.py --list

`claims.yaml` is the table of the runs. Each trains the small Llama of `compare_methods.py` on its text, 600 steps of
1,024 tokens unless the table says otherwise, at the learning rate that `results/methods` found for its method, or at
the best of some multiples of it. A run that has its file is not repeated, so the work can be cut into pieces, and
several processes can share it. `docs/claims_page.py` makes the page of the rows in `results/claims/rows.yaml`.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import compare_methods
import stdlib_text
import torch
import yaml
from arguments import UsageError
from claims_probes import PROBES
from running import run as run_script
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Trainer, TrainerCallback

from hf_sparse24 import sparse_weights
from hf_sparse24.progress import Progress

RECIPES = Path(__file__).resolve().parent
RESULTS = RECIPES / "results" / "claims"
STEPS = 600
LOGGED = 20
SEARCHED = 9
"""The seed of the runs that search a learning rate. No verdict rests on it."""


@dataclass(frozen=True)
class Run:
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    like: str = ""
    """The method whose learning rate it takes; empty: its own."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Of train.py."""
    steps: int = STEPS
    seeds: int = 1
    """How many: 0, 1, 2, ..."""
    factors: tuple[float, ...] = ()
    """Multiples of the learning rate to search, by seed `SEARCHED`; the other seeds take the best."""
    factors_of: str = ""
    """The run that searched for this one too."""
    fork: int = 0
    """The step from which the factor holds: before it, all runs of a seed are the same dense training."""
    loss_scale: float = 1.0
    moments: bool = False
    """Whether to keep the second moments of the MLPs at half of the run, for the runs of the next two fields."""
    against: tuple[str, ...] = ()
    """Runs of the same seed with whose second moments to compare those of this one."""
    frozen_from: str = ""
    """A run of the same seed whose second moments the MLPs have, from their second step on."""
    probe: str = ""
    """What is done with the trained model: a key of `claims_probes.PROBES`."""


def read_table() -> dict[str, dict[str, Run]]:
    """The runs by group, then by name."""
    groups = yaml.safe_load((RECIPES / "claims.yaml").read_text())
    return {group: {name: Run(**run) for name, run in runs.items()} for group, runs in groups.items()}


GROUPS = read_table()


def cells() -> Iterator[tuple[str, str, Run, int, float]]:
    """Group, name, run, seed and factor (0: the best) of each result: searches, then first seeds first."""
    table = [(group, name, run) for group, runs in GROUPS.items() for name, run in runs.items()]
    for group, name, run in table:
        for factor in run.factors:
            yield group, f"{name}-x{factor:g}-seed{SEARCHED}", run, SEARCHED, factor
    for seed in range(max(run.seeds for _, _, run in table)):
        for group, name, run in table:
            if seed < run.seeds and not (seed == SEARCHED and run.factors):
                yield group, f"{name}-seed{seed}", run, seed, 0.0


def best_factor(name: str, run: Run, results: Path) -> float:
    """The factor of the lowest loss in a run's search; 1 for a run without one.

    Raises:
        UsageError: the search is not finished.
    """
    source, searched = (run.factors_of, _find(run.factors_of)) if run.factors_of else (name, run)
    files = {factor: results / f"{source}-x{factor:g}-seed{SEARCHED}.json" for factor in searched.factors}
    if missing := [file.stem for file in files.values() if not file.exists()]:
        raise UsageError(f"{name}: its learning rate is not searched; first run --only {' '.join(missing)}")
    losses = {factor: json.loads(file.read_text())["eval_loss"] for factor, file in files.items()}
    return min(losses, key=losses.__getitem__) if losses else 1.0


def _find(name: str) -> Run:
    return next(runs[name] for runs in GROUPS.values() if name in runs)


def short(value: float) -> float:
    """The value with four digits."""
    return float(f"{value:.4g}")


class Watch(TrainerCallback):
    """Sees to what a run has besides its training: second moments, a factor from the fork on, a scaled loss.

    `points` are the step, the mean and the geometric mean of Adam's second moment over the MLPs' weights, whenever
    training logs. `spread` is the mean and the standard deviation over these weights of log(v / v'), v' of each of
    `run.against`, at half of the run.
    """

    def __init__(self, trainer: Trainer, run: Run, factor: float, moments: Path, file: str):
        self.trainer, self.run, self.factor, self.folder, self.file = trainer, run, factor, moments, file
        self.points: list[tuple[int, float, float]] = []
        self.spread: dict[str, tuple[float, float]] = {}
        self.frozen = load_file(self._path(run.frozen_from)) if run.frozen_from else {}
        if run.loss_scale != 1:
            compute = trainer.compute_loss
            trainer.compute_loss = lambda model, *args, **kwargs: _scaled(
                compute(model, *args, **kwargs), run.loss_scale if model.training else 1
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs and (found := self._second_moments(state.global_step)):
            variance = torch.cat([tensor.flatten() for tensor in found.values()])
            means = variance.mean().item(), variance.clamp(min=1e-30).log().mean().exp().item()
            self.points.append((state.global_step, *map(short, means)))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.run.fork and state.global_step == self.run.fork:
            schedule = self.trainer.lr_scheduler
            last = len(schedule.base_lrs) - 1  # the group of the embeddings and the head, whose rate stays
            schedule.base_lrs = [rate * (1 if at == last else self.factor) for at, rate in enumerate(schedule.base_lrs)]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sets v so that AdamW's own update of it, beta2 v + (1 - beta2) g^2, gives the frozen one."""
        beta2, optimizer = args.adam_beta2, self.trainer.optimizer
        for name, parameter in self.trainer.model.named_parameters():
            if name in self.frozen and parameter in optimizer.state:
                found = optimizer.state[parameter]
                frozen = self.frozen[name] * (1 - beta2 ** (found["step"].item() + 1))
                found["exp_avg_sq"].copy_((frozen - (1 - beta2) * parameter.grad.square()) / beta2)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != state.max_steps // 2 or not (self.run.moments or self.run.against):
            return
        found = self._second_moments(state.global_step)
        if self.run.moments:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in found.items()}, self._path(self.file))
        for name in self.run.against:
            other = load_file(self._path(name))
            logs = [found[key].clamp(min=1e-30).log() - other[key].clamp(min=1e-30).log() for key in other]
            ratio = torch.cat([log.flatten() for log in logs])
            self.spread[name] = short(ratio.mean().item()), short(ratio.std().item())

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}-seed{self.trainer.args.seed}.safetensors"

    def _second_moments(self, step: int) -> dict[str, Tensor]:
        """Adam's second moments of the MLPs' weights, corrected for their start at zero."""
        optimizer = self.trainer.optimizer
        moments = optimizer.state if hasattr(optimizer, "state") else {}
        switched = getattr(getattr(optimizer, "optimizer", optimizer), "switched", False)  # then v is corrected already
        correction = 1 if switched else 1 - self.trainer.args.adam_beta2**step
        parameters = self.trainer.model.named_parameters()
        return {
            name: moments[p]["exp_avg_sq"] / correction for name, p in parameters if ".mlp." in name and p in moments
        }


def _scaled(loss: Any, scale: float) -> Any:
    return (loss[0] * scale, *loss[1:]) if isinstance(loss, tuple) else loss * scale


def measure(
    name: str, run: Run, seed: int, data: str, *, factor: float = 1.0, steps: int | None = None
) -> dict[str, Any]:
    """Train one model and return what its JSON holds: what `compare_methods.run` returns, and what the claims need."""
    watches: list[Watch] = []

    def watch(trainer: Trainer) -> None:
        watches.append(Watch(trainer, run, factor, Path(data).parent / "moments", name))
        trainer.add_callback(watches[0])

    steps = steps or run.steps
    flags = {"logging_steps": max(1, steps * LOGGED // STEPS)} | run.flags
    variants = {name: (run.method, run.settings)}
    rate = compare_methods.rate_of(run.like or run.method) * (1 if run.fork else factor)
    result = compare_methods.run(name, rate, seed, data, steps, variants, flags, watch)
    (watched,) = watches
    model, optimizer = watched.trainer.model, watched.trainer.optimizer
    result["loss"] = [short(value) for value in result["loss"]]
    result["flip_rate"] = [value and short(value) for value in result["flip_rate"]]
    result["method"], result["settings"], result["flags"] = run.method, run.settings, flags
    result["factor"], result["variance"], result["log_ratio"] = factor, watched.points, watched.spread
    result["switch_step"] = getattr(getattr(optimizer, "optimizer", optimizer), "switch_step", None)
    logs = watched.trainer.state.log_history
    result["switch_statistic"] = [(x["step"], short(x["switch_statistic"])) for x in logs if "switch_statistic" in x]
    scales = [float(weight.state["scale"]) for weight in sparse_weights(model).values() if "scale" in weight.state]
    result["scales"] = [short(scale) for scale in scales]
    return result | ({"probe": PROBES[run.probe](watched.trainer, seed)} if run.probe else {})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="only these groups, or runs")
    parser.add_argument("--list", action="store_true", help="print the names of the runs, and which are there")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the runs' JSON")
    parser.add_argument("--data", default="runs/stdlib_text", help="directory of the text and its tokenizer")
    args = parser.parse_args(argv)
    chosen = [cell for cell in cells() if not args.only or {*cell[:2]} & {*args.only}]
    if not chosen:
        parser.error(f"--only {' '.join(args.only)}: names no group and no run; --list shows them")
    if args.list:
        print("\n".join(f"{name}  {'there' if _path(args, name).exists() else '-'}" for _, name, *_ in chosen))
        return
    stdlib_text.prepare(args.data)
    args.results.mkdir(parents=True, exist_ok=True)
    with Progress("runs", len(chosen), "run") as progress:
        for _, name, run, seed, factor in chosen:
            if not _path(args, name).exists():
                progress.update(0, name)
                variant = name.rsplit("-seed", 1)[0]
                result = measure(
                    variant, run, seed, args.data, factor=factor or best_factor(variant, run, args.results)
                )
                stdlib_text.replace_file(_path(args, name), json.dumps(result) + "\n")
            progress.update()


def _path(args: argparse.Namespace, name: str) -> Path:
    return args.results / f"{name}.json"


if __name__ == "__main__":
    run_script(main)
