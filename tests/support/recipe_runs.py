"""What tests of recipes share: a text, its tokenizer, and the flags of a tiny run."""

import json
from pathlib import Path

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
