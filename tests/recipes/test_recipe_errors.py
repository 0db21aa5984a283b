"""A recipe's errors in flags and toy data are one line that says what to do; other errors keep their traceback."""

import sys
from pathlib import Path

import pytest
import train
import yaml
import zoo
from arguments import TOY_DATA, SparseArguments, UsageError, check_toy_data, parse_arguments
from paths import RECIPES
from running import run, sparse_or_dense_trainer
from transformers import TrainingArguments


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "neither of model_name_or_path"),
        (["--method", "magic"], "method='magic': must be one of dense"),
        (["--sparse24", '{"pattern": "5:4"}'], "pattern='5:4'"),
        (["--stepz", "3"], "--stepz"),
    ],
)
def test_wrong_flags(flags, expected, capsys, monkeypatch):
    given = ["--model_name_or_path", "gpt2", "--dataset", "a.txt"] if flags[1:] and "gpt2" not in flags else []
    monkeypatch.setattr(sys, "argv", ["recipes/train.py", *given, *flags])
    with pytest.raises(SystemExit) as stopped:
        run(lambda: parse_arguments(train.ARGUMENTS))
    error = capsys.readouterr().err
    last = error.splitlines()[-1]
    assert (
        stopped.value.code == 2
        and last.startswith("train.py: error: ")
        and expected in last
        and "Traceback" not in error
    )


@pytest.mark.parametrize("method", [{"method": "step"}, {"method": "ste", "sparse24": {"dense_start": 1}}])
def test_a_run_without_a_sparse_step_is_refused(method, tmp_path):
    arguments = SparseArguments(**method), TrainingArguments(tmp_path, max_steps=1, use_cpu=True, report_to="none")
    with pytest.raises(UsageError, match="max_steps=1: total_steps=1 leaves no sparse step"):
        sparse_or_dense_trainer(arguments[0], model=zoo.build("llama"), args=arguments[1])


@pytest.mark.parametrize("bug", [lambda: int("x"), lambda: Path("/absent").read_text(), lambda: {}["x"]])
def test_other_errors_keep_their_traceback(bug):
    with pytest.raises((ValueError, FileNotFoundError, KeyError)):
        run(bug)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/*toy*.yaml")) + [RECIPES / "quickstart.yaml"], ids=str)
def test_paths_of_toy_settings_have_a_command(path):
    """Every path below runs/ that toy settings read is in the table, and the script that makes it exists."""
    values = {str(v) for k, v in yaml.safe_load(path.read_text()).items() if k != "output_dir"}
    for value in (value for value in values if value.startswith("runs/")):
        command = TOY_DATA["/".join(value.split("/")[:2])]
        script = command.removeprefix("python ").split()[0]
        assert command == "make demo" or (RECIPES.parent / script).is_file()


def test_missing_toy_data_names_its_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = [str(RECIPES / "quickstart.yaml")]
    with pytest.raises(UsageError, match=r"dataset='runs/stdlib_text/train.jsonl': not there; `python recipes"):
        check_toy_data(parse_arguments(train.ARGUMENTS, flags))
    for name in ("train.jsonl", "validation.jsonl", "tokenizer"):
        (tmp_path / "runs/stdlib_text" / name).mkdir(parents=True)
    check_toy_data(parse_arguments(train.ARGUMENTS, flags))
    with pytest.raises(UsageError, match="`make demo` makes it"):
        check_toy_data(parse_arguments(train.ARGUMENTS, [*flags, "--teacher", "./runs/quickstart"]))
    check_toy_data(parse_arguments(train.ARGUMENTS, [*flags, "--teacher", "runs/of-mine"]))
