"""Damaged and hostile files end every command in one line that names the file and the field, never in a traceback."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import patched

from hf_sparse24 import export_model
from hf_sparse24.tools import doctor
from hf_sparse24_command import main

WEIGHT, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
ALL = "doctor inspect verify export"
NESTED = "[" * 9999
OWN = "quantization_config"
TEXTS = [NESTED, '{"a":' * 9999, "{", "[]", "null", "\xff", "", '{"a": ' + "9" * 9999 + "}"]

CONFIG = [
    *(((), text, "config.json") for text in TEXTS),
    ((OWN,), "sparse24", "quantization_config='sparse24'"),
    ((OWN,), [1], "quantization_config=[1]"),
]
MODEL = [
    (("model_type",), "nothing", "nothing"),
    (("model_type",), {}, "model_type={}"),
    (("architectures",), 3, "architectures=3"),
    (("hidden_size",), "many", "'hidden_size'"),
    (("hidden_size",), 10**30, "config.json"),
    (("vocab_size",), -5, "-5"),
    (("hidden_act",), "x", "KeyError: 'x'"),
    (("layer_types",), 3, "config.json"),
    (("pad_token_id",), 10**9, "config.json"),
    (("dtype",), "x", "'x'"),
    (("attn_implementation",), 3, "config.json"),
    (("transformers_weights",), 3, "transformers_weights=3"),
]
TRAINING = [
    ((OWN, "quant_method"), 3, "quantized with 3"),
    ((OWN, "pattern"), 24, "config.json is damaged, or of another version: ValueError: pattern=24"),
    ((OWN, "method"), ["s-ste"], "method=['s-ste']"),
    ((OWN, "target_modules"), "(", "target_modules='('"),
]
PACKED = [
    ((OWN, "packed"), [], "config.json: packed=[]"),
    ((OWN, "packed", "version"), "1", "packed.version='1'"),
    ((OWN, "packed", "weights"), [[WEIGHT]], "packed.weights"),
    ((OWN, "packed", "weights"), [WEIGHT, WEIGHT], "packed.weights"),
    ((OWN, "packed", "export"), 3, "packed.export"),
]
LISTING = [
    *(((), text, "sparse24.json") for text in TEXTS),
    (("format",), [], "format"),
    (("weights",), [WEIGHT], "sparse24.json"),
    (("weights", WEIGHT), -1.0, "dimension other"),
    (("weights", WEIGHT), [-1], "sparse24.json"),
    (("weights", WEIGHT), -3, "dimension other"),
    (("weights", NORM), -1, NORM),
    (("weights", "nothing.weight"), -1, "nothing.weight"),
    (("files",), 3, "sparse24.json"),
    (("config",), "x", "sparse24.json"),
    (("config", "pattern"), [2, 4], "pattern=[2, 4]"),
    (("patterns",), {WEIGHT: 3}, "pattern=3"),
]
DENSE = [(("files", "x"), "0", "'x'"), (("weights", NORM), -1, f"FAILED {NORM}: is not 2:4")]  # a vector
INDEX = [
    *(((), text, "index.json") for text in TEXTS),
    (("weight_map",), [], "weight_map"),
    (("weight_map", NORM), "../x", "weight_map"),
    (("weight_map", NORM), "x.safetensors", "x.safetensors"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    patched().save_pretrained(root / "training")
    export_model(patched(), root / "dense")
    export_model(patched(), root / "packed", "packed", max_shard_size="20KB")
    return root


def refused(directory: Path, *commands: str, capsys) -> list[str]:
    """What the commands say that refuse a checkpoint, each in one line; the others report what is wrong, or nothing."""
    said = []
    for command in commands:
        out = directory.parent / "out"
        status = main([command, str(directory), *([str(out)] if command == "export" else [])])
        lines = capsys.readouterr()
        assert status in (0, 2) or (command, status) == ("verify", 1)
        if status == 1:
            said += [line for line in lines.out.splitlines() if line.startswith("FAILED")]
        if status == 2:
            own = [line for line in lines.err.splitlines() if line.startswith("hf-sparse24: ")]
            assert len(own) == 1 and lines.err.endswith(f"{own[0]}\n") and not out.exists()
            said += own
        shutil.rmtree(out, ignore_errors=True)
    return said


def change_json(path: Path, keys: tuple[str, ...], value: Any) -> None:
    if not keys:
        path.write_bytes(value.encode("latin-1"))
        return
    values = inner = json.loads(path.read_text())
    for key in keys[:-1]:
        inner = inner.setdefault(key, {})
    inner[keys[-1]] = value
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("name", "file", "keys", "value", "words", "commands"),
    [
        *(("training", "config.json", *case, ALL) for case in [*CONFIG, *MODEL, *TRAINING]),
        *(("packed", "config.json", *case, "inspect verify") for case in [*CONFIG, *PACKED]),
        *(("dense", "sparse24.json", *case, "inspect verify export") for case in [*LISTING, *DENSE]),
        *(("packed", "sparse24.json", *case, "inspect verify") for case in LISTING),
        *(("packed", "packed.safetensors.index.json", *case, "inspect verify") for case in INDEX),
    ],
)
def test_json(name, file, keys, value, words, commands, checkpoints, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "devices", lambda: [])  # whose self-test takes seconds
    directory = Path(shutil.copytree(checkpoints / name, tmp_path / "copy"))
    change_json(directory / file, keys, value)
    said = refused(directory, *commands.split(), capsys=capsys)
    assert any(words in line for line in said), said


@pytest.mark.parametrize("header", TEXTS)
@pytest.mark.parametrize(("name", "commands"), [("dense", "inspect verify export"), ("training", "export")])
def test_a_safetensors_header(name, commands, header, checkpoints, tmp_path, capsys):
    directory = Path(shutil.copytree(checkpoints / name, tmp_path / "copy"))
    text = header.encode("latin-1")
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    said = refused(directory, *commands.split(), capsys=capsys)
    assert len(said) == len(commands.split()) and all("model.safetensors" in line for line in said)


DTYPES = {"F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F8_E4M3FNUZ": 8, "C64": 64, "U16": 16, "I64": 64, "BOOL": 8, "E": 8}


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("dtype", [*DTYPES, None])
@pytest.mark.parametrize("part", [WEIGHT, "model.embed_tokens.weight"])
def test_an_entry_of_a_header(part, dtype, checkpoints, tmp_path, capsys):
    """Another dtype for the same bytes, or another name."""
    directory = Path(shutil.copytree(checkpoints / "dense", tmp_path / "copy"))
    data = (directory / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    entry = header.pop(part)
    if dtype is not None:
        size = (entry["data_offsets"][1] - entry["data_offsets"][0]) * 8 // DTYPES[dtype]
        entry |= {"dtype": dtype, "shape": [entry["shape"][0], size // entry["shape"][0]]}
    header["other" if dtype is None else part] = entry
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    said = refused(directory, "inspect", "verify", "export", capsys=capsys)
    assert any(part in line or "model.safetensors" in line for line in said)
