"""Notebooks run from top to bottom on a CPU, and what they show when they are only read is what they print then."""

import re
import sys

import nbformat
import pytest
from paths import ROOT

NOTEBOOKS = ROOT / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))

import run  # noqa: E402

STORE = "`python notebooks/run.py` stores the outputs again"
PATHS = run.NOTEBOOKS


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell) -> str:
    """What a cell prints, without what differs between machines: numbers, and the width of their columns."""
    text = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
    return " ".join(re.sub(r"\d[\d,.]*(e[+-]?\d+)?", "#", text).split())


def pictures(cell) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_the_outputs_of_one_run(path):
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), STORE
    prints = [cell for cell in cells if re.search(r"^ *print\(", cell.source, re.MULTILINE)]
    assert prints and all(printed(cell) for cell in prints), STORE
    shows = [cell for cell in cells if "plt.show()" in cell.source]
    assert shows and all(pictures(cell) == cell.source.count("plt.show()") for cell in shows), STORE
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert path.stat().st_size < 600e3
    assert not re.search(r"site-packages|/(home|root|tmp|usr|Users)/|vnd.jupyter.widget", str(outputs)), STORE


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_gives_what_is_stored(path):
    """Apart from numbers, which follow the versions of Python, whose source is the text, and of torch."""
    stored, new = (code_cells(notebook) for notebook in (nbformat.read(path, as_version=4), run.execute(path)))
    for before, after in zip(stored, new, strict=True):
        assert not [output.text for output in after.outputs if output.get("name") == "stderr"]
        assert pictures(after) == pictures(before), STORE
        if "sample" not in after.metadata.get("tags", []):  # text of the standard library, or in its manner
            assert printed(after) == printed(before), STORE
