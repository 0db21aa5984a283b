"""py.typed holds: in a user's script, a type checker knows what the public functions take and return."""

import os
import re
import subprocess
import sys

import pages
import pytest

SCRIPT = """
import torch
from hf_sparse24 import (
    DistillationConfig, Sparse24Callback, Sparse24Config, Sparse24Controller, Sparse24Trainer,
    describe_settings, export_model, fuse_gated_mlps, make_model_card, oneshot, pack_model, patch_model, push_to_hub,
    unpack_model, unpatch_model,
)
from hf_sparse24.methods import StepAdamW, step_param_groups
from sparse24_kernels import (
    Pattern, masked_decay_, mvue, nm_mask, pack_nm, packed_linear, s_ste_scale, sparse_linear, transposable_mask,
    unpack_nm,
)
from sparse24_kernels.gemm import linear_problem, plan_gemm
from sparse24_kernels.prune import prune_forms
from sparse24_kernels.dispatch import choose_kernels
from sparse24_kernels.masks import count_flips
from transformers import PreTrainedModel, Trainer, TrainingArguments


def on_models(model: PreTrainedModel, args: TrainingArguments, batches: list[torch.Tensor], plain: Trainer) -> None:
    config = Sparse24Config(method="t-sr-ste", mask_interval=20)
    reveal_type(config.replace(mask_interval=40))  # Sparse24Config
    reveal_type(Sparse24Config.from_dict(config.to_dict()))  # Sparse24Config
    report = patch_model(model, config)
    reveal_type(report)  # PatchReport
    reveal_type(oneshot(model, batches))  # OneshotReport
    trainer = Sparse24Trainer(model, args, sparse24_config=config, distillation=DistillationConfig(weight=0.5))
    reveal_type(trainer.patch_report)  # PatchReport | None
    reveal_type(Sparse24Callback.add_to(plain))  # Sparse24Callback
    optimizer = StepAdamW(step_param_groups(model), total_steps=10)
    controller = Sparse24Controller(model, optimizer, total_steps=10)
    reveal_type(controller.metrics())  # dict[str, float]
    reveal_type(make_model_card(model))  # ModelCard
    reveal_type(push_to_hub(model, "me/model"))  # CommitInfo | None
    export_model(model, "out", format="packed")
    reveal_type(pack_model(model))  # int
    reveal_type(unpatch_model(model))  # Module


def on_tensors(x: torch.Tensor) -> None:
    reveal_type(Pattern.parse("2:4"))  # Pattern
    reveal_type(nm_mask(x))  # Tensor
    reveal_type(masked_decay_(x, x, x, 0.1))  # Tensor
    reveal_type(mvue(x))  # Tensor
    reveal_type(unpack_nm(pack_nm(x)))  # Tensor
    plan = plan_gemm(linear_problem(8, 16, 32, x.dtype), x.device)
    reveal_type(plan.is_sparse)  # bool
    reveal_type(sparse_linear(x, x, plan=plan))  # Tensor
    reveal_type(packed_linear(x, pack_nm(x), plan=plan))  # Tensor


def wrong(model: PreTrainedModel, x: torch.Tensor) -> None:
    patch_model(model, "s-ste")  # error: Argument 2 to "patch_model"
    export_model(model)  # error: Missing positional argument "directory"
    nm_mask(x, m="4")  # error: Argument "m" to "nm_mask"
    choose_kernels("cuda")  # error: Argument 1 to "choose_kernels"
    Sparse24Trainer(model, sparse24_config="s-ste")  # error: Argument "sparse24_config" to "Sparse24Trainer"
"""


@pytest.mark.slow
def test_a_users_script(tmp_path):
    """By mypy --strict; the comments are what it must reveal, or complain of, and nothing else may come."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-color-output", "--cache-dir", str(tmp_path / "cache")]
    paths = os.pathsep.join([str(pages.ROOT), str(pages.ROOT / "kernels")])
    environment = os.environ | {"MYPYPATH": paths, "COLUMNS": "1000"}
    flags = ["--explicit-package-bases", "--follow-imports=silent", "--ignore-missing-imports", "--config-file="]
    done = subprocess.run(
        [*command, *flags, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    said = dict(re.findall(r"^script\.py:(\d+): (.*)$", done.stdout, re.MULTILINE))
    for number, line in enumerate(SCRIPT.splitlines(), 1):
        wanted = line.partition("  # ")[2]
        found = re.sub(r"\b(?:[a-zA-Z_]\w*\.)+(?=[A-Z])|\bbuiltins\.", "", said.pop(str(number), ""))
        found = re.sub(r"tuple\[(?:[^][]|\[[^][]*\])*, fallback=(\w+)\]", r"\1", found)  # named tuples by their names
        if line.strip().startswith("reveal_type"):
            assert found == f'note: Revealed type is "{wanted}"', (line, found)
        else:
            assert wanted in found if wanted else not found, (line, found)
    assert not said, done.stdout + done.stderr
