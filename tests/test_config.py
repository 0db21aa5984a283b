"""Sparse24Config: defaults of the methods, validation, JSON, other versions."""

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
import torch
import zoo

from hf_sparse24 import Sparse24Config, __version__, describe_settings, patch_model
from hf_sparse24.config import SavedConfig
from hf_sparse24.facts import RunFacts
from hf_sparse24.methods import METHODS
from hf_sparse24.run import set_phase, sparse_run


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "sste"}, r"method='sste': must be one of \['ast', .*'t-sr-ste'\]"),
        ({"method": ["ste"]}, r"method=\['ste'\]: must be one of"),
        ({"pattern": "2-4"}, "pattern='2-4': must be 'N:M'"),
        ({"pattern": 24}, "pattern=24: must be"),
        ({"target_modules": ""}, "target_modules='': must be"),
        ({"target_modules": ["mlp", 3]}, "target_modules=.*3.*: must be"),
        ({"target_modules": "(mlp"}, r"target_modules='\(mlp': not a valid regular expression"),
        ({"exclude_modules": 3}, "exclude_modules=3: must be"),
        ({"layers_to_transform": -1}, "layers_to_transform=-1: must be"),
        ({"layers_to_transform": True}, "layers_to_transform=True: must be"),
        ({"method": "sr-ste", "masked_decay": -1}, "masked_decay=-1: must be a finite number >= 0"),
        ({"method": "sr-ste", "masked_decay": float("nan")}, "masked_decay=nan: must be"),
        ({"method": "sr-ste", "decay_on": "loss"}, r"decay_on='loss': must be one of \['gradient', 'weight'\]"),
        ({"method": "t-sr-ste", "mask_solver": "best"}, "mask_solver='best': must be one of"),
        ({"method": "step", "switch_by": 1.5}, "switch_by=1.5: must be an int"),
        ({"method": "ste", "switch_rule": "geometric"}, "switch_rule='geometric': method 'ste' has no switch_rule"),
        ({"fp8": 1}, r"fp8=1: must be one of \[True, False\]"),
        ({"activations": "1:4"}, r"activations='1:4': must be one of \['dense', '2:4'\]"),
        ({"masked_decay": 1e-4}, "masked_decay=0.0001: method 's-ste' has no masked_decay"),
        ({"method": "t-sr-ste", "mask_interval": 0}, "mask_interval=0: must be at least 1"),
        ({"dense_tail": 1.0}, r"dense_tail=1.0: must be an int >= 0 .* or a float in \[0, 1\)"),
        ({"dense_start": True}, "dense_start=True: must be"),
        ({"weight_grad": "sparse"}, r"weight_grad='sparse': must be one of \['dense', 'mvue', "),
        ({"layer_patterns": 3}, "layer_patterns=3: must be a dict"),
        ({"layer_patterns": {"up_proj": "4:2"}}, r"layer_patterns=\{'up_proj': '4:2'\}: must be"),
        ({"scale_rule": 0.0}, r"scale_rule=0.0: must be one of \['mse', 'l1', 'none'\]"),
        ({"backend": "cublas"}, r"backend='cublas': must be one of \['auto', 'dense', 'cusparselt', 'cpu'\]"),
        ({"backend": ["auto"]}, r"backend=\['auto'\]: must be one of"),
        ({"pattern": 10**5000}, "pattern=<int, which cannot be printed: .*>: must be"),
        ({"layers_to_transform": 2**80}, "layers_to_transform=1208925819614629174706176: must be"),
        ({"target_modules": b"mlp"}, "target_modules=b'mlp': must be"),
        ({"fp8": torch.tensor(1)}, r"fp8=1: must be one of \[True, False\]"),
        ({"method": "sr-ste", "masked_decay": 10**5000}, "masked_decay=<int, .*>: must be a finite number >= 0"),
        ({"method": "sr-ste", "masked_decay": torch.tensor([1e-4, 1e-3])}, r"masked_decay=tensor\(.*\): must be"),
        ({"method": "sr-ste", "masked_decay": torch.tensor(1.0, device="meta")}, "masked_decay=tensor.*: must be"),
        ({"method": "sr-ste", "masked_decay": "1e-5"}, "masked_decay='1e-5': must be a finite number >= 0"),
        ({"method": "t-sr-ste", "mask_interval": "40"}, "mask_interval='40': must be"),
        ({"dense_start": 2**70}, "dense_start=1180591620717411303424: must be"),
    ],
)
def test_wrong_values_name_the_field_the_value_and_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sparse24Config(**arguments)


@pytest.mark.parametrize(
    ("arguments", "same"),
    [
        ({"fp8": torch.tensor(True)}, {"fp8": True}),
        ({"fp8": np.bool_(False)}, {"fp8": False}),
        ({"dense_start": np.int64(5)}, {"dense_start": 5}),
        ({"dense_tail": np.float32(0.5)}, {"dense_tail": 0.5}),
        ({"method": "sr-ste", "masked_decay": np.float64(1e-4)}, {"method": "sr-ste", "masked_decay": 1e-4}),
        ({"method": "sr-ste", "masked_decay": torch.tensor(0.5)}, {"method": "sr-ste", "masked_decay": 0.5}),
        ({"method": np.str_("ste"), "pattern": np.array("1:4")}, {"method": "ste", "pattern": "1:4"}),
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
    with pytest.raises(TypeError, match=r"no argument 'mask_intervall'; .*method='t-sr-ste' \[.*'mask_interval'"):
        Sparse24Config(method="t-sr-ste", mask_intervall=3)
    with pytest.raises(TypeError, match="no argument 'phase'"):  # it is no setting
        Sparse24Config(phase="dense")


def test_a_config_is_frozen():
    config = Sparse24Config(method="t-sr-ste", mask_interval=7)
    for field, value in {"pattern": "4:8", "masked_decay": 1e-3, "phase": "dense"}.items():
        with pytest.raises(AttributeError, match=rf"{field}={value!r}: .*replace"):
            setattr(config, field, value)
    assert config == Sparse24Config(method="t-sr-ste", mask_interval=7)


def test_replace_makes_another():
    config = Sparse24Config(method="t-sr-ste", mask_interval=7)
    changed = config.replace(masked_decay=1e-3, target_modules=["up_proj"])
    assert changed == Sparse24Config(method="t-sr-ste", target_modules=["up_proj"], masked_decay=1e-3, mask_interval=7)
    assert changed.replace(masked_decay=None).masked_decay == config.masked_decay == 6e-5
    with pytest.raises(ValueError, match=r"mask_interval=7: .*'ste'"):
        config.replace(method="ste")
    assert config.replace(method="ste", mask_interval=None) == Sparse24Config(method="ste")  # with its defaults
    with pytest.raises(ValueError, match="pattern='4:2'"):
        config.replace(pattern="4:2")


def test_a_run_changes_settings_and_no_other_field():
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="t-sr-ste"))
    run = sparse_run(model)
    for field, value in {"pattern": "4:8", "backend": "dense", "target_modules": "attention", "method": "ste"}.items():
        with pytest.raises(ValueError, match=rf"{field}='{value}': .*unpatch_model"):
            run.change_settings(**{field: value})
    run.change_settings(masked_decay=1e-3, weight_grad="dense")
    assert run.method.settings.masked_decay == 1e-3
    assert run.method.gemms.grad_weight.sparse is None  # GEMMs follow their settings
    assert model.config.quantization_config is run.saved and run.saved.to_dict()["masked_decay"] == 1e-3
    with pytest.raises(ValueError, match="masked_decay=-1: must be"):
        run.change_settings(masked_decay=-1)
    assert run.method.settings.masked_decay == run.config.masked_decay == 1e-3


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_a_copy_is_a_config_of_its_own(duplicate):
    config = Sparse24Config(method="sr-ste", target_modules=["up_proj"])
    other = duplicate(config)
    assert other == config and other.to_dict() == config.to_dict()
    assert other is not config and other.replace(masked_decay=1.0).masked_decay == 1.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"method": "ste", "tile": 4, "sparsity": 0.5},
            r"unknown keys .*: \['sparsity', 'tile'\]; known are .*'backend'",
        ),
        ({"hf_sparse24_version": "99.1", "tile": 4}, r"\['tile'\].* saved by hf_sparse24 99.1: pip install .*==99.1"),
        ({"hf_sparse24_version": "soon"}, "hf_sparse24_version='soon'"),
        (["ste"], r"a dict whose keys are strings, got \['ste'\]"),
        ({"quant_method": "gptq"}, "quant_method='gptq'"),
        ({"method": "ste", "mask_interval": 40}, "mask_interval=40: method 'ste' has no mask_interval"),
    ],
)
def test_dicts_that_are_no_config(values, message):
    with pytest.raises(ValueError, match=message):
        Sparse24Config.from_dict(values)


def test_a_config_of_a_later_version_whose_keys_are_known_is_read(caplog):
    config = Sparse24Config(method="t-sr-ste", masked_decay=1e-3)
    assert Sparse24Config.from_dict(config.to_dict() | {"hf_sparse24_version": "99.1"}) == config
    assert "99.1" in caplog.text and __version__ in caplog.text


def test_facts_are_saved_with_the_config_and_belong_to_the_run():
    values = {"method": "t-sr-ste", "phase": "dense", "finished": True, "pruning": {"tokens": 3}}
    saved = SavedConfig.from_dict(values)
    assert saved.facts == RunFacts("dense", True, None, {"tokens": 3}) and saved.config == Sparse24Config("t-sr-ste")
    assert SavedConfig.from_dict(saved.to_dict()) == saved and values.items() <= saved.to_dict().items()
    assert (saved.method, saved.mask_interval, saved.phase, saved.finished) == ("t-sr-ste", 40, "dense", True)
    assert not hasattr(saved, "scale_rule") and copy.deepcopy(saved) == saved
    assert Sparse24Config.from_dict(saved.to_dict()) == saved.config
    with pytest.raises(ValueError, match=r"phase='done': .*\['sparse', 'dense'\]"):
        SavedConfig.from_dict({"phase": "done"})


def test_config_json_follows_the_run():
    model = zoo.build("llama")
    patch_model(model)
    copied = copy.deepcopy(model)
    set_phase(model, "dense")
    assert model.config.to_dict()["quantization_config"]["phase"] == "dense"
    assert copied.config.to_dict()["quantization_config"]["phase"] == "sparse"
    set_phase(copied, "dense")
    assert copied.config.to_dict()["quantization_config"]["phase"] == "dense"
    with pytest.raises(ValueError, match=r"phase='done': must be one of \['sparse', 'dense'\]"):
        set_phase(model, "done")
