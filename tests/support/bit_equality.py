"""Scenarios of training, saving, exporting, pruning and adapting, and a hash of all that they compute.

    python tests/support/bit_equality.py               # every scenario, compared with bit_equality.json
    python tests/support/bit_equality.py --only lora   # those whose names begin with "lora"
    python tests/support/bit_equality.py --record      # write bit_equality.json

`--record` belongs to the commit before such a change: the scenarios use public names alone, so that this file runs
there too. Hashed are weights, masks, scales, moments of optimizers, losses and logits, never bytes of files, whose
records may change. CPUs and libraries round differently. So everything runs in a child process with `PORTABLE`, where a
hash does not depend on the instruction set. Each hash has a norm beside it, to compare where hashes cannot be equal.
"""

import argparse
import copy
import gc
import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_suffix(".json")
PORTABLE = {
    "ATEN_CPU_CAPABILITY": "default",
    "CUDA_VISIBLE_DEVICES": "",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX,-AVX2,-FMA,-FMA4,-AVX512F,-AVX512DQ,-AVX512VL,-AVX512BW",
    "HF_HUB_OFFLINE": "1",
    "MKL_CBWR": "COMPATIBILITY",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "PYTHONHASHSEED": "0",
    "SPARSE24_CPU": "off",
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_INTERPRET": "0",
}
"""The environment of a run whose bits no instruction set changes: no AVX, no FMA, no kernels in C++, one thread."""
_CHILD = "BIT_EQUALITY_CHILD"

Part = tuple[str, float]
"""The first 16 digits of a hash, and the norm of what was hashed."""


def measure(only: str = "", environment: dict[str, str] = PORTABLE) -> dict[str, Any]:
    """The facts of this machine, and the parts of each scenario by name: computed in a child process."""
    with tempfile.TemporaryDirectory() as folder:
        given = os.environ | environment | {_CHILD: folder, "SPARSE24_CACHE": f"{folder}/cache"}
        command = [sys.executable, __file__, "--only", only]
        subprocess.run(command, env=given, check=True, stdout=subprocess.DEVNULL)  # logs of Trainers
        return json.loads(Path(folder, "result.json").read_text())


def differences(recorded: dict[str, Part], found: dict[str, Part], *, exact: bool = True) -> list[str]:
    """The parts of a scenario that differ: by their hashes where `exact`, else by their norms.

    Rounding alone moves these norms by up to 0.4 % (AVX-512 in place of `PORTABLE`): a mask flips, and training goes on
    from there.
    """
    wrong = [f"{part}: missing or new" for part in sorted(recorded.keys() ^ found.keys())]
    for part, (digest, norm) in recorded.items():
        if part in found and digest != found[part][0]:
            near = math.isclose(norm, found[part][1], rel_tol=1e-2)
            if exact or not near:
                wrong.append(f"{part}: {found[part][0]} with norm {found[part][1]!r}, recorded {digest} with {norm!r}")
    return wrong


# Below, all that runs in the child, in whose environment torch is imported.

VOCAB, STEPS = 96, 6
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "llama": SIZES,
    "gpt2": {
        "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
        "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "qwen3_moe": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}  # fmt: skip
METHODS = {
    "fixed-mask": {},
    "s-ste": {},
    "slope": {},
    "sr-ste": {"masked_decay": 1e-2},
    "ste": {},
    "step": {"switch_after": 1, "switch_by": 2},
    "t-sr-ste": {"masked_decay": 1e-2, "mask_interval": 2, "dense_tail": 1},
}
"""The library's methods, with lengths that fit `STEPS` steps."""


class Parts:
    """The parts of a scenario, by name."""

    def __init__(self):
        self.found: dict[str, Part] = {}

    def add(self, name: str, value: Any) -> None:
        """Hash tensors and numbers, in containers of any depth. The order of a dict's keys does not matter; the names
        of its keys do not either, so that renamed buffers have equal hashes."""
        leaves = list(_leaves(value))
        digest = hashlib.sha256("\n".join(sorted(digest for digest, _ in leaves)).encode())
        squares = [norm**2 for _, norm in leaves if math.isfinite(norm)]
        assert leaves and name not in self.found, name
        self.found[name] = digest.hexdigest()[:16], math.sqrt(math.fsum(squares))


def _leaves(value: Any) -> Iterator[tuple[str, float]]:
    """A hash and a norm of each tensor and number."""
    import torch

    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, bool | int | float):
        yield hashlib.sha256(repr(value).encode()).hexdigest(), abs(float(value))
    elif isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode() + data)
        yield digest.hexdigest(), tensor.double().norm().item()
    else:
        assert value is None or isinstance(value, str), type(value)


def build(name: str = "llama", seed: int = 0) -> Any:
    """A small model whose weights depend on no library's way to initialise them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **MODELS[name]))
    _fill(model.named_parameters(), seed, 0.1)
    assert not any(isinstance(module, torch.nn.Dropout) and module.p for module in model.modules())
    return model.train()


def _fill(parameters: Any, seed: int, scale: float) -> None:
    """Random values for matrices; vectors, such as biases and norms, stay."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(parameters):
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def patched(name: str, method: str, seed: int = 0, **settings: Any) -> Any:
    from hf_sparse24 import Sparse24Config, patch_model

    model = build(name, seed)
    patch_model(model, Sparse24Config(method=method, **{"target_modules": "all-linear"} | METHODS[method] | settings))
    return model


def batch(seed: int = 0, rows: int = 2, length: int = 12) -> dict[str, Any]:
    import torch

    ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(**batch(99)).logits


def arguments(folder: Path, **overrides: Any) -> Any:
    from transformers import TrainingArguments

    defaults = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
    }
    return TrainingArguments(str(folder), **(defaults | overrides))


def rows(count: int = 32) -> list[dict[str, Any]]:
    return [{name: ids[0] for name, ids in batch(seed, rows=1).items()} for seed in range(count)]


def trainer(model: Any, folder: Path, own: dict[str, Any] | None = None, **overrides: Any) -> Any:
    from hf_sparse24 import Sparse24Trainer

    return Sparse24Trainer(model, arguments(folder, **overrides), train_dataset=rows(), **(own or {}))


def logged(run: Any) -> list[dict[str, float]]:
    """All numbers that a Trainer logged each step, without times."""
    return [log for log in run.state.log_history if "loss" in log]


class Loop:
    """A training loop of two micro-batches a step, with the optimizer that the method wants."""

    def __init__(self, model: Any, steps: int = STEPS, lr: float = 1e-2, **settings: Any):
        import torch

        from hf_sparse24 import Sparse24Controller, sparse_run
        from hf_sparse24.methods import step_param_groups

        groups = step_param_groups(model, 0.0)
        own = sparse_run(model).method.make_optimizer(groups, total_steps=steps, lr=lr)
        self.model, self.optimizer = model, own or torch.optim.AdamW(groups, lr=lr)
        self.controller = Sparse24Controller(model, self.optimizer, total_steps=steps, **settings)
        self.losses: list[float] = []

    def run(self, steps: int = STEPS) -> "Loop":
        """Train until `steps` steps are done."""
        while self.controller.step < steps:
            for micro_step in range(2):
                loss = self.model(**batch(2 * self.controller.step + micro_step)).loss
                loss.backward()
                self.losses.append(loss.item())
                self.controller.after_micro_step()
            self.optimizer.step()
            self.losses += self.controller.metrics().values()
            self.optimizer.zero_grad()
        return self

    def states(self) -> Any:
        return copy.deepcopy([part.state_dict() for part in (self.model, self.optimizer, self.controller)])

    def load(self, states: Any) -> "Loop":
        for part, state in zip((self.model, self.optimizer, self.controller), states, strict=True):
            part.load_state_dict(state)
        return self

    def add(self, parts: Parts) -> None:
        parts.add("losses", self.losses)
        add_state(parts, "trained", self.model, self.optimizer)


def add_state(parts: Parts, name: str, model: Any, optimizer: Any = None) -> None:
    """The state dict, the logits, and the optimizer's state."""
    parts.add(f"{name}: state", model.state_dict())
    parts.add(f"{name}: logits", logits(model))
    if optimizer is not None:
        parts.add(f"{name}: optimizer", optimizer.state_dict()["state"])


def add_saved(parts: Parts, model: Any, folder: Path, exports: tuple[str, ...] = ("dense", "packed", "int8")) -> None:
    """The model saved and exported in each format, after loading."""
    from transformers import AutoModelForCausalLM

    from hf_sparse24 import export_model, sparse_run, unpack_model

    model.eval().save_pretrained(folder / "saved")
    add_state(parts, "reloaded", AutoModelForCausalLM.from_pretrained(folder / "saved"))
    for format in exports:
        if format != "dense" and sparse_run(model).phase != "sparse":
            continue  # dense weights have no packed form
        values = {"values": "int8"} if format == "int8" else {}
        export_model(model, folder / format, "packed" if format == "int8" else format, **values)
        loaded = AutoModelForCausalLM.from_pretrained(folder / format)
        add_state(parts, f"exported {format}", loaded)
        if format != "dense":
            add_state(parts, f"exported {format}, unpacked", unpack_model(loaded))


Scenario = Callable[[Parts, Path], None]


def train_and_save(method: str, name: str = "llama", **settings: Any) -> Scenario:
    """Trained by the Trainer with accumulation, stopped and resumed, saved, loaded and exported."""

    def run(parts: Parts, folder: Path) -> None:
        model = patched(name, method, **settings)
        whole = trainer(model, folder / "run", save_strategy="steps", save_steps=3)
        whole.train()
        parts.add("log", logged(whole))
        add_state(parts, "trained", model, whole.optimizer)
        resumed = trainer(patched(name, method, seed=9, **settings), folder / "resumed")
        resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-3"))
        parts.add("log after resuming", logged(resumed))
        add_state(parts, "resumed", resumed.model, resumed.optimizer)
        add_saved(parts, model, folder)

    return run


def own_loop(method: str, name: str = "llama", dtype: str = "float32", **settings: Any) -> Scenario:
    """Trained by a controller without a Trainer, stopped and resumed, then unpatched."""

    def run(parts: Parts, folder: Path) -> None:
        import torch

        from hf_sparse24 import unpatch_model

        def loop(seed: int) -> Loop:
            return Loop(patched(name, method, seed, **settings).to(getattr(torch, dtype)), seed=3)

        first = loop(0).run(STEPS // 2)
        states = first.states()
        first.run().add(parts)
        resumed = loop(9).load(states).run()
        add_state(parts, "resumed", resumed.model, resumed.optimizer)
        add_state(parts, "unpatched", unpatch_model(first.model))

    return run


def one_shot(name: str = "llama", method: str = "fixed-mask", pattern: str = "2:4", **options: Any) -> Scenario:
    """Pruned in one shot, saved and exported, and trained on."""

    def run(parts: Parts, folder: Path) -> None:
        from hf_sparse24 import Sparse24Config, oneshot

        model = build(name)
        config = Sparse24Config(method=method, pattern=pattern, target_modules="all-linear")
        report = oneshot(model, [batch(seed, 4, 24) for seed in range(4)], config, **options)
        parts.add("errors", [layer.error for layer in report.layers])
        add_state(parts, "pruned", model)
        add_saved(parts, model, folder, ("packed", "int8"))
        Loop(model.train(), 3, lr=1e-3).run(3).add(parts)

    return run


def lora(method: str, name: str = "llama", packed: bool = False) -> Scenario:
    """LoRA through the mask: trained by a Trainer with the callback, saved, loaded, merged."""

    def run(parts: Parts, folder: Path) -> None:
        import peft
        from transformers import AutoModelForCausalLM, Trainer

        from hf_sparse24 import Sparse24Callback, export_model

        base = patched(name, method)
        if packed:
            export_model(base, folder / "base", "packed")
            base = AutoModelForCausalLM.from_pretrained(folder / "base")
        else:
            base.save_pretrained(folder / "base")
        targets = ["up_proj", "down_proj"] if name == "llama" else ["c_fc", "mlp.c_proj"]
        config = peft.LoraConfig(
            r=4, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM", fan_in_fan_out=name == "gpt2"
        )
        model = peft.get_peft_model(base, config)
        _fill(((key, value) for key, value in model.named_parameters() if "lora_" in key), 7, 0.05)
        run = Trainer(model, arguments(folder / "run"), train_dataset=rows())
        Sparse24Callback.add_to(run)
        run.train()
        parts.add("log", logged(run))
        parts.add("adapter", [value for key, value in model.named_parameters() if "lora_" in key])
        parts.add("logits", logits(model))
        model.save_pretrained(folder / "adapter")
        again = AutoModelForCausalLM.from_pretrained(folder / "base")
        parts.add("loaded: logits", logits(peft.PeftModel.from_pretrained(again, folder / "adapter")))
        add_state(parts, "merged", model.merge_and_unload())

    return run


def distillation(method: str, **own: Any) -> Scenario:
    """Trained with a dense teacher."""

    def run(parts: Parts, folder: Path) -> None:
        from hf_sparse24 import DistillationConfig

        settings = {"teacher": build(seed=1)} | ({"distillation": DistillationConfig(**own)} if own else {})
        run = trainer(patched("llama", method), folder, settings)
        run.train()
        parts.add("log", logged(run))
        add_state(parts, "trained", run.model, run.optimizer)

    return run


def experts(method: str) -> Scenario:
    """Stacked experts: trained in a loop, saved and loaded."""

    def run(parts: Parts, folder: Path) -> None:
        stacks = [key for key, value in build("qwen3_moe").named_parameters() if value.dim() == 3]
        model = patched("qwen3_moe", method, target_modules=[key.removesuffix(".weight") for key in stacks])
        Loop(model).run().add(parts)
        add_saved(parts, model, folder, ("dense",))

    return run


def packed_masters(parts: Parts, folder: Path) -> None:
    """Only kept values train: by the Trainer, resumed, saved, exported, unpacked."""
    from hf_sparse24 import unpack_model

    model = patched("llama", "fixed-mask", master="packed")
    whole = trainer(model, folder / "run", save_strategy="steps", save_steps=3)
    whole.train()
    resumed = trainer(patched("llama", "fixed-mask", seed=9, master="packed"), folder / "resumed")
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-3"))
    for name, run in {"trained": whole, "resumed": resumed}.items():
        parts.add(f"{name}: log", logged(run))
        add_state(parts, name, run.model, run.optimizer)
    add_saved(parts, model, folder, ("dense", "packed"))
    add_state(parts, "unpacked", unpack_model(model))


def decay_search(method: str) -> Scenario:
    """`masked_decay="auto"`, determined by probes, then trained with."""

    def run(parts: Parts, folder: Path) -> None:
        settings = {"mask_interval": 1, "dense_tail": 0} if method == "t-sr-ste" else {}
        model = patched("llama", method, masked_decay="auto", **settings)
        run = trainer(model, folder, max_steps=12, warmup_steps=8, gradient_accumulation_steps=1)
        run.train()
        parts.add("mu", [run.decay_tuning.mu, list(run.decay_tuning.mu), run.decay_tuning.chosen])
        parts.add("log", logged(run))
        add_state(parts, "trained", model, run.optimizer)

    return run


SCENARIOS: dict[str, Scenario] = {
    **{f"trainer {method}": train_and_save(method) for method in METHODS},
    "trainer slope adapters": train_and_save("slope", adapter_rank=2, adapter_steps=2),
    "trainer gpt2 s-ste": train_and_save("s-ste", "gpt2"),
    "trainer gpt2 t-sr-ste 16:32": train_and_save("t-sr-ste", "gpt2", pattern="16:32", dense_tail=0),
    "trainer layer patterns": train_and_save("sr-ste", layer_patterns={"down_proj": "1:4", "q_proj": "2:8"}),
    **{f"loop {method}": own_loop(method) for method in METHODS},
    "loop slope random": own_loop("slope", initial_mask="random", adapter_rank=2, adapter_steps=2),
    "loop bf16 s-ste": own_loop("s-ste", dtype="bfloat16"),
    "loop bf16 t-sr-ste": own_loop("t-sr-ste", dtype="bfloat16", decay_on="weight", dense_start=1),
    "loop mvue-approx": own_loop("ste", weight_grad="mvue-approx", input_grad="mvue"),
    "loop mvue-1:2, 2:4 activations": own_loop("sr-ste", weight_grad="mvue-1:2", activations="2:4"),
    "loop fp8": own_loop("s-ste", fp8=True, scale_rule="l1"),
    "oneshot sparsegpt": one_shot(reconstruct=None),
    "oneshot block": one_shot(pattern="16:32", passes=2),
    "oneshot block int8 gpt2": one_shot("gpt2", passes=1, values="int8"),
    "oneshot wanda layer": one_shot(criterion="wanda", reconstruct="layer"),
    "oneshot transposable": one_shot(method="t-sr-ste", reconstruct=None),
    "lora fixed-mask": lora("fixed-mask"),
    "lora s-ste gpt2": lora("s-ste", "gpt2"),
    "lora packed": lora("fixed-mask", packed=True),
    "distillation": distillation("fixed-mask"),
    "distillation temperature": distillation("s-ste", weight=0.7, temperature=2.0),
    **{f"experts {method}": experts(method) for method in ("fixed-mask", "s-ste", "sr-ste")},
    "packed masters": packed_masters,
    **{f"decay search {method}": decay_search(method) for method in ("sr-ste", "t-sr-ste")},
}


def facts() -> dict[str, str]:
    """What decides whether hashes must be equal, and the commit that computed them."""
    import torch
    import transformers

    import hf_sparse24

    vendor = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith(("vendor", "model n"))]
    package = Path(hf_sparse24.__file__).parent
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=package, capture_output=True, text=True)
    return {
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": " ".join([platform.machine(), *dict.fromkeys(vendor)]),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _run_child(folder: Path, only: str) -> None:
    import torch
    import transformers

    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    found = {}
    gc.freeze()
    for name, scenario in SCENARIOS.items():
        if name.startswith(only):
            torch.manual_seed(0)
            parts, place = Parts(), folder / name.replace(" ", "_").replace(":", "_")
            try:
                scenario(parts, place)
                found[name] = parts.found
            except Exception:  # the others go on
                print(f"{name}:\n{traceback.format_exc()}", file=sys.stderr)
                found[name] = {}
    (folder / "result.json").write_text(json.dumps({"facts": facts(), "scenarios": found}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="NAME", help="scenarios whose names begin with this")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    given = parser.parse_args()
    if folder := os.environ.get(_CHILD):
        _run_child(Path(folder), given.only)
        return 0
    result = measure(given.only)
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {"facts": None, "scenarios": {}}
    if given.record and all(result["scenarios"].values()):
        result["scenarios"] = recorded["scenarios"] | result["scenarios"] if given.only else result["scenarios"]
        lines = re.sub(r"\[\s+(\S+)\s+(\S+)\s+\]", r"[\1 \2]", json.dumps(result, indent=1))  # a line for each part
        RECORD.write_text(lines + "\n")
        return 0
    print(f"recorded: {recorded['facts']}\nhere:     {result['facts']}")
    failed = False
    for name, parts in result["scenarios"].items():
        wrong = differences(recorded["scenarios"].get(name, {}), parts)
        print(f"{'DIFFERS' if wrong else 'equal  '} {name}", *wrong, sep="\n    ")
        failed |= bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
