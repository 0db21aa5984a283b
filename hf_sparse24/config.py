"""Sparse24Config: what becomes sparse, by which method, and when. PRESETS: the published numbers of each method."""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from packaging.version import InvalidVersion, Version
from sparse24_kernels import BACKENDS, SCALE_RULES, SOLVERS
from transformers.utils.quantization_config import QuantizationConfigMixin

from .version import __version__

GRADIENTS = ("dense", "mvue", "mvue-approx", "mvue-1:2")
PHASES = ("sparse", "dense")
TARGET_GROUPS = ("mlp", "attention", "all-linear")


@dataclass(frozen=True)
class Preset:
    """What a method uses where the user says nothing. `None` marks a setting that the method does not have."""

    masked_decay: float | None = None
    decay_on: str | None = None
    mask_interval: int | None = None
    mask_solver: str | None = None
    scale_rule: str | None = None
    scale_frozen: bool | None = None
    switch_rule: str | None = None
    switch_after: float | None = None
    switch_by: float | None = None
    weight_grad: str = "dense"
    input_grad: str = "dense"
    activations: str = "dense"
    fp8: bool = False
    dense_start: float | None = 0
    dense_tail: float | None = 0


PRESETS = {
    # The straight-through baseline. GEMMs: output 2:4, grad_input dense, grad_weight dense.
    "ste": Preset(),
    # Zhou et al. 2021 (arXiv 2102.04010): lambda_W = 2e-4. GEMMs as for "ste".
    "sr-ste": Preset(masked_decay=2e-4, decay_on="gradient"),
    # Hu et al. 2024 (arXiv 2404.01847): masks every 40 optimizer steps, the last sixth dense (250k of 300k steps);
    # lambda_W = 6e-5 is their GPT-2 124M, other models need their own. GEMMs: all three 2:4.
    "t-sr-ste": Preset(
        masked_decay=6e-5,
        decay_on="gradient",
        mask_interval=40,
        mask_solver="exact",
        weight_grad="mvue",
        dense_tail=1 / 6,
    ),
    # Hu et al. 2024 (arXiv 2409.09099): no hyper-parameter. GEMMs: output 2:4, grad_input a dense product with the
    # 2:4 weight's values, grad_weight 2:4.
    "s-ste": Preset(scale_rule="mse", scale_frozen=True, weight_grad="mvue"),
    # Lu et al. 2023 (arXiv 2302.01172): AutoSwitch option I, clipped to 10 % and 50 % of training. GEMMs: dense at
    # first, then output 2:4.
    "step": Preset(switch_rule="arithmetic", switch_after=0.1, switch_by=0.5, dense_start=None),
    # ASP-style (Mishra et al. 2021, arXiv 2104.08378): one mask, from the weights training starts with. Output 2:4.
    "fixed-mask": Preset(),
}


@dataclass(repr=False)
class Sparse24Config(QuantizationConfigMixin):
    """How a model is made 2:4 sparse. Goes into `config.json` as its `quantization_config`.

    Every setting left at `None` takes the value of the method's preset when the config is made, so a config that
    was saved keeps meaning the same.

    Args:
        method: `"ste"`, `"sr-ste"`, `"t-sr-ste"`, `"s-ste"`, `"step"` or `"fixed-mask"`; see `hf_sparse24.methods`.
        pattern: `"N:M"`, N of every M consecutive weights along the input dimension are kept. Only `"2:4"` has
            hardware.
        target_modules: `"mlp"`, `"attention"`, `"all-linear"`; or a regular expression that must match a module's
            whole name; or a list of name endings, each of which must match at least one module. Output embeddings,
            heads, poolers, routers and embeddings are never touched.
        exclude_modules: a regular expression or a list of name endings to leave dense.
        layers_to_transform: block indices (an int or a list) to restrict the change to; `None` for all.
        masked_decay: lambda_W >= 0, the pull of pruned weights towards zero; `"auto"` lets `Sparse24Trainer` determine
            it by short probes (see `tune_masked_decay`). Methods with decay only, as the next.
        decay_on: `"gradient"` adds `lambda_W * weight` to the pruned weights' gradient, before the optimizer (Hu et al.
            2024); `"weight"` takes `lr * lambda_W * weight` off them directly, past Adam's normalisation.
        mask_interval: how often the mask is searched anew, `"t-sr-ste"` only. Like `dense_start` and `dense_tail` a
            *length*: an int counts optimizer steps, a float below 1 is a fraction of training.
        mask_solver: `"exact"`, `"min-cost-flow"`, `"greedy"` or `"two-approx"`, `"t-sr-ste"` only; see
            `sparse24_kernels.transposable_mask`.
        scale_rule: `"mse"`, `"l1"` or `"none"`: what S-STE's scale keeps. `"s-ste"` only, as the next.
        scale_frozen: whether that scale stays what it was when sparsity began; `False` recomputes it every step, which
            the paper shows to be harmful.
        switch_rule: `"arithmetic"` (option I) or `"geometric"` (option II): the mean that decides when STEP freezes the
            variance. `"step"` only, as the next two.
        switch_after, switch_by: lengths; STEP switches not before the one, and at the other whatever the rule says.
        weight_grad: how the output gradient is pruned in the grad_weight product, groups along tokens: `"dense"` not
            at all, `"mvue"` 2:4 with least variance, `"mvue-approx"` the two-draw 2:4 estimate, `"mvue-1:2"`.
        input_grad: the same for the grad_input product, groups along output features.
        activations: `"dense"`, or `"2:4"` to prune them by magnitude in the output product.
        fp8: simulate FP8 products: E4M3 forward, E5M2 backward, one current scale per tensor.
        dense_start: length of dense training before sparsity starts.
        dense_tail: length of dense training after it ends.
        backend: `"auto"`, or the implementation of the sparse products by name.
        phase: `"sparse"` or `"dense"`: what the weights of the model that carries this config are used as. Kept up to
            date by training (after the dense tail the model is dense); not part of a comparison of configs.

    Raises:
        ValueError: with the field, the value and what is allowed.
    """

    quant_method: str = field(default="sparse24", init=False)
    method: str = "s-ste"
    pattern: str = "2:4"
    target_modules: str | list[str] = "mlp"
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    masked_decay: float | str | None = None
    decay_on: str | None = None
    mask_interval: int | float | None = None
    mask_solver: str | None = None
    scale_rule: str | None = None
    scale_frozen: bool | None = None
    switch_rule: str | None = None
    switch_after: int | float | None = None
    switch_by: int | float | None = None
    weight_grad: str | None = None
    input_grad: str | None = None
    activations: str | None = None
    fp8: bool | None = None
    dense_start: int | float | None = None
    dense_tail: int | float | None = None
    backend: str = "auto"
    phase: str = field(default="sparse", compare=False)

    def __post_init__(self):
        _check_choice("method", self.method, PRESETS)
        _check_pattern(self.pattern)
        for name in ("target_modules", "exclude_modules"):
            _check_module_names(name, getattr(self, name))
        _check_layers(self.layers_to_transform)
        for name, default in vars(PRESETS[self.method]).items():
            if getattr(self, name) is None:
                setattr(self, name, default)
            elif default is None:
                raise ValueError(f"{name}={getattr(self, name)!r}: method {self.method!r} has no {name}; leave it None")
            elif name in _CHOICES:
                _check_choice(name, getattr(self, name), _CHOICES[name])
            elif name != "masked_decay":
                _check_length(name, getattr(self, name))
        if self.masked_decay not in (None, "auto"):
            _check_number("masked_decay", self.masked_decay)
        if self.mask_interval is not None and self.mask_interval == 0:
            raise ValueError("mask_interval=0: must be at least 1 step or a fraction above 0")
        if sum(length for length in (self.dense_start, self.dense_tail) if isinstance(length, float)) >= 1:
            raise ValueError(f"dense_start={self.dense_start}, dense_tail={self.dense_tail}: leave no sparse step")
        _check_choice("backend", self.backend, ("auto", *BACKENDS))
        _check_choice("phase", self.phase, PHASES)

    @property
    def n(self) -> int:
        return int(self.pattern.split(":")[0])

    @property
    def m(self) -> int:
        return int(self.pattern.split(":")[1])

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"hf_sparse24_version": __version__}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs):
        """Read what `to_dict` wrote, or a dict with any of the arguments.

        Raises:
            ValueError: a key this version does not know, a value it does not allow, or a config saved by a newer
                version of hf_sparse24.
        """
        values = dict(config_dict)
        _check_version(values.pop("hf_sparse24_version", __version__))
        quant_method = values.pop("quant_method", "sparse24")
        if quant_method != "sparse24":
            raise ValueError(f"quant_method={quant_method!r}: a Sparse24Config has 'sparse24'")
        known = {f.name for f in dataclasses.fields(cls) if f.init}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown keys in a Sparse24Config: {unknown}; known are {sorted(known)}")
        config = cls(**values)
        return (config, kwargs) if return_unused_kwargs else config


_CHOICES = {
    "decay_on": ("gradient", "weight"),
    "mask_solver": SOLVERS,
    "scale_rule": SCALE_RULES,
    "scale_frozen": (True, False),
    "switch_rule": ("arithmetic", "geometric"),
    "weight_grad": GRADIENTS,
    "input_grad": GRADIENTS,
    "activations": ("dense", "2:4"),
    "fp8": (True, False),
}


def _check_choice(name: str, value: Any, allowed) -> None:
    if value not in tuple(allowed):
        raise ValueError(f"{name}={value!r}: must be one of {list(allowed)}")


def _check_pattern(pattern: Any) -> None:
    match = re.fullmatch(r"(\d+):(\d+)", pattern) if isinstance(pattern, str) else None
    if match is None or not 0 < int(match[1]) < int(match[2]):
        raise ValueError(f"pattern={pattern!r}: must be 'N:M' with 0 < N < M, such as '2:4'")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name}={value!r}: must be a finite number >= 0")


def _check_length(name: str, value: Any) -> None:
    steps = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    fraction = isinstance(value, float) and 0 <= value < 1
    if not steps and not fraction:
        raise ValueError(f"{name}={value!r}: must be an int >= 0 (optimizer steps) or a float in [0, 1) (a fraction)")


def _check_module_names(name: str, value: Any) -> None:
    if value is None and name == "exclude_modules":
        return
    if isinstance(value, str) and value:
        if value not in TARGET_GROUPS:
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"{name}={value!r}: not a valid regular expression ({error})") from error
        return
    if isinstance(value, list) and value and all(isinstance(item, str) and item for item in value):
        return
    groups = f"one of {list(TARGET_GROUPS)}, " if name == "target_modules" else ""
    raise ValueError(f"{name}={value!r}: must be {groups}a regular expression, or a non-empty list of name endings")


def _check_layers(value: Any) -> None:
    indices = value if isinstance(value, list) else [value]
    if value is not None and not (indices and all(type(i) is int and i >= 0 for i in indices)):
        raise ValueError(f"layers_to_transform={value!r}: must be a block index >= 0 or a non-empty list of them")


def _check_version(saved: str) -> None:
    try:
        newer = Version(saved) > Version(__version__)
    except (InvalidVersion, TypeError) as error:
        raise ValueError(f"hf_sparse24_version={saved!r}: not a version number") from error
    if newer:
        raise ValueError(
            f"hf_sparse24_version={saved!r}: saved by a newer hf_sparse24 than the installed {__version__}; "
            f"upgrade with `pip install -U hf_sparse24`"
        )
