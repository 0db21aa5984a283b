"""How many files a reader of one call goes through, counted in the call itself.

A stay is a pair of files of hf_sparse24: one whose code runs, and another whose function or method it enters, however
often. A call from outside, such as from Transformers, counts as from one more file. Commit 79372d2b had 45 stays in 26
files for `patch_model(model, config)`, and 65 in 30 to load its training checkpoint.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import zoo
from transformers import AutoModelForCausalLM

import hf_sparse24
from hf_sparse24 import Sparse24Config, patch_model

ROOT = f"{Path(hf_sparse24.__file__).parent}/"


def stays(function: Callable[[], object]) -> set[tuple[str | None, str]]:
    """The stays in a call, as pairs of file names; None stands for what is not of hf_sparse24."""
    found: set[tuple[str | None, str]] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        entered, caller = frame.f_code.co_filename, frame.f_back
        if event != "call" or not entered.startswith(ROOT):
            return
        while caller is not None and not caller.f_code.co_filename.startswith(ROOT):
            caller = caller.f_back
        source = None if caller is None else caller.f_code.co_filename
        if source != entered:
            found.add((source, entered))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found


def test_patching_and_loading_stay_in_few_files(tmp_path):
    model, config = zoo.build("llama", num_hidden_layers=1), Sparse24Config()
    patching = stays(lambda: patch_model(model, config))
    assert len(patching) <= 35 and len({file for _, file in patching}) <= 22
    model.save_pretrained(tmp_path)
    loading = stays(lambda: AutoModelForCausalLM.from_pretrained(tmp_path))
    assert len(loading) <= 57 and len({file for _, file in loading}) <= 27
