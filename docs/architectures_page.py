"""The page of the architectures that the tests build: what `patch_model` says of each, so that it cannot go stale."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel, logging

from hf_sparse24 import Sparse24Config, patch_model
from hf_sparse24.tables import markdown_table

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
import model_kinds
import zoo

INTRO = """# Architectures

The layers that `patch_model` makes sparse with `target_modules="all-linear"`, in models of two blocks with random
weights. A stack of experts counts as a layer. The tests save and reload each but ResNet: outputs are equal bit for bit.

Layers are found by structure, not from this list. For any other model, print what `patch_model` returns."""

FAMILIES = {
    "decoders": [*zoo.CAUSAL, *zoo.OTHERS],
    "mixtures of experts": list(zoo.MOE),
    "masked language models": list(zoo.MASKED),
    "vision, two towers, encoder-decoders, speech": [name for name in model_kinds.KINDS if "-" not in name],
    "state spaces": list(zoo.STATE_SPACES),
    "convolutional": list(zoo.CONVOLUTIONAL),
}


def page() -> str:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what Transformers says of tiny models
    try:
        rows = [row for family, names in FAMILIES.items() for row in family_rows(family, names)]
    finally:
        logging.set_verbosity(verbosity)
    return f"{INTRO}\n\n{markdown_table(['', 'architectures', 'sparse', 'what stays dense'], rows)}\n"


def family_rows(family: str, names: list[str]) -> Iterator[list[str]]:
    """A row for all architectures of a family of which the same becomes sparse."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name in names:
        alike.setdefault(facts(name), []).append(f"`{name}`")
    for (sparse, dense), found in sorted(alike.items(), key=lambda each: -len(each[1])):
        yield [family, ", ".join(sorted(found)), sparse, dense]


def facts(name: str) -> tuple[str, str]:
    """How many of an architecture's linear layers become sparse, and why the others do not."""
    try:
        report = patch_model(build(name), Sparse24Config("fixed-mask", target_modules="all-linear"))
    except ValueError:
        return "refused", "convolutions: nothing is left to make sparse"
    linear = len(report.patched) + len(report.skipped)
    reasons = {reason.partition(":")[0] for reason in report.skipped.values()}
    return f"{len(report.patched)} of {linear}", "; ".join(sorted(reasons))


def build(name: str) -> PreTrainedModel:
    with torch.device("meta"):  # no weights: `patch_model` looks at modules
        return model_kinds.build(name) if name in model_kinds.KINDS else zoo.build(name)
