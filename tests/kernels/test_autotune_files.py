"""The files of autotuning: cached, damaged, shared by two processes."""

import json
import os
import pwd
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from autotune_stage import CPU, HERE, PROBLEM, measured, remember, tune, user_file
from sparse24_kernels import Algorithm
from sparse24_kernels.gemm import autotune
from sparse24_kernels.gemm.autotune import choose, reset
from sparse24_kernels.gemm.autotune import table as autotune_table
from sparse24_kernels.gemm.autotune.table import Table

pytestmark = pytest.mark.usefixtures("autotune_stage")


def test_a_file_holds_what_was_measured():
    path = remember(PROBLEM, measured(3, 80.0))
    (entry,) = json.loads(path.read_text())["entries"]
    assert list(entry.values())[:3] == [64, 4096, 128]


def edited(**changes):
    return lambda text: json.dumps(json.loads(text) | changes)


NO_TABLE = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "no JSON": lambda text: "hello",
    "binary": lambda text: "\x00\udcff\udcfe",
    "a list": lambda text: "[]",
    "nested": lambda text: "[" * 100_000,
    "a number of 10000 digits": lambda text: text.replace("50.0", "9" * 10000),
    "older format": edited(format=1),
    "newer format": edited(format=3),
    "format 2.0": edited(format=2.0),
    "format true": edited(format=True),
    "no entries": edited(entries=None),
    "another environment": edited(environment=HERE._replace(cusparselt="701")._asdict()),
}


@pytest.mark.parametrize("nonsense", NO_TABLE)
def test_a_file_that_is_no_table_is_kept_aside_with_one_warning(nonsense):
    path = remember(PROBLEM, measured(1, 50.0))
    original = NO_TABLE[nonsense](path.read_text()).encode(errors="surrogateescape")
    path.write_bytes(original)
    with pytest.warns(UserWarning, match="is not read: .*; it is kept as") as caught:
        assert choose(PROBLEM, CPU).reason == autotune.NOT_TUNED
        assert path.read_bytes() == original  # reading changes nothing
        table = autotune._table(HERE)
        table.add(PROBLEM, (measured(2, 50.0),))
        table.save()
    (aside,) = path.parent.glob("*.unreadable-*")
    assert len(caught) == 1 and str(path) in str(caught[0].message) and aside.name in str(caught[0].message)
    assert aside.read_bytes() == original
    reset()
    assert choose(PROBLEM, CPU).algorithm.id == 2


BAD_ENTRIES = {
    "a number": lambda entry: 1,
    "text for m": lambda entry: entry | {"m": "64"},
    "negative n": lambda entry: entry | {"n": -1},
    "unknown dtype": lambda entry: entry | {"dtype": "float7"},
    "dtype of no string": lambda entry: entry | {"dtype": ["bfloat16"]},
    "0 for false": lambda entry: entry | {"transposed": 0},
    "candidates of text": lambda entry: entry | {"candidates": "ab"},
    "lists in lists": lambda entry: entry | {"candidates": json.loads("[" * 300 + "]" * 300)},
}
BAD_CANDIDATES = {
    "zero time": {"sparse_us": 0.0},
    "negative time": {"dense_us": -5.0},
    "infinite time": {"dense_us": float("inf")},
    "nan": {"sparse_us": float("nan")},
    "a time beyond floats": {"sparse_us": 10**1000},
    "id of text": {"id": "1"},
    "id true": {"id": True},
    "negative id": {"id": -3},
    "split_k 10^9": {"split_k": 10**9},
}
BAD_ENTRIES |= {
    name: lambda entry, change=change: entry | {"candidates": [entry["candidates"][0] | change]}
    for name, change in BAD_CANDIDATES.items()
}


@pytest.mark.parametrize("bad", BAD_ENTRIES)
def test_a_bad_record_costs_no_other(bad):
    other, third = PROBLEM._replace(m=128), PROBLEM._replace(m=256)
    table = Table(HERE)
    table.add(PROBLEM, (measured(1, 50.0),))
    table.add(other, (measured(2, 50.0),))
    table.fail(third, Algorithm(5), "hung")
    table.save()
    data = json.loads(user_file().read_text())
    data["entries"][0] = BAD_ENTRIES[bad](data["entries"][0])
    bad_failure = data["failures"][0] | {"dtype": "float4"}  # a later version's
    data["failures"].insert(0, bad_failure)
    user_file().write_text(json.dumps(data | {"comment": "by hand"}))
    with pytest.warns(UserWarning, match="records that cannot be read are left as they are, 2 of them") as caught:
        assert choose(PROBLEM, CPU).reason == autotune.NOT_TUNED
        assert choose(other, CPU).algorithm == Algorithm(2)
        remember(third, measured(3, 50.0), measured(5, 10.0))
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="2 of them"):
        assert [choose(problem, CPU).algorithm for problem in (other, third)] == [Algorithm(2), Algorithm(3)]
    kept = json.loads(user_file().read_text())
    assert str(data["entries"][0]) in str(kept["entries"]) and kept["comment"] == "by hand"
    assert kept["failures"] == data["failures"] and not list(user_file().parent.glob("*.unreadable-*"))


def test_what_can_be_read_and_is_nested_too_deeply_to_be_written_is_kept_aside():
    path = remember(PROBLEM, measured(1, 50.0))
    original = path.read_text().replace("50.0", "[" * 980 + "]" * 980)
    path.write_text(original)
    with pytest.warns(UserWarning, match="is not read: RecursionError: maximum recursion depth"):
        remember(PROBLEM, measured(2, 50.0))
    assert [aside.read_text() for aside in path.parent.glob("*.unreadable-*")] == [original]
    assert choose(PROBLEM, CPU).algorithm.id == 2


DAMAGE = {
    "truncated": lambda text: text.rstrip()[:-3],
    "without its beginning": lambda text: text[text.index("entries") :],
    "a number of 10000 digits": lambda text: text.replace("50.0", "9" * 10000),
    "nested too deeply to be read": lambda text: text.replace("50.0", "[" * 10_000),
    "nested too deeply to be written": lambda text: text.replace("50.0", "[" * 980 + "]" * 980),
    "no text": lambda text: text.replace("50.0", "\udcff"),
    "no environment": edited(environment="here"),
    "entries of text": edited(entries="ab"),
    "failures under another name": lambda text: text.replace("failures", "failure"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_failure_is_remembered_though_its_file_is_damaged(damage):
    table, reason = Table(HERE), 'wrong: {"a": [1]} }{'
    table.add(PROBLEM, (measured(1, 50.0),))
    table.fail(PROBLEM, Algorithm(5), reason)
    table.save()
    user_file().write_bytes(DAMAGE[damage](user_file().read_text()).encode(errors="surrogateescape"))
    autotune.reset()
    with pytest.warns(UserWarning, match="is not read, apart from 1 failed algorithms: "):
        assert Table(HERE).unusable(PROBLEM, Algorithm(5)) == reason
        remember(PROBLEM, measured(5, 10.0), measured(2, 50.0))
    assert choose(PROBLEM, CPU).algorithm == Algorithm(2)
    assert Table(HERE).unusable(PROBLEM, Algorithm(5)) == reason


@pytest.mark.parametrize("change", [{"format": 3}, {"entries": [1]}])
def test_a_failure_is_remembered_whatever_else_is_in_its_file(change):
    table = Table(HERE)
    table.fail(PROBLEM, Algorithm(5), "hung")
    table.save()
    data = json.loads(user_file().read_text()) | change
    data["failures"].append({"algorithm": "of a later version"})
    user_file().write_text(json.dumps(data))
    with pytest.warns(UserWarning):
        assert Table(HERE).unusable(PROBLEM, Algorithm(5)) == "hung"
        remember(PROBLEM, measured(5, 10.0), measured(2, 50.0))
        assert choose(PROBLEM, CPU).algorithm == Algorithm(2)
    assert json.loads(user_file().read_text())["failures"] == data["failures"]


def test_a_file_that_must_not_be_read_is_not_replaced(monkeypatch):
    path = remember(PROBLEM, measured(1, 50.0))
    before, read_bytes = path.read_bytes(), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda _: (_ for _ in ()).throw(PermissionError("not yours")))
    with pytest.warns(UserWarning) as caught:
        remember(PROBLEM, measured(2, 50.0))
    assert ["not yours" in str(warning.message) for warning in caught] == [True, True]
    assert read_bytes(path) == before


def test_links_in_the_places_of_lock_and_file_keep_their_targets(tmp_path):
    target = tmp_path / "precious"
    target.write_text("precious")
    user_file().parent.mkdir()
    user_file().with_suffix(".lock").symlink_to(target)
    with pytest.warns(UserWarning, match=r"\.lock cannot be locked \(.*of two processes that save at once"):
        path = remember(PROBLEM, measured(1, 50.0))
    assert target.read_text() == "precious"
    path.with_suffix(".lock").unlink()
    path.with_suffix(".lock").hardlink_to(target)
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    before = path.read_text()
    remember(PROBLEM, measured(2, 50.0))
    assert target.read_text() == "precious" and (tmp_path / "elsewhere.json").read_text() == before
    assert choose(PROBLEM, CPU).algorithm.id == 2


def test_a_directory_in_the_files_place_and_a_folder_that_cannot_be_made(stand_in, monkeypatch, tmp_path):
    user_file().mkdir(parents=True)
    with pytest.warns(UserWarning, match="cannot be read .*all counts as not tuned"):
        assert choose(PROBLEM, CPU).backend == "dense"
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARSE24_CACHE", str(tmp_path / "file" / "cache"))  # unwritable, even for root
    reset()
    with pytest.warns(UserWarning, match="autotune: .*file") as caught:
        verdicts = tune([PROBLEM, PROBLEM._replace(m=128)], CPU, worker=stand_in(_0=50).command)
    assert len(caught) <= 2
    assert [verdict.algorithm for verdict in verdicts.values()] == [Algorithm(0)] * 2
    assert choose(PROBLEM, CPU).backend == "cusparselt"  # of this process's memory


def test_a_save_that_fails_leaves_the_old_file(monkeypatch):
    path = remember(PROBLEM, measured(1, 50.0))
    before = path.read_text()
    monkeypatch.setattr(autotune_table.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.warns(UserWarning, match=r"cannot be saved \(disk full\): they are lost when"):
        remember(PROBLEM, measured(2, 50.0))
    assert path.read_text() == before
    assert {file.name for file in path.parent.iterdir()} == {path.name, path.with_suffix(".lock").name}


def test_cache_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.setenv("SPARSE24_CACHE", "~/own")
    assert autotune_table.user_directory() == Path("/somebody/own")
    monkeypatch.delenv("SPARSE24_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert autotune_table.user_directory() == Path("/xdg/sparse24")
    for unset in ("relative", "~/cache", ""):  # by the XDG specification
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert autotune_table.user_directory() == Path("/somebody/.cache/sparse24")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert autotune_table.user_directory() == Path("/somebody/.cache/sparse24")


@pytest.mark.parametrize("own", [None, "~/cache", "~no-such-user/cache"])
def test_without_a_home_directory_measurements_stay_in_memory_and_a_warning_says_so(own, monkeypatch, tmp_path):
    if own:
        monkeypatch.setenv("SPARSE24_CACHE", own)
    else:
        monkeypatch.delenv("SPARSE24_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: (_ for _ in ()).throw(KeyError()))
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="no home directory for ~.*: set SPARSE24_CACHE to a directory") as caught:
        table = autotune._table(HERE)
        table.add(PROBLEM, (measured(2, 50.0),))
        table.save()
        table.save()
    assert len(caught) == 2 and "lost when this process ends" in str(caught[1].message)
    assert choose(PROBLEM, CPU).algorithm.id == 2 and not list(tmp_path.iterdir())


def test_two_processes_that_save_at_once_lose_nothing():
    code = textwrap.dedent(
        f"""
        import sys, torch
        from sparse24_kernels.gemm.autotune.table import *
        from sparse24_kernels.gemm.autotune.records import *
        from sparse24_kernels import Algorithm, GemmProblem
        table, own = Table(Environment(*{tuple(HERE)!r})), int(sys.argv[1])
        print("ready", flush=True)
        sys.stdin.read(1)
        for i in range(12):
            problem = GemmProblem(16 + 16 * own, 16 + 16 * i, 64, torch.bfloat16, True, True)
            table.add(problem, (Measured(Algorithm(i), 1.0, 2.0),))
            table.fail(problem, Algorithm(i, 2 + own), "hung")
            table.save()
        """
    )
    variables = os.environ | {"PYTHONPATH": str(Path(autotune.__file__).parents[3])}
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
