"""Tuning with workers that hang, crash, babble and lie."""

import os
import subprocess
import sys
import threading
import time

import pytest
from autotune_stage import CPU, HERE, PROBLEM, measured, remember, tune
from sparse24_kernels.gemm import autotune
from sparse24_kernels.gemm.autotune import choose, reset
from sparse24_kernels.gemm.autotune import search as autotune_search
from sparse24_kernels.gemm.autotune import table as autotune_table
from sparse24_kernels.gemm.problem import Algorithm

pytestmark = pytest.mark.usefixtures("autotune_stage")


def entry(problem=PROBLEM):
    return autotune_table.read(HERE)[problem]


def test_search(stand_in):
    worker = stand_in(
        **{"0": 90, "1": 95, "2": 60, "3": "wrong", "4": 70, "5": 80, "6": 85, "max_id": 15},
        **{"2/2": 55, "2/4": 99, "4/2": 65},
    )
    progress = []
    verdicts = tune([PROBLEM], CPU, worker=worker.command, on_progress=progress.append)
    assert verdicts == {PROBLEM: choose(PROBLEM, CPU)}
    assert verdicts[PROBLEM][:4] == ("cusparselt", Algorithm(2, 2), 55.0, 100.0)
    first = ["0", "12"]  # of the usual winners those that this library has
    rest = [*map(str, range(1, 12)), "13", "14", "15"]
    variants = [f"{id}/{split_k}" for split_k in (2, 4) for id in (2, 4, 5)]
    final = ["2/2", "2", "4/2", "4", "5"]  # until three without split-k have passed
    assert worker.tried() == [*first, *rest, *variants, *final]
    assert [found.algorithm for found in entry().candidates] == [
        *(Algorithm(2, 2), Algorithm(2), Algorithm(4, 2), Algorithm(4), Algorithm(5))
    ]
    assert "Algorithm(id=3, split_k=1): wrong numbers" in entry().failures
    assert len(progress) == len(worker.tried()) and progress[-1].best_speedup == 100 / 55
    assert (progress[0].problem, progress[0].number, progress[0].total) == (PROBLEM, 0, 1)
    assert str(progress[0]) == "64 x 4096 x 128, 1 candidates tried, best 1.11 times dense"


def test_a_bucket_is_measured_once_at_its_largest_n(stand_in):
    worker = stand_in(_0=50, max_id=0)
    problems = [PROBLEM._replace(n=n) for n in (3600, 4096, 4000)]
    verdicts = tune(problems, CPU, worker=worker.command)
    assert list(verdicts) == problems and {verdict.algorithm for verdict in verdicts.values()} == {Algorithm(0)}
    assert worker.tried() == ["0", "0/2", "0/4", "0"] and "64 x 4096 x 128" in verdicts[problems[0]].reason


def test_only_what_the_final_round_measures_is_kept(stand_in):
    """The best of many is partly luck: 2 was fast once."""
    worker = stand_in(**{"1": 80, "2": [50, 97, 97], "max_id": 2})
    assert tune([PROBLEM], CPU, worker=worker.command)[PROBLEM][1:3] == (Algorithm(1), 80.0)
    worker = stand_in(**{"1": [80, 99], "2": [50, "wrong"], "max_id": 2})
    assert tune([PROBLEM._replace(m=128)], CPU, worker=worker.command).popitem()[1].backend == "dense"
    assert "Algorithm(id=2, split_k=1): wrong numbers" in entry(PROBLEM._replace(m=128)).failures


def test_what_won_elsewhere_is_tried_first(stand_in):
    remember(PROBLEM._replace(m=128), measured(9, 50.0), measured(3, 51.0))
    remember(PROBLEM._replace(m=256), measured(9, 50.0))
    remember(PROBLEM._replace(m=512), measured(30, 50.0))
    remember(PROBLEM._replace(transposed=False), measured(7, 50.0))  # another layout's ids may mean something else
    worker = stand_in(_0=90, max_id=22)
    tune([PROBLEM], CPU, worker=worker.command)
    assert worker.tried()[:6] == ["9", "0", "17", "20", "12", "1"]


def test_a_finalist_that_fails_makes_room_for_the_next(stand_in):
    """Screening checks one input; the final round all of them."""
    worker = stand_in(
        **{str(number): [50 + number, "wrong" if number < 3 else 50 + number] for number in range(6)}, max_id=5
    )
    assert tune([PROBLEM], CPU, worker=worker.command)[PROBLEM].algorithm == Algorithm(3)
    assert [found.algorithm.id for found in entry().candidates] == [3, 4, 5]


def test_the_end_of_the_ids(stand_in):
    known = stand_in(**{"max_id": 3, "3": 60, "4": 10})
    assert tune([PROBLEM], CPU, worker=known.command)[PROBLEM].algorithm == Algorithm(3)
    assert "4" not in known.tried()
    known.log.unlink()
    everything = stand_in(**{str(number): 90 - number / 10 for number in range(100)})
    assert tune([PROBLEM], CPU, worker=everything.command)[PROBLEM].algorithm == Algorithm(63)


@pytest.mark.parametrize(
    "misdeed, reason",
    [
        ("hang", "no answer within 0.5 s"),
        ("crash", "it died of SIGSEGV"),
        ("exit", "it ended with exit code 3"),
        ("wrong", "wrong numbers"),
    ],
)
def test_a_misdeed_is_recorded_and_the_run_goes_on(misdeed, reason, stand_in):
    worker = stand_in(**{"0": 90, "1": [misdeed, 40], "2": 60, "max_id": 2})
    assert tune([PROBLEM], CPU, worker=worker.command)[PROBLEM].algorithm == Algorithm(2)
    assert worker.tried().count("1") == 1
    assert [found.algorithm.id for found in entry().candidates if found.algorithm.split_k == 1] == [2, 0]
    assert f"Algorithm(id=1, split_k=1): {reason}" in entry().failures


def test_noise_between_replies_does_no_harm(stand_in):
    assert tune([PROBLEM], CPU, worker=stand_in(_0="noise", max_id=0).command)[PROBLEM].sparse_us == 80.0


def test_when_nothing_passes_the_verdict_is_remembered(stand_in):
    worker = stand_in(_0="wrong", _1="wrong", max_id=1)
    reason = tune([PROBLEM], CPU, worker=worker.command)[PROBLEM].reason
    assert "no algorithm passes the checks: Algorithm(id=0, split_k=1): wrong numbers" in reason
    reset()
    assert choose(PROBLEM, CPU).reason == reason


def test_time_runs_out(stand_in):
    worker = stand_in(**{"0": 50} | {str(number): "hang" for number in range(1, 64)})
    start = time.monotonic()
    assert tune([PROBLEM], CPU, seconds_per_problem=1, worker=worker.command)[PROBLEM].algorithm == Algorithm(0)
    assert time.monotonic() - start < 5
    assert len(worker.tried()) < 10


def test_a_worker_that_never_starts():
    command = [sys.executable, "-S", "-c", "raise SystemExit(5)"]
    verdicts = tune([PROBLEM, PROBLEM._replace(m=128)], CPU, worker=command)
    for verdict in verdicts.values():
        assert verdict.backend == "dense" and "it ended with exit code 5" in verdict.reason
    assert choose(PROBLEM, CPU).reason == autotune.NOT_TUNED  # nothing was measured, so nothing is remembered
    assert not HERE.path().exists()


def test_a_device_that_does_not_come_back(stand_in, monkeypatch):
    monkeypatch.setattr(autotune_search, "KILL_SECONDS", 0.1)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: None)
    worker = stand_in(_0="hang")
    child = autotune_search.Child(worker.command)
    child.ask({"algorithm": None}, 10)
    process = child._process
    try:
        with pytest.raises(RuntimeError, match="the device seems stuck"):
            child.ask({"algorithm": [0, 1]}, 0.1)
    finally:
        process.terminate()
        process.wait()


def test_tuning_changes_the_verdict(stand_in):
    assert choose(PROBLEM, CPU).backend == "dense" and not choose(PROBLEM, CPU).measured
    tune([PROBLEM], CPU, worker=stand_in(_0=50, max_id=0).command)
    assert choose(PROBLEM._replace(n=4000), CPU).algorithm == choose(PROBLEM, CPU).algorithm == Algorithm(0)
    assert choose(PROBLEM, CPU).backend == "cusparselt" and choose(PROBLEM, CPU).measured
    tune([PROBLEM], CPU, worker=stand_in(_0=120, max_id=0).command)
    assert choose(PROBLEM, CPU).backend == "dense" and choose(PROBLEM, CPU).measured


def test_interrupting_keeps_what_is_done(stand_in):
    worker = stand_in(**{"0": 50, "1": "wrong", "max_id": 2})
    seen = []

    def interrupt(progress):
        seen.append(progress)
        if progress.number == 1 and progress.tried == 2:
            raise KeyboardInterrupt

    problems = [PROBLEM, PROBLEM._replace(m=128, transposed=False), PROBLEM._replace(m=256)]
    with pytest.raises(KeyboardInterrupt):
        tune(problems, CPU, worker=worker.command, on_progress=interrupt)
    reset()
    assert [choose(problem, CPU).backend for problem in problems] == ["cusparselt", "dense", "dense"]
    assert set(autotune_table.read(HERE)) == {PROBLEM}
    assert {progress.total for progress in seen} == {3}


def test_a_terminals_ctrl_c_reaches_the_parent_alone(stand_in):
    child = autotune_search.Child(stand_in(_0=50).command)
    child.ask({"algorithm": None}, 10)
    process = child._process
    assert os.getsid(process.pid) == process.pid
    child.stop()
    assert process.returncode is not None


def test_ctrl_c_while_a_child_hangs(stand_in, monkeypatch):
    monkeypatch.setattr(autotune_search, "CANDIDATE_SECONDS", 100)
    worker = stand_in(_0="hang")

    def press():
        while "0" not in (worker.log.read_text() if worker.log.exists() else ""):
            time.sleep(0.01)
        os.kill(os.getpid(), 2)

    finger = threading.Thread(target=press)
    finger.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        tune([PROBLEM], CPU, worker=worker.command)
    finger.join()
    assert time.monotonic() - start < 10
    assert not autotune_table.read(HERE)
