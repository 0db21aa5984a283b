"""Sparse24Config: defaults of the methods, validation when made and when changed, JSON, other versions."""

import copy
import dataclasses
import enum
import json
import pickle
import warnings

import numpy as np
import pytest
import torch
import zoo

from hf_sparse24 import Sparse24Config, __version__, describe_settings, patch_model, unpatch_model
from hf_sparse24.methods import METHODS
from hf_sparse24.patching.surgery import set_phase
from hf_sparse24.run import patched_config, sparse_run


class Name(enum.StrEnum):
    STE = "ste"
    UP = "up_proj"


def test_every_method_has_a_card_and_says_what_its_settings_mean():
    for name, method in METHODS.items():
        fields = [field.name for field in dataclasses.fields(method.Settings)]
        assert list(describe_settings(name)) == fields
        # A text says it itself, and does not send the reader to the source.
        assert all(text and not text.startswith((" ", "see ")) for text in describe_settings(name).values())
        module = __import__(method.__module__, fromlist=["__doc__"])
        for entry in ("Method card", "Hyper-parameters", "Known limits", "Measured here", "Reference"):
            assert entry in module.__doc__, (module, entry)


def test_none_means_what_the_method_says():
    config = Sparse24Config(method="t-sr-ste")
    assert (config.masked_decay, config.mask_interval, config.weight_grad) == (6e-5, 40, "mvue")
    assert (config.dense_start, config.dense_tail) == (0, pytest.approx(1 / 6))
    assert config == Sparse24Config(method="t-sr-ste", masked_decay=6e-5)
    assert Sparse24Config(method="sr-ste").masked_decay == 2e-4
    assert Sparse24Config().method == "s-ste" and Sparse24Config(masked_decay=None) == Sparse24Config()
    with pytest.raises(AttributeError, match="a Sparse24Config with method='s-ste' has no 'masked_decay'"):
        _ = Sparse24Config().masked_decay
    assert (Sparse24Config(method="ste", pattern="4:8").n, Sparse24Config(method="ste", pattern="4:8").m) == (4, 8)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_json_round_trip(method):
    config = Sparse24Config(
        method=method,
        target_modules=["up_proj"],
        exclude_modules=r".*\.0\..*",
        layers_to_transform=[1],
        backend="dense",
    )
    saved = json.loads(config.to_json_string())
    assert saved["quant_method"] == "sparse24" and saved["hf_sparse24_version"] == __version__
    assert Sparse24Config.from_dict(saved) == config
    assert Sparse24Config.from_dict(saved, return_unused_kwargs=True, other=1) == (config, {"other": 1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"method": "sste"},
            r"method='sste': must be one of \['ast', .*'t-sr-ste'\]; import "
            r"the module of a method of your own first",
        ),
        ({"method": ["ste"]}, r"method=\['ste'\]: must be one of"),
        ({"pattern": "2-4"}, "pattern='2-4': must be 'N:M'"),
        ({"pattern": "4:4"}, "pattern='4:4': must be 'N:M' with 0 < N < M"),
        ({"pattern": 24}, "pattern=24: must be"),
        ({"target_modules": ""}, "target_modules='': must be"),
        ({"target_modules": []}, r"target_modules=\[\]: must be"),
        ({"target_modules": ["mlp", 3]}, "target_modules=.*3.*: must be"),
        ({"target_modules": None}, "target_modules=None: must be"),
        ({"target_modules": "(mlp"}, r"target_modules='\(mlp': not a valid regular expression"),
        ({"exclude_modules": 3}, "exclude_modules=3: must be"),
        ({"layers_to_transform": -1}, "layers_to_transform=-1: must be"),
        ({"layers_to_transform": []}, r"layers_to_transform=\[\]: must be"),
        ({"layers_to_transform": True}, "layers_to_transform=True: must be"),
        ({"method": "sr-ste", "masked_decay": -1}, "masked_decay=-1: must be a finite number >= 0"),
        ({"method": "sr-ste", "masked_decay": float("nan")}, "masked_decay=nan: must be"),
        ({"method": "sr-ste", "masked_decay": "some"}, "masked_decay='some': must be"),
        ({"method": "sr-ste", "decay_on": "loss"}, r"decay_on='loss': must be one of \['gradient', 'weight'\]"),
        ({"method": "t-sr-ste", "mask_solver": "best"}, "mask_solver='best': must be one of"),
        ({"scale_rule": "l2"}, "scale_rule='l2': must be one of"),
        ({"scale_frozen": "yes"}, r"scale_frozen='yes': must be one of \[True, False\]"),
        ({"method": "step", "switch_by": 1.5}, "switch_by=1.5: must be an int"),
        ({"method": "step", "dense_start": 5}, "dense_start=5: method 'step' has no dense_start"),
        ({"method": "ste", "switch_rule": "geometric"}, "switch_rule='geometric': method 'ste' has no switch_rule"),
        ({"fp8": 1.5}, "fp8=1.5: must be one of"),
        ({"fp8": 1}, r"fp8=1: must be one of \[True, False\]"),
        ({"scale_frozen": 0}, r"scale_frozen=0: must be one of \[True, False\]"),
        ({"activations": "1:4"}, r"activations='1:4': must be one of \['dense', '2:4'\]"),
        ({"input_grad": "sparse"}, "input_grad='sparse': must be one of"),
        ({"masked_decay": 1e-4}, "masked_decay=0.0001: method 's-ste' has no masked_decay"),
        ({"method": "ste", "mask_interval": 40}, "mask_interval=40: method 'ste' has no mask_interval"),
        ({"method": "t-sr-ste", "mask_interval": 0}, "mask_interval=0: must be at least 1"),
        ({"dense_tail": 1.0}, r"dense_tail=1.0: must be an int >= 0 .* or a float in \[0, 1\)"),
        ({"dense_start": -5}, "dense_start=-5: must be"),
        ({"dense_start": True}, "dense_start=True: must be"),
        (
            {"weight_grad": "sparse"},
            r"weight_grad='sparse': must be one of \['dense', 'mvue', 'mvue-approx', 'mvue-1:2', 'magnitude'\]",
        ),
        ({"grad_input_weight": "dense"}, r"grad_input_weight='dense': must be one of \['pruned', 'mvue'\]"),
        ({"scale_rule": 0.0}, r"scale_rule=0.0: must be one of \['mse', 'l1', 'none'\] or a number above 0"),
        ({"threshold_gamma": 1.0}, r"threshold_gamma=1.0: must be a number in \[0, 1\)"),
        ({"backend": "cublas"}, r"backend='cublas': must be one of \['auto', 'dense', 'cusparselt'\]"),
        ({"backend": "reference"}, "backend='reference': must be one of"),
        ({"backend": ["auto"]}, r"backend=\['auto'\]: must be one of"),
        ({"pattern": 10**5000}, "pattern=<int, which cannot be printed: .*>: must be"),
        ({"pattern": "2:" + "4" * 5000}, "pattern='2:4.*: must be"),
        ({"layers_to_transform": 2**80}, "layers_to_transform=1208925819614629174706176: must be"),
        ({"target_modules": b"mlp"}, "target_modules=b'mlp': must be"),
        ({"scale_frozen": torch.tensor(1)}, r"scale_frozen=1: must be one of \[True, False\]"),
        ({"fp8": np.array([True])}, r"fp8=array\(\[ True\]\): must be one of"),
        ({"method": "sr-ste", "masked_decay": 10**400}, "masked_decay=1000.*: must be a finite number >= 0"),
        ({"method": "sr-ste", "masked_decay": 10**5000}, "masked_decay=<int, .*>: must be a finite number >= 0"),
        ({"method": "sr-ste", "masked_decay": torch.tensor([1e-4, 1e-3])}, r"masked_decay=tensor\(.*\): must be"),
        ({"method": "sr-ste", "masked_decay": torch.tensor(1.0, device="meta")}, "masked_decay=tensor.*: must be"),
        ({"method": "sr-ste", "masked_decay": np.complex64(1)}, r"masked_decay=\(1\+0j\): must be"),
        (
            {"method": "sr-ste", "masked_decay": "1e-5"},
            r"masked_decay='1e-5': must be a finite number >= 0; this is a string, the number is 1\.0e-05 \(1e-4 is",
        ),
        ({"method": "t-sr-ste", "mask_interval": "40"}, "mask_interval='40': must be .* the number is 40 "),
        ({"dense_start": "5e-2"}, "dense_start='5e-2': must be .* the number is 0.05 "),
        ({"dense_start": 2**70}, "dense_start=1180591620717411303424: must be"),
    ],
)
def test_wrong_values_name_the_field_the_value_and_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sparse24Config(**arguments)


@pytest.mark.parametrize(
    ("arguments", "same"),
    [
        ({"scale_frozen": np.bool_(False), "fp8": torch.tensor(True)}, {"scale_frozen": False, "fp8": True}),
        ({"dense_start": np.int64(5)}, {"dense_start": 5}),
        ({"dense_tail": np.float32(0.5)}, {"dense_tail": 0.5}),
        ({"method": "sr-ste", "masked_decay": np.float64(1e-4)}, {"method": "sr-ste", "masked_decay": 1e-4}),
        ({"method": "sr-ste", "masked_decay": torch.tensor(0.5)}, {"method": "sr-ste", "masked_decay": 0.5}),
        ({"method": np.str_("ste"), "pattern": np.array("1:4")}, {"method": "ste", "pattern": "1:4"}),
        ({"method": Name.STE, "target_modules": [Name.UP]}, {"method": "ste", "target_modules": ["up_proj"]}),
        ({"layers_to_transform": [np.int32(1), torch.tensor(0)]}, {"layers_to_transform": [1, 0]}),
    ],
)
def test_scalars_of_numpy_and_torch_are_the_numbers_that_they_hold(arguments, same):
    config = Sparse24Config(**arguments)
    assert config == Sparse24Config(**same)
    for name, value in same.items():
        assert type(getattr(config, name)) is type(value)
    assert Sparse24Config.from_dict(json.loads(config.to_json_string())) == config


def test_names_that_no_method_has():
    with pytest.raises(
        TypeError, match=r"no argument 'mask_intervall'; it has .*, and with method='t-sr-ste' \[.*'mask_interval'"
    ):
        Sparse24Config(method="t-sr-ste", mask_intervall=3)
    with pytest.raises(TypeError, match="no argument 'phase'"):  # it is no setting
        Sparse24Config(phase="dense")


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("method", "sste", ValueError, "method='sste': must be one of"),
        ("pattern", "4:2", ValueError, "pattern='4:2': must be 'N:M'"),
        ("target_modules", [], ValueError, r"target_modules=\[\]: must be"),
        ("layers_to_transform", -1, ValueError, "layers_to_transform=-1: must be"),
        ("backend", "cublas", ValueError, "backend='cublas': must be one of"),
        ("masked_decay", -1, ValueError, "masked_decay=-1: must be a finite number"),
        ("dense_start", 0.9, ValueError, "dense_start=0.9, dense_tail=0.16.*: leave no sparse step"),
        ("scale_rule", "mse", AttributeError, "scale_rule='mse': method 't-sr-ste' has no scale_rule"),
        ("mask_intervall", 3, AttributeError, "mask_intervall=3: method 't-sr-ste' has no mask_intervall"),
        ("phase", "dense", AttributeError, "phase='dense': phase of a Sparse24Config cannot be assigned to"),
    ],
)
def test_assignments_are_checked(field, value, error, message):
    config = Sparse24Config(method="t-sr-ste")
    with pytest.raises(error, match=message):
        setattr(config, field, value)
    assert config == Sparse24Config(method="t-sr-ste")


def test_assignments_change_the_config():
    config = Sparse24Config(method="t-sr-ste", mask_interval=7)
    config.masked_decay = 1e-3
    config.target_modules = ["up_proj"]
    assert config == Sparse24Config(method="t-sr-ste", target_modules=["up_proj"], masked_decay=1e-3, mask_interval=7)
    config.masked_decay = None
    assert config.masked_decay == 6e-5
    with pytest.raises(ValueError, match="mask_interval=7: method 'ste' has no mask_interval; leave it None"):
        config.method = "ste"
    config.mask_interval = None
    config.method = "ste"  # what was not given takes the new method's defaults
    assert config == Sparse24Config(method="ste", target_modules=["up_proj"])


def test_the_config_of_a_patched_model_is_written_by_its_run_alone():
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="t-sr-ste"))
    config, run = patched_config(model), sparse_run(model)
    for field, value in {"pattern": "4:8", "backend": "dense", "target_modules": "attention", "method": "ste"}.items():
        with pytest.raises(ValueError, match=rf"{field}='{value}': a model is patched with this config; call unpatch"):
            setattr(config, field, value)
        with pytest.raises(ValueError, match=rf"{field}='{value}': a model is patched with this config; call unpatch"):
            run.change_settings(**{field: value})
    with pytest.raises(ValueError, match=r"call sparse_run\(model\)\.change_settings\(masked_decay=\.\.\.\)"):
        config.masked_decay = 1e-3
    run.change_settings(masked_decay=1e-3, weight_grad="dense")
    assert run.method.settings.masked_decay == 1e-3
    assert run.method.gemms.grad_weight.sparse is None  # GEMMs follow their settings
    assert model.config.quantization_config is config is run.config and config.to_dict()["masked_decay"] == 1e-3
    with pytest.raises(ValueError, match="masked_decay=-1: must be"):
        run.change_settings(masked_decay=-1)
    assert run.method.settings.masked_decay == config.masked_decay == 1e-3
    loose = config.replace(pattern="4:8")
    loose.masked_decay = 1.0
    assert (loose.pattern, config.pattern, config.masked_decay) == ("4:8", "2:4", 1e-3)
    unpatch_model(model)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_a_copy_is_a_config_of_its_own(duplicate):
    config = Sparse24Config(method="sr-ste", target_modules=["up_proj"])
    other = duplicate(config)
    assert other == config and other.to_dict() == config.to_dict()
    other.target_modules = ["down_proj"]
    other.masked_decay = 1.0
    assert (config.target_modules, config.masked_decay) == (["up_proj"], 2e-4)


def test_unknown_keys_and_malformed_versions_are_errors():
    with pytest.raises(
        ValueError, match=r"unknown keys in a Sparse24Config: \['sparsity', 'tile'\]; known are .*'backend'"
    ):
        Sparse24Config.from_dict({"method": "ste", "tile": 4, "sparsity": 0.5})
    with pytest.raises(ValueError, match="hf_sparse24_version='soon': not a version number"):
        Sparse24Config.from_dict({"hf_sparse24_version": "soon"})
    with pytest.raises(ValueError, match=r"hf_sparse24_version='999.*: not a version number"):
        Sparse24Config.from_dict({"hf_sparse24_version": "9" * 5000})
    with pytest.raises(ValueError, match=r"is read from a dict whose keys are strings, got \['ste'\]"):
        Sparse24Config.from_dict(["ste"])
    with pytest.raises(ValueError, match="quant_method='gptq'"):
        Sparse24Config.from_dict({"quant_method": "gptq"})
    with pytest.raises(ValueError, match="method 'ste' has no mask_interval; leave it None"):
        Sparse24Config.from_dict({"method": "ste", "mask_interval": 40})


def test_newer_versions(caplog):
    config = Sparse24Config(method="t-sr-ste", masked_decay=1e-3)
    saved = config.to_dict() | {"hf_sparse24_version": "99.1"}
    assert Sparse24Config.from_dict(saved) == config
    assert f"saved by hf_sparse24 99.1, {__version__} is installed; all its keys are known" in caplog.text
    with pytest.raises(
        ValueError, match=r"unknown keys .*\['tile'\].*; it was saved by hf_sparse24 99.1: pip install -U"
    ):
        Sparse24Config.from_dict(saved | {"tile": 4})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Sparse24Config.from_dict(saved | {"hf_sparse24_version": __version__})


# What version 0.1 wrote into config.json: every setting of every method, null where the method has none.
SAVED_BY_0_1 = {
    "quant_method": "sparse24", "hf_sparse24_version": "0.1.0", "phase": "sparse", "backend": "reference",
    "pattern": "2:4", "target_modules": "mlp", "exclude_modules": None, "layers_to_transform": None,
    "dense_start": 0, "dense_tail": 0, "weight_grad": "dense", "input_grad": "dense", "activations": "dense",
    "fp8": False, "masked_decay": None, "decay_on": None, "mask_interval": None, "mask_solver": None,
    "scale_rule": None, "scale_frozen": None, "switch_rule": None, "switch_after": None, "switch_by": None,
}  # fmt: skip
OF_METHOD_BY_0_1 = {
    "ste": {},
    "fixed-mask": {},
    "sr-ste": {"masked_decay": 0.0002, "decay_on": "gradient"},
    "t-sr-ste": {
        "masked_decay": 6e-05, "decay_on": "gradient", "mask_interval": 40, "mask_solver": "exact",
        "weight_grad": "mvue", "dense_tail": 0.16666666666666666,
    },
    "s-ste": {"scale_rule": "mse", "scale_frozen": True, "weight_grad": "mvue"},
    "step": {"switch_rule": "arithmetic", "switch_after": 0.1, "switch_by": 0.5, "dense_start": None},
}  # fmt: skip


@pytest.mark.parametrize("method", OF_METHOD_BY_0_1)
def test_configs_of_version_0_1(method):
    """They mean what they meant, which is what the defaults still are but for the rule by which STEP switches."""
    since = {"switch_rule": "arithmetic"} if method == "step" else {}
    settings = OF_METHOD_BY_0_1[method]
    config = Sparse24Config.from_dict(SAVED_BY_0_1 | settings | {"method": method, "phase": "dense"})
    assert config == Sparse24Config(method=method, backend="dense", **since) and config.phase == "dense"
    expected = {name: value for name, value in (SAVED_BY_0_1 | settings).items() if value is not None}
    ours = config.to_dict()
    for name in expected.keys() - {"phase", "backend", "hf_sparse24_version"}:
        assert ours[name] == expected[name]
    changed = Sparse24Config.from_dict(SAVED_BY_0_1 | settings | {"method": method, "weight_grad": "mvue-approx"})
    assert changed == Sparse24Config(method=method, backend="dense", weight_grad="mvue-approx", **since)


def test_the_phase_is_saved_and_does_not_make_configs_differ():
    dense = Sparse24Config.from_dict({"phase": "dense"})
    assert dense.phase == dense.to_dict()["phase"] == dense.replace().phase == "dense"
    assert dense == Sparse24Config() and Sparse24Config().phase == "sparse"
    with pytest.raises(ValueError, match=r"phase='done': must be one of \['sparse', 'dense'\]"):
        Sparse24Config.from_dict({"phase": "done"})
    model = zoo.build("llama")
    patch_model(model)
    set_phase(model, "dense")
    assert model.config.to_dict()["quantization_config"]["phase"] == "dense"
