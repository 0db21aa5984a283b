"""What `test_launch.py` starts on every rank: trains as the flags say, and compares the ranks' sparse weights.

    torchrun --standalone --nproc-per-node 2 tests/support/launched.py recipes/quickstart.yaml --max_steps 4

Fails if weights, masks, state or phases differ in any bit.
"""

import gc
import hashlib
import sys

import torch
import torch.distributed as dist
from paths import RECIPES
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(RECIPES))

import train
from running import leave

from hf_sparse24 import sparse_weights


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def main() -> None:
    trainer = train.main()
    model = trainer.accelerator.unwrap_model(trainer.model)
    mine = {
        name: (weight.run.phase, digest(model.get_parameter(name), weight.mask(), *weight.state.values()))
        for name, weight in sparse_weights(model).items()
    }
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    different = [name for name in mine if any(rank[name] != mine[name] for rank in ranks)]
    if different or not mine:
        raise SystemExit(f"ranks differ in {different}")
    if dist.get_rank() == 0:
        print(f"{len(ranks)} ranks agree in {len(mine)} weights")
    leave(trainer)
    assert not any(isinstance(found, DistributedDataParallel) for found in gc.get_objects())


if __name__ == "__main__":
    main()
