"""Run notebooks from top to bottom and store their outputs in them, so that they can be read without running.

    python notebooks/run.py                              # all of them, each in a minute or two on a CPU
    python notebooks/run.py notebooks/02_masks.ipynb     # one

What a notebook writes goes into a temporary directory. What differs from run to run (when a cell ran, which Python ran
it) is not stored.
"""

import argparse
import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = sorted(Path(__file__).resolve().parent.glob("*.ipynb"))
TIMEOUT = 600  # seconds for one cell
WIDGET = "application/vnd.jupyter.widget-view+json"


def execute(path: Path) -> NotebookNode:
    """The notebook with the outputs of a fresh run; `path` itself is left as it is.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; the message has its code and its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as directory:
        client = NotebookClient(
            notebook,
            timeout=TIMEOUT,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": directory}},
        )
        # DeepSpeed, where it is installed, prints which device it has found, unless it is told.
        client.execute(env={"DS_ACCELERATOR": "cpu", **os.environ})
    for cell in notebook.cells:
        if cell.cell_type == "code":  # progress bars are widgets, of which a stored notebook shows nothing
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}  # without the version
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, default=NOTEBOOKS, help="default: all next to this script")
    for path in parser.parse_args().notebooks:
        nbformat.write(execute(path), path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
