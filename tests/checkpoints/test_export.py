"""export_model over what is there already: never a mixture of the old model and the new one, and nothing else lost."""

import os
import re
import resource
from pathlib import Path

import pytest
import torch
import zoo
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from checkpoints import patched
from safetensors.torch import save
from sparse_models import DENSE_METHODS, Mlp, ended_dense, logits
from torch import nn
from transformers import AutoModelForCausalLM

from hf_sparse24 import Sparse24Config, export_model, pack_model, patch_model, unpack_model, unpatch_model
from hf_sparse24.checkpoints.replacing import STAGING, replaced_model

OUTDATED = re.compile(r"model.*\.safetensors(\.index\.json)?")
CHANGES = ("mkdir", "remove", "replace", "rmdir", "unlink")
"""The functions of `os` that change a directory; pathlib and shutil call them too."""

SINGLE = {"config.json": "A", "model.safetensors": "A"}
SHARDED = dict.fromkeys(("config.json", "model.safetensors.index.json", "model-00001-of-00001.safetensors"), "B")
MODELS = {"none": {}, "single": SINGLE, "sharded": SHARDED, "other": dict.fromkeys(SINGLE, "C")}

FILES = {"README.md", "config.json", "generation_config.json", "model.safetensors", "sparse24.json"}


def write(directory: Path, files: dict[str, str]) -> None:
    with replaced_model(directory, OUTDATED) as new:
        for name, text in files.items():
            (new / name).write_text(text)


def read(directory: Path) -> dict[str, str]:
    """The files as a reader sees them."""
    return {path.name: path.read_text() for path in directory.iterdir() if path.is_file()}


class Killed(BaseException):
    pass


def write_until(directory: Path, files: dict[str, str], changes: int) -> bool:
    """Write a model in a process that can make so many changes to directories, and then none; whether it got through.

    Not a single one after the first that fails: a process that is killed does not clean up.
    """
    left = changes

    def limited(function):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, limited(getattr(os, name)))
        try:
            write(directory, files)
        except Killed:
            return False
    return True


@pytest.mark.parametrize(
    ("old", "new"),
    [("none", "single"), ("other", "single"), ("single", "sharded"), ("sharded", "single"), ("sharded", "sharded")],
)
def test_cut_at_any_moment_it_is_one_model_or_none(old, new, tmp_path):
    before, after = MODELS[old] | {"notes.txt": "mine"}, MODELS[new] | {"notes.txt": "mine"}
    outcomes = []
    done = False
    while not done:
        directory = tmp_path / str(len(outcomes))
        directory.mkdir()
        for name, text in before.items():
            (directory / name).write_text(text)
        done = write_until(directory, MODELS[new], len(outcomes))
        found = read(directory)
        outcomes.append(found == after)
        assert found in (before, after) or "config.json" not in found
        write(directory, MODELS["other"])  # the next one finds its way, and cleans up
        assert read(directory) == MODELS["other"] | {"notes.txt": "mine"}
        assert not (directory / STAGING).exists()
    assert len(outcomes) > 5 and outcomes[-1] and (old == new or not outcomes[0])


def test_cut_again_and_again(tmp_path):
    """One interrupted export is no obstacle to the next interrupted export."""
    for changes in range(20):
        write_until(tmp_path, (SHARDED, MODELS["other"], SINGLE)[changes % 3], changes)
    write(tmp_path, SHARDED)
    assert read(tmp_path) == SHARDED


def test_an_error_while_writing_keeps_the_old_model(tmp_path):
    write(tmp_path, SINGLE)
    with pytest.raises(KeyboardInterrupt), replaced_model(tmp_path, OUTDATED) as new:
        (new / "config.json").write_text("half")
        raise KeyboardInterrupt
    assert read(tmp_path) == SINGLE and not (tmp_path / STAGING).exists()


def test_a_full_disk_is_named_and_keeps_the_old_model(tmp_path):
    export_model(patched(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))  # a file cannot grow further
    try:
        with pytest.raises(OSError, match=f"too large.*{tmp_path.name}"):
            export_model(patched(intermediate_size=96), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_two_at_once(tmp_path, monkeypatch):
    with replaced_model(tmp_path, OUTDATED) as new:
        (new / "config.json").write_text("A")
        with pytest.raises(BlockingIOError, match="another process is exporting into"):
            write(tmp_path, SINGLE)
    monkeypatch.setattr("hf_sparse24.files.fcntl", None)
    write(tmp_path / "newer", SINGLE)
    assert read(tmp_path / "newer") == SINGLE


def test_a_model_replaces_another_of_other_sizes_and_leaves_none_of_its_shards(tmp_path):
    export_model(patched(intermediate_size=96), tmp_path, max_shard_size="20KB")
    (tmp_path / "README.md").write_text("mine")
    model = patched()
    export_model(model, tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))
    assert {path.name for path in tmp_path.iterdir()} == FILES | {"README.md"}


@pytest.mark.parametrize("format", ["dense", "packed"])
@pytest.mark.parametrize(
    ("name", "value", "dtype"), [("norm", torch.nan, None), ("up", torch.inf, None), ("up", 6e4, 16)]
)
def test_a_model_that_is_not_finite_replaces_no_other(name, value, dtype, format, tmp_path):
    """As after a loss explosion; or where S-STE's scale makes finite masters overflow, which writing them shows."""
    model = patched()
    export_model(model, tmp_path, format)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    weight = model.model.norm.weight if name == "norm" else model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight.view(-1)[5] = value
    model = model.half() if dtype else model
    with pytest.raises(ValueError, match=rf"NaN or inf in the weights of model.*{name}.*; nothing was exported.*bf16"):
        export_model(model, tmp_path, format)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def refused(directory: Path, name: str) -> None:
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(ValueError, match=rf"no export of hf_sparse24 \(.*{name}.*another directory"):
        export_model(patched(), directory)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


@pytest.mark.parametrize("kind", ["dense", "shards", "training"])
def test_a_model_that_is_no_export_is_not_written_over(kind, tmp_path):
    """Such as the dense original that the sparse model began as, or its master weights."""
    model = patched() if kind == "training" else zoo.build("llama", seed=1)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if kind == "shards" else "5GB")
    refused(tmp_path, "config.json")


@pytest.mark.parametrize(
    "name",
    [
        *("trainer_state.json", "optimizer.pt", "scheduler.pt", "adapter_config.json", "pytorch_model.bin"),
        *("model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "sparse24.json"),
    ],
)
def test_a_file_of_something_else_is_not_written_over(name, tmp_path):
    """Of a training, an adapter, or weights without a config."""
    weights = save({"x": torch.ones(2)}, {"format": "pt"})
    (tmp_path / name).write_bytes(weights if name.endswith(".safetensors") else b"{}")
    refused(tmp_path, name)


def test_what_a_killed_export_has_left_is_written_over(tmp_path):
    replace, changed = os.replace, []

    def killed(source, target):
        replace(source, target)
        changed.append(target)
        if len(changed) == moves:
            raise Killed

    for moves in range(1, 5):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            patch.setattr(os, "replace", killed)
            export_model(patched(), tmp_path)
        changed.clear()
        if moves < 4:
            assert not (tmp_path / "config.json").exists()
    export_model(patched(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES


def test_a_model_that_was_not_patched(tmp_path):
    model = patched()
    with pytest.raises(ValueError, match="LlamaForCausalLM is no PreTrainedModel that was patched as a whole"):
        del model.config.quantization_config
        export_model(model, tmp_path)
    plain = Mlp()
    patch_model(plain, Sparse24Config(target_modules="all-linear"))
    with pytest.raises(
        ValueError, match=r"Mlp is no PreTrainedModel.* unpatch_model\(copy.deepcopy\(model\)\).*save_mo"
    ):
        export_model(plain, tmp_path)


@pytest.mark.parametrize("method", DENSE_METHODS)
def test_an_export_without_sparse_weights_says_so(method, tmp_path, caplog):
    export_model(patched(method=method), tmp_path / "sparse")
    assert not caplog.records
    export_model(ended_dense(method), tmp_path / "dense")
    (record,) = caplog.records
    assert f"no weight in {tmp_path / 'dense'} is 2:4" in record.message and "dense_tail=0" in record.message


def test_wrapped_models_are_looked_through(tmp_path):
    model = patched()
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier test's, in this process
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    expected = logits(model)
    wrapped = [nn.DataParallel(model), torch.compile(model), torch.compile(nn.DataParallel(model))]
    for number, wrapper in enumerate([*wrapped, accelerator.prepare(model)]):
        export_model(wrapper, tmp_path / str(number))
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / str(number))), expected)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    with pytest.raises(ValueError, match="parts of the model are compiled"):
        export_model(model, tmp_path / "part")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not (tmp_path / "part").exists()


@pytest.mark.parametrize("convert", [export_model, pack_model, unpatch_model])
def test_offloaded_weights_are_no_export(convert, tmp_path):
    model = patched()
    model.save_pretrained(tmp_path / "model")
    options = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "off"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options)
    arguments = [tmp_path / "out"] if convert is export_model else []
    with pytest.raises(ValueError, match=r"are offloaded .*; load it without device_map"):
        convert(loaded, *arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("dense_math")
def test_a_packed_model_is_told_how_it_is_exported(tmp_path):
    model = patched()
    pack_model(model)
    with pytest.raises(ValueError, match=r"the model is packed: call unpack_model\(model\), then patch"):
        export_model(model, tmp_path)
    expected = logits(unpack_model(model))
    patch_model(model, Sparse24Config(method="fixed-mask"))
    export_model(model, tmp_path, "packed")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)
