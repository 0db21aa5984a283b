"""Masks that change by the gradient: which weights leave and enter, on literal numbers, and whole trainings."""

import importlib
import json
from types import SimpleNamespace

import pytest
import stdlib_text
import torch
import zoo
from method_runs import STEPS, loop, run_steps
from sparse24_kernels import Pattern, pack_bits, unpack_bits
from torch import tensor

from hf_sparse24 import Sparse24Config, export_model, patch_model, sparse_weights
from hf_sparse24.methods import METHODS, Piece, StepContext


@pytest.fixture
def dynamic_masks(monkeypatch):
    """The recipe, whose method is gone after the test."""
    monkeypatch.setitem(METHODS, "dynamic-mask", None)
    module = importlib.import_module("dynamic_masks")
    METHODS["dynamic-mask"] = module.DynamicMask
    return module


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("leaving", "gradient", "after"),
    [
        ([0, 0, 0, 0], [0.0, 0.0, 9.0, -9.0], [1, 1, 0, 0]),  # no weight is replaced that does not leave
        ([0, 1, 0, 0], [9.0, 9.0, 0.1, -0.2], [1, 0, 0, 1]),  # by magnitude; its own gradient does not count
        ([1, 0, 0, 0], [0.0, 0.0, 0.0, 0.0], [0, 1, 1, 0]),  # ties: the lower index
        ([1, 0, 0, 0], [0.0, 0.0, 0.0, float("inf")], [0, 1, 0, 1]),
    ],
)
def test_an_exchange_within_a_group(dynamic_masks, dim, leaving, gradient, after):
    def across(row, dtype):
        untouched = {torch.bool: [False, True, True, False], torch.float32: [1.0, 2.0, 3.0, 4.0]}[dtype]
        if leaving is row:
            untouched = [False] * 4
        matrix = torch.stack([tensor(row).to(dtype), tensor(untouched)])
        return matrix if dim == 1 else matrix.t().contiguous()

    result = dynamic_masks.exchanged(
        across([1, 1, 0, 0], torch.bool), across(leaving, torch.bool), across(gradient, torch.float32), 2, 4, dim
    )
    assert torch.equal(result, across(after, torch.bool))


def change_gradients(dynamic_masks, values, gradient, mask, signs, moment, step, **settings):
    """The hook of a method on one row of weights; `values`, `gradient` and `moment` are changed."""
    method = dynamic_masks.DynamicMask(dynamic_masks.DynamicMask.Settings(**settings), Pattern(2, 4))
    state = {"mask_bits": pack_bits(tensor([mask]) > 0), "sign_bits": pack_bits(tensor([signs]) > 0)}
    weight = SimpleNamespace(master=values, state=state, set_state=state.update, input_dim=-1)
    optimizer = SimpleNamespace(state={values: {"step": tensor(3.0), "exp_avg": moment}})
    context = StepContext(step, 100, "sparse", optimizer, {"w": weight})
    method.change_gradients([Piece("w", values, gradient, 0.1, lambda: None)], context)
    return [unpack_bits(state[name], values.shape[1]).int()[0].tolist() for name in ("mask_bits", "sign_bits")]


def test_weights_whose_sign_has_flipped_leave(dynamic_masks):
    """Eight weights: the second has become negative; in the other group nothing has flipped."""
    values = tensor([[1.0, -0.5, 0.3, 0.0, 0.0, 0.1, -2.0, 0.0]])  # 0.3: not yet set to zero
    gradient = tensor([[1.0, 7.0, 2.0, -3.0, 8.0, 1.0, 1.0, 8.0]])
    moment = torch.ones(1, 8)
    bits = {"mask": [1, 1, 0, 0, 0, 1, 1, 0], "signs": [1, 1, 0, 1, 0, 1, 0, 1]}
    settings = {"moment": moment, "step": 9, "drop": "sign", "interval": 10}
    mask, signs = change_gradients(dynamic_masks, values, gradient, **bits, **settings)
    assert mask == [1, 0, 0, 1, 0, 1, 1, 0]
    assert values.tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0, pytest.approx(0.1), -2.0, 0.0]]
    assert gradient.tolist() == [[1.0, 0.0, 0.0, -3.0, 0.0, 1.0, 1.0, 0.0]]  # what enters moves by its gradient
    assert moment.tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0]]
    # Signs of kept weights as they are; what enters goes against its gradient.
    assert [sign for sign, kept in zip(signs, mask) if kept] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("step", "mask"),
    [
        (49, [0, 1, 1, 0, 1, 1, 0, 0]),  # fraction 0.5 of 4 weights, (1 + cos(pi 50/75)) / 2 = 0.25 of that: none
        (9, [0, 1, 0, 1, 1, 1, 0, 0]),  # at step 10: 0.5 * 4 * 0.957 = 1 weight, the smallest
        (10, [0, 1, 1, 0, 1, 1, 0, 0]),  # between exchanges
        (79, [0, 1, 1, 0, 1, 1, 0, 0]),  # after the last one
    ],
)
def test_the_smallest_weights_leave(dynamic_masks, step, mask):
    values = tensor([[0.0, 5.0, -0.1, 0.0, 0.2, 3.0, 0.0, 0.0]])
    gradient = tensor([[1.0, 0.0, 0.0, -2.0, 0.0, 0.0, 1.0, 1.0]])
    bits = {"mask": [0, 1, 1, 0, 1, 1, 0, 0], "signs": [0] * 8}
    settings = {"moment": torch.ones(1, 8), "step": step, "drop": "magnitude", "interval": 10, "fraction": 0.5}
    found, _ = change_gradients(dynamic_masks, values, gradient, **bits, **settings)
    assert found == mask and not values[tensor([mask]) == 0].any() and not gradient[tensor([mask]) == 0].any()


@pytest.mark.parametrize("drop", ["sign", "magnitude"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # GPT-2's groups run along dimension 0
def test_a_training_stays_exactly_2_of_4(dynamic_masks, kind, drop, tmp_path):
    model = zoo.build(kind)
    patch_model(model, Sparse24Config(method="dynamic-mask", drop=drop, interval=1, fraction=0.5))
    optimizer, controller = loop(model, lr=3e-2)
    weights = sparse_weights(model)
    before = {name: weight.mask() for name, weight in weights.items()}
    changes = []
    for _ in range(STEPS):
        run_steps(model, optimizer, controller, 1)
        masks = {name: weight.mask() for name, weight in weights.items()}
        changes.append(any(not torch.equal(masks[name], before[name]) for name in masks))
        for name, weight in weights.items():
            groups = masks[name].movedim(weight.input_dim, -1).unflatten(-1, (-1, 4))
            assert (groups.sum(-1) == 2).all()
            moments = [optimizer.state[weight.master][key] for key in ("exp_avg", "exp_avg_sq")]
            assert not any(x[~masks[name]].any() for x in (weight.master, *moments))
        before = masks
    until = int(0.75 * STEPS)
    assert any(changes[:until]) and not any(changes[until:])
    export_model(model, tmp_path, format="packed")


@pytest.mark.usefixtures("own_cache")
def test_runs_of_the_recipe(dynamic_masks, tmp_path, capsys, monkeypatch):
    stdlib_text.prepare(tmp_path / "text", 300, max_files=60)
    monkeypatch.setattr(stdlib_text, "prepare", lambda directory: directory)
    common = ["--steps", "8", "--data", str(tmp_path / "text"), "--results", str(tmp_path)]
    dynamic_masks.main(["sign-1", *common])
    saved = json.loads((tmp_path / "8_steps" / "sign-1-lr0.004-seed0.json").read_text())
    assert saved["variant"] == "sign-1" and saved["tokens"] == 8 * 8 * 128
    assert saved["sparse24"]["method"] == "dynamic-mask" and saved["sparse24"]["interval"] == 1
    assert saved["flip_rate"][0] > 0
    with pytest.raises(SystemExit) as stopped:
        dynamic_masks.main(["--help"])
    assert stopped.value.code == 0 and "magnitude-100" in capsys.readouterr().out
