"""Sparse24Config: what becomes sparse, by which method, and how it goes into config.json."""

import copy
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any, Self

from packaging.version import Version
from sparse24_kernels import Pattern
from sparse24_kernels.gemm.backend import backend_names
from transformers.utils.quantization_config import QuantizationConfigMixin

from .methods import DEFAULT_METHOD, METHODS, SparseMethod, method_class
from .methods.settings import SHARED, MethodSettings, one_of, plain, shown
from .module_names import TARGET_GROUPS, check_module_names
from .progress import get_logger
from .version import __version__
from .weights.packed_weight import PackedFormat

logger = get_logger(__name__)


class Sparse24Config(QuantizationConfigMixin):
    """How a model is made 2:4 sparse. Goes into `config.json` as its `quantization_config`, flat.

    Values are checked when the config is made and when a field is assigned to. A setting that is not given, or None,
    takes the method's default when the config is made, so a config that was saved keeps meaning the same. A patched
    model has a config of its own, which its run writes and which cannot be assigned to (see `sparse_run`).

    Args:
        method: the name of a registered method: `"s-ste"` (the default), `"t-sr-ste"`, `"sr-ste"`, `"step"`,
            `"fixed-mask"`, `"slope"`, `"ste"`, or one of your own (`register_method`). `METHODS` has
            them all.
        pattern: `"N:M"`, N of every M consecutive weights along the input dimension are kept. Sparse tensor cores and
            packed weights take `"2:4"` and what is within it: one of any M, two of a multiple of four.
        target_modules: `"mlp"`, `"attention"` or `"all-linear"`; the end of a module's name, such as `"up_proj"` or
            `"mlp.up_proj"`, or a list of these; or a regular expression of Python's `re` that must match a module's
            whole name, which is what every string is taken for that could not be a name. What matches no linear layer
            is an error. Output embeddings, heads, poolers, routers and all else outside the repeated blocks
            (`nn.ModuleList`) are touched only where their whole names are given, such as `"lm_head"`. The three groups
            mean all stacks of a model; of a multi-modal model that writes text, the language model alone: its vision
            and audio towers become sparse where names or an expression match them.
        exclude_modules: what to leave dense, in the same words.
        layers_to_transform: block indices (an int or a list) to restrict the change to; None for all. What no block
            has is an error.
        layer_patterns: other patterns for some layers, such as `{"down_proj": "1:4"}`: N:M by what picks the layers, in
            the words of `target_modules`. Of several that pick a layer, the first counts.
        backend: what runs the GEMMs. `"auto"` takes sparse tensor cores where a measurement of `hf-sparse24 tune` says
            that they are faster, and dense math on the pruned weights elsewhere; `"dense"` and `"cusparselt"` always
            take the one or the other.
        dense_start: length of dense training before sparsity starts: an int counts optimizer steps, a float below 1 is
            a fraction of training. None for the method's default.
        dense_tail: length of dense training after sparsity ends, in the same units. None for the method's default.
        settings: of the method, such as `masked_decay` and `mask_interval` of `"t-sr-ste"`; `describe_settings(method)`
            lists them with their meanings and defaults.

    All values are those of JSON. Scalars of NumPy and torch are taken as numbers; numbers in strings are refused.

    Attributes:
        settings: the method's `Settings`, also readable as attributes of the config (`config.mask_interval`).
        phase: how the model computes: `"sparse"`, `"dense"`, or another phase of its method. Not part of a comparison.
        finished: whether a run has ended in the dense phase. What trains the model further leaves it dense.
        packed: of a packed model, which weights are packed; None of any other.
        pruning: by what `oneshot` has pruned the model, as a dict of its settings and of the calibration data's size;
            None where it has not. Not part of a comparison.
        whole_names: whether whole names in `target_modules` reach heads and the like; in old checkpoints they do not.
        passed: the config that `from_pretrained` was given beside the checkpoint's own; None without one.

    Raises:
        ValueError: a value that is not allowed; the message has the field, the value and what is allowed.
        TypeError: a keyword that is a setting of no registered method.

    Examples:
        >>> config = Sparse24Config(method="t-sr-ste", target_modules="all-linear", mask_interval=20)
        >>> config.mask_interval, config.dense_tail
        (20, 0.16666666666666666)
    """

    quant_method: str = "sparse24"  # type: ignore[assignment]  # Transformers' enum has only its own methods

    def __init__(
        self,
        method: str = DEFAULT_METHOD,
        pattern: str = "2:4",
        target_modules: str | list[str] = "mlp",
        exclude_modules: str | list[str] | None = None,
        layers_to_transform: int | list[int] | None = None,
        layer_patterns: dict[str, str] | None = None,
        backend: str = "auto",
        dense_start: int | float | None = None,
        dense_tail: int | float | None = None,
        **settings: Any,
    ):
        shared = {
            "method": plain(method),
            "pattern": plain(pattern),
            "layer_patterns": copy.copy(layer_patterns),
            "target_modules": plain(target_modules),
            "exclude_modules": plain(exclude_modules),
            "layers_to_transform": plain(layers_to_transform),
            "backend": plain(backend),
        }
        settings |= {"dense_start": dense_start, "dense_tail": dense_tail}
        given = {name: plain(value) for name, value in settings.items() if value is not None}
        cls = method_class(shared["method"])
        _check_shared(**shared)
        _check_names(cls, settings, given)
        self.__dict__.update(
            **shared,
            settings=cls.Settings(**given),
            phase="sparse",
            finished=False,
            packed=None,
            pruning=None,
            passed=None,
            whole_names=True,
            _given=given,
            _is_live=False,
        )

    def __getattr__(self, name: str) -> Any:
        # Only called for what is not found otherwise; `settings` itself is missing while a copy is being made.
        settings = self.__dict__.get("settings")
        if settings is None or not hasattr(settings, name):
            raise AttributeError(f"a Sparse24Config with method={self.__dict__.get('method')!r} has no {name!r}")
        return getattr(settings, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "passed":
            self.__dict__["passed"] = value
        elif hasattr(type(self), name) or (name in self.__dict__ and name not in SHARED):
            raise AttributeError(f"{name}={shown(value)}: {name} of a Sparse24Config cannot be assigned to")
        elif name not in SHARED and not hasattr(self.settings, name):
            raise AttributeError(f"{name}={shown(value)}: method {self.method!r} has no {name}")
        elif self._is_live:
            way = "unpatch_model(model), then patch_model with another config"
            if name not in SHARED:
                way = f"sparse_run(model).change_settings({name}=...)"
            raise ValueError(f"{name}={shown(value)}: a model is patched with this config; call {way}")
        else:
            self.__dict__.update(self.replace(**{name: value}).__dict__)

    def get_loading_attributes(self) -> dict[str, Any]:
        """What Transformers sets on a checkpoint's config where `from_pretrained` gets this one as well.

        Returns:
            This config, by the name of the attribute that takes it.
        """
        return {"passed": self}

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, that no model is patched with; checked like a new config.

        Args:
            changes: arguments of `Sparse24Config`, settings of the method included.

        Returns:
            The new config; this one stays as it is.
        """
        config = type(self)(**({name: getattr(self, name) for name in SHARED} | self._given | changes))
        config.record(phase=self.phase, whole_names=self.whole_names or "target_modules" in changes)
        return config

    def given_settings(self) -> dict[str, Any]:
        """The settings that were given when the config was made; all others have the method's defaults.

        Returns:
            Their values by name.
        """
        return dict(self._given)

    def record(self, **values: Any) -> None:
        """Write fields as they are, unchecked: for the run that owns this config, and for what was read from a file.

        Args:
            values: by name of the field.
        """
        self.__dict__.update(values)

    @property
    def n(self) -> int:
        """N of the pattern N:M."""
        return Pattern.parse(self.pattern).n

    @property
    def m(self) -> int:
        """M of the pattern N:M."""
        return Pattern.parse(self.pattern).m

    def to_dict(self) -> dict[str, Any]:
        """What goes into `config.json`.

        Returns:
            All fields and settings by name, flat, with `quant_method`, `phase` and the version of this library.
        """
        return self._fields() | {
            "quant_method": self.quant_method,
            "phase": self.phase,
            "hf_sparse24_version": __version__,
            **({"finished": True} if self.finished else {}),
            **({} if self.packed is None else {"packed": self.packed.to_dict()}),
            **({} if self.pruning is None else {"pruning": copy.deepcopy(self.pruning)}),
            **({"whole_names": True} if self.whole_names and self.target_modules not in TARGET_GROUPS else {}),
        }

    def _fields(self) -> dict[str, Any]:
        return copy.deepcopy({name: getattr(self, name) for name in SHARED}) | dataclasses.asdict(self.settings)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sparse24Config) and self._fields() == other._fields()

    __hash__ = None  # type: ignore[assignment]  # mutable, as configs of Transformers are

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Self:
        """Read what `to_dict` wrote, or a dict with any of the arguments.

        A config of a later version is read, with a warning, if this version knows all its keys.

        Args:
            config_dict: the dict, as `quantization_config` of a `config.json` has it.
            return_unused_kwargs: return `kwargs` too, as Transformers asks.
            kwargs: not used.

        Returns:
            The config; with `return_unused_kwargs` a tuple of it and `kwargs`.

        Raises:
            ValueError: a key this version does not know, or a value it does not allow.
        """
        if not isinstance(config_dict, dict) or not all(isinstance(key, str) for key in config_dict):
            raise ValueError(f"a Sparse24Config is read from a dict whose keys are strings, got {shown(config_dict)}")
        values = dict(config_dict)
        saved_by = values.pop("hf_sparse24_version", __version__)
        is_newer = _is_newer(saved_by)
        quant_method = values.pop("quant_method", cls.quant_method)
        if quant_method != cls.quant_method:
            raise ValueError(f"quant_method={shown(quant_method)}: a Sparse24Config has {cls.quant_method!r}")
        phase, packed = values.pop("phase", "sparse"), values.pop("packed", None)
        pruning, finished = values.pop("pruning", None), values.pop("finished", False) is True
        if not isinstance(pruning, dict | None):
            raise ValueError(f"pruning={shown(pruning)}: must be a dict of what oneshot was called with")
        whole_names = values.pop("whole_names", "hf_sparse24_version" not in config_dict) is True
        if values.get("backend") == "reference":  # what version 0.1 called dense math
            values["backend"] = "dense"
        method = method_class(values.get("method", DEFAULT_METHOD))
        unknown = sorted(set(values) - {*SHARED, *_setting_names()})
        if unknown:
            upgrade = f"; it was saved by hf_sparse24 {saved_by}: pip install -U hf_sparse24" if is_newer else ""
            known = sorted({*SHARED, *_names_of(method.Settings)})
            raise ValueError(f"unknown keys in a Sparse24Config: {unknown}; known are {known}{upgrade}")
        if is_newer:
            logger.warning(
                f"this config was saved by hf_sparse24 {saved_by}, {__version__} is installed; all its keys are known"
            )
        config = cls(**values)
        if phase not in method.phases:
            raise ValueError(f"phase={shown(phase)}: must be one of {list(method.phases)}")
        config.record(
            phase=phase,
            finished=finished,
            pruning=pruning,
            whole_names=whole_names,
            packed=None if packed is None else PackedFormat.from_dict(packed),
        )
        return (config, kwargs) if return_unused_kwargs else config  # type: ignore[return-value]  # for Transformers


def fixed_differences(ours: Sparse24Config, theirs: Sparse24Config) -> str:
    """What of another config a patched model cannot take, for messages: `"method='ste', now 's-ste'"`."""
    fixed = [name for name in SHARED if name != "backend"]
    if ours.method == theirs.method:
        fixed += [name for name in method_class(ours.method).settings_of_state if name in theirs.given_settings()]
    pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in fixed}
    return ", ".join(f"{name}={one!r}, now {other!r}" for name, (one, other) in pairs.items() if one != other)


def _names_of(settings: type[MethodSettings]) -> list[str]:
    return [field.name for field in dataclasses.fields(settings)]


def _setting_names() -> set[str]:
    return {name for method in METHODS.values() for name in _names_of(method.Settings)}


def _check_names(method: type[SparseMethod], names: dict[str, Any], given: dict[str, Any]) -> None:
    """Every name is a setting of some method; those with a value are settings of this one."""
    own = _names_of(method.Settings)
    for name in names:
        if name not in own and name not in _setting_names():
            known = f"it has {list(SHARED)}, and with method={method.name!r} {own}"
            raise TypeError(f"Sparse24Config has no argument {name!r}; {known}")
    for name, value in given.items():
        if name not in own:
            others = [other.name for other in METHODS.values() if name in _names_of(other.Settings)]
            way = f"leave it None, or take a method that has it: {others}"
            raise ValueError(f"{name}={shown(value)}: method {method.name!r} has no {name}; {way}")


def _check_shared(
    method: str,
    pattern: Any,
    layer_patterns: Any,
    target_modules: Any,
    exclude_modules: Any,
    layers_to_transform: Any,
    backend: Any,
) -> None:
    if layer_patterns is not None and not isinstance(layer_patterns, dict):
        raise ValueError(f"layer_patterns={shown(layer_patterns)}: must be a dict such as {{'down_proj': '1:4'}}")
    for names, other in (layer_patterns or {}).items():
        check_module_names("layer_patterns", names)
        _check_pattern(f"layer_patterns={shown(layer_patterns)}: {names!r}", other)
    _check_pattern("pattern", pattern)
    check_module_names("target_modules", target_modules)
    if exclude_modules is not None:
        check_module_names("exclude_modules", exclude_modules)
    layers = layers_to_transform if isinstance(layers_to_transform, list) else [layers_to_transform]
    if layers_to_transform is not None and not (layers and all(_is_index(layer) for layer in layers)):
        raise ValueError(
            f"layers_to_transform={shown(layers_to_transform)}: must be a block index >= 0 or a non-empty list of them"
        )
    wrong = one_of("auto", *backend_names())(backend)
    if wrong:
        raise ValueError(f"backend={shown(backend)}: {wrong}")


def _check_pattern(field: str, value: Any) -> None:
    try:
        Pattern.parse(value)
    except ValueError:
        raise ValueError(f"{field}={shown(value)}: must be 'N:M' with 0 < N < M, such as '2:4'") from None


def _is_index(value: Any) -> bool:
    return type(value) is int and 0 <= value <= sys.maxsize


def _is_newer(saved: Any) -> bool:
    try:
        return Version(saved) > Version(__version__)
    except (ValueError, TypeError) as error:  # InvalidVersion is a ValueError
        raise ValueError(f"hf_sparse24_version={shown(saved)}: not a version number") from error
