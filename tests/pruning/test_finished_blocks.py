"""An interrupted one-shot pruning goes on behind its last finished block, and ends as without an interruption."""

import pytest
import torch
import zoo
from oneshot_models import fixed_mask
from sparse_models import assert_same_state

from hf_sparse24 import oneshot
from hf_sparse24.pruning.finished_blocks import FinishedBlocks


def batches() -> list[dict[str, torch.Tensor]]:
    return [zoo.batch(i) for i in range(4)]


def prune(model, *, data=None, **options):
    return oneshot(model, data or batches(), fixed_mask(), **{"passes": 2, "criterion": "sparsegpt"} | options)


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
    assert_same_state(resumed, zoo.build("llama"))
    assert [path.name for path in tmp_path.iterdir()] == ["block-0000.safetensors"]
    again = prune(resumed, resume_dir=tmp_path, **options)
    assert len(saved) == 2 + len(expected.model.layers) - 1  # the first block came from its file
    assert (again.layers, again.blocks) == (report.layers, report.blocks)
    assert_same_state(resumed, expected)


def test_files_of_another_run_are_refused(tmp_path):
    prune(zoo.build("llama"), resume_dir=tmp_path)
    other = zoo.build("llama")
    with torch.no_grad():
        other.lm_head.weight += 1
    same = zoo.build("llama")
    for model, options in ((other, {}), (same, {"passes": 3}), (same, {"data": batches()[:3]})):
        with pytest.raises(ValueError, match="resume_dir="):
            prune(model, resume_dir=tmp_path, **options)
