"""Sparse24Config: presets, validation, JSON."""

import json

import pytest

from hf_sparse24 import PRESETS, Sparse24Config, __version__
from hf_sparse24.methods import METHODS


def test_every_method_has_a_preset_and_a_card():
    assert list(METHODS) == list(PRESETS)
    for method in METHODS.values():
        module = __import__(method.__module__, fromlist=["__doc__"])
        for entry in ("Method card", "Hyper-parameters", "Known limits", "Measured here", "Reference"):
            assert entry in module.__doc__, (module, entry)


def test_none_means_the_preset():
    config = Sparse24Config(method="t-sr-ste")
    assert (config.masked_decay, config.mask_interval, config.weight_grad) == (6e-5, 40, "mvue")
    assert (config.dense_start, config.dense_tail) == (0, pytest.approx(1 / 6))
    assert config == Sparse24Config(method="t-sr-ste", masked_decay=6e-5)
    assert Sparse24Config(method="sr-ste").masked_decay == 2e-4
    assert Sparse24Config().method == "s-ste" and Sparse24Config().masked_decay is None
    assert (Sparse24Config(method="ste", pattern="4:8").n, Sparse24Config(method="ste", pattern="4:8").m) == (4, 8)


@pytest.mark.parametrize("method", PRESETS)
def test_json_round_trip(method):
    config = Sparse24Config(
        method=method, target_modules=["up_proj"], exclude_modules=r".*\.0\..*", layers_to_transform=[1], dense_tail=3
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
            r"method='sste': must be one of \['ste', 'sr-ste', 't-sr-ste', 's-ste', 'step', 'fixed-mask'\]",
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
            r"weight_grad='sparse': must be one of \['dense', 'mvue', 'mvue-approx', 'mvue-1:2'\]",
        ),
        ({"backend": "cublas"}, r"backend='cublas': must be one of \['auto', 'reference', 'cusparselt'\]"),
        ({"phase": "done"}, "phase='done': must be one of"),
    ],
)
def test_wrong_values_name_the_field_the_value_and_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sparse24Config(**arguments)


def test_unknown_keys_and_foreign_versions_are_errors():
    with pytest.raises(ValueError, match=r"unknown keys in a Sparse24Config: \['sparsity', 'tile'\]"):
        Sparse24Config.from_dict({"method": "ste", "tile": 4, "sparsity": 0.5})
    with pytest.raises(ValueError, match=f"saved by a newer hf_sparse24 than the installed {__version__}; upgrade"):
        Sparse24Config.from_dict({"hf_sparse24_version": "99.0"})
    with pytest.raises(ValueError, match="hf_sparse24_version='soon': not a version number"):
        Sparse24Config.from_dict({"hf_sparse24_version": "soon"})
    with pytest.raises(ValueError, match="quant_method='gptq'"):
        Sparse24Config.from_dict({"quant_method": "gptq"})


def test_phase_does_not_make_configs_differ():
    assert Sparse24Config(phase="dense") == Sparse24Config()
