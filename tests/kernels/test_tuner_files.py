"""The tuner's files: shipped, cached, damaged, shared by two processes."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from sparse24_kernels import tuner
from sparse24_kernels.cusparselt import Algorithm
from sparse24_kernels.tuner import choose, reset, tune
from sparse24_kernels.tuner import records as tuner_records
from sparse24_kernels.tuner import table as tuner_table
from sparse24_kernels.tuner.records import Environment
from sparse24_kernels.tuner.table import Table
from tuner_stage import CPU, HERE, PROBLEM, measured, remember, user_file

pytestmark = pytest.mark.usefixtures("tuner_stage")


def test_shipped_tables_are_read_and_the_users_override():
    shipped = tuner_table.SHIPPED / HERE.file_name()
    shipped.parent.mkdir()
    remember(PROBLEM, measured(1, 50.0))
    small = PROBLEM._replace(n=1024)
    remember(small, measured(2, 50.0))
    os.replace(user_file(), shipped)
    assert [choose(problem, CPU).algorithm.id for problem in (PROBLEM, small)] == [1, 2]
    before = shipped.read_text()
    remember(PROBLEM, measured(3, 80.0))
    assert [choose(problem, CPU).algorithm.id for problem in (PROBLEM, small)] == [3, 2]
    assert shipped.read_text() == before
    assert list(json.loads(user_file().read_text())["entries"][0].values())[:3] == [64, 4096, 128]
    assert len(json.loads(user_file().read_text())["entries"]) == 1  # what is shipped is not copied


def test_the_files_that_are_shipped():
    folder = Path(tuner_table.__file__).parent / "tables"
    rules = tuner_records.parse_rules(json.loads((folder / "deny.json").read_text()))
    assert all(rule.reason and rule.source for rule in rules)
    for path in folder.glob("*.json"):
        if path.name != "deny.json":
            data = json.loads(path.read_text())
            environment = Environment(**data["environment"])
            assert path.name == environment.file_name()
            assert tuner_records.parse_table(data, environment)


def edited(**changes):
    return lambda text: json.dumps(json.loads(text) | changes)


def edited_entry(**changes):
    def edit(text):
        data = json.loads(text)
        data["entries"][0] |= changes
        return json.dumps(data)

    return edit


def edited_candidate(**changes):
    def edit(text):
        data = json.loads(text)
        data["entries"][0]["candidates"][0] |= changes
        return json.dumps(data)

    return edit


NONSENSE = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "no JSON": lambda text: "hello",
    "binary": lambda text: "\x00\udcff\udcfe",
    "a list": lambda text: "[]",
    "nested": lambda text: "[" * 100_000,
    "a number of 10000 digits": lambda text: text.replace("50.0", "9" * 10000),
    "a time beyond floats": lambda text: text.replace("50.0", "9" * 1000),
    "other format": edited(format=2),
    "format 1.0": edited(format=1.0),
    "format true": edited(format=True),
    "no entries": edited(entries=None),
    "entries of numbers": edited(entries=[1]),
    "failures of strings": edited(failures=["x"]),
    "another environment": edited(environment=HERE._replace(cusparselt="701")._asdict()),
    "text for m": edited_entry(m="64"),
    "negative n": edited_entry(n=-1),
    "unknown dtype": edited_entry(dtype="float7"),
    "dtype of no string": edited_entry(dtype=["bfloat16"]),
    "0 for false": edited_entry(transposed=0),
    "candidates of text": edited_entry(candidates="ab"),
    "zero time": edited_candidate(sparse_us=0.0),
    "negative time": edited_candidate(dense_us=-5.0),
    "infinite time": edited_candidate(dense_us=float("inf")),
    "nan": edited_candidate(sparse_us=float("nan")),
    "id of text": edited_candidate(id="1"),
    "id true": edited_candidate(id=True),
    "negative id": edited_candidate(id=-3),
    "split_k 10^9": edited_candidate(split_k=10**9),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_nonsense_is_ignored_with_one_warning_and_overwritten(nonsense):
    path = remember(PROBLEM, measured(1, 50.0))
    path.write_bytes(NONSENSE[nonsense](path.read_text()).encode(errors="surrogateescape"))
    with pytest.warns(UserWarning, match="is ignored") as caught:
        assert choose(PROBLEM, CPU).reason == tuner.NOT_TUNED
        table = tuner._table(HERE)
        table.add(PROBLEM, (measured(2, 50.0),))
        table.save()
    assert len(caught) == 1 and str(path) in str(caught[0].message)
    reset()
    assert choose(PROBLEM, CPU).algorithm.id == 2


def test_a_directory_in_the_files_place_and_a_folder_that_cannot_be_made(stand_in, monkeypatch, tmp_path):
    user_file().mkdir(parents=True)
    with pytest.warns(UserWarning, match="is ignored"):
        assert choose(PROBLEM, CPU).backend == "dense"
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARSE24_CACHE", str(tmp_path / "file" / "cache"))  # unwritable, even for root
    reset()
    with pytest.warns(UserWarning, match="tuner: .*file") as caught:
        verdicts = tune([PROBLEM, PROBLEM._replace(m=128)], CPU, worker=stand_in(_0=50).command)
    assert len(caught) <= 2
    assert [verdict.algorithm for verdict in verdicts.values()] == [Algorithm(0)] * 2
    assert choose(PROBLEM, CPU).backend == "cusparselt"  # of this process's memory


def test_a_save_that_fails_leaves_the_old_file(monkeypatch):
    path = remember(PROBLEM, measured(1, 50.0))
    before = path.read_text()
    monkeypatch.setattr(tuner_table.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.warns(UserWarning, match=r"cannot be written \(disk full\)"):
        remember(PROBLEM, measured(2, 50.0))
    assert path.read_text() == before
    assert {file.name for file in path.parent.iterdir()} == {path.name, path.with_suffix(".lock").name}


def test_cache_directory(monkeypatch):
    monkeypatch.delenv("SPARSE24_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert tuner_table.user_directory() == Path("/xdg/sparse24")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somebody")
    assert tuner_table.user_directory() == Path("/somebody/.cache/sparse24")


def test_two_processes_that_save_at_once_lose_nothing():
    code = textwrap.dedent(
        f"""
        import sys, torch
        from sparse24_kernels.tuner.table import *
        from sparse24_kernels.tuner.records import *
        from sparse24_kernels.cusparselt import Algorithm, Problem
        table, own = Table(Environment(*{tuple(HERE)!r})), int(sys.argv[1])
        print("ready", flush=True)
        sys.stdin.read(1)
        for i in range(12):
            problem = Problem(16 + 16 * own, 16 + 16 * i, 64, torch.bfloat16, True, True)
            table.add(problem, (Measured(Algorithm(i), 1.0, 2.0),))
            table.fail(problem, Algorithm(i, 2 + own), "hung")
            table.save()
        """
    )
    variables = os.environ | {"PYTHONPATH": str(Path(tuner.__file__).parents[2])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": variables}
    savers = [subprocess.Popen([sys.executable, "-c", code, str(i)], **pipes) for i in range(2)]
    for saver in savers:
        assert saver.stdout.readline() == b"ready\n"
    for saver in savers:
        saver.stdin.close()
    while any(saver.poll() is None for saver in savers):  # a reader sees a whole file at any time
        Table(HERE)
        time.sleep(0.01)
    for saver in savers:
        saver.stdout.close()
    assert [saver.returncode for saver in savers] == [0, 0]
    table = Table(HERE)
    assert len(table.entries) == len(table.failures) == 24
