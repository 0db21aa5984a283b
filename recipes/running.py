"""What every training script does around `Trainer.train`: start or resume, sparse or dense, save and evaluate."""

import logging
import math
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from arguments import SparseArguments, UsageError
from optional import MissingPackage
from sparse24_kernels import Pattern
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import SaveStrategy, get_last_checkpoint

from hf_sparse24 import Sparse24Config, Sparse24Trainer, __version__, sparse_run, unpatch_model
from hf_sparse24.methods import METHODS
from hf_sparse24.training.resume import last_whole_checkpoint


def run(main: Callable[[], Any]) -> Any:
    """`main()`, the whole of a script; a wrong flag, or data that is not there, is one line, and exit status 2 as
    argparse's. Any other error keeps its traceback. What the library logs of long work is shown.

    Raises:
        SystemExit: a `UsageError`, or a package that is missing.
    """
    logger = logging.getLogger("hf_sparse24")
    logger.setLevel(logging.INFO)
    if logging.lastResort is not None:
        logging.lastResort.setLevel(logging.INFO)  # writes to stderr where logging is not set up
    try:
        return main()
    except (UsageError, MissingPackage) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        logger.setLevel(logging.NOTSET)


def checkpoint_to_resume(args: TrainingArguments) -> str | bool | None:
    """What `Trainer.train` goes on from: None to start afresh, True for the last checkpoint in `output_dir`.

    Raises:
        UsageError: a fresh run whose checkpoints would mix with those of an earlier one. `save_total_limit` would
            delete the new ones first, and a later resume would take the old run's.
    """
    given = args.resume_from_checkpoint
    resume = {"true": True, "false": None}.get(str(given).lower(), given)
    last = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    if resume is None and last is not None and args.save_strategy != SaveStrategy.NO:
        raise UsageError(
            f"output_dir={args.output_dir!r}: holds {Path(last).name} of an earlier run; --resume_from_checkpoint true "
            f"goes on from it; to start afresh, name another directory or delete its checkpoints"
        )
    return (whole_checkpoint(args.output_dir) if resume is True else None) or resume


def whole_checkpoint(output_dir: str) -> str | None:
    """The newest checkpoint in a directory that a Trainer has written to its end; None where there is none."""
    try:
        return last_whole_checkpoint(output_dir)
    except ValueError:
        return None


def sparse_or_dense_trainer(
    sparse_args: SparseArguments, *, classes=(Sparse24Trainer, Trainer), teacher=None, distillation=None, **shared
) -> Trainer:
    """A Sparse24Trainer, or a plain Trainer for `method="dense"`, the control run.

    Args:
        classes: of the two.
        teacher, distillation: of Sparse24Trainer.
        shared: what both trainers take.

    Raises:
        UsageError: the control run of a model that computes with 2:4 weights, or one with a teacher; too few steps.
    """
    if sparse_args.method != "dense":
        config = sparse_args.make_config()
        patched = sparse_run(shared["model"])
        if patched is not None and patched.config.method != config.method:
            own = patched.config.method
            raise UsageError(
                f"method={config.method!r}: {shared['model'].config.name_or_path} was trained by {own!r}, and goes on "
                f"by that (--method {own}); by another, fine-tune its export (hf-sparse24 export)"
            )
        if patched is None or not patched.facts.finished:
            check_steps(config, shared["args"].max_steps)
        return classes[0](**shared, sparse24_config=config, teacher=teacher, distillation=distillation)
    if teacher is not None:
        raise UsageError("teacher is for sparse methods; method='dense' is a plain Trainer")
    check_dense(shared["model"])
    return classes[1](**shared, callbacks=sparse_args.make_callbacks())


def check_steps(config: Sparse24Config, steps: int) -> None:
    """Raise a UsageError for a run that leaves its method no sparse step; without max_steps the Trainer says so."""
    try:
        if steps > 0:
            METHODS[config.method](config.settings, Pattern.parse(config.pattern)).schedule(steps)
    except ValueError as error:
        raise UsageError(f"method={config.method!r}, max_steps={steps}: {error}") from error


def check_dense(model: PreTrainedModel) -> None:
    """Make a model whose sparse training has ended dense an ordinary one.

    Raises:
        UsageError: the control run of a model that computes with 2:4 weights.
    """
    patched = sparse_run(model)
    if patched is not None and patched.facts.finished and patched.is_dense:
        unpatch_model(model, sparse=False)
    elif patched is not None or getattr(model.config, "quantization_config", None) is not None:
        name = model.config.name_or_path
        raise UsageError(f"method='dense': {name} is a 2:4 model; take a dense one as control")


def train_and_save(trainer: Trainer, resume: str | bool | None) -> None:
    """Train, and save model, state and metrics in `output_dir`."""
    if isinstance(trainer, Sparse24Trainer) and trainer.is_world_process_zero():
        print(trainer.patch_report)
    result = trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    trainer.save_state()
    save_metrics(trainer, "train", result.metrics)


def evaluate_text(trainer: Trainer) -> None:
    """Evaluate on `eval_dataset`, if there is one; prints and saves the loss in nats per token, and the perplexity."""
    if trainer.eval_dataset is not None:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 100))
        save_metrics(trainer, "eval", metrics)


def evaluate_splits(trainer: Trainer, held_out: dict[str, Any]) -> None:
    """Evaluate on each split, and save its metrics: of validation as eval, of validation_matched as eval_matched."""
    for name, rows in held_out.items():
        split = name.replace("validation", "eval")
        save_metrics(trainer, split, trainer.evaluate(rows, metric_key_prefix=split))


def save_metrics(trainer: Trainer, split: str, metrics: dict) -> None:
    """Print the metrics, and write them to `<split>_results.json` and into `all_results.json`."""
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)


def versions() -> dict[str, str]:
    """The versions of what a result depends on."""
    found = {"hf_sparse24": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return found | {"python": platform.python_version()}


def leave(trainer: Trainer) -> None:
    """End a run of one or several processes, which leave together: one that exits early takes the others down.

    What wraps the model for DDP is freed before its process group is destroyed. Freed after it, it holds Python's lock
    while it waits for a thread of gloo that waits for that lock: torch 2.13 hangs so, once in ten runs or fewer.
    """
    trainer.model_wrapped = trainer.model
    trainer.accelerator.free_memory()
    trainer.accelerator.end_training()
