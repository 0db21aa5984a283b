"""An interrupted one-shot pruning goes on behind its last finished block, and ends as without an interruption."""

import copy
import re

import pytest
import torch
import zoo
from oneshot_models import assert_untouched, fixed_mask
from safetensors.torch import save
from sparse_models import assert_same_state, snapshot

from hf_sparse24 import oneshot
from hf_sparse24.files import locked_directory
from hf_sparse24.pruning.finished_blocks import FinishedBlocks


def batches() -> list[dict[str, torch.Tensor]]:
    return [zoo.batch(i) for i in range(4)]


def prune(model, *, data=None, **options):
    return oneshot(model, data or batches(), fixed_mask(), **{"passes": 2, "criterion": "sparsegpt"} | options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", {"reconstruct": "layer"}),
        ("llama", {"values": "int8"}),
        ("qwen3_moe", {"calibrate_all_experts": True}),
    ],
    ids=str,
)
def test_a_resumed_run_is_bit_equal_to_one_without_interruption(name, options, tmp_path, monkeypatch):
    expected, resumed = zoo.build(name), zoo.build(name)
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
    assert_same_state(resumed, zoo.build(name))
    assert [path.name for path in tmp_path.iterdir()] == ["block-0000.safetensors"]
    again = prune(resumed, resume_dir=tmp_path, **options)
    assert len(saved) == 2 + len(expected.model.layers) - 1  # the first block came from its file
    assert (again.layers, again.blocks) == (report.layers, report.blocks)
    assert_same_state(resumed, expected)


def changed(model, change):
    with torch.no_grad():
        change(model)
    return model


OTHERS = {
    "weights": lambda: (changed(zoo.build("llama"), lambda model: model.lm_head.weight.add_(1)), {}),
    "order of rows": lambda: (
        changed(zoo.build("llama"), lambda model: model.lm_head.weight.set_(model.lm_head.weight.flip(0))),
        {},
    ),
    "config": lambda: (zoo.build("llama", hidden_act="relu"), {}),
    "passes": lambda: (zoo.build("llama"), {"passes": 3}),
    "fewer batches": lambda: (zoo.build("llama"), {"data": batches()[:3]}),
    "order of batches": lambda: (zoo.build("llama"), {"data": batches()[::-1]}),
    "shapes": lambda: (
        zoo.build("llama"),
        {"data": [{k: v.reshape(-1, v.shape[1] // 2) for k, v in batch.items()} for batch in batches()]},
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_files_of_another_call_are_refused(other, tmp_path):
    prune(zoo.build("llama"), resume_dir=tmp_path)
    model, options = OTHERS[other]()
    before = snapshot(model)
    with pytest.raises(ValueError, match="resume_dir="):
        prune(model, resume_dir=tmp_path, **options)
    assert_untouched(model, before)


def test_files_made_under_another_autocast_are_refused(tmp_path):
    prune(zoo.build("llama"), resume_dir=tmp_path)
    with pytest.raises(ValueError, match="resume_dir="), torch.autocast("cpu", torch.bfloat16):
        prune(zoo.build("llama"), resume_dir=tmp_path)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_blocks_behind_a_missing_file_are_pruned_again(missing, tmp_path):
    first, second, third = (zoo.build("llama", num_hidden_layers=3) for _ in range(3))
    report = prune(first, resume_dir=tmp_path)
    before = set(tmp_path.iterdir())
    (tmp_path / f"block-000{missing}.safetensors").unlink()
    for model in (second, third):  # the second call, from its files alone
        again = prune(model, resume_dir=tmp_path)
        assert (again.layers, again.blocks) == (report.layers, report.blocks)
        assert_same_state(model, first)
        assert set(tmp_path.iterdir()) == before


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[:-1], lambda data: save({"x": torch.ones(2)}), flipped],
)  # fmt: skip
def test_a_damaged_file_is_named(damage, tmp_path):
    model, path = zoo.build("llama"), tmp_path / "block-0001.safetensors"
    prune(zoo.build("llama"), resume_dir=tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=re.escape(str(path))):
        prune(model, resume_dir=tmp_path)
    assert_untouched(model, zoo.build("llama").state_dict())
    path.unlink()  # as the message says
    prune(model, resume_dir=tmp_path)


def test_one_process_at_a_time_uses_a_directory(tmp_path):
    with locked_directory(tmp_path, ""), pytest.raises(BlockingIOError, match="resume_dir="):
        prune(zoo.build("llama"), resume_dir=tmp_path)
    for _ in range(2):
        prune(zoo.build("llama"), resume_dir=tmp_path)


@pytest.mark.parametrize(("finished", "others"), [(0, "2 blocks"), (1, "1 block"), (2, None)])
def test_the_first_block_tells_once_when_the_others_end(finished, others, tmp_path, monkeypatch):
    model, said = zoo.build("llama", num_hidden_layers=3), []
    prune(copy.deepcopy(model), resume_dir=tmp_path)
    for number in range(finished, 3):
        (tmp_path / f"block-{number:04}.safetensors").unlink()
    monkeypatch.setattr("hf_sparse24.pruning.calibration.logger.info", said.append)
    prune(model, resume_dir=tmp_path)
    told = [re.sub(r"[\d.]+ s, until 20\d\d-\d\d-\d\d \d\d:\d\d$", "", line) for line in said if "the other" in line]
    assert told == [f"pruning the other {others} takes about "] * (others is not None)
