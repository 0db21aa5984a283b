"""Sparse24Config: what becomes sparse, by which method, and when. PRESETS: the published numbers of each method."""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from packaging.version import InvalidVersion, Version
from sparse24_kernels import BACKENDS
from transformers.utils.quantization_config import QuantizationConfigMixin

from .version import __version__


@dataclass(frozen=True)
class Preset:
    """What a method uses where the user says nothing. `None` marks a setting that the method does not have."""

    masked_decay: float | None
    mask_interval: int | None
    weight_grad: str
    dense_start: int | float
    dense_tail: int | float
    patterns: tuple[str, ...] | None = None  # None: any N:M


WEIGHT_GRADS = ("dense", "mvue")
PHASES = ("sparse", "dense")
TARGET_GROUPS = ("mlp", "attention", "all-linear")

PRESETS = {
    # The straight-through baseline. GEMMs: output 2:4, grad_input dense, grad_weight dense.
    "ste": Preset(masked_decay=None, mask_interval=None, weight_grad="dense", dense_start=0, dense_tail=0),
    # Zhou et al. 2021 (arXiv 2102.04010): lambda_W = 2e-4. GEMMs as for "ste".
    "sr-ste": Preset(masked_decay=2e-4, mask_interval=None, weight_grad="dense", dense_start=0, dense_tail=0),
    # Hu et al. 2024 (arXiv 2404.01847): masks every 40 optimizer steps, the last sixth dense (250k of 300k steps);
    # lambda_W = 6e-5 is their GPT-2 124M, other models need their own. GEMMs: all three 2:4.
    "t-sr-ste": Preset(
        masked_decay=6e-5, mask_interval=40, weight_grad="mvue", dense_start=0, dense_tail=1 / 6, patterns=("2:4",)
    ),
    # Hu et al. 2024 (arXiv 2409.09099): no hyper-parameter. GEMMs: output 2:4, grad_input a dense product with the
    # 2:4 weight's values, grad_weight 2:4.
    "s-ste": Preset(masked_decay=None, mask_interval=None, weight_grad="mvue", dense_start=0, dense_tail=0),
}


@dataclass(repr=False)
class Sparse24Config(QuantizationConfigMixin):
    """How a model is made 2:4 sparse. Goes into `config.json` as its `quantization_config`.

    Every setting left at `None` takes the value of the method's preset when the config is made, so a config that
    was saved keeps meaning the same.

    Args:
        method: `"ste"`, `"sr-ste"`, `"t-sr-ste"` or `"s-ste"`; see `hf_sparse24.methods`.
        pattern: `"N:M"`, N of every M consecutive weights along the input dimension are kept. `"t-sr-ste"` does
            `"2:4"` only.
        target_modules: `"mlp"`, `"attention"`, `"all-linear"`; or a regular expression that must match a module's
            whole name; or a list of name endings, each of which must match at least one module. Output embeddings,
            heads, poolers, routers and embeddings are never touched.
        exclude_modules: a regular expression or a list of name endings to leave dense.
        layers_to_transform: block indices (an int or a list) to restrict the change to; `None` for all.
        masked_decay: lambda_W >= 0, added to the gradient of pruned weights as `lambda_W * weight`. Methods with
            decay only.
        mask_interval: how often the mask is searched anew, `"t-sr-ste"` only. Like the next two a *length*: an int
            counts optimizer steps, a float below 1 is a fraction of training.
        weight_grad: `"dense"`, or `"mvue"` to prune the output gradient 2:4 at random, unbiased, in the grad_weight
            product.
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
    masked_decay: float | None = None
    mask_interval: int | float | None = None
    weight_grad: str | None = None
    dense_start: int | float | None = None
    dense_tail: int | float | None = None
    backend: str = "auto"
    phase: str = field(default="sparse", compare=False)

    def __post_init__(self):
        _check_choice("method", self.method, PRESETS)
        preset = PRESETS[self.method]
        self._check_pattern(preset)
        for name in ("target_modules", "exclude_modules"):
            _check_module_names(name, getattr(self, name))
        _check_layers(self.layers_to_transform)
        for name in ("masked_decay", "mask_interval", "weight_grad", "dense_start", "dense_tail"):
            default = getattr(preset, name)
            if getattr(self, name) is None:
                setattr(self, name, default)
            elif default is None:
                raise ValueError(f"{name}={getattr(self, name)!r}: method {self.method!r} has no {name}; leave it None")
        if self.masked_decay is not None:
            _check_number("masked_decay", self.masked_decay)
        for name in ("mask_interval", "dense_start", "dense_tail"):
            _check_length(name, getattr(self, name))
        if self.mask_interval is not None and self.mask_interval == 0:
            raise ValueError("mask_interval=0: must be at least 1 step or a fraction above 0")
        _check_choice("weight_grad", self.weight_grad, WEIGHT_GRADS)
        _check_choice("backend", self.backend, ("auto", *BACKENDS))
        _check_choice("phase", self.phase, PHASES)

    def _check_pattern(self, preset: Preset) -> None:
        match = re.fullmatch(r"(\d+):(\d+)", self.pattern) if isinstance(self.pattern, str) else None
        if match is None or not 0 < int(match[1]) < int(match[2]):
            raise ValueError(f"pattern={self.pattern!r}: must be 'N:M' with 0 < N < M, such as '2:4'")
        if preset.patterns is not None and self.pattern not in preset.patterns:
            raise ValueError(f"pattern={self.pattern!r}: method {self.method!r} does {', '.join(preset.patterns)} only")

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


def _check_choice(name: str, value: Any, allowed) -> None:
    if value not in tuple(allowed):
        raise ValueError(f"{name}={value!r}: must be one of {list(allowed)}")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name}={value!r}: must be a finite number >= 0")


def _check_length(name: str, value: Any) -> None:
    if value is None:
        return
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
