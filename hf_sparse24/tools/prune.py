"""`hf-sparse24 prune`: make a pretrained model sparse with nothing but text, and export it.

`oneshot` prunes all linear layers by a part of the text, and by text that the dense model writes from nothing, which
keeps what it knows beyond the text given. Then the kept weights train on the rest, with the dense model as teacher. The
dense model, the pruned one and the export are measured on held-out text. A folder keeps what is finished until the
export is verified. The defaults were measured on SmolLM2-135M (docs/measured/pretrained.md).
"""

import argparse
import hashlib
import logging
import math
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from sparse24_kernels.cache_folder import write_json
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.utils.logging import disable_progress_bar

from ..checkpoints.export import export_model
from ..files import locked_directory, read_json, written_whole
from ..hub.card import CARD, read_card, write_model_card
from ..progress import Progress, get_logger, is_watched
from ..pruning.calibration import evaluating
from ..pruning.oneshot import oneshot
from ..pruning.own_text import BATCH, own_text
from ..tables import text_table
from ..training.callback import Sparse24Callback
from ..training.distillation import DistillationConfig, distill
from ..training.resume import last_whole_checkpoint
from .checkpoint_commands import verify_checkpoint
from .models import OF_A_TOKENIZER, WEIGHTS
from .prune_job import PruneJob

logger = get_logger(__name__)

CONTROL = "dense model, not trained on this text"
HIDDEN, IGNORED = 0.15, -100  # share of the tokens that a masked model has to predict, and the label of the others


def prune(options: argparse.Namespace) -> int:
    """Prune, train, export and verify; the exit status is 1 where the export is not what it should be."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_sparse24").setLevel(logging.INFO)  # lines about long work, where no bar can be seen
    if not is_watched():
        disable_progress_bar()
    set_seed(options.seed)
    job = PruneJob(options)
    print(job, flush=True)
    dense = _load(job, options.model, torch.bfloat16)  # of fp32, a teacher would be cast at every step
    job.work.mkdir(parents=True, exist_ok=True)
    try:
        with locked_directory(job.work, f"another process works in {job.work}: wait for it, or name another output"):
            _claim(job)
            return _run(job, dense)
    except (SafetensorError, RuntimeError) as error:
        if not re.search(r"No space left|StorageFull|inline_container", str(error)):  # the last is torch.save's
            raise
        way = "free some space, and give the same command again"
        raise OSError(f"{job.work} or {options.output}: no space is left on the device ({error}); {way}") from error


def _run(job: PruneJob, dense: PreTrainedModel) -> int:
    options = job.options
    metrics = {"dense": measure(job, "dense", dense, dense)}
    _prune(job, dense, job.work / "pruned")
    model = _load(job, job.work / "pruned", torch.float32)  # as after an interruption
    if job.steps:
        metrics["pruned"] = measure(job, "pruned", model, dense)
        model = _train(job, model, dense)
        if hasattr(dense.config, "use_cache"):  # which a Trainer turns off
            model.config.use_cache = dense.config.use_cache
    export_model(model.to(job.dtype), options.output, options.format, values=options.values)
    tokenizer = AutoTokenizer.from_pretrained(options.model, **job.trust)  # job's cuts texts off by now
    tokenizer.save_pretrained(options.output)
    last = "trained" if job.steps else "pruned"
    metrics[last] = measure(job, last, _load(job, options.output, "auto"), dense)
    _write_card(job, model, metrics)
    status = verify_checkpoint(argparse.Namespace(checkpoint=options.output))
    rows = [[name, *(f"{value:.4f}" for value in found.values())] for name, found in metrics.items()]
    print(f"\n{text_table([['model', *metrics['dense']], *rows])}\n")
    if job.steps:
        print("The dense model was not trained on this text: the difference is not what sparsity costs.\n")
        if metrics["trained"]["loss"] > metrics["pruned"]["loss"]:
            print("The export is worse than the model before training: give more text, or --tokens 0.\n")
    own = job.cls._auto_class  # where its code lies with it
    print("import hf_sparse24\n" * (options.format == "packed") + f"from transformers import {own or job.cls.__name__}")
    trust = ", trust_remote_code=True" if own else ""
    print(f"model = {own or job.cls.__name__}.from_pretrained({options.output!r}{trust})", flush=True)
    if options.format == "dense":
        print(f"# to train it further and keep its zeros, with adapters too: see {options.output}/{CARD}", flush=True)
    if status == 0:
        _remove(job.work)
    return status


def _remove(folder: Path) -> None:
    """Delete a folder. It is renamed first: no run resumes from half a folder."""
    done = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    os.replace(folder, done / "done")
    shutil.rmtree(done)


def _load(job: PruneJob, source: str | Path, dtype: torch.dtype | str) -> Any:
    return job.cls.from_pretrained(source, dtype=dtype, **job.trust).to(job.device)


def _claim(job: PruneJob) -> None:
    """Say in the folder of what is finished whose it is. ValueError: it is of another run."""
    settings = {"model": _hash_of_files(job), "text": job.text, "device": job.device}
    settings |= {name: getattr(job.options, name) for name in ("pattern", "seed", "trust_remote_code")} | job.tokens
    file = job.work / "run.json"
    if file.exists():
        theirs = read_json(file)
        others = [name for name, value in settings.items() if theirs.get(name) != value]
        if others:
            way = "give the same arguments and the same files of the model, or delete it"
            raise ValueError(f"{job.work} is of a run that differs in {', '.join(others)}: {way}")
        print(f"going on from {job.work}", flush=True)
    elif any(job.work.iterdir()):
        raise ValueError(f"{job.work} is in the way, and is of no run of this command: name another output")
    write_json(file, settings)


def _hash_of_files(job: PruneJob) -> str:
    """A hash of all bytes of the model's weights, configs and tokenizer; of a model on the Hub, its commit."""
    if not os.path.isdir(job.options.model):
        return job.source.name  # a snapshot's folder has the name of the commit
    paths = {path for pattern in (*WEIGHTS, "*.bin", "*.py", *OF_A_TOKENIZER) for path in job.source.glob(pattern)}
    found = hashlib.sha256()
    for path in sorted(paths):
        with path.open("rb") as file:
            found.update(f"{path.relative_to(job.source)} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return found.hexdigest()


@torch.no_grad()
def measure(job: PruneJob, name: str, model: PreTrainedModel, dense: PreTrainedModel) -> dict[str, float]:
    """Metrics on held-out text: the loss in nats per predicted token and the perplexity; of an encoder, which predicts
    none, the mean cosine of its and `dense`'s hidden states."""
    total, count, generator = 0.0, 0, torch.Generator().manual_seed(0)
    progress = Progress(f"measuring the {name} model", len(job.held_out), "block", logger.info)
    with torch.autocast(job.device, torch.bfloat16), evaluating(model), progress:
        for rows in job.held_out.split(job.batch_size):
            batch = {name: ids.to(job.device) for name, ids in _batch(job, rows, generator).items()}
            number = int((batch["labels"] != IGNORED).sum())
            if job.kind == "encoder":
                states = [one.base_model(batch["input_ids"]).last_hidden_state.float() for one in (model, dense)]
                value = torch.cosine_similarity(states[0], states[1], dim=-1).mean()
            else:
                value = model(**batch).loss
            if number:  # a block of which no token is hidden has no loss
                total, count = total + value.item() * number, count + number
            progress.update(len(rows))
    mean = total / max(count, 1)
    found = {"cosine to dense": mean} if job.kind == "encoder" else {"loss": mean, "perplexity": math.exp(mean)}
    print(f"{name}: {', '.join(f'{what} {value:.4f}' for what, value in found.items())} on held-out text", flush=True)
    return found


def _batch(job: PruneJob, rows: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Inputs and labels: all tokens, or those that are hidden from a masked model."""
    if job.kind != "masked":
        return {"input_ids": rows, "labels": rows.clone()}
    hidden, mask = torch.rand(rows.shape, generator=generator, device="cpu") < HIDDEN, job.tokenizer.mask_token_id
    return {"input_ids": rows.masked_fill(hidden, mask), "labels": rows.masked_fill(~hidden, IGNORED)}


def _prune(job: PruneJob, dense: PreTrainedModel, folder: Path) -> None:
    """Save the pruned model to a folder, unless it is there."""
    if folder.exists():
        return
    data = torch.cat([job.calibration, *_own_text(job, dense)])
    model = _load(job, job.options.model, torch.float32)
    blocks, part = job.work / "blocks", job.work / "pruned.part"
    with torch.autocast(job.device, torch.bfloat16):
        report = oneshot(model, data.split(1), job.config, resume_dir=blocks)
        print(report, flush=True)
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    os.replace(part, folder)
    shutil.rmtree(blocks)


def _own_text(job: PruneJob, dense: PreTrainedModel) -> Iterator[Tensor]:
    """Text of the dense model, in batches that have a file each: writing takes long, and Ctrl-C loses none."""
    special = job.tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    begin, end = special.index(0), special[::-1].index(0)  # how many stand around a text, such as a bos_token
    block = job.calibration[:1]
    length = block.shape[1] - begin - end
    for start in range(0, job.own, BATCH):
        path, number = job.work / f"own-{start:06}.safetensors", min(BATCH, job.own - start)
        try:
            text = load_file(path)["tokens"]
        except (FileNotFoundError, SafetensorError):  # not written yet, or damaged
            text = own_text(dense, job.tokenizer, number, length, seed=job.own * job.options.seed + start)
            with written_whole(path) as unfinished:
                save_file({"tokens": text}, unfinished)
        yield torch.cat([block[:, :begin].expand(number, -1), text, block[:, begin + length :].expand(number, -1)], 1)


def _train(job: PruneJob, model: PreTrainedModel, dense: PreTrainedModel) -> PreTrainedModel:
    """The model with its kept weights trained, or trained on. KeyboardInterrupt: Ctrl-C; a checkpoint is saved."""
    folder, on_cpu = job.work / "training", job.device == "cpu"
    settings: dict[str, Any] = {"max_steps": job.steps, "per_device_train_batch_size": job.batch_size}
    settings |= {"learning_rate": job.learning_rate, "lr_scheduler_type": "cosine", "warmup_steps": 0.1}
    settings |= {"bf16": True, "use_cpu": on_cpu, "dataloader_pin_memory": not on_cpu, "seed": job.options.seed}
    settings |= {"save_steps": math.ceil(job.steps / 10), "save_total_limit": 1, "logging_steps": 10}
    arguments = TrainingArguments(str(folder), disable_tqdm=not is_watched(), report_to="none", **settings)
    data: dict[str, Any] = {"train_dataset": list(job.training)}
    data["data_collator"] = lambda rows: _batch(job, torch.stack(rows))
    stop, checkpoint = _Stop(), None
    trainer = Trainer(model, arguments, callbacks=[stop], **data)
    distill(model, dense, DistillationConfig(weight=job.teacher_weight))
    Sparse24Callback.add_to(trainer)
    with suppress(ValueError):  # there is none
        checkpoint = last_whole_checkpoint(folder)
    if checkpoint and TrainerState.load_from_json(f"{checkpoint}/{TRAINER_STATE_NAME}").global_step >= job.steps:
        return _load(job, checkpoint, torch.float32)  # a Trainer would take one more step
    before = signal.signal(signal.SIGINT, stop.press)
    try:
        trainer.train(checkpoint)
    finally:
        signal.signal(signal.SIGINT, before)
    if stop.is_pressed:
        raise KeyboardInterrupt
    return model


class _Stop(TrainerCallback):
    """Ends training with a checkpoint after Ctrl-C; a second Ctrl-C ends it at once."""

    is_pressed = False

    def press(self, *_: object) -> None:
        self.is_pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, b"saving a checkpoint after this step; Ctrl-C again ends at once\n")  # loggers are not for handlers

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self.is_pressed:
            control.should_save = control.should_training_stop = True


def _write_card(job: PruneJob, model: PreTrainedModel, metrics: dict[str, dict[str, float]]) -> None:
    options, folder = job.options, Path(job.options.output)
    *_, results = metrics.values()
    details: dict[str, Any] = {"dense_control": metrics["dense"], "control_name": CONTROL}
    details |= {"results": results, "hyperparameters": job.tokens | {"seed": options.seed}}
    if job.steps:
        details["results"] = results | {"loss before training": metrics["pruned"]["loss"]}
        details["hyperparameters"]["learning rate"] = job.learning_rate
    details |= {"format": options.format, "values": options.values, "model_id": folder.resolve().name}
    details["existing"] = read_card(folder / CARD, CARD)
    base = None if os.path.isdir(options.model) else options.model
    write_model_card(model, folder, base_model=base, **details)
