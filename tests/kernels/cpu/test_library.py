"""How the kernels for CPUs get there: compiled once and kept, or a reason why there are none. The compiler is a script
that hands out the library which these tests compiled first."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from paths import ROOT
from sparse24_kernels.cpu import build, library

WAY_OUT = "$SPARSE24_CACHE names another folder to keep them in"
COMPILER = """#!/bin/sh
echo "$@" >> {log}
for last; do :; done
while [ "$1" != -o ]; do test "$1" = -shared && linked={library}; shift; done
cp "${{linked:-/dev/null}}" "$2"
"""


@pytest.fixture(scope="module")
def real():
    """The file of the library, compiled where it is kept for good."""
    loaded = library.load()
    if isinstance(loaded, str):
        pytest.skip(loaded)
    return loaded.functions._name


@pytest.fixture
def cache(tmp_path, monkeypatch, real):
    """An empty cache folder."""
    monkeypatch.setenv("SPARSE24_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiler(tmp_path, monkeypatch, cache, real):
    """A stand-in for the compiler. What it was called with is in its log."""
    script, log = tmp_path / "compiler", tmp_path / "log"
    script.write_text(COMPILER.format(log=log, library=real))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    log.touch()
    return log


def load():
    return library.load.__wrapped__()


def links(log: Path) -> int:
    return sum("-shared" in line for line in log.read_text().splitlines())


def test_it_is_compiled_once_and_found_again(compiler, cache, caplog):
    assert isinstance(load(), library.Library) and isinstance(load(), library.Library)
    assert [record.getMessage() for record in caplog.records] == [
        "compiling the kernels for this CPU, once: some ten seconds"
    ]
    assert len(compiler.read_text().splitlines()) == len(build.units()) + 1
    (file,) = cache.glob("*.so")
    assert file.stem.startswith(f"native-{build.fingerprint()}-") and not list(cache.glob(".build*"))


@pytest.mark.parametrize("keep", [0, 1000, -100])
def test_a_damaged_library_is_compiled_again(compiler, cache, keep):
    load()
    (file,) = cache.glob("*.so")
    whole = file.read_bytes()
    file.unlink()  # this process has it in memory
    file.write_bytes(whole[:keep] if keep >= 0 else whole[:keep] + bytes(-keep))
    assert isinstance(load(), library.Library) and links(compiler) == 2
    assert [found.read_bytes() for found in cache.glob("*.so")] == [whole]


def test_those_that_start_together_compile_once(compiler):
    """Threads, or processes: each opens the lock's file itself."""
    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert links(compiler) == 1


@pytest.mark.slow
def test_what_was_interrupted_leaves_nothing_broken(compiler, cache):
    script = Path(os.environ["CXX"])
    usual = script.read_text()
    script.write_text("#!/bin/sh\necho started\nexec sleep 60\n")
    code = "from sparse24_kernels.cpu.library import load; load()"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "kernels")}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True, stderr=-3)
    while not list(cache.glob(".build-*")):
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(120) != 0
    script.write_text(usual)
    assert not list(cache.glob(".build-*")) and not list(cache.glob("*.so"))
    assert isinstance(load(), library.Library)


def test_the_one_in_the_wheel_comes_first(compiler, cache, real, tmp_path, monkeypatch):
    """And what it was made from stands in its name: sources that changed since are compiled."""
    shipped = tmp_path / f"native-{build.fingerprint()}.so"
    shipped.write_bytes(Path(real).read_bytes())
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    assert load().functions._name == str(shipped) and not links(compiler) and not cache.exists()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    assert load().functions._name != str(shipped) and links(compiler) == 1


def test_one_in_the_wheel_that_does_not_load_is_compiled(compiler, tmp_path, monkeypatch):
    (tmp_path / f"native-{build.fingerprint()}.so").write_bytes(b"made for another system")
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    assert isinstance(load(), library.Library) and links(compiler) == 1


def test_no_compiler(cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    reason = "no kernels for this CPU: no C++ compiler is installed: install g++ or clang++, or name one in $CXX"
    assert load() == reason and not cache.exists()
    monkeypatch.setenv("CXX", "/nowhere/g++ -m64")
    assert load() == "no kernels for this CPU: CXX='/nowhere/g++ -m64' is not installed"
    monkeypatch.setattr(sys, "platform", "win32")
    assert load() == "no kernels for this CPU: they compile on Linux and macOS, not on win32"


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo 'x.cpp:1: error: what is __m512bh?' >&2; exit 1", "x.cpp:1: error: what is __m512bh?"),
        ("exit 1", "no message"),
    ],
)
def test_a_compiler_that_does_not_compile_them(compiler, cache, script, error):
    Path(os.environ["CXX"]).write_text(f"#!/bin/sh\n{script}\n")
    expected = f"no kernels for this CPU: {os.environ['CXX']} does not compile them, GCC 11 or Clang 12 do: {error}"
    assert load() == expected and not list(cache.glob("*.so"))


def test_a_folder_that_cannot_be_written_or_is_not_there(compiler, cache, monkeypatch):
    cache.write_text("a file")  # where a folder is wanted: root may write anywhere
    assert load().startswith("no kernels for this CPU: ") and load().endswith(
        "$SPARSE24_CACHE names another folder to keep them in"
    )
    monkeypatch.delenv("SPARSE24_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no HOME, and an unknown user
    assert load() == f"no kernels for this CPU: Could not determine home directory.; {WAY_OUT}"


def test_a_library_that_does_not_load_is_told(compiler, cache):
    """As from a compiler for another machine, or a file system that is mounted noexec."""
    script = Path(os.environ["CXX"])
    script.write_text(script.read_text().replace("linked=", "unused="))
    for _ in range(2):
        assert "does not load" in load() and "delete it" in load() and links(compiler) == 1


def test_what_a_killed_process_left_is_removed(compiler, cache):
    (cache / ".build-left" / "objects").mkdir(parents=True)
    assert isinstance(load(), library.Library) and not list(cache.glob(".build*"))


def test_the_switch(compiler, monkeypatch):
    monkeypatch.setenv("SPARSE24_CPU", "off")
    assert load() == "SPARSE24_CPU=off"
    monkeypatch.setenv("SPARSE24_CPU", "portable")
    assert load().path == "portable"
    monkeypatch.setenv("SPARSE24_CPU", "sse")
    assert load() == f"no kernels for this CPU: path='sse': this CPU runs {list(library.load().paths)}"
