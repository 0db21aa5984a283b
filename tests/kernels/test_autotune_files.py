"""The files of autotuning: where they are, what they hold, and that damaged ones count as absent."""

import json
import pwd
from pathlib import Path

import pytest
from autotune_stage import CPU, HERE, PROBLEM, measured, remember, tune
from sparse24_kernels import cache_folder
from sparse24_kernels.gemm import autotune
from sparse24_kernels.gemm.autotune import choose, reset
from sparse24_kernels.gemm.autotune import table as autotune_table
from sparse24_kernels.gemm.problem import Algorithm

pytestmark = pytest.mark.usefixtures("autotune_stage")


def test_a_file_holds_what_was_measured():
    path = remember(PROBLEM, measured(3, 80.0))
    ((problem, (candidates, _)),) = json.loads(path.read_text())["entries"]
    assert problem == [64, 4096, 128, "bfloat16", True, True] and candidates == [[[3, 1], 80.0, 100.0]]


def edited(**changes):
    return lambda text: json.dumps(json.loads(text) | changes)


UNREADABLE = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "no JSON": lambda text: "hello",
    "binary": lambda text: "\x00\udcff\udcfe",
    "a list": lambda text: "[]",
    "nested": lambda text: "[" * 100_000,
    "a number of 10000 digits": lambda text: text.replace("50.0", "9" * 10000),
    "a time beyond floats": lambda text: text.replace("50.0", "1" + "0" * 1000),
    "a time that is text": lambda text: text.replace("50.0", '"fast"'),
    "older format": edited(format=3),
    "newer format": edited(format=5),
    "no entries": edited(entries=None),
    "a bad entry": edited(entries=[1]),
    "an unknown dtype": lambda text: text.replace("bfloat16", "float7"),
}


@pytest.mark.parametrize("damage", UNREADABLE)
def test_a_file_that_cannot_be_read_counts_as_absent_with_a_warning(damage, stand_in):
    path = remember(PROBLEM, measured(1, 50.0))
    original = UNREADABLE[damage](path.read_text()).encode(errors="surrogateescape")
    path.write_bytes(original)
    with pytest.warns(UserWarning, match=r"earlier measurements cannot be read .*all counts as not tuned") as caught:
        assert choose(PROBLEM, CPU).reason == autotune.NOT_TUNED
    assert len(caught) == 1 and path.read_bytes() == original  # reading changes nothing
    with pytest.warns(UserWarning, match="cannot be read"):
        remember(PROBLEM, measured(2, 50.0))
    assert choose(PROBLEM, CPU).algorithm.id == 2


def test_a_link_in_the_place_of_the_file_keeps_its_target(tmp_path):
    path = remember(PROBLEM, measured(1, 50.0))
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    before = path.read_text()
    remember(PROBLEM, measured(2, 50.0))
    assert (tmp_path / "elsewhere.json").read_text() == before
    assert choose(PROBLEM, CPU).algorithm.id == 2


def test_what_another_process_saves_meanwhile_stays(stand_in):
    other = PROBLEM._replace(m=128)
    assert choose(PROBLEM, CPU).reason == autotune.NOT_TUNED  # the file was read
    autotune_table.write(HERE, {other: autotune_table.Entry((measured(7, 50.0),))})
    tune([PROBLEM], CPU, worker=stand_in(_0=50, max_id=0).command)
    assert set(autotune_table.read(HERE)) == {PROBLEM, other}
    reset()
    assert choose(other, CPU).algorithm.id == 7


def test_a_directory_in_the_files_place_and_a_folder_that_cannot_be_made(stand_in, monkeypatch, tmp_path):
    HERE.path().mkdir(parents=True)
    with pytest.warns(UserWarning, match="cannot be read .*all counts as not tuned"):
        assert choose(PROBLEM, CPU).backend == "dense"
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARSE24_CACHE", str(tmp_path / "file" / "cache"))  # unwritable, even for root
    reset()
    with pytest.raises(OSError, match="file"):
        tune([PROBLEM], CPU, worker=stand_in(_0=50, max_id=0).command)


def test_a_save_that_fails_leaves_the_old_file(monkeypatch):
    path = remember(PROBLEM, measured(1, 50.0))
    before = path.read_text()
    monkeypatch.setattr(cache_folder.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        remember(PROBLEM, measured(2, 50.0))
    assert path.read_text() == before and choose(PROBLEM, CPU).algorithm == Algorithm(1)


def test_cache_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.setenv("SPARSE24_CACHE", "~/own")
    assert HERE.path().parent == Path("/somebody/own")
    monkeypatch.delenv("SPARSE24_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert HERE.path().parent == Path("/xdg/sparse24")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert HERE.path().parent == Path("/somebody/.cache/sparse24")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert HERE.path().parent == Path("/somebody/.cache/sparse24")


@pytest.mark.parametrize("own", [None, "~/cache", "~no-such-user/cache"])
def test_without_a_home_directory_nothing_is_tuned_and_a_warning_says_so(own, monkeypatch, tmp_path):
    if own:
        monkeypatch.setenv("SPARSE24_CACHE", own)
    else:
        monkeypatch.delenv("SPARSE24_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: (_ for _ in ()).throw(KeyError()))
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="cannot be read .*home directory"):
        assert choose(PROBLEM, CPU).reason == autotune.NOT_TUNED
    assert not list(tmp_path.iterdir())
