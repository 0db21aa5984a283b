"""Fixtures for the tests of several recipes."""

import sys
from pathlib import Path

import pytest
import stdlib_text
import tiny_chats
import tiny_images
import tiny_tasks
import torch
import zoo
from recipe_runs import TEXTS

from hf_sparse24 import Sparse24Config, export_model, patch_model


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    # datasets 5 waits 5 s whenever a shuffled Parquet stream ends.
    monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.1, raising=False)


@pytest.fixture(scope="module")
def metrics_cache(tmp_path_factory):
    """Caches of data sets and metrics for a module that trains by `evaluate`'s metrics."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("cache")
        patch.setattr("datasets.config.HF_DATASETS_CACHE", directory / "datasets")
        patch.setattr("evaluate.config.HF_MODULES_CACHE", str(directory / "modules"))  # it imports metrics from there
        patch.setattr(sys, "path", [str(directory / "modules"), *sys.path])  # before the user's own cache
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "evaluate_modules"]:
        del sys.modules[name]  # another module's metrics lie elsewhere


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("tokenizer")
    stdlib_text.train_tokenizer(TEXTS, 300).save_pretrained(directory)
    return str(directory)


@pytest.fixture
def text_file(tmp_path) -> str:
    path = tmp_path / "train.txt"
    path.write_text("".join(TEXTS))
    return str(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """One model with a tokenizer: `dense`, `sparse` (a training checkpoint of S-STE), `zeros` (a dense export)."""
    directory = tmp_path_factory.mktemp("models")
    tokenizer = stdlib_text.train_tokenizer(TEXTS, 300)
    torch.manual_seed(0)
    model = zoo.build("llama", vocab_size=300, max_position_embeddings=128, initializer_range=0.2, num_hidden_layers=1)
    model.save_pretrained(directory / "dense")
    patch_model(model, Sparse24Config(method="s-ste"))
    model.save_pretrained(directory / "sparse")
    export_model(model, directory / "zeros")
    for name in ("dense", "sparse", "zeros"):
        tokenizer.save_pretrained(directory / name)
    return directory


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    return tiny_chats.prepare(tmp_path_factory.mktemp("chats"), max_files=60)


@pytest.fixture(scope="session")
def tasks(tmp_path_factory) -> Path:
    return tiny_tasks.prepare(tmp_path_factory.mktemp("tasks"), vocab_size=1024, max_files=250)


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    return tiny_images.prepare(tmp_path_factory.mktemp("digits"))
