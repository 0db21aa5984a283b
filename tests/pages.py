"""The documentation's pages, and how their code runs: in order, in one namespace, in a directory of its own.

There, tiny models stand under the names that the pages load, so that `from_pretrained("gpt2")` needs no network, and
files under the names of the reader's data.
"""

import json
import re
from pathlib import Path
from typing import Any

import build_site
import stdlib_text
import zoo

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
GENERATED = build_site.pages()
_WRITTEN = [page for page in sorted(DOCS.rglob("*.md")) if str(page.relative_to(DOCS)) not in GENERATED]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "recipes/README.md", *_WRITTEN]
# What a page loads, and the architecture that stands for it.
STAND_INS = {"gpt2": "gpt2", "meta-llama/Llama-3.2-1B": "llama", "google-bert/bert-base-uncased": "bert"}
TEXTS = [f"def function_{i}(a, b):\n    return a * {i} + b\n" for i in range(16)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """The page's fenced code of a language, in order; indentation (lists, tabs, notes) taken off."""
    found = []
    for indent, code in re.findall(rf"^( *)```{language}\b[^\n]*\n(.*?)^\1```", page.read_text(), re.M | re.S):
        found.append(re.sub(rf"^{indent}", "", code, flags=re.M))
    return found


def prepare(directory: Path) -> dict[str, Any]:
    """The stand-ins in a directory, and the names that pages take for granted."""
    tokenizer = stdlib_text.train_tokenizer(TEXTS, 300)
    for name, architecture in STAND_INS.items():
        zoo.build(architecture, vocab_size=300, initializer_range=0.2).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    (directory / "my_text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return {"__name__": "page"}


def run(page: Path, directory: Path, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run the page's Python in `directory`, which must be the working directory; the namespace that it leaves."""
    scope = prepare(directory) | (names or {})
    for number, code in enumerate(blocks(page, "python"), 1):
        exec(compile(code, f"{name_of(page)}, code block {number}", "exec"), scope)
    return scope
