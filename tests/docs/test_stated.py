"""Figures on the README and the guides equal the committed results, and every one has a source; see stated.py."""

import json
import re
import shutil

import pages
import pytest
import stated
from paths import ROOT

RESULTS = ROOT / "recipes" / "results"
CHECKED = r"(README|docs/(index|faq|start/(does_it_help|limits|which_way)|(methods|concepts)/index|guides/\w+))\.md"
GUIDES = [page for page in pages.PAGES if re.fullmatch(CHECKED, page)]


def plain(text: str) -> str:
    return " ".join(text.split())


def missing(page: str, figures: dict[str, float]) -> list[str]:
    """What the page should state, and does not."""
    text = plain(pages.PAGES[page])
    return [
        said for said in (plain(each.format(**figures)) for each in stated.STATED.get(page, [])) if said not in text
    ]


@pytest.mark.parametrize("page", stated.STATED)
def test_stated_figures_equal_the_results(page):
    assert not missing(page, stated.figures(RESULTS)), f"{page} lacks these; correct the page, or stated.py"


UNITS = r"%|times|nats|ms\b|us\b|[GMk]B\b|CPU s|seconds|tokens (?:per|a) second"
MEASURED = re.compile(rf"(?<![\w.])\d[\d,]*(?:\.\d+)?(?= ?(?:{UNITS})|x\b)|(?<![\w./:-])\d+\.\d+(?![\w./])")
NAMES = "torch|torchao|accelerate|Transformers|PEFT|TRL|vLLM|Python|Triton|GCC|Clang|cuSPARSELt|compressed-tensors"
NAMES += "|bitsandbytes"
VERSION = rf"\d+\.\d+\.\d[\w.]*|\b(?:{NAMES}|capability|version|section|older than)(?: of)? \d+\.\d+"
ARXIV = r"\b\d{4}\.\d{4,5}\b"


@pytest.mark.parametrize("page", GUIDES)
def test_every_figure_has_a_source(page):
    """What looks measured is in `STATED` or `FIXED`. Code, links and versions do not count."""
    figures = stated.figures(RESULTS)
    text = plain(re.sub(r"```.*?```|\$\$.*?\$\$", " ", pages.PAGES[page], flags=re.DOTALL))
    for said in [each.format(**figures) for each in stated.STATED.get(page, [])] + stated.FIXED:
        text = text.replace(plain(said), " ")
    text = re.sub(rf"`[^`]+`|\]\([^)]*\)|{VERSION}|{ARXIV}", " ", text)
    found = [text[max(each.start() - 60, 0) : each.end() + 30] for each in MEASURED.finditer(text)]
    assert not found, f"{page}: no source in tests/support/stated.py"


def test_a_changed_result_is_noticed(tmp_path):
    """One loss in one result file moves, and the pages that state it no longer agree."""
    copy = shutil.copytree(RESULTS, tmp_path / "results")
    path = copy / "pretrained/runs/oneshot-0-lr0-seed0.json"
    run = json.loads(path.read_text())
    run["corpora"]["validation"]["nats"][0] *= 1.05
    path.write_text(json.dumps(run))
    lacking = missing("README.md", stated.figures(copy))
    assert len(lacking) == 3
