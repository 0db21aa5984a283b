"""What every test gets: a fixed seed, quiet progress bars, a registered method, and deprecations of
Transformers as failures."""

import gc
import logging
import os
import signal
import sys
from importlib.util import find_spec

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: a test that asks the Hub must fail
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the compiled tests and DataLoaders fork
# Before the kernels are imported, which run on CPU tensors with a 1. Workers of xdist see no `-m gpu`, and inherit a 0.
if torch.cuda.is_available() and any(argument.endswith("gpu") for argument in sys.argv):
    os.environ.setdefault("TRITON_INTERPRET", "0")
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import methods.ast  # noqa: F401  the example outside the package: tests of every method cover it
import own_method  # noqa: F401  registers itself for the same
import pytest
import transformers
from accelerate.state import GradientState
from sparse24_kernels import dispatch
from sparse24_kernels.cpu import build
from sparse24_kernels.gemm import autotune, cpu_kernels
from sparse24_kernels.gemm.backend import ON_CHANGE

if find_spec("triton"):
    import triton_interpreter

    triton_interpreter.compute_as_hardware()

transformers.utils.logging.disable_progress_bar()
# Tiny tensors gain nothing from threads, and on a busy machine threads that wait for each other cost a factor of 30.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
# Some tests press Ctrl-C, which a shell's background jobs ignore, and their children with them.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path, config):
    """With `-m gpu`, leave out the files without such tests: a machine with a GPU may lack the packages they import."""
    if config.option.markexpr == "gpu":
        files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
        return None if any("mark.gpu" in file.read_text() for file in files) else True


@pytest.fixture(autouse=True, scope="module")
def _no_search_for_garbage_among_imports():
    """Accelerate collects garbage at every start of a training. Half a million objects of the libraries would make that
    longer than the training of a tiny model."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # libraries look for leaks when the interpreter ends


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    for forget in ON_CHANGE:  # a test before may have planned by a stand-in
        forget()


@pytest.fixture
def compiler():
    """A C++ compiler, which torch's inductor needs on a CPU."""
    try:
        return build.compiler()
    except build.BuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def dense_math():
    """Packed weights run by dense math on a CPU, with its bits: kernels in C++ are switched off, here and in processes
    that a test starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSE24_CPU", "off")
        patch.setattr(dispatch, "IMPLEMENTATIONS", [each for each in dispatch.IMPLEMENTATIONS if each.name != "cpu"])
        _forget_choices()
        yield
    _forget_choices()


@pytest.fixture
def faster_from_32():
    """A CPU of a kind whose sparse GEMMs were measured to be faster from 32 tokens and features on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_kernels, "faster_from", lambda: 32)
        _forget_choices()
        yield
    _forget_choices()


def _forget_choices():
    for forget in (dispatch.choose.cache_clear, autotune._decide.cache_clear, *ON_CHANGE):
        forget()


@pytest.fixture(autouse=True)
def _no_loader_is_left():
    """A training that an error ends leaves its DataLoader to accelerate, which then steps at every micro-batch."""
    yield
    GradientState().dataloader_references = [None]


@pytest.fixture(autouse=True)
def _deprecations_fail(caplog):
    """Transformers announces many removals in its log, where `filterwarnings = error` does not see them."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)
    said = [record.getMessage() for when in ("setup", "call") for record in caplog.get_records(when)]
    assert not [text for text in said if "deprecated" in text.lower()]
