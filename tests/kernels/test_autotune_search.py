"""Tuning with workers that hang, crash, babble and lie."""

import os
import subprocess
import sys
import threading
import time

import pytest
from autotune_stage import CPU, HERE, PROBLEM, measured, remember, tune, user_file
from sparse24_kernels.gemm import autotune
from sparse24_kernels.gemm.autotune import child as autotune_child
from sparse24_kernels.gemm.autotune import choose, reset
from sparse24_kernels.gemm.autotune import search as autotune_search
from sparse24_kernels.gemm.autotune.table import Table
from sparse24_kernels.gemm.problem import Algorithm

pytestmark = pytest.mark.usefixtures("autotune_stage")


def test_search(stand_in):
    worker = stand_in(
        **{"0": 90, "1": 95, "2": 60, "3": "wrong", "4": 70, "5": 80, "6": 85},
        **{"2/2": 55, "2/4": 99, "2/-1": 50, "4/2": 65},
    )
    progress = []
    verdicts = tune([PROBLEM], CPU, worker=worker.command, on_progress=progress.append)
    assert verdicts == {PROBLEM: choose(PROBLEM, CPU)}
    assert verdicts[PROBLEM][:4] == ("cusparselt", Algorithm(2, -1), 50.0, 100.0)
    first = ["0", "17", "20", "12"]
    rest = [*map(str, range(1, 12)), "13", "14", "15"]  # 7 to 11 and 13 to 15: rejected, eight in a row
    variants = [f"{id}/{split_k}" for split_k in (2, 4, -1) for id in (2, 4, 5)]
    final = ["2/-1", "2/2", "2", "4", "5"]  # the fastest three, and the fastest deterministic three
    assert worker.tried() == [*first, *rest, *variants, *final]
    assert [found.algorithm for found in Table(HERE).entries[PROBLEM]] == [
        *(Algorithm(2, -1), Algorithm(2, 2), Algorithm(2), Algorithm(4), Algorithm(5))
    ]
    assert len(progress) == len(worker.tried()) and progress[-1].best_speedup == 2.0
    assert (progress[0].problem, progress[0].number, progress[0].total) == (PROBLEM, 0, 1)
    assert str(progress[0]) == "64 x 4096 x 128, 1 candidates tried, best 1.11 times dense"


def test_only_what_the_final_round_measures_is_kept(stand_in):
    """The best of many is partly luck: 2 was fast once."""
    worker = stand_in(**{"1": 80, "2": [50, 97, 97]})
    assert tune([PROBLEM], CPU, worker=worker.command)[PROBLEM][1:3] == (Algorithm(1), 80.0)
    worker = stand_in(**{"1": [80, 99], "2": [50, "wrong"]})
    assert tune([PROBLEM._replace(m=128)], CPU, worker=worker.command).popitem()[1].backend == "dense"
    assert Algorithm(2) in [algorithm for _, algorithm in Table(HERE).failures]


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
    worker = stand_in(**{str(number): [50 + number, "wrong" if number < 3 else 50 + number] for number in range(6)})
    assert tune([PROBLEM], CPU, worker=worker.command)[PROBLEM].algorithm == Algorithm(3)
    assert [found.algorithm.id for found in Table(HERE).entries[PROBLEM]] == [3, 4, 5]


def test_the_end_of_the_ids(stand_in, tmp_path):
    gap = stand_in(**{"0": 90, "8": 60, "63": 10})  # seven refused ids do not end the search, nor does it go past 64
    tune([PROBLEM], CPU, worker=gap.command)
    assert [int(name) for name in gap.tried() if "/" not in name][4:18] == [*range(1, 12), 13, 14, 15]
    gap.log.unlink()
    known = stand_in(**{"max_id": 3, "3": 60, "4": 10})
    assert tune([PROBLEM], CPU, worker=known.command)[PROBLEM].algorithm == Algorithm(3)
    assert "4" not in known.tried()
    known.log.unlink()
    everything = stand_in(**{str(number): 90 - number / 10 for number in range(100)})
    assert tune([PROBLEM], CPU, worker=everything.command)[PROBLEM].algorithm == Algorithm(63)


def test_ids_that_kill_every_child_end_too(stand_in):
    worker = stand_in(**{"0": 60} | {str(number): "exit" for number in range(1, 64)})
    assert tune([PROBLEM], CPU, worker=worker.command)[PROBLEM].algorithm == Algorithm(0)
    assert [int(name) for name in worker.tried() if "/" not in name] == [0, 17, 20, 12, *range(1, 9), 0]


@pytest.mark.parametrize(
    "misdeed, reason",
    [
        ("hang", "no answer within 0.5 s"),
        ("crash", "it died of SIGSEGV: CUDA error: illegal access"),
        ("exit", "it ended with exit code 3"),
        ("garbage", "it broke the connection"),
        ("close", "it broke the connection"),
        ("wrong", "wrong numbers"),
        ("nonsense", "impossible times"),
        ("zero", "impossible times"),
        ("nan", "impossible times"),
    ],
)
def test_a_misdeed_is_remembered_and_the_run_goes_on(misdeed, reason, stand_in):
    worker = stand_in(**{"0": 90, "1": [misdeed, 40], "2": 60, "max_id": 2})
    near, other = PROBLEM._replace(n=PROBLEM.n - 16), PROBLEM._replace(m=128, n=1024)
    verdicts = tune([PROBLEM, near], CPU, worker=worker.command)
    assert [verdict.algorithm for verdict in verdicts.values()] == [Algorithm(2)] * 2
    assert worker.tried().count("1") == 1  # not for a size of the same bucket either
    ((key, remembered),) = Table(HERE).failures.items()
    assert key == (PROBLEM, Algorithm(1)) and reason in remembered
    reset()
    tune([PROBLEM], CPU, worker=worker.command)  # nor in another process
    assert worker.tried().count("1") == 1
    remember(PROBLEM, measured(1, 10.0), measured(2, 60.0))  # nor by a table that says it is fast
    assert choose(PROBLEM, CPU).algorithm == Algorithm(2)
    remember(other, measured(1, 10.0), measured(2, 60.0))  # another size is checked, and chosen, by itself
    assert choose(other, CPU).algorithm == Algorithm(1)


def test_noise_between_replies_does_no_harm(stand_in):
    assert tune([PROBLEM], CPU, worker=stand_in(_0="noise").command)[PROBLEM].sparse_us == 80.0
    assert not Table(HERE).failures


def test_when_nothing_passes_the_verdict_is_remembered(stand_in):
    worker = stand_in(_0="wrong", _1="wrong", max_id=1)
    assert "no algorithm passes" in tune([PROBLEM], CPU, worker=worker.command)[PROBLEM].reason
    reset()
    assert "no algorithm passes" in choose(PROBLEM, CPU).reason


def test_when_nothing_can_be_timed_the_reason_is_told_and_nothing_is_remembered(stand_in):
    worker = stand_in(_0="untimed", _1="wrong", max_id=1)
    reason = "no algorithm could be timed: no CUDA graph takes this call"
    assert tune([PROBLEM], CPU, worker=worker.command)[PROBLEM].reason == reason
    reset()
    assert choose(PROBLEM, CPU).reason == autotune.NOT_TUNED


def test_time_runs_out(stand_in):
    worker = stand_in(**{"0": 50} | {str(number): "hang" for number in range(1, 64)})
    start = time.monotonic()
    assert tune([PROBLEM], CPU, seconds_per_problem=1, worker=worker.command)[PROBLEM].algorithm == Algorithm(0)
    assert time.monotonic() - start < 5
    assert len(worker.tried()) < 10


@pytest.mark.parametrize("command", [["/no/such/program"], [sys.executable, "-S", "-c", "raise SystemExit('bad day')"]])
def test_a_worker_that_never_starts(command):
    verdicts = tune([PROBLEM, PROBLEM._replace(m=128)], CPU, worker=command)
    for verdict in verdicts.values():
        assert verdict.backend == "dense" and ("bad day" in verdict.reason or "No such file" in verdict.reason)
    assert choose(PROBLEM, CPU).reason == autotune.NOT_TUNED  # nothing was measured, so nothing is remembered
    assert not user_file().exists()


def test_a_device_that_does_not_come_back(stand_in, monkeypatch):
    monkeypatch.setattr(autotune_child, "KILL_SECONDS", 0.1)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: None)
    worker = stand_in(_0="hang")
    started = []
    start = autotune_child.Child._start

    def start_and_note(self):
        pipe = start(self)
        started.append(self._process)
        return pipe

    monkeypatch.setattr(autotune_child.Child, "_start", start_and_note)
    try:
        verdicts = tune([PROBLEM, PROBLEM._replace(m=128)], CPU, worker=worker.command)
    finally:
        for process in started:
            process.terminate()
            process.wait()
        time.sleep(0.1)
    assert len(started) == 1 and all("device seems stuck" in verdict.reason for verdict in verdicts.values())
    assert [algorithm for _, algorithm in Table(HERE).failures] == [Algorithm(0)]


def test_tuning_changes_the_verdict(stand_in):
    assert choose(PROBLEM, CPU).backend == "dense" and not choose(PROBLEM, CPU).measured
    tune([PROBLEM], CPU, worker=stand_in(_0=50).command)
    assert choose(PROBLEM._replace(n=4000), CPU).algorithm == choose(PROBLEM, CPU).algorithm == Algorithm(0)
    assert choose(PROBLEM, CPU).backend == "cusparselt" and choose(PROBLEM, CPU).measured
    tune([PROBLEM], CPU, worker=stand_in(_0=120).command)
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
    table = Table(HERE)
    assert len(table.entries) == 1 and len(table.failures) == 2  # of the second problem too
    assert {progress.total for progress in seen} == {3}


def test_a_terminals_ctrl_c_reaches_the_parent_alone(stand_in):
    with autotune_child.Child(stand_in(_0=50).command) as child:
        child.ask({"algorithm": None}, 10)
        process = child._process
        assert os.getsid(process.pid) == process.pid
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
    assert not Table(HERE).entries and not Table(HERE).failures
