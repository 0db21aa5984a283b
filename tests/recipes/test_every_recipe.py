"""What recipes for tasks do alike: they resume, refuse wrong flags, and have settings of full and of toy size."""

import importlib
import json

import pytest
import torch
from arguments import parse_arguments
from paths import RECIPES
from recipe_runs import TOYS, toy_flags
from task_runs import flags, text_flags
from transformers import TrainingArguments

pytestmark = [
    # TRL and PEFT still use names of Transformers 4 that Transformers 5 is renaming.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.usefixtures("metrics_cache"),
]

pytest.importorskip("peft")
pytest.importorskip("trl")

ON_TEXT = ("sft", "lora")
DATA = {"glue": "tasks", "image_classification": "digits"}
OWN = {
    "glue": {"max_samples": 64},
    # Without random crops: which of them a resumed run draws depends on what was read ahead.
    "image_classification": {"max_samples": 64, "smallest_crop": 1, "mixup": 0, "cutmix": 0},
    "sft": {"max_length": 96, "max_samples": 16, "gradient_checkpointing": False},
}


def main(name, flags):
    return importlib.import_module(name).main(flags)


@pytest.fixture
def make_flags(request, tmp_path, models):
    """The flags of a tiny run of a recipe, from a 2:4 model where it needs one."""

    def make(name, base=None, **settings):
        if name in TOYS:
            return toy_flags(name, request.getfixturevalue(DATA[name]), tmp_path / "out", **settings)
        base, method = models / (base or "sparse"), {"method": "s-ste"}
        if name == "sft":
            chats = request.getfixturevalue("chats") / "instructions"
            return flags(tmp_path, base, **{"dataset": chats, **OWN["sft"], **method, **settings})
        return text_flags(tmp_path, base, **method | settings)

    return make


@pytest.mark.parametrize("name", [*TOYS, "train", *ON_TEXT])
def test_a_run_resumes_bit_for_bit_and_a_second_one_is_refused(name, make_flags, tmp_path):
    settings = {**OWN.get(name, {}), "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "max_steps": 4}
    whole = main(name, make_flags(name, **settings))
    with pytest.raises(ValueError, match="holds checkpoint-4 of an earlier run; --resume_from_checkpoint true goes on"):
        main(name, make_flags(name, **settings))
    checkpoint = tmp_path / "out" / "checkpoint-2"
    written = (checkpoint / "trainer_state.json").stat().st_mtime_ns
    (tmp_path / "out" / "checkpoint-4").rename(tmp_path / "elsewhere")
    resume = checkpoint if name in ON_TEXT else "true"
    resumed = main(name, make_flags(name, **settings, resume_from_checkpoint=resume))
    assert resumed.state.global_step == 4
    assert (checkpoint / "trainer_state.json").stat().st_mtime_ns == written, "it began again"
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("glue", {"task": "sst3"}, "task='sst3': must be one of cola, sst2"),
        ("image_classification", {"smallest_crop": 0}, "smallest_crop=0.0: must be above 0"),
        ("image_classification", {"mixup": -1}, "mixup=-1.0: must be at least 0"),
        ("image_classification", {"validation_split": "dev"}, "has no split 'dev'"),
        ("image_classification", {"image_column": "img"}, r"lacks the columns \['img'\]"),
        ("image_classification", {"config_overrides": '{"hiden_size": 4}'}, r"\['hiden_size'\] are no fields"),
        ("image_classification", {"model_type": "vitt"}, "model_type='vitt': must be one of"),
        ("lora", {"lora_r": 0}, "lora_r=0: must be at least 1"),
        ("lora", {"lora_dropout": 1.0}, r"lora_dropout=1.0: must be in \[0, 1\)"),
        ("lora", {"export_format": "gguf"}, "export_format='gguf': must be one of dense, packed"),
        ("lora", {"method": "fixed-mask"}, "already patched with another config"),
        ("lora", {"method": "fixed-mask", "base": "dense"}, r"3 of 3 weights .* are dense, .*hf-sparse24 prune"),
        ("sft", {"method": "fixed-mask", "base": "dense", "lora": True}, r"3 of 3 weights .* are dense"),
        ("sft", {"dataset": None}, "dataset is missing"),
    ],
)
def test_wrong_flags(name, settings, message, make_flags):
    with pytest.raises(ValueError, match=message):
        main(name, make_flags(name, **settings))


@pytest.mark.parametrize(
    ("name", "settings", "row", "message"),
    [
        ("glue", {"task": "qqp"}, {"text": "a"}, r"task='qqp': .* lacks the columns \['label', 'question1'"),
        ("sft", {}, {"question": "1 + 1", "answer": "2"}, r"\['answer', 'question'\]; SFT needs messages, or prompt"),
    ],
)
def test_data_without_what_the_recipe_needs(name, settings, row, message, make_flags, tmp_path):
    (tmp_path / "data").mkdir()
    card = {"configs": [{"config_name": settings.get("task", "default"), "data_files": "train.jsonl"}]}
    (tmp_path / "data" / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
    (tmp_path / "data" / "train.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=message):
        main(name, make_flags(name, **settings, dataset=tmp_path / "data"))


@pytest.mark.parametrize("name", ON_TEXT)
def test_full_size_and_toy_settings(name):
    """The scripts know every key; the toy settings on top of the others ask for nothing that a CPU lacks."""
    full, toy = (str(RECIPES / "finetune" / f"{name}{suffix}.yaml") for suffix in ("", "-toy"))
    classes = importlib.import_module(name).ARGUMENTS
    *_, training_args = parse_arguments(classes, [full, "--bf16", "false", "--use_cpu", "true"])
    assert training_args.output_dir == f"runs/{name}"
    *_, training_args = parse_arguments(classes, [full, toy])
    assert training_args.use_cpu and not training_args.bf16 and training_args.max_steps > 0
    assert isinstance(training_args, TrainingArguments) and training_args.output_dir == f"runs/{name}-toy"
