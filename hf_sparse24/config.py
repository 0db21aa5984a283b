"""Sparse24Config: what becomes sparse, and by which method. SavedConfig: that and the facts of a run."""

import copy
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Self

from packaging.version import Version
from sparse24_kernels import Pattern
from sparse24_kernels.gemm.backend import backend_names
from transformers.utils.quantization_config import QuantizationConfigMixin

from .facts import FACTS, RunFacts
from .methods import DEFAULT_METHOD, METHODS, SparseMethod, method_class
from .methods.settings import SHARED, Check, MethodSettings, one_of, plain
from .module_names import ModuleNames
from .progress import get_logger
from .tables import shown
from .version import __version__

logger = get_logger(__name__)


class _InConfigJson(QuantizationConfigMixin):
    """The `quantization_config` of a model: equal where `config.json` says the same; its lists cannot be hashed."""

    quant_method: str = "sparse24"  # type: ignore[assignment]  # Transformers' enum has only its own methods

    def __iter__(self) -> Iterator[tuple[str, object]]:
        yield from self.to_dict().items()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.to_dict() == other.to_dict()

    def get_loading_attributes(self) -> dict[str, Any]:
        # Transformers asks for them where `from_pretrained` gets this config, and the checkpoint has its own.
        way = "load it without quantization_config, call unpack_model(model) if it is packed, then patch_model"
        raise ValueError(f"the checkpoint is sparse, with a config of its own: {way}")


class Sparse24Config(_InConfigJson):
    """How a model is made 2:4 sparse. Goes into `config.json` as its `quantization_config`, flat.

    A config is frozen and checked; `replace` makes another. A setting that is not given, or None, takes the method's
    default when the config is made, so a saved config keeps its meaning. What changes in training, such as the phase,
    belongs to the model's run (see `sparse_run`).

    Args:
        method: the name of a registered method: `"s-ste"` (the default), `"t-sr-ste"`, `"sr-ste"`, `"step"`,
            `"fixed-mask"`, `"slope"`, `"ste"`, or one of your own (`register_method`).
        pattern: `"N:M"`, N of every M consecutive weights along the input dimension are kept. Sparse tensor cores take
            `"2:4"` and what is within it: one of any M, two of a multiple of four. Packed weights take every M that
            divides 64; on a CPU `"16:32"` has the bytes of `"2:4"` and loses less.
        target_modules: `"mlp"`, `"attention"` or `"all-linear"`; the end of a module's name, such as `"up_proj"` or
            `"mlp.up_proj"`, or a list of these; or a regular expression of Python's `re` that matches a module's whole
            name. What matches no linear layer is an error. Output embeddings, heads, poolers, routers and all else
            outside the repeated blocks (`nn.ModuleList`) become sparse only by their whole names, such as `"lm_head"`.
            In a multi-modal model that writes text the three groups mean the language model alone.
        exclude_modules: what to leave dense, in the same words.
        layers_to_transform: block indices (an int or a list) to restrict the change to; None for all.
        layer_patterns: other patterns for some layers, such as `{"down_proj": "1:4"}`: N:M by what picks the layers, in
            the words of `target_modules`. Two that pick a layer must have the same pattern.
        backend: what runs the GEMMs: `"dense"`, `"cusparselt"`, `"cpu"`, or `"auto"`: sparse GEMMs where `hf-sparse24
            tune`, or on AMD's CPUs we, measured that they are faster, and a GPU need not wait; else dense math.
        dense_start: length of dense training before sparsity starts: an int counts optimizer steps, a float below 1 is
            a fraction of training. None for the method's default.
        dense_tail: length of dense training after sparsity ends, in the same units. None for the method's default.
        settings: of the method, such as `masked_decay` and `mask_interval` of `"t-sr-ste"`; `describe_settings(method)`
            lists them with their meanings and defaults.

    All values are those of JSON. Scalars of NumPy and torch are taken as numbers; numbers in strings are refused.

    Attributes:
        settings: the method's `Settings`, also readable as attributes of the config (`config.mask_interval`).
        given: the values of those settings that were given, by name; the others have the method's defaults.

    Raises:
        ValueError: a value that is not allowed; the message has the field, the value and what is allowed.
        TypeError: a keyword that is a setting of no registered method.

    Examples:
        >>> config = Sparse24Config(method="t-sr-ste", target_modules="all-linear", mask_interval=20)
        >>> config.mask_interval, config.dense_tail
        (20, 0.16666666666666666)
    """

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
        patterns = copy.copy(layer_patterns)
        values = method, pattern, patterns, target_modules, exclude_modules, layers_to_transform, backend
        shared = {name: plain(value) for name, value in zip(SHARED, values)}
        settings |= {"dense_start": dense_start, "dense_tail": dense_tail}
        given = {name: plain(value) for name, value in settings.items() if value is not None}
        cls = method_class(shared["method"])
        _check_shared(shared)
        _check_names(cls, settings, given)
        self.__dict__.update(shared, settings=cls.Settings(**given), given=given)

    def __getattr__(self, name: str) -> Any:
        # `settings` itself is missing while a copy is being made.
        settings = self.__dict__.get("settings")
        if settings is None or not hasattr(settings, name):
            raise AttributeError(f"a Sparse24Config with method={self.__dict__.get('method')!r} has no {name!r}")
        return getattr(settings, name)

    def __setattr__(self, name: str, value: object) -> None:
        other = f"config.replace({name}=...) makes another"
        way = f"sparse_run(model).change_settings({name}=...) changes a setting of a patched model"
        raise AttributeError(f"{name}={shown(value)}: a Sparse24Config is frozen; {other}, and {way}")

    def replace(self, **changes: Any) -> Self:
        """A config with some fields changed; checked like a new one.

        Args:
            changes: arguments of `Sparse24Config`, settings of the method included.

        Returns:
            The new config; this one stays as it is.
        """
        return type(self)(**({name: getattr(self, name) for name in SHARED} | self.given | changes))

    def fields(self) -> dict[str, Any]:
        """Return all values, those of the method's settings included.

        Returns:
            Copies of the values by name.
        """
        return copy.deepcopy({name: getattr(self, name) for name in SHARED}) | dataclasses.asdict(self.settings)

    def to_dict(self) -> dict[str, Any]:
        """Return what goes into `config.json`.

        Returns:
            All fields by name, with `quant_method` and the version of this library.
        """
        return self.fields() | {"quant_method": self.quant_method, "hf_sparse24_version": __version__}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Self:  # type: ignore[override]  # called with no more than this
        """Read what `to_dict` wrote, or a dict with any of the arguments. The facts of a run are left out.

        A config of a later version is read, with a warning, if this version knows all its keys.

        Args:
            config_dict: `quantization_config` of a `config.json`.

        Returns:
            The config.

        Raises:
            ValueError: a key this version does not know, or a value it does not allow.
        """
        if not isinstance(config_dict, dict) or not all(isinstance(key, str) for key in config_dict):
            raise ValueError(f"a Sparse24Config is read from a dict whose keys are strings, got {shown(config_dict)}")
        values = dict(config_dict)
        if whole := values.pop("part_of", None):
            way = f"load the whole by {whole}.from_pretrained, and take the part of it"
            raise ValueError(f"part_of={shown(whole)}: the files are those of a whole model, which is sparse: {way}")
        saved_by = values.pop("hf_sparse24_version", __version__)
        try:
            is_later = Version(saved_by) > Version(__version__)
        except (ValueError, TypeError) as error:  # InvalidVersion is a ValueError
            raise ValueError(f"hf_sparse24_version={shown(saved_by)}: not a version number") from error
        quant_method = values.pop("quant_method", cls.quant_method)
        if quant_method != cls.quant_method:
            raise ValueError(f"quant_method={shown(quant_method)}: a Sparse24Config has {cls.quant_method!r}")
        for name in FACTS:
            values.pop(name, None)
        method = method_class(values.get("method", DEFAULT_METHOD))
        unknown = sorted(set(values) - {*SHARED, *_setting_names()})
        if unknown:
            known = sorted({*SHARED, *_names_of(method.Settings)})
            by = f"it was saved by hf_sparse24 {saved_by!s:.20}: pip install hf_sparse24=={saved_by!s:.20}"
            raise ValueError(f"unknown keys in a Sparse24Config: {unknown}; known are {known}; {by}")
        if is_later:
            logger.warning(f"hf_sparse24 {saved_by} saved this config, {__version__} is installed; it knows all keys")
        return cls(**values)


class SavedConfig(_InConfigJson):
    """The `quantization_config` of a sparse model: its config and the facts of its run. `config.json` has both, flat.

    Fields of both are attributes, such as `method` and `phase`. The model's run replaces config and facts.
    """

    def __init__(self, config: Sparse24Config, facts: RunFacts | None = None):
        self.config, self.facts = config, facts or RunFacts()

    def __getattr__(self, name: str) -> Any:
        # Neither exists while a copy is being made.
        facts, config = self.__dict__.get("facts"), self.__dict__.get("config")
        return getattr(facts if name in FACTS else config, name)

    def to_dict(self) -> dict[str, Any]:
        """The config's fields and the run's facts by name: what `config.json` says."""
        return self.config.to_dict() | self.facts.to_dict()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Self:  # type: ignore[override]  # called with no more than this
        """Read what `to_dict` wrote; raise ValueError as `Sparse24Config.from_dict` does."""
        config = Sparse24Config.from_dict(config_dict)
        return cls(config, RunFacts.from_dict(config_dict, method_class(config.method).phases))


# `from_pretrained(sparse_checkpoint, quantization_config=Sparse24Config(...))` compares the names of the two classes.
SavedConfig.__name__ = Sparse24Config.__name__


def fixed_differences(ours: Sparse24Config, theirs: Sparse24Config) -> str:
    """The differences that a patched model refuses, for messages: `"method='ste', now 's-ste'"`; empty for none."""
    fixed = [name for name in SHARED if name != "backend"]
    if ours.method == theirs.method:
        fixed += [name for name in method_class(ours.method).settings_of_state if name in theirs.given]
    pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in fixed}
    return ", ".join(f"{name}={one!r}, now {other!r}" for name, (one, other) in pairs.items() if one != other)


def _names_of(settings: type[MethodSettings]) -> list[str]:
    return [field.name for field in dataclasses.fields(settings)]


def _setting_names() -> set[str]:
    return {name for method in METHODS.values() for name in _names_of(method.Settings)}


def _check_names(method: type[SparseMethod], names: Mapping[str, object], given: Mapping[str, object]) -> None:
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


def _check_shared(values: dict[str, Any]) -> None:
    for field, check in _CHECKS.items():
        if wrong := check(values[field]):
            raise ValueError(f"{field}={shown(values[field])}: {wrong}")
    for names in values["layer_patterns"] or ():
        ModuleNames("layer_patterns", names)
    ModuleNames("target_modules", values["target_modules"])
    if values["exclude_modules"] is not None:
        ModuleNames("exclude_modules", values["exclude_modules"])


def _is_pattern(value: Any) -> str | None:
    try:
        Pattern.parse(value)
    except ValueError:
        return "must be 'N:M' with 0 < N < M, such as '2:4'"
    return None


def _are_patterns(value: object) -> str | None:
    if value is None or (isinstance(value, dict) and not any(map(_is_pattern, value.values()))):
        return None
    return "must be a dict of names and patterns 'N:M' with 0 < N < M, such as {'down_proj': '1:4'}"


def _are_indices(value: object) -> str | None:
    layers = value if isinstance(value, list) else [value]
    if value is None or (layers and all(type(layer) is int and 0 <= layer <= sys.maxsize for layer in layers)):
        return None
    return "must be a block index >= 0 or a non-empty list of them"


_CHECKS: dict[str, Check] = {
    "pattern": _is_pattern,
    "layer_patterns": _are_patterns,
    "layers_to_transform": _are_indices,
    "backend": lambda value: one_of("auto", *backend_names())(value),
}
