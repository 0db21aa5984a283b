"""The flags of train.py, from YAML files and the command line, and the errors of wrong ones."""

import json

import pytest
import stdlib_text
import train
import yaml
from arguments import UsageError, parse_arguments, read_yaml
from recipe_runs import LLAMA, flags, jsonl
from text_data import DataArguments, load_text
from transformers import AutoTokenizer, PreTrainedTokenizerFast

pytestmark = pytest.mark.usefixtures("own_cache")


def test_yaml_and_flags_on_top(tmp_path, tokenizer, text_file):
    settings = {"dataset": text_file, "model_type": "llama", "config_overrides": LLAMA, "tokenizer_name": tokenizer}
    settings |= {"target_modules": "attention", "sparse24": {"weight_grad": "dense"}, "max_steps": 3, "use_cpu": True}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings) + "learning_rate: 1e-3\nbf16: false\ndataset_config: null\n")
    model_args, _, data_args, sparse_args, _, training_args = parse_arguments(
        train.ARGUMENTS, [str(path), "--max_steps", "7"]
    )
    assert (training_args.max_steps, training_args.learning_rate, training_args.bf16) == (7, 1e-3, False)
    assert model_args.config_overrides == LLAMA
    assert (data_args.dataset, data_args.dataset_config) == (text_file, None)
    assert sparse_args.make_config().target_modules == "attention"
    assert sparse_args.make_config().weight_grad == "dense"
    path.write_text(yaml.safe_dump(settings | {"target_modules": ["up_proj", "down_proj"]}))
    assert parse_arguments(train.ARGUMENTS, [str(path)])[3].make_config().target_modules == ["up_proj", "down_proj"]


def test_the_last_of_two_alternatives_wins(tmp_path):
    """Of a YAML file below another one, or below the command line; both in one place are an error."""
    split, file = tmp_path / "split.yaml", tmp_path / "file.yaml"
    split.write_text("dataset: a.txt\nvalidation_split: 0.1\n")
    file.write_text("dataset: a.txt\nvalidation_file: b.txt\n")

    def chosen(*argv):
        data = parse_arguments(train.ARGUMENTS, [*map(str, argv), "--model_type=llama", "--tokenizer_name=t"])[2]
        return data.validation_file, data.validation_split

    assert chosen(split, "--validation_file", "c.txt") == chosen(split, "--validation-file=c.txt") == ("c.txt", None)
    assert chosen(file, "--validation_split=0.2") == chosen(split, "--validation_split=0.2") == (None, "0.2")
    assert chosen(split, file) == ("b.txt", None) and chosen(file, split) == (None, "0.1")
    with pytest.raises(ValueError, match="both of validation_file and validation_split given"):
        chosen(split, "--validation_file=c.txt", "--validation_split=0.2")


@pytest.mark.parametrize("number", ["1e-4", "1E-4", "1.e-4", "0.1e-3", ".1e-3", "+1e-4", "1.0e-4", "0.0001"])
def test_numbers_of_a_yaml_file_are_numbers_at_every_depth(tmp_path, number):
    path = tmp_path / "config.yaml"
    path.write_text(f"sparse24:\n  masked_decay: {number}\n  list: [{number}, e4, 1e, 3]\n")
    assert read_yaml(str(path), train.ARGUMENTS) == {"sparse24": {"masked_decay": 1e-4, "list": [1e-4, "e4", "1e", 3]}}


def test_help_shows_the_flags_of_the_script(capsys):
    shown = {}
    for flag in ("-h", "--help", "--help-all"):
        with pytest.raises(SystemExit) as stopped:
            parse_arguments(train.ARGUMENTS, [flag])
        assert stopped.value.code == 0
        shown[flag] = capsys.readouterr().out
    assert shown["-h"] == shown["--help"] and len(shown["-h"].splitlines()) < 80
    assert all(flag in shown["-h"] for flag in ("--dataset", "--sparse24", "--objective", "--help-all"))
    assert "--neftune_noise_alpha" not in shown["-h"] and "--neftune_noise_alpha" in shown["--help-all"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_stepz: 3\n", r"unknown keys \['max_stepz'\]"),
        ("- a\n- b\n", "must be a mapping"),
        ("max_steps: [3\n", "config.yaml: not YAML"),
        ("max_steps: 3\n\tmodel: x\n", "config.yaml: not YAML"),
        ("[" * 9999, "config.yaml: not YAML"),
        ("max_steps: 2020-99-99\n", "config.yaml: not YAML"),
        ("max_steps: \xff\n", "config.yaml: not YAML"),
    ],
)
def test_wrong_yaml(tmp_path, content, message):
    path = tmp_path / "config.yaml"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(UsageError, match=message):
        parse_arguments(train.ARGUMENTS, [str(path)])
    with pytest.raises(ValueError, match="no such file"):
        parse_arguments(train.ARGUMENTS, [str(tmp_path / "absent.yaml")])


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"dataset": None}, ValueError, "dataset is missing"),
        ({"dataset": "absent.txt"}, ValueError, "absent.txt: no such file"),
        ({"text_column": "body"}, ValueError, r"text_column='body': .*train.txt has the columns \['text'\]"),
        ({"model_type": None, "config_overrides": None}, ValueError, "neither of model_name_or_path"),
        ({"model_type": "lama"}, ValueError, "model_type='lama': must be one of"),
        ({"overrides": {"hiden_size": 16}}, ValueError, r"\['hiden_size'\] are no fields of LlamaConfig"),
        ({"config_overrides": "{hidden_size: 16}"}, ValueError, "config_overrides=.*: not JSON"),
        ({"overrides": {**LLAMA, "vocab_size": 200}}, ValueError, "the tokenizer has 300 tokens, the model embeds 200"),
        ({"tokenizer_name": None}, ValueError, "model_type='llama' needs tokenizer_name"),
        ({"objective": "prefix"}, ValueError, "objective='prefix': must be one of causal, masked"),
        ({"dtype": "int8"}, ValueError, "dtype='int8': must be one of float32, bfloat16"),
        ({"distillation": '{"weight": 1}'}, ValueError, "distillation is for a teacher"),
        ({"distillation": '{"wait": 1}', "teacher": "t"}, ValueError, r"\['wait'\] are no fields of Distillation"),
        ({"method": "magic"}, ValueError, "method='magic': must be one of dense, ast, .*s-ste"),
        ({"sparse24": '{"patern": "2:4"}'}, ValueError, r"unknown keys in a Sparse24Config: \['patern'\]"),
        ({"block_size": 64}, ValueError, "sequences of 64 tokens: the model has 32 positions"),
        ({"validation_split": "1.5"}, ValueError, "validation_split='1.5': a fraction must be between 0 and 1"),
        ({"validation_split": 0.1, "streaming": True}, ValueError, "a stream has no length"),
        ({"validation_split": 0.1, "validation_file": "x.txt"}, ValueError, "both of validation_file"),
        ({"validation_split": 0.9999}, ValueError, "validation_split=0.9999: leaves nothing of"),
        ({"distributed": '{"tp": 2}'}, ValueError, r"distributed: \['tp'\] are no fields of DistributedConfig"),
    ],
)
def test_clear_errors(tmp_path, tokenizer, text_file, settings, error, message):
    settings = {"dataset": text_file, "tokenizer": tokenizer, **settings}
    if "tokenizer_name" in settings:
        settings["tokenizer"] = settings.pop("tokenizer_name")
    with pytest.raises(error, match=message):
        train.make_trainer(*parse_arguments(train.ARGUMENTS, flags(tmp_path, **settings)))


@pytest.mark.parametrize("streaming", [False, True])
def test_too_little_text(tmp_path, tokenizer, streaming):
    arguments = flags(tmp_path, jsonl(tmp_path / "t.jsonl", ["abc", *[""] * 20, "xy"]), tokenizer, streaming=streaming)
    with pytest.raises(ValueError, match="the text has 7 tokens, less than one block"):
        train.main(arguments)
    (tmp_path / "t.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"t\.jsonl: empty, there is no text in it"):
        train.main(arguments)


@pytest.mark.parametrize(
    ("missing", "objective", "message"),
    [("eos_token", "causal", "has no eos_token"), ("mask_token", "masked", "has no mask_token")],
)
def test_tokenizer_lacks_a_token(tmp_path, tokenizer, text_file, missing, objective, message):
    tokens = {name: token for name, token in stdlib_text.SPECIAL_TOKENS.items() if name != missing}
    tokenizer_object = AutoTokenizer.from_pretrained(tokenizer).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=tokenizer_object, **tokens).save_pretrained(tmp_path / "lacking")
    with pytest.raises(ValueError, match=message):
        train.main(flags(tmp_path, text_file, tmp_path / "lacking", objective=objective))


def test_a_named_split_of_local_files_is_the_file_of_that_name(tmp_path):
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")

    def read(source, split):
        return load_text(str(source), DataArguments(str(source)), split)["text"]

    assert (read(tmp_path, "train"), read(tmp_path, "validation")) == (["train"], ["validation"])
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.jsonl").write_text('{"text": "a"}\n')
    assert read(tmp_path / "one", "train") == ["a"]
    with pytest.raises(UsageError, match=r"split 'validation': .* has no file of that name; give a fraction"):
        read(tmp_path / "one", "validation")
