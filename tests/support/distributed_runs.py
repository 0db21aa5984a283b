"""Methods that several processes train, and a check that they train as one process with the same global batch."""

from typing import Any

import pytest
import ranks
import torch


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


METHODS: dict[str, dict[str, Any]] = {
    "ste": {},
    "sr-ste": {"masked_decay": 0.05},
    "sr-ste-on-weight": {"masked_decay": 0.05, "decay_on": "weight"},
    "s-ste": {},
    "t-sr-ste": {"masked_decay": 0.05, "mask_interval": 2, "dense_tail": 1},
    "step": {"switch_after": 2, "switch_by": 5},
    "step-arithmetic": {"switch_after": 2, "switch_by": 4, "switch_rule": "arithmetic"},
    "fixed-mask": {"dense_start": 2},
    "slope": {"initial_mask": "random", "dense_start": 2},
    "slope-adapters": {"adapter_rank": 2, "adapter_steps": 3},
    "ast": {"masked_decay": 0.05, "mask_interval": 2},
    "own": {},
}
SOME = [name if name in ("sr-ste", "t-sr-ste", "slope-adapters") else slow(name) for name in METHODS]
"""The methods as parameters of tests, most of them in the slow lane."""
_NAMES = ("ste", "sr-ste", "s-ste", "t-sr-ste", "step", "fixed-mask", "slope", "ast", "own")


def settings(name: str) -> dict[str, Any]:
    """The arguments of the Sparse24Config that a key of `METHODS` stands for."""
    method = next(m for m in sorted(METHODS, key=len, reverse=True) if name.startswith(m) and m in _NAMES)
    return {"method": method, "target_modules": "all-linear", **METHODS[name]}


def assert_same_tensors(result: dict[str, Any], expected: dict[str, Any], rtol: float, atol: float) -> None:
    """Of two that `ranks.state_of` made, the masks are equal, the weights and the methods' state close."""
    for kind in ("weights", "state", "masks"):
        assert result[kind].keys() == expected[kind].keys()
        for name, tensor in expected[kind].items():
            tolerance = {"rtol": 0, "atol": 0} if kind == "masks" else {"rtol": rtol, "atol": atol}
            torch.testing.assert_close(result[kind][name], tensor, **tolerance)


def check_equal(world: int, model: str, config: dict[str, Any], engine: str, **options: Any) -> None:
    """Every process of `world` ends with what one process ends with that takes all their batches.

    Of models with one layer, but by `s-ste`, `t-sr-ste` and with four processes and more.
    """
    if world < 4 and config["method"] not in ("s-ste", "t-sr-ste"):
        one_layer = {"n_layer" if model == "gpt2" else "num_hidden_layers": 1}
        options["sizes"] = one_layer | options.get("sizes", {})
    one = ranks.train(0, world, model, config, "one", **{k: v for k, v in options.items() if k == "sizes"})
    many = ranks.run(world, _train, model, config, engine, options)
    for result in many:
        for (loss, norm, phase, metrics), (loss1, norm1, phase1, metrics1) in zip(result["log"], one["log"]):
            assert phase == phase1
            assert loss == pytest.approx(loss1, rel=2e-6) and norm == pytest.approx(norm1, rel=1e-6)
            assert metrics == pytest.approx(metrics1, rel=1e-5, abs=1e-7)
        assert_same_tensors(result, one, rtol=1e-9, atol=1e-12)
    for name, tensor in many[0]["state"].items():
        assert all(torch.equal(tensor, other["state"][name]) for other in many[1:])


def _train(rank, world, model, config, engine, options):
    return ranks.train(rank, world, model, config, engine, **options)
