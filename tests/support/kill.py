"""Kill training at random moments, with SIGKILL: nothing is lost.

    python tests/support/kill.py 50      # kills

A run that is killed, and resumed until it ends, has the weights of a run that was not killed, bit for bit, and no
checkpoint is lost that had been saved. All runs are forks of one process, which imports everything once.
"""

import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import zoo
from safetensors.torch import load_file
from training_runs import arguments, dataset
from transformers import utils

from hf_sparse24 import Sparse24Config, Sparse24Trainer
from hf_sparse24.training.resume import last_whole_checkpoint

STEPS = 10
WRITING, SAVED = 0, 1
shared = mmap.mmap(-1, 2)  # with the forks: whether one is writing; the last step whose checkpoint is saved


class Run(Sparse24Trainer):
    def _save_checkpoint(self, *args) -> None:
        shared[WRITING] = 1
        super()._save_checkpoint(*args)
        shared[SAVED] = min(self.state.global_step, STEPS)  # a run that is done is not saved again
        shared[WRITING] = 0


def train(directory: Path) -> None:
    """Begin the run in `directory`, or go on with it, and save what it ends with."""
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    args = arguments(directory, max_steps=STEPS, learning_rate=1e-2, **saving)
    config = Sparse24Config(method="t-sr-ste", mask_interval=4, target_modules="all-linear")
    run = Run(zoo.build("llama"), args, train_dataset=dataset(), sparse24_config=config)
    run.train(resume_from_checkpoint=newest(directory) > 0)
    run.save_model(str(directory / "end"))


def newest(directory: Path) -> int:
    """The step of the newest whole checkpoint; 0 where there is none."""
    try:
        return int(last_whole_checkpoint(directory).rpartition("-")[2])
    except ValueError:
        return 0


def ends(function: Callable[..., None], *args, kill: Callable[[], bool] = lambda: False) -> bool:
    """Call a function in a fork, and kill that as soon as `kill` is true. Whether the function came to its end."""
    shared[WRITING] = 0
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function(*args)
            status = 0
        finally:
            os._exit(status)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0, "the fork failed by itself"
            return True
        if kill():
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1] == 0
        time.sleep(1e-4)


def moment(draw: random.Random, longest: float, write: float) -> Callable[[], bool]:
    """True from a random moment on, within `longest` seconds; for every other moment, within `write` seconds of the
    next write after it."""
    end = time.monotonic() + draw.uniform(0, longest)
    delay = draw.uniform(0, write) if draw.random() < 0.5 else None

    def reached() -> bool:
        nonlocal end, delay
        now = time.monotonic()
        if now < end:
            return False
        if delay is None:
            return True
        if shared[WRITING]:
            end, delay = now + delay, None
        return False

    return reached


def timed(function: Callable[..., object], *args) -> float:
    start = time.monotonic()
    function(*args)
    return time.monotonic() - start


def kill_training(kills: int, root: Path, draw: random.Random) -> str:
    duration = timed(ends, train, root / "whole")
    expected = load_file(root / "whole" / "end" / "model.safetensors")
    killed = writing = half = resumed = runs = 0
    while killed < kills:
        directory = root / f"run-{runs}"
        shared[SAVED] = 0
        while not ends(train, directory, kill=moment(draw, duration, 0.03) if killed < kills else lambda: False):
            killed += 1
            writing += shared[WRITING]
            step, saved = newest(directory), [int(path.name[11:]) for path in directory.glob("checkpoint-*")]
            assert step >= shared[SAVED], f"step {shared[SAVED]} was saved, and {step} is the newest whole checkpoint"
            half += max(saved, default=0) > step
            resumed += step > 0
        end = load_file(directory / "end" / "model.safetensors")
        assert end.keys() == expected.keys() and all(torch.equal(end[name], expected[name]) for name in end)
        shutil.rmtree(directory)
        runs += 1
    return (
        f"training: {killed} kills, {writing} while a checkpoint was written, after {half} the newest one was not "
        f"whole; {resumed} resumes from a checkpoint, {killed - resumed} from the start; no saved step lost, "
        f"{runs} of {runs} runs ended bit-equal"
    )


def main(kills: int, seed: int = 0) -> None:
    torch.set_num_threads(1)
    utils.logging.disable_progress_bar()
    utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as root:
        print(kill_training(kills, Path(root), random.Random(seed)), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
