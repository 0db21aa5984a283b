"""What reports show of themselves in a notebook: small tables, escaped, without colours of their own; short reprs."""

from html.parser import HTMLParser

import pytest
import torch
import zoo

from hf_sparse24 import Sparse24Config, oneshot, patch_model
from hf_sparse24.tables import html_table
from hf_sparse24.training.decay_search import DecayTuning


class Cells(HTMLParser):
    """The text of each cell by row, and whether every tag is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert dict(attrs).keys() <= {"style"} and "color" not in str(attrs) and "background" not in str(attrs)
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def reports():
    model = zoo.build("llama")
    batches = [torch.randint(64, (2, 16)) for _ in range(2)]
    pruned = oneshot(model, batches, Sparse24Config(method="fixed-mask"), reconstruct=None)
    return {
        "patch": patch_model(zoo.build("gpt2")),
        "oneshot": pruned,
        "tuning": DecayTuning(1e-3, {6e-5: 0.8, 2e-4: 0.4}, 6e-5),
    }


def test_tables(reports):
    rows = {name: Cells(report._repr_html_()).rows for name, report in reports.items()}
    assert rows["patch"][0] == ["module group", "layers", "weights", "sparse"]
    assert rows["oneshot"][1][:2] == ["model.layers.*.mlp.gate_proj", "2"] and len(rows["oneshot"]) == 4
    assert rows["tuning"][1:] == [["6.0e-05", "0.800", "chosen"], ["2.0e-04", "0.400", ""]]


def test_everything_is_escaped():
    text = html_table("<script>", ["<b>"], [["a & b", '<img src="x">']])
    assert "<script>" not in text and "<img" not in text and "a &amp; b" in text and "&lt;b&gt;" in text
