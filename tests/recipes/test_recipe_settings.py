"""What the recipes' YAML files say, how their packages are asked for, and how their runs are tracked."""

import image_classification
import pytest
import torch
import train
from arguments import parse_arguments
from optional import require
from paths import RECIPES
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
)

from hf_sparse24 import patch_model

PRETRAIN = {  # millions of parameters
    "gpt2": 124,
    "gpt2 gpt2-fp8": 124,
    "gpt2 gpt2-350m": 355,
    "gpt2 gpt2-774m": 774,
    "gpt2 gpt2-1558m": 1558,
    "gpt2 gpt2-toy toy": 1.1,
    "llama": 368,
    "llama llama-toy toy": 1.3,
    "bert": 113,
    "bert bert-toy toy": 1.1,
}
IMAGES = {  # millions of parameters, images in a step
    "deit-tiny": (5.7, 1024),
    "deit-tiny deit-small": (22, 1024),
    "deit-tiny deit-toy": (0.2, None),
}
VOCABULARY = {"gpt2": 50257, "t5-base": 32100, "bert-base-uncased": 30522}


@pytest.mark.parametrize("names", PRETRAIN)
def test_pretraining(names):
    """The model has the size that it is called by, and its MLPs become sparse by the method that the files name."""
    files = [str(RECIPES / "pretrain" / f"{name}.yaml") for name in names.split()]
    model_args, objective, data_args, sparse_args, _, training_args = parse_arguments(
        train.ARGUMENTS, [*files, "--use_cpu=true", "--bf16=false"]
    )
    config_class = CONFIG_MAPPING[model_args.model_type]
    vocabulary = VOCABULARY.get(model_args.tokenizer_name, 2048)
    config = config_class(**model_args.config_overrides, vocab_size=vocabulary, pad_token_id=0)
    with torch.device("meta"):
        auto = AutoModelForMaskedLM if objective.objective == "masked" else AutoModelForCausalLM
        model = auto.from_config(config)
    assert model.num_parameters() / 1e6 == pytest.approx(PRETRAIN[names], rel=0.06)
    assert data_args.block_size <= config.max_position_embeddings
    assert patch_model(model, sparse_args.make_config()).patched
    sequences = training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps * 8
    assert "toy" in names or sequences == (4096 if "bert" in names else 512)


@pytest.mark.parametrize("names", IMAGES)
def test_images(names):
    millions, examples = IMAGES[names]
    files = [str(RECIPES / "pretrain" / f"{name}.yaml") for name in names.split()]
    arguments = parse_arguments(image_classification.ARGUMENTS, [*files, "--use_cpu=true", "--bf16=false"])
    model_args, _, sparse_args, training_args = arguments
    fields = {"image_size": 8 if "toy" in names else 224, "num_labels": 10 if "toy" in names else 1000}
    config = CONFIG_MAPPING[model_args.model_type](**fields, **model_args.config_overrides)
    with torch.device("meta"):
        model = AutoModelForImageClassification.from_config(config)
    assert model.num_parameters() / 1e6 == pytest.approx(millions, rel=0.06)
    assert patch_model(model, sparse_args.make_config()).patched
    steps = training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps * 8
    assert examples is None or steps == examples


def test_every_file_is_used():
    assert {path.stem for path in (RECIPES / "pretrain").iterdir()} == {
        name for key in (*PRETRAIN, *IMAGES) for name in key.split()
    }
    assert {path.stem for path in (RECIPES / "finetune").iterdir()} == {
        f"{script}{size}" for script in ("glue", "sft", "lora") for size in ("", "-toy")
    }


def test_a_missing_package_is_an_error_with_the_command_that_helps(tmp_path, monkeypatch):
    message = r"needs absent_package: pip install -c constraints.txt -e '.\[recipes\]' in the root of the repository"
    with pytest.raises(ImportError, match=message):
        require("absent_package", "recipes")
    (tmp_path / "broken_package.py").write_text("import absent_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'absent_package'"):
        require("broken_package", "recipes")
    assert require("json", "recipes").loads("1") == 1
