"""An interrupted one-shot pruning goes on behind its last finished block, and ends as without an interruption."""

import pytest
import torch
import zoo

from hf_sparse24 import Sparse24Config, oneshot
from hf_sparse24.methods import ONESHOT_METHOD
from hf_sparse24.pruning import finished_blocks
from hf_sparse24.pruning.finished_blocks import FinishedBlocks

CONFIG = Sparse24Config(method=ONESHOT_METHOD, target_modules="all-linear")


def batches() -> list[dict[str, torch.Tensor]]:
    return [zoo.batch(i) for i in range(4)]


def prune(model, *, data=None, **options):
    return oneshot(model, data or batches(), CONFIG, **{"passes": 2, "criterion": "sparsegpt"} | options)


@pytest.mark.parametrize("options", [{}, {"reconstruct": "layer"}, {"values": "int8"}], ids=str)
def test_a_resumed_run_is_bit_equal_to_one_without_interruption(options, tmp_path, monkeypatch):
    expected, resumed = zoo.build("llama"), zoo.build("llama")
    report = prune(expected, **options)

    save, saved = FinishedBlocks.save, []

    def interrupted(*arguments):
        saved.append(arguments)
        if len(saved) == 2:
            raise KeyboardInterrupt
        save(*arguments)

    monkeypatch.setattr(FinishedBlocks, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prune(resumed, resume_dir=tmp_path, **options)
    dense = zoo.build("llama")
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), dense.parameters()))
    assert [path.name for path in tmp_path.iterdir()] == ["block-0000.safetensors"]
    again = prune(resumed, resume_dir=tmp_path, **options)
    assert len(saved) == 2 + len(expected.model.layers) - 1  # the first block came from its file
    assert (again.layers, again.blocks) == (report.layers, report.blocks)
    found, wanted = resumed.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_files_of_another_run_are_refused(tmp_path):
    prune(zoo.build("llama"), resume_dir=tmp_path)
    other = zoo.build("llama")
    with torch.no_grad():
        other.lm_head.weight += 1
    for model, options in (
        (other, {}),
        (zoo.build("llama"), {"passes": 3}),
        (zoo.build("llama"), {"data": batches()[:3]}),
    ):
        with pytest.raises(ValueError, match="resume_dir="):
            prune(model, resume_dir=tmp_path, **options)


def test_a_file_that_is_cut_off_has_no_name_that_is_read(tmp_path, monkeypatch):
    """It is written under another name first."""

    def full_disk(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(finished_blocks, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        prune(zoo.build("llama"), resume_dir=tmp_path)
    monkeypatch.undo()
    prune(zoo.build("llama"), resume_dir=tmp_path)
