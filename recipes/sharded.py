"""Pre-train with FSDP2 or tensor parallelism in a loop of one's own: torch, and a Sparse24Controller.

    torchrun --nproc-per-node 2 recipes/sharded.py recipes/quickstart.yaml --parallel fsdp2
    torchrun --nproc-per-node 2 recipes/sharded.py recipes/quickstart.yaml --parallel tp

The flags are those of `train.py`, without its objective and teacher. Trackers, evaluation and a model card come with a
Trainer: `accelerate launch --config_file recipes/accelerate/fsdp2.yaml recipes/train.py`, on GPUs. This script shows
what happens in between, and runs on a CPU too. Started again with the same flags, it goes on from its last checkpoint,
also in another number of processes: with the same global batch, on the same curve.
"""

import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from arguments import SparseArguments, UsageError, check_choice, check_toy_data, parse_arguments
from models import ModelArguments, make_model
from running import run
from text_data import DataArguments, make_datasets
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    TrainingArguments,
    get_scheduler,
    set_seed,
)
from transformers.trainer_utils import SaveStrategy
from transformers.utils.logging import tqdm

from hf_sparse24 import Sparse24Controller, export_model, patch_model, sparse_run
from hf_sparse24.methods import step_param_groups
from hf_sparse24.weights.sharding import whole


@dataclass
class ParallelArguments:
    parallel: str = field(default="fsdp2", metadata={"help": "fsdp2 or tp."})

    def __post_init__(self):
        check_choice("parallel", self.parallel, ("fsdp2", "tp"))


def sharded_model(model_args, sparse_args, args: TrainingArguments, parallel: str, tokenizer, block_size: int):
    """The patched model, of which this process holds a part. Patch first, then shard."""
    config = sparse_args.make_config()
    set_seed(args.seed)
    if parallel == "tp":
        if args.bf16:
            raise UsageError("bf16 is for fsdp2 here; with tp, load the weights in it: --dtype bfloat16")
        model_args.distributed = {"tp_size": dist.get_world_size()}  # Transformers patches and shards while it loads
    model = make_model(model_args, AutoModelForCausalLM, tokenizer, block_size, args, config)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if parallel == "tp":
        return model.train()
    if config is not None:
        patch_model(model, config)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    model.to(args.device)
    for block in next(module for module in model.modules() if isinstance(module, nn.ModuleList)):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model.train()


def make_optimizer(model: PreTrainedModel, args: TrainingArguments) -> torch.optim.Optimizer:
    """The method's own, or AdamW; after sharding, which replaces the parameters."""
    settings = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    groups = step_param_groups(model, args.weight_decay)
    run = sparse_run(model)
    own = run and run.method.make_optimizer(groups, total_steps=args.max_steps, **settings)
    return own or torch.optim.AdamW(groups, **settings)


def rows(step: int, micro: int, size: int, part: int, parts: int, args: TrainingArguments) -> list[int]:
    """Which of `size` rows process `part` of `parts` takes: of the same global batches, however many there are."""
    batch, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    first = ((step * steps + micro) * parts + part) * batch
    epochs = {index // size for index in range(first, first + batch)}
    order = {e: torch.randperm(size, generator=torch.Generator().manual_seed(args.seed + e)).tolist() for e in epochs}
    return [order[index // size][index % size] for index in range(first, first + batch)]


def clip(model: nn.Module, limit: float) -> Tensor:
    """Clip the norm of all gradients, of which some may be sharded and others not; returns what it was."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norms = [whole(torch.linalg.vector_norm(gradient)) for gradient in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for gradient in gradients if limit > 0 else []:  # 0 is for no clipping, as in a Trainer
        gradient.mul_((limit / (norm + 1e-6)).clamp(max=1))
    return norm


def save(folder: Path, model, optimizer, controller, schedule) -> None:
    """A checkpoint that any number of processes can read, there as a whole or not at all."""
    weights, moments = get_state_dict(model, optimizer)
    part = folder.with_name(f"{folder.name}.part")
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)
    dist.barrier()
    state = {"model": weights, "optimizer": moments, "controller": controller, "schedule": schedule}
    dcp.save(state, checkpoint_id=part)
    if dist.get_rank() == 0:
        part.rename(folder)


def resume(output: Path, model, optimizer, controller, schedule) -> None:
    """Go on from the newest checkpoint, if there is one."""
    found = [path for path in output.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    if not found:
        return
    newest = max(found, key=lambda path: int(path.name.rpartition("-")[2]))
    saved, method = {"controller": {"method": ""}}, controller.run.method.name
    dcp.load(saved, checkpoint_id=newest)
    if saved["controller"]["method"] != method:
        raise UsageError(f"method={method!r}: {newest} is of {saved['controller']['method']!r}; go on with that one")
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=newest)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    dcp.load({"controller": controller, "schedule": schedule}, checkpoint_id=newest)  # last: STEP's asks its optimizer


def main(argv: list[str] | None = None) -> list[float]:
    """Train, save and export; returns the losses of the steps that this call took."""
    classes = (ModelArguments, DataArguments, SparseArguments, ParallelArguments, TrainingArguments)
    model_args, data_args, sparse_args, parallel_args, args = parse_arguments(classes, argv)
    check_toy_data((model_args, data_args))
    if sparse_args.method == "dense":
        raise UsageError("method='dense': this script trains sparse models; train.py makes the control run")
    if args.fp16 or data_args.streaming:
        raise UsageError("fp16 and streaming are for train.py; here take bf16, and streaming: false")
    if args.max_steps < 1:
        raise UsageError(f"max_steps={args.max_steps}: must be given, and at least 1")
    rank, world, output = args.process_index, args.world_size, Path(args.output_dir)
    # Tensor parallelism gives every process the same rows.
    part, parts = (0, 1) if parallel_args.parallel == "tp" else (rank, world)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
    with args.main_process_first(desc="tokenizing"):
        data, _ = make_datasets(replace(data_args, validation_file=None, validation_split=None), tokenizer, args.seed)
    model = sharded_model(model_args, sparse_args, args, parallel_args.parallel, tokenizer, data_args.block_size)
    optimizer = make_optimizer(model, args)
    controller = Sparse24Controller(model, optimizer, args.max_steps, seed=args.seed, metrics_interval=10)
    warmup = args.get_warmup_steps(args.max_steps)
    shape = args.lr_scheduler_kwargs
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, warmup, args.max_steps, scheduler_specific_kwargs=shape)
    resume(output, model, optimizer, controller, schedule)
    saves = args.save_strategy != SaveStrategy.NO

    losses = []
    progress = tqdm(total=args.max_steps, initial=controller.step, disable=rank != 0)
    for step in range(controller.step, args.max_steps):
        total = torch.zeros((), device=args.device)
        for micro in range(args.gradient_accumulation_steps):
            ids = data[rows(step, micro, len(data), part, parts, args)]["input_ids"]
            batch = torch.tensor(ids, device=args.device)
            loss = model(input_ids=batch, labels=batch).loss / args.gradient_accumulation_steps
            loss.backward()
            controller.after_micro_step()
            total += loss.detach()
        clip(model, args.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(float(total) / world)
        metrics = controller.metrics()  # all processes: weights are sharded
        progress.set_postfix({"loss": losses[-1]} | metrics)
        progress.update()
        if saves and (step + 1) % int(args.save_steps) == 0:
            save(output / f"checkpoint-{step + 1}", model, optimizer, controller, schedule)

    if parallel_args.parallel == "tp":
        model.save_pretrained(output / "final")  # gathers by itself
    else:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            model.save_pretrained(output / "final", state_dict=full)
    export_model(model, output / "export")
    if rank == 0:
        tokenizer.save_pretrained(output / "export")
    dist.barrier()
    return losses


if __name__ == "__main__":
    run(main)
    dist.destroy_process_group()
