"""What tests of recipes share: a text, its tokenizer, and the flags of a tiny run."""

import json
from pathlib import Path

from paths import RECIPES

from recipes.benchmarks.variants import peak_memory

TEXTS = [f"def function_{i}(a, b):\n    return a * {i} + b\n" * 6 for i in range(30)]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32}


def flags(tmp_path, dataset, tokenizer, model_type="llama", overrides=LLAMA, **settings) -> list[str]:
    settings = {
        "dataset": dataset,
        "tokenizer_name": tokenizer,
        "model_type": model_type,
        "config_overrides": json.dumps(overrides),
        "block_size": 16,
        "output_dir": tmp_path / "out",
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **settings,
    }
    return [f"--{name}={value}" for name, value in settings.items() if value is not None]


def jsonl(path: Path, texts=TEXTS, column="text") -> str:
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return str(path)


BERT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
DEIT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
ENCODER = {**BERT, "max_position_embeddings": 128, "initializer_range": 0.1}
TOYS = {  # YAML files, and sizes of a smaller model
    "glue": ("finetune", "glue", "glue-toy", ENCODER),
    "image_classification": ("pretrain", "deit-tiny", "deit-toy", {**DEIT, "initializer_range": 0.1}),
}


def toy_flags(name: str, data: Path, output: Path, **settings) -> list[str]:
    """The toy YAML files of a recipe, with a smaller model; `data` is what its `tiny_*.py` has prepared."""
    kind, *files, sizes = TOYS[name]
    reader = "image_processor_name" if name == "image_classification" else "tokenizer_name"
    settings = {
        "dataset": data / name if kind == "finetune" else data,
        reader: data / ("processor" if name == "image_classification" else "tokenizer"),
        "config_overrides": json.dumps(sizes),
        "output_dir": output,
        "report_to": "none",
        "disable_tqdm": True,
        **settings,
    }
    given = [f"--{key}={value}" for key, value in settings.items() if value is not None]
    return [*(str(RECIPES / kind / f"{file}.yaml") for file in files), *given]


def results(directory: Path) -> dict:
    return json.loads((directory / "all_results.json").read_text())


class InThisProcess:
    """What a benchmark's `Variant` does in a process, without the seconds that starting one takes."""

    def __init__(self, loaded: tuple):
        self.respond, self.loaded = loaded

    def ask(self, **request) -> dict:
        return self.respond(**request) | {"peak GB": peak_memory()}

    def close(self) -> None:
        pass
