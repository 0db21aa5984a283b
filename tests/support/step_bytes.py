"""What a training step of a tiny model moves and holds in each of several processes, for `hf-sparse24 plan`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import zoo
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from hf_sparse24 import Sparse24Config, Sparse24Controller, patch_model
from hf_sparse24.tools.sizes import Setting

ROWS, LENGTH = 2, 16


@dataclass(frozen=True)
class Case:
    """How the step is run: `engine` is `Setting.parallel`, `settings` are the method's, `sizes` the model's."""

    engine: str
    settings: dict[str, Any]
    sizes: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False
    name: str = "llama"

    def setting(self, world: int) -> Setting:
        return Setting(world, ROWS * LENGTH, self.engine, self.dtype, self.checkpointing)

    def meta_model(self):
        with torch.device("meta"):
            model = zoo.build(self.name, **self.sizes)
        patch_model(model, Sparse24Config(**self.settings))
        return model


class Moved(TorchDispatchMode):
    """Counts the bytes of all collectives by kind: of what is reduced, or of what has been gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.overloadpacket.__name__
            if name in ("allreduce_", "all_reduce"):
                self.nbytes["all_reduce"] += _size(args[0])
            elif name == "broadcast_":  # DDP's, while it sets up
                self.nbytes["broadcast"] += _size(args[0])
            elif name == "_allgather_base_":
                self.nbytes["all_gather"] += _size(args[0])
            elif name == "all_gather_into_tensor":
                self.nbytes["all_gather"] += _size(args[0]) * args[1]
            elif name == "_reduce_scatter_base_":
                self.nbytes["reduce_scatter"] += _size(args[1])
            elif name not in ("wait_tensor", "_wrap_tensor_autograd"):
                raise AssertionError(f"{func} is not counted")
        return func(*args, **(kwargs or {}))


def _size(tensors: torch.Tensor | Sequence) -> int:
    return tensors.nbytes if isinstance(tensors, torch.Tensor) else sum(map(_size, tensors))


def steps(rank: int, world: int, cases: Sequence[Case]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """For every case, the bytes moved by kind and the bytes held by kind, in the third step."""
    return [_step(case) for case in cases]


def _step(case: Case) -> tuple[dict[str, int], dict[str, int]]:
    model = _model(case)
    if case.checkpointing:
        model.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters())
    Sparse24Controller(model, optimizer, total_steps=10, metrics_interval=10)
    module = model
    if case.engine == "ddp":
        module = DistributedDataParallel(model)
        module.broadcast_buffers = False  # as Sparse24Trainer has it
    ids = torch.randint(3, 90, (ROWS, LENGTH))
    uses_autocast = case.engine != "fsdp2" and case.dtype == torch.bfloat16
    for _ in range(3):  # the first also measures what is logged, in the second DDP sets up its buckets anew
        optimizer.zero_grad()
        with Moved() as moved:
            with torch.autocast("cpu", torch.bfloat16, enabled=uses_autocast):
                loss = module(input_ids=ids, labels=ids).loss
            loss.backward()
            gradients = sum(_local(p.grad).nbytes for p in model.parameters())
            optimizer.step()
    held = {
        "parameters": sum(_local(p).nbytes for p in model.parameters()),
        "gradients": gradients,
        "moments": sum(
            _local(x).nbytes for state in optimizer.state.values() for key, x in state.items() if key != "step"
        ),
        "buffers": sum(_local(buffer).nbytes for buffer in model.buffers()),
    }
    return dict(moved.nbytes), held


def _model(case: Case):
    model = zoo.build(case.name, **case.sizes)
    config = Sparse24Config(**case.settings)
    patch_model(model, config)
    if case.engine == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=case.dtype, reduce_dtype=torch.float32)
        for layer in next(module for module in model.modules() if isinstance(module, nn.ModuleList)):
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    return model


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
