"""match_config: what a model is when it is saved decides what its config says, though modules were replaced since."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..config import SavedConfig
from ..extensions import adapters_in
from ..run import SparseRun, sparse_run
from ..weights.storage import layer_name, name_without_adapters
from .ownership import LAYERS, adopt, forget_quantizer, name_layers, outermost, packed_patterns, sparse_layers
from .targets import find_candidates, find_places


def match_config(model: nn.Module) -> None:
    """Let the configs in a model name the layers that are sparse or packed now, where that has changed since they were
    written. ValueError: a config cannot say what the model is, as its architecture has other layers."""
    adopt(model)  # where a part was patched by itself, or a layer is a copy of another one
    for owner in outermost(model):
        saved = getattr(owner.config, "quantization_config", None)
        if isinstance(saved, SavedConfig) and not adapters_in(owner):  # with adapters, these alone are saved
            _match(owner, saved)


def _match(owner: Any, saved: SavedConfig) -> None:
    packed, run = saved.facts.packed, sparse_run(owner)
    now = sparse_layers(owner) if packed is None else packed_patterns(owner)
    written = owner.__dict__.get(LAYERS) if packed is None else packed.weights
    if now == written and (run is None or run.saved is saved):
        return
    made = _as_loaded(owner)
    _reject(_layers(owner) ^ _layers(made))
    if not now:
        name_layers(owner, SparseRun(saved))
        forget_quantizer(owner)
    elif packed is not None and run is None:
        saved.facts = replace(saved.facts, packed=replace(packed, weights=now))
    elif run is not None:
        owner.config.quantization_config = run.saved  # all that is sparse may be of another model
        run.owners.add(owner)
        name_layers(owner, run)
        picked = {
            each.name: each.pattern or run.method.pattern for each in find_candidates(made, run) if not each.skipped
        }
        _reject({name for name, _ in picked.items() ^ now.items()} if packed is None else set())
        owner.__dict__[LAYERS] = now


def _layers(model: nn.Module) -> set[str]:
    """The names in files of linear layers and of stacks of experts' weights, packed ones included."""
    return {name_without_adapters(name) for name in find_places(model)} | {*map(layer_name, packed_patterns(model))}


def _as_loaded(owner: Any) -> nn.Module:
    """The model as `from_pretrained` makes it of its config, without weights; itself where its class needs more."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return type(owner)(copy.deepcopy(owner.config))
    except Exception:  # whatever a constructor of foreign code raises
        return owner


def _reject(differing: set[str]) -> None:
    if differing:
        way = "change model.config to what the model is, such as num_hidden_layers; or keep model.state_dict()"
        raise ValueError(
            f"{min(differing)}: modules were replaced or removed, and config.json would tell others: {way}"
        )
