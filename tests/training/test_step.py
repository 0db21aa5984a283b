"""A run of STEP: the optimizer that it takes, and what it says at its end."""

import pytest
import sparse_models
import zoo

from hf_sparse24 import Sparse24Controller
from hf_sparse24.methods import StepAdamW, step_param_groups
from hf_sparse24.run import sparse_run

SETTINGS = {"switch_after": 1, "switch_by": 4, "switch_rule": "geometric", "update_clip": 0.5}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"total_steps": 1000}, r"total_steps=1000, not 10"),
        ({"switch_by": 9}, r"switch_by=9, not 4"),
        ({"switch_by": 0.5}, r"switch_by=5, not 4"),
        ({"switch_after": 2}, r"switch_after=2, not 1"),
        ({"switch_rule": "arithmetic"}, r"switch_rule='arithmetic', not 'geometric'"),
        ({"update_clip": 1.0}, r"update_clip=1.0, not 0.5, .*make_optimizer\(step_param_groups\(model\), total_steps"),
    ],
)
def test_an_optimizer_with_other_settings_is_refused(other, message):
    model = sparse_models.patched("llama", method="step", **SETTINGS)
    arguments = {"total_steps": 10, **SETTINGS, **other}
    with pytest.raises(ValueError, match=message):
        Sparse24Controller(model, StepAdamW(step_param_groups(model), **arguments), total_steps=10)
    same = {"total_steps": 10, **SETTINGS, "switch_by": 0.4}  # 4 steps too
    Sparse24Controller(model, StepAdamW(step_param_groups(model), **same), total_steps=10)


@pytest.mark.parametrize("tail", [0, 2])
@pytest.mark.parametrize("skips", [False, True])
def test_a_run_is_finished_only_where_the_switch_came(tail, skips):
    """A GradScaler skips steps: the controller counts them, and the optimizer does not."""
    model = sparse_models.patched("llama", method="step", dense_tail=tail, switch_after=4, switch_by=4)
    run = sparse_run(model)
    optimizer = run.method.make_optimizer(step_param_groups(model), total_steps=10, lr=1e-3)
    controller = Sparse24Controller(model, optimizer, total_steps=10)
    for seed in range(10):
        if skips and seed:
            controller.skip_step()
            continue
        model(**zoo.batch(seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.switched is not skips
    assert run.phase == ("dense" if skips or tail else "sparse")
    assert run.facts.finished is bool(tail and not skips)
