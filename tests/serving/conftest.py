"""A real pretrained model with a dense 2:4 export of it, which engines serve."""

from pathlib import Path

import pytest
import real_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sparse24 import Sparse24Config, export_model, patch_model


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> Path:
    return real_model.smollm2(tmp_path_factory)


@pytest.fixture(scope="session")
def smollm2_24(smollm2, tmp_path_factory) -> Path:
    """Its dense export with every linear layer 2:4 by magnitude. Nothing trained it since, so it says little."""
    folder = tmp_path_factory.mktemp("exports") / "smollm2-24"
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    patch_model(model, Sparse24Config(method="fixed-mask", target_modules="all-linear"))
    export_model(model, folder)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder)
    return folder
