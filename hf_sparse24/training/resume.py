"""Resuming a Trainer's run: which checkpoint is whole, whether it is of this run, and the phase that it was saved in.

The Trainer writes a checkpoint in place, file by file, `trainer_state.json` last (Transformers 5.11 to 5.23). A
checkpoint without that file was not finished; one that lacks another was being deleted. The format of a file tells
whether it ends too early.
"""

import json
import re
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..config import SavedConfig, Sparse24Config
from ..files import read_json
from ..methods.masked_decay import AUTO
from ..methods.settings import SHARED
from ..progress import get_logger
from ..run import set_phase, sparse_run
from ..weights.sparse_weight import sparse_weights

logger = get_logger(__name__)

CONFIG = "config.json"
OWN_CONFIG = "sparse24_config.json"  # where no `config.json` has the config, as with adapters

_WEIGHTS = re.compile(r"(pytorch_|adapter_)?model.*\.(safetensors|bin)")
_TOGETHER = ("optimizer*", "scheduler.pt", "rng_state*.pth")


def last_whole_checkpoint(output_dir: str | Path) -> str:
    """The newest whole checkpoint in a Trainer's output directory; damaged ones cost a warning. ValueError: none is."""
    found = [(path.name.partition("-")[2], path) for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")]
    damaged: list[str] = []
    for _, path in sorted(((int(step), path) for step, path in found if step.isdecimal()), reverse=True):
        damage = checkpoint_damage(path)
        if damage is None:
            if damaged:
                logger.warning(f"resuming from {path}, the newest whole checkpoint: {'; '.join(damaged)}")
            return str(path)
        damaged.append(f"{path.name}: {damage}")
    why = "; ".join(damaged) or "none at all"
    raise ValueError(f"resume_from_checkpoint=True: no whole checkpoint in {output_dir} ({why}); start without it")


def checkpoint_damage(checkpoint: str | Path) -> str | None:
    """Why a run cannot go on from a Trainer's checkpoint: a file that is missing or ends too early. None if whole."""
    root = Path(checkpoint)
    if not (root / TRAINER_STATE_NAME).is_file():
        return f"{TRAINER_STATE_NAME}, which is written last, is missing"
    if not any(_WEIGHTS.fullmatch(path.name) for path in root.rglob("*")):
        return "it has no weights"
    for path in sorted(root.rglob("*")):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt"):  # compares the length of the file with its header
                    pass
            elif path.name == TRAINER_STATE_NAME or path.name.endswith(("config.json", ".index.json")):
                for name in read_json(path).get("weight_map", {}).values():
                    if not (path.parent / name).exists():
                        return f"{name} is missing"
            elif path.suffix in (".pt", ".pth", ".bin") and path.parent == root and not zipfile.is_zipfile(path):
                return f"{path.name} is cut short or damaged"  # its directory stands at the end
        except (SafetensorError, ValueError, AttributeError, TypeError):
            return f"{path.name} is cut short or damaged"
    # None of these with save_only_model; DeepSpeed has its own.
    absent = [pattern for pattern in _TOGETHER if not any(root.glob(pattern))]
    if 0 < len(absent) < len(_TOGETHER) and not any(root.glob("global_step*")):
        return f"{absent[0].replace('*', '')} is missing"
    return None


def saved_config(checkpoint: str | Path) -> SavedConfig | None:
    """The config of the patched model, or of the one below an adapter, that a Trainer saved; None without one."""
    model_config, own = Path(checkpoint) / CONFIG, Path(checkpoint) / OWN_CONFIG
    if model_config.is_file():
        saved = read_json(model_config).get("quantization_config")
    else:
        saved = read_json(own) if own.is_file() else None
    if not isinstance(saved, dict) or saved.get("quant_method") != Sparse24Config.quant_method:
        return None
    return SavedConfig.from_dict(saved)


def save_config(model: nn.Module, checkpoint: str | Path) -> None:
    """Write the config of a patched model where what was saved of the model has none."""
    run = sparse_run(model)
    if run is not None and not (Path(checkpoint) / CONFIG).exists():
        (Path(checkpoint) / OWN_CONFIG).write_text(json.dumps(run.saved.to_dict(), indent=2) + "\n")


def check_resumed(model: nn.Module, checkpoint: str | Path, warn: bool = True) -> None:
    """Raise ValueError if a checkpoint is of another method, pattern or layers than the model; `warn` of settings."""
    run, saved = sparse_run(model), saved_config(checkpoint)
    if run is None:
        return
    if saved is None:
        if unknown := _unknown_weight(model, checkpoint):
            way = "load it by from_pretrained, call patch_model, and start a new run"
            raise ValueError(f"{checkpoint} is of a dense model, and a Trainer does not load its {unknown!r}: {way}")
        if warn and (Path(checkpoint) / CONFIG).is_file():
            logger.warning(f"{checkpoint} is of a model that was not patched: sparsity starts from its dense weights")
        return
    ours, theirs = run.config.fields(), saved.config.fields()
    differences = {
        name: f"{name}={theirs.get(name)!r}, now {ours.get(name)!r}"
        for name in ours | theirs
        if ours.get(name) not in (theirs.get(name), AUTO) and name != "backend"
    }
    fixed = (*SHARED, *run.method.settings_of_state)
    if refused := [text for name, text in differences.items() if name in fixed]:
        way = "To train its weights in another way, load them by from_pretrained, then call "
        way += "unpatch_model(model, sparse=False) and patch_model(model, config), and start a new run"
        said = f"cannot resume from {checkpoint}, which was saved with {'; '.join(refused)}"
        raise ValueError(f"{said}: patch the model with the config of that run. {way}")
    if warn and differences:
        logger.warning(f"resuming from {checkpoint}, which was saved with {'; '.join(differences.values())}")


def _unknown_weight(model: nn.Module, checkpoint: str | Path) -> str | None:
    """A weight in a checkpoint whose name the model does not have, as of an expert, which `from_pretrained` stacks."""
    names = set(model.state_dict())
    for file in Path(checkpoint).glob("model*.safetensors"):
        with safe_open(file, "pt") as weights:
            if unknown := [name for name in weights.keys() if name not in names]:  # noqa: SIM118
                return unknown[0]
    return None


def restore(model: nn.Module, checkpoint: str | Path) -> None:
    """Give `model` what the Trainer does not load of a checkpoint: the phase that it was saved in."""
    saved, run = saved_config(checkpoint), sparse_run(model)
    if saved is None and (Path(checkpoint) / CONFIG).is_file():  # masks and scales are of the weights before
        for weight in sparse_weights(model).values():
            weight.init_state()
    elif saved is not None and run is not None:
        run.record(finished=False)  # the state is loaded already
        set_phase(model, saved.facts.phase)
        run.record(finished=saved.facts.finished)
