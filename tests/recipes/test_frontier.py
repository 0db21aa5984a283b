"""The frontier: a row of a tiny model is measured once, what is missing is skipped, and the page finds the fronts."""

import json

import frontier_page
import pytest
from paths import ROOT
from recipe_runs import InThisProcess

from recipes.benchmarks import engines, frontier

COMMITTED = ROOT / "recipes/results/frontier"


@pytest.fixture
def run(tmp_path, monkeypatch):
    def in_this_process(module, engine, path, python=None):
        return InThisProcess(engines.ENGINES[engine](path))

    monkeypatch.setattr(frontier, "Variant", in_this_process)
    monkeypatch.setattr("torch.compile", lambda function, **options: function)
    folders = ["--folder", str(tmp_path / "models"), "--output", str(tmp_path)]
    return lambda *arguments: frontier.main(["--quick", *folders, *arguments])


@pytest.mark.slow
def test_a_row_is_measured_once(run, tmp_path):
    for name in ("dense bf16", "dense int8", "16:32 int8"):
        run("--only", name)
    rows = frontier_page.read(tmp_path, "tiny Llama")
    assert list(rows) == ["dense bf16", "dense int8", "16:32 int8"]  # by bytes
    assert max(frontier_page.kl(rows["dense bf16"]), frontier_page.kl(rows["dense int8"])) < 0.002
    assert frontier_page.kl(rows["16:32 int8"]) > frontier_page.kl(rows["dense int8"])
    for speed in rows["dense int8"]["speed"].values():
        assert speed["turns"] == 2 and speed["first token over dense bf16"][1] > 0
    assert rows["dense int8"]["environment"]["cpu"] and rows["dense int8"]["peak GB"] > 0
    path = tmp_path / "tiny-Llama-16-32-int8.json"
    before = path.read_text()
    run("--only", "16:32 int8")
    assert path.read_text() == before


def test_the_committed_page():
    assert (ROOT / "docs/measured/frontier.md").read_text() == frontier_page.page(COMMITTED)
    rows = {json.loads(path.read_text())["row"] for path in COMMITTED.glob("*.json")}
    assert {row for row in rows if not row.startswith("OpenVINO")} <= set(frontier.ROWS)
