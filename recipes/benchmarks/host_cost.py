"""Process time of a layer and micro-batch, its share of the step included, so small that it is the host's: 7 layers of
64 x 64, 16 tokens, 4 micro-batches and a step of SGD, one thread: `python -m recipes.benchmarks.host_cost`."""

import json
from time import process_time

import torch
from torch import nn

from hf_sparse24 import Sparse24Config, Sparse24Controller, patch_model

from .timing import Sampler, take_turns


def sampler(method: str, layers: int = 7, passes: int = 4, steps: int = 20) -> Sampler:
    model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(layers))
    optimizer, x = torch.optim.SGD(model.parameters(), 1e-3), torch.randn(16, 64, requires_grad=True)
    if method != "dense":
        patch_model(model, Sparse24Config(method=method, target_modules="all-linear"))
        controller = Sparse24Controller(model, optimizer, total_steps=10**6)

    def sample() -> float:
        start = process_time()
        for done in range(1, steps * passes + 1):
            nn.Sequential(*model)(x).sum().backward()
            if done % passes == 0:
                optimizer.step()
                optimizer.zero_grad()
            elif method != "dense":
                controller.after_micro_step()
        return (process_time() - start) / (steps * passes * layers)

    return sample


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = take_turns({way: sampler(way) for way in ("dense", "s-ste", "t-sr-ste", "fixed-mask")}, least=15)
    us = {way: round(1e6 * min(seconds), 1) for way, seconds in found.items()}
    print(json.dumps({"us": us, "more": {way: round(x - us["dense"], 1) for way, x in us.items()}}, indent=1))
