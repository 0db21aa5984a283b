"""patch_model and unpatch_model: make a model's linear layers 2:4 sparse in place, and back."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ..config import SavedConfig, Sparse24Config, fixed_differences
from ..extensions import adapters_in, check_unmerged
from ..layers.experts import SparseExperts
from ..layers.linear import Sparse24Conv1D, Sparse24Linear
from ..layers.packed import unpack_weight
from ..layers.sparse_module import choose_class, make_dense
from ..run import SparseRun, wants_packed_master
from ..weights.sharding import check_whole, is_sharded, local
from ..weights.sparse_weight import SparseWeight, first_of_each, sparse_weights
from ..weights.storage import TRAINED, Storage, layer_name
from .masters import check_masters, pack_masters
from .ownership import adopt, check_not_offloaded, name_layers, write_config
from .refusals import check_module, check_trainable, reject_non_finite, reject_quantized, reject_wrapped
from .report import PatchReport, make_report
from .targets import Candidate, find_candidates


def patch_model(model: nn.Module, config: Sparse24Config | None = None) -> PatchReport:
    """Make the linear layers of `model` that `config` names N:M sparse, in place.

    Parameters stay the same objects with the same names; layers change their class and gain buffers. An error changes
    nothing. With `master="packed"` the kept values are new Parameters: make the optimizer afterwards.

    Args:
        model: any model of Transformers, or another module, whose layers stand in `nn.ModuleList`s. May be on the meta
            device. Its own config says from then on that it is sparse, where that is one of Transformers. If it is a
            part of a model, call `patch_model(whole)`, train or export the whole before you save it.
        config: what becomes sparse, and by which method. None for the config that the model has, else
            `Sparse24Config()`.

    Returns:
        A report of what is sparse, what is not, and why; print it. Where the model is patched already, the settings
        that `config` gives are its settings from now on, and no weight changes.

    Raises:
        ValueError: the model cannot be patched as it is (compiled, wrapped, quantized, with adapters, NaN or inf,
            DeepSpeed ZeRO-3), is patched in another way, or has no layer that the config names.

    Examples:
        >>> from transformers import AutoConfig, AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("gpt2"))
        >>> report = patch_model(model, Sparse24Config(target_modules="mlp"))
        >>> report.patched[0]
        'transformer.h.0.mlp.c_fc'
        >>> print(report)
        2:4 sparse by s-ste: ...
    """
    if not isinstance(config, Sparse24Config | None):
        raise ValueError(f"config={config!r}: must be a Sparse24Config or None")
    check_module(model)
    found = sparse_weights(model, Storage)
    check_trainable(found)
    run = next((weight.run for weight in found.values() if weight.run is not None), None)
    if run is not None:
        return _patch_again(model, run, config)
    reject_wrapped(model)
    reject_quantized(model)
    if adapters_in(model):
        raise ValueError("the model has adapters: patch it first, then add them, so that they act through its masks")
    run = SparseRun(config or named_config(model) or Sparse24Config())
    candidates = find_candidates(model, run)
    is_pretrained = _loses_weights(candidates, run)
    weights = _make_sparse(model, run, candidates)
    adopt(model, weights)
    report = make_report(model, run, candidates, is_pretrained, _gemms(weights))
    if wants_packed_master(run.config):
        pack_masters(weights, run)
    return report


def _patch_again(model: nn.Module, run: SparseRun, config: Sparse24Config | None) -> PatchReport:
    """Take the settings of a config over into a model that is patched, and report what is sparse."""
    if config is not None:
        if others := fixed_differences(run.config, config):
            raise ValueError(f"already patched with another config ({others}); call unpatch_model(model) first")
        run.change_settings(**config.given)
        run.change_config(backend=config.backend)
    sparse = {layer_name(name) for name in sparse_weights(model, TRAINED)}
    candidates = [
        each if each.skipped or each.name in sparse else each._replace(skipped="dense when the rest was patched")
        for each in find_candidates(model, run)
    ]
    adopt(model)
    return make_report(model, run, candidates, False, _gemms(sparse_weights(model)))


def _gemms(weights: dict[str, SparseWeight]) -> tuple:
    return tuple((gemm, each.sizes) for each in weights.values() if not each.is_stack for gemm in each.method.gemms)


def named_config(model: Any) -> Sparse24Config | None:
    """The Sparse24Config in a dense model's own config; None where it has none."""
    named = getattr(getattr(model, "config", None), "quantization_config", None)
    if isinstance(named, SavedConfig):
        return named.config
    if not isinstance(named, dict) or named.get("quant_method") != Sparse24Config.quant_method:
        return None
    return Sparse24Config.from_dict(named)


def _loses_weights(candidates: list[Candidate], run: SparseRun) -> bool:
    """Whether the first weight that becomes sparse is from a file, and has more non-zeros than the pattern leaves."""
    first = next((candidate for candidate in candidates if candidate.skipped is None), None)
    if first is None or first.weight.is_meta or not getattr(first.weight, "_is_hf_initialized", False):
        return False  # Transformers marks what it has read from a file
    weight, pattern = local(first.weight), first.pattern or run.method.pattern
    return bool(weight.count_nonzero() > weight.numel() * pattern.n / pattern.m)


def _make_sparse(model: nn.Module, run: SparseRun, candidates: list[Candidate]) -> dict[str, SparseWeight]:
    """Make what is not skipped sparse, and return it: all of it, or nothing."""
    targets = [candidate for candidate in candidates if candidate.skipped is None]
    if not targets:
        named = [c for c in candidates if not str(c.skipped).startswith("not in target_modules")] or candidates
        reasons = sorted({f"{c.name.rpartition('.')[2]}: {c.skipped}" for c in named}) or ["no linear layers"]
        left = f"target_modules={run.config.target_modules!r} leaves no layer to make sparse ({'; '.join(reasons[:8])})"
        way = "A list of whole names, as model.named_modules() has them, reaches every layer that can be pruned"
        raise ValueError(f"nothing to patch: {left}. {way}")
    reject_non_finite([(target.name, target.weight) for target in targets])
    names = {target.weight: target.name for target in reversed(targets)}  # those that share a weight share its masks
    try:
        for target in targets:
            check_whole(target.name, target.weight)
            name = names[target.weight]
            SparseWeight.attach(target.module, target.parameter, target.input_dim, run, target.pattern, name)
            choose_class(target.module, Sparse24Linear, Sparse24Conv1D, SparseExperts)
        weights = sparse_weights(model)
        _reject_doubled_parameters(weights)
        if wants_packed_master(run.config):
            check_masters(weights, run)
        write_config(model, run)
    except BaseException:  # no memory for the state, an error in a method of the user's, Ctrl-C
        for weight in sparse_weights(model).values():
            make_dense(weight)
        for owner in list(run.owners):
            name_layers(owner, run)
        raise
    return weights


@torch.no_grad()
def unpatch_model(model: nn.Module, sparse: bool = True) -> nn.Module:
    """Turn a patched model back into plain Transformers, in place.

    Its controller ends. Where `model` is a part of a sparse model, the rest stays sparse.

    Args:
        model: a model that `patch_model` changed.
        sparse: keep the weights the model computes with, so that its outputs stay the same. `False` keeps the dense
            master weights. Packed masters become dense weights with zeros either way.

    Returns:
        The same model.

    Raises:
        ValueError: the model is not patched, or compiled, wrapped or sharded, or an adapter is merged; it has adapters,
            and `sparse` is False.

    Examples:
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained("gpt2")
        >>> _ = patch_model(model, Sparse24Config(method="fixed-mask"))
        >>> unpatch_model(model).transformer.h[0].mlp.c_fc.weight.eq(0).float().mean()
        tensor(0.5000)
    """
    check_module(model)
    weights = sparse_weights(model, TRAINED)
    check_unmerged(model)
    if not sparse and adapters_in(model):
        way = "call model.unload() of PEFT first, or keep the sparse weights (sparse=True)"
        raise ValueError(f"sparse=False: the model has adapters, which act on its sparse weights; {way}")
    for name, weight in weights.items():
        if is_sharded(weight.master):
            way = "call export_model(model, directory) in all processes, which writes the plain model"
            raise ValueError(f"{name} is sharded: {way}")
    reject_wrapped(model)
    if not weights:
        raise ValueError("the model is not patched; there is nothing to undo")

    def write(group: list[SparseWeight]) -> None:
        if not group[0].storage.has_zeros:
            unpack_weight(group[0])  # none is shared
            return
        # All first, then written: layers that share one weight must not prune what another has pruned already.
        keeps_master = not sparse or group[0].run.is_dense
        results = [None if keeps_master else weight.merged() for weight in group]
        for weight, result in zip(group, results):
            make_dense(weight, result)

    release(model, weights, write)
    return model


def release(
    model: nn.Module, weights: Mapping[str, SparseWeight], convert: Callable[[list[SparseWeight]], None]
) -> None:
    """End the controllers, let `convert` detach the sparse weights, and let configs say what is left.

    `convert` gets one group after the other: the weights of one module, and those that share a Parameter with them.
    """
    check_not_offloaded(model)
    runs = {id(weight.run): cast(SparseRun, weight.run) for weight in weights.values()}
    for run in runs.values():
        if run.controller is not None:
            run.controller.end()
    groups: dict[int, list[SparseWeight]] = {}
    for weight in weights.values():
        keys = id(weight.module), id(weight.master)
        group = next((groups[key] for key in keys if key in groups), [])
        group.append(weight)
        groups |= dict.fromkeys(keys, group)
    for group in {id(group): group for group in groups.values()}.values():
        convert(group)
    inside = [module for module in model.modules() if isinstance(module, PreTrainedModel)]  # a copy's are no owners yet
    for run in runs.values():
        owners = {*run.owners, *inside}
        for owner in sorted(owners, key=lambda owner: len(list(owner.modules()))):  # the whole has the last word
            name_layers(owner, run)


def _reject_doubled_parameters(weights: dict[str, SparseWeight]) -> None:
    """Raise ValueError where a shared weight would have two sets of a method's Parameters: a merge takes one."""
    first = first_of_each(weights)
    doubled = [name for name, weight in weights.items() if weight.parameters and name not in first]
    if doubled:
        own, way = list(weights[doubled[0]].parameters), "leave one of the layers out with exclude_modules"
        raise ValueError(f"{doubled[0]} is shared, and the method trains {own} for each layer: {way}")
