"""Runs a function in several processes with gloo, and what most such tests run: a few steps of training.

Processes are forked from a server that has imported everything once, and serve one test after the other.
"""

import gc
import io
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any

import methods.ast  # noqa: F401  registers the method
import own_method
import peft
import pytest
import torch
import zoo
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import set_seed
from transformers.distributed import DistributedConfig

from hf_sparse24 import Sparse24Config, Sparse24Controller, patch_model, sparse_run, sparse_weights, unpatch_model
from hf_sparse24.methods import step_param_groups
from hf_sparse24.weights.sharding import whole

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["ranks", "torch.distributed.fsdp", "torch.distributed.checkpoint"])


def _start_server() -> None:
    # It looks for modules where Python does by itself, and passes over what it does not find.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


def start(function: Callable, *args: Any) -> BaseProcess:
    """A process that calls a function, in the environment of the first; it ends with these tests at the latest."""
    _start_server()
    process = _context.Process(target=function, args=args, daemon=True)
    process.start()
    return process


class _Group:
    """`world` processes of one gloo group, which call one function after the other: a new group for each costs 2 s."""

    def __init__(self, world: int):
        self.folder = tempfile.TemporaryDirectory()
        _start_server()
        self.processes = [
            ProcessPoolExecutor(1, _context, _join, (self.folder.name, rank, world)) for rank in range(world)
        ]

    def end(self) -> None:
        """Kill its processes."""
        for executor in self.processes:
            for process in list((executor._processes or {}).values()):
                process.kill()
            executor.shutdown()
        self.folder.cleanup()


_groups: dict[int, _Group] = {}


def run(world: int, function: Callable, *args: Any, timeout: float = 120) -> list[Any]:
    """What `function(rank, world, *args)` returns in each of `world` processes of one group.

    Once more where a process dies by a signal: torch 2.13 corrupts its heap ("malloc(): unaligned tcache chunk") in
    about one of 350 runs of FSDP2 with gloo, of dense models without this library too.

    Raises:
        RuntimeError: with the traceback of the first process that failed; or some did not end in time.
    """
    for is_last in (False, False, True):
        group = _groups.pop(world, None) or _Group(world)
        calls = [
            each.submit(_call, rank, world, os.getcwd(), function, args) for rank, each in enumerate(group.processes)
        ]
        ended, waiting = wait(calls, timeout, FIRST_EXCEPTION)
        errors = [error for call in ended if (error := call.exception()) is not None]
        if not errors and not waiting:
            _groups[world] = group
            return [torch.load(io.BytesIO(call.result()), weights_only=False) for call in calls]
        group.end()
        if is_last or not any(isinstance(error, BrokenProcessPool) for error in errors):
            raise RuntimeError("\n".join(map(str, errors)) or f"{len(waiting)} processes take more than {timeout} s")
    raise AssertionError("the last try returns or raises")


def _join(folder: str, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # accelerate asks, and never uses them
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    gc.freeze()  # `gc.collect` below need not look through the libraries


def _call(rank: int, world: int, directory: str, function: Callable, args: tuple) -> bytes:
    environment, results = dict(os.environ), io.BytesIO()
    os.chdir(directory)
    set_seed(0)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        torch.save(function(rank, world, *args), results)
    except BaseException:
        raise RuntimeError(f"process {rank}:\n{traceback.format_exc()}") from None
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()
    return results.getvalue()


def make(name: str, settings: dict[str, Any], engine: str, steps: int, **options: Any) -> tuple:
    """A tiny patched model, wrapped or sharded by `engine`, with its optimizer and controller."""
    # Doubles: Adam makes steps of rounding errors in gradients that are next to zero.
    model = zoo.build(name, **options.pop("sizes", {})).double()
    if name in zoo.MOE:
        model.set_experts_implementation("eager")  # the others take no doubles
    config = Sparse24Config(**settings)
    if engine == "tp":
        with tempfile.TemporaryDirectory() as own:
            folder = [own]
            torch.distributed.broadcast_object_list(folder)
            model.save_pretrained(folder[0])  # which the first process alone does
            torch.distributed.barrier()
            plan = DistributedConfig(tp_size=torch.distributed.get_world_size())
            sharded = {"distributed_config": plan, "quantization_config": config}
            model = type(model).from_pretrained(folder[0], dtype=torch.float64, **sharded).train()
            torch.distributed.barrier()
    else:
        patch_model(model, config)
    shared = shard(model, engine, **options)
    if settings["method"] in ("step", "ast"):  # which have an optimizer of their own
        groups = step_param_groups(model)
        optimizer = sparse_run(model).method.make_optimizer(groups, total_steps=steps, lr=1e-2, betas=(0.9, 0.5))
    else:
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        cls = own_method.OwnAdamW if settings["method"] == "own" else torch.optim.AdamW
        optimizer = cls(groups, lr=1e-2, foreach=False)
    return shared, optimizer, Sparse24Controller(shared, optimizer, total_steps=steps, seed=5)


def shard(model: nn.Module, engine: str, **options: Any) -> nn.Module:
    """`engine`: "one", "ddp", "fsdp2", or "tp", which Transformers has done; options go to `fully_shard`."""
    if engine == "ddp":
        return DistributedDataParallel(model, forward_sync_buffers=False, find_unused_parameters=True)
    if engine == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in next(m for m in model.modules() if isinstance(m, nn.ModuleList)):
            fully_shard(block, **options)
        fully_shard(model, **options)
    return model


def train(rank: int, world: int, name: str, settings: dict[str, Any], engine: str, steps: int = 6, **options: Any):
    """Train on this process's part of each batch, two micro-batches a step; "one" and "tp" take those of all `world`.

    Returns:
        Losses of each step (mean over all data), the weights and state at the end, metrics, and phases.
    """
    model, optimizer, controller = make(name, settings, engine, steps, **options)
    log: list[Any] = []
    for step in range(steps):
        log.append(run_step(model, optimizer, controller, step, rank, world, engine))
    return {"log": log, **state_of(model)}


def run_step(model, optimizer, controller, step: int, rank: int, world: int, engine: str) -> tuple:
    takes_all = engine in ("one", "tp")
    parts = range(world) if takes_all else [rank]
    loss = torch.zeros(())
    for micro in range(2):
        _sync(model, engine, micro == 1)
        for part in parts:
            if engine == "one":  # what process `part` draws
                controller._streams.set(controller.seed, part, controller.step, micro)
            batch = zoo.batch(seed=100 * step + 10 * part + micro)
            part_loss = model(**batch).loss / (2 * len(parts))
            part_loss.backward()
            loss += part_loss.detach()
        if engine != "one":
            controller.after_micro_step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([whole(gradient) for gradient in gradients])
    for gradient in gradients:  # torch's own clips no mixture of DTensors and plain tensors, as tensor parallelism has
        gradient.mul_((0.5 / (norm + 1e-6)).clamp(max=1))
    optimizer.step()
    optimizer.zero_grad()
    if not takes_all:
        torch.distributed.all_reduce(loss)
        loss /= world
    metrics = controller.metrics() | controller.layer_flip_rates()
    return float(loss), float(norm), controller.phase, metrics


def _sync(model: nn.Module, engine: str, last: bool) -> None:
    if engine == "ddp":
        model.require_backward_grad_sync = last
    elif engine == "fsdp2":
        model.set_requires_gradient_sync(last)


@torch.no_grad()
def state_of(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """All weights and the methods' state, whole."""
    module = getattr(model, "module", model)
    weights = {name: whole(tensor).clone() for name, tensor in module.named_parameters()}
    masks = {name: weight.mask() for name, weight in sparse_weights(module).items()}
    state = {
        f"{name}.{key}": whole(tensor).clone()
        for name, weight in sparse_weights(module).items()
        for key, tensor in weight.state.items()
    }
    return {"weights": weights, "masks": masks, "state": state}


def refusals(model: nn.Module) -> tuple[str, str]:
    """What adding LoRA to a sharded model, and unpatching it, say."""
    with pytest.raises(ValueError) as unpatched:
        unpatch_model(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["up_proj"]))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad])
    with pytest.raises(ValueError) as adapters:
        Sparse24Controller(adapted, optimizer, total_steps=4)
    return str(adapters.value), str(unpatched.value)
