"""The documentation's pages, and how their code runs: in order, in one namespace, in a separate directory.

There, tiny models stand under the names that the pages load, so that `from_pretrained("gpt2")` needs no network, and
files under the names of the reader's data.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import build_site
import stdlib_text
import zoo
from datasets import Dataset
from paths import ROOT

DOCS = ROOT / "docs"
_FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "recipes/README.md", *sorted(DOCS.rglob("*.md"))]
# Name to text; those that are generated as they would be now, not as they lie there.
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in _FILES}
PAGES |= {f"docs/{name}": text for name, text in build_site.pages().items()}
# What a page loads, and the architecture that stands for it.
STAND_INS = {"gpt2": "gpt2", "meta-llama/Llama-3.2-1B": "llama", "google-bert/bert-base-uncased": "bert"}
TEXTS = [f"def function_{i}(a, b):\n    return a * {i} + b\n" for i in range(16)]


def blocks(page: str, language: str) -> list[str]:
    """The page's fenced code of a language, in order; indentation (lists, tabs, notes) taken off."""
    found = re.findall(rf"^( *)```{language}\b[^\n]*\n(.*?)^\1```", PAGES[page], re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", code, flags=re.MULTILINE) for indent, code in found]


@cache
def _stand_ins() -> TemporaryDirectory:
    made = TemporaryDirectory()
    directory = Path(made.name)
    tokenizer = stdlib_text.train_tokenizer(TEXTS, 300)
    for name, architecture in STAND_INS.items():
        zoo.build(architecture, vocab_size=300, initializer_range=0.2).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    (directory / "my_text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return made


def prepare(directory: Path) -> dict[str, Any]:
    """The stand-ins in a directory, and the names that pages take for granted."""
    shutil.copytree(_stand_ins().name, directory, dirs_exist_ok=True)
    return {"__name__": "page", "data": Dataset.from_dict({key: x.tolist() for key, x in zoo.batch(rows=8).items()})}


def run_apart(page: str, directory: Path) -> None:
    """`run` in a separate process: for pages with process groups, which torch 2.13 crashes once in some hundred runs
    (see ranks.py)."""
    command = [sys.executable, "-c", "import sys, pathlib, pages; pages.run(sys.argv[1], pathlib.Path.cwd())", page]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for _ in range(2):
        ended = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
        if ended.returncode not in (-signal.SIGABRT, -signal.SIGSEGV):
            break
    assert ended.returncode == 0, ended.stderr


def run(page: str, directory: Path) -> None:
    """Run the page's Python in `directory`, which must be the working directory."""
    scope = prepare(directory)
    for number, code in enumerate(blocks(page, "python"), 1):
        exec(compile(code, f"{page}, code block {number}", "exec"), scope)
