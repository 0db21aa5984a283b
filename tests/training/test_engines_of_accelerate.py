"""accelerate's engines: what it is told before anything starts, and its FSDP2, which it runs on GPUs only, by hand."""

from types import SimpleNamespace

import pytest
import ranks
import torch
import zoo
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from distributed_runs import settings
from torch.distributed.device_mesh import init_device_mesh

from hf_sparse24 import Sparse24Config, Sparse24Controller, patch_model
from hf_sparse24.training.checks import check_engine

FSDP2 = {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"}


def accelerator(**plugin) -> SimpleNamespace:
    """As much of an Accelerator as these functions look at."""
    made = FullyShardedDataParallelPlugin(**{"auto_wrap_policy": "transformer_based_wrap", **plugin})
    return SimpleNamespace(state=SimpleNamespace(fsdp_plugin=made), mixed_precision="no", is_main_process=True)


@pytest.mark.filterwarnings("ignore:.*FSDP.*:FutureWarning")
@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ({"fsdp_version": 1}, r"FSDP1 flattens weights.* use FSDP2, by `fsdp_version: 2`"),
        ({"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"}, r"SHARDED_STATE_DICT.*FULL_STATE_DICT"),
    ],
)
def test_an_engine_that_fails_later_is_refused_before_anything_starts(plugin, message):
    model = zoo.build("llama")
    patch_model(model)
    with pytest.raises(ValueError, match=message):
        check_engine(accelerator(**plugin), model)


def test_loading_that_sends_no_buffers_is_refused():
    model, without_state = zoo.build("llama"), zoo.build("llama")
    patch_model(model, Sparse24Config(method="s-ste"))
    patch_model(without_state, Sparse24Config(method="sr-ste"))
    check_engine(accelerator(**FSDP2, cpu_ram_efficient_loading=False), model)
    efficient = accelerator(**FSDP2, cpu_ram_efficient_loading=True)
    check_engine(efficient, without_state)
    with pytest.raises(ValueError, match=r"'scale'.*`fsdp_cpu_ram_efficient_loading: false`"):
        check_engine(efficient, model)


def test_fsdp2_as_accelerate_wraps():
    for phases, masks_agree in ranks.run(2, _wrapped):
        assert phases == ["sparse", "sparse", "dense"] and masks_agree


def _wrapped(rank, world):
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(**settings("t-sr-ste")))
    engine = accelerator(**FSDP2, cpu_ram_efficient_loading=False)
    engine.torch_device_mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    engine.parallelism_config = SimpleNamespace(fsdp_dim_names=("dp",))
    model = fsdp2_prepare_model(engine, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    controller = Sparse24Controller(model, optimizer, total_steps=3)
    phases = []
    for step in range(3):
        model(**zoo.batch(10 * step + rank)).loss.backward()
        phases.append(controller.phase)
        optimizer.step()
        optimizer.zero_grad()
    masks = ranks.state_of(model)["masks"]
    seen = [None] * world
    torch.distributed.all_gather_object(seen, {name: mask.tolist() for name, mask in masks.items()})
    return phases, seen[0] == seen[1]
