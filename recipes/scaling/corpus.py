"""A text of Python sources out of pinned wheels, with a tokenizer: 200 MB, and validation from other packages.

`prepare("runs/python_sources")` writes `train.jsonl`, `validation.jsonl`, `tokenizer/` and `sources.json`, which lists
packages, licences and characters. A second call reuses them.
"""

import hashlib
import json
import random
import sys
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

# ruff: noqa: E402 (imports come after the path that they need)
ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT), str(ROOT / "kernels")]

from recipes.pretrained.material import made, packages
from recipes.pretrained.texts import wheel_of
from recipes.stdlib_text import train_tokenizer, write_rows

REQUIREMENTS = Path(__file__).with_name("packages.txt")
VALIDATION = ("celery", "networkx", "scrapy", "sqlglot")
VALIDATION_CHARACTERS = 350_000  # of each package
TOKENIZER_CHARACTERS = 10_000_000
VOCABULARY = 2048


def prepare(folder: Path) -> Path:
    """The folder with the text; made unless it is there.

    Raises:
        RuntimeError: pip cannot fetch the packages, or a hash differs.
    """
    if folder.exists():
        return folder
    wheels = packages(folder.with_name(f"{folder.name}_packages"), REQUIREMENTS)
    names = [line.split("==")[0] for line in REQUIREMENTS.read_text().splitlines() if "==" in line]
    with made(folder) as new:
        seen: set[bytes] = set()
        texts, sources = {}, {}
        for name in names:
            wheel = wheel_of(name, wheels)
            texts[name] = list(modules(wheel, seen))
            sources[name] = {"wheel": wheel.name, "licence": licence(wheel), "characters": sum(map(len, texts[name]))}
        draw = random.Random(0)
        train = [text for name in names if name not in VALIDATION for text in texts[name]]
        draw.shuffle(train)
        validation = []
        for name in VALIDATION:
            draw.shuffle(texts[name])
            validation += first(texts[name], VALIDATION_CHARACTERS)
        for part, documents in {"train": train, "validation": validation}.items():
            write_rows(new / f"{part}.jsonl", [{"text": text} for text in documents])
        train_tokenizer(first(train, TOKENIZER_CHARACTERS), VOCABULARY).save_pretrained(new / "tokenizer")
        (new / "sources.json").write_text(json.dumps(sources, indent=1) + "\n")
    return folder


def modules(wheel: Path, seen: set[bytes]) -> Iterator[str]:
    """The Python sources of a wheel, in the order of their paths, without tests and without what was `seen`."""
    with ZipFile(wheel) as file:
        for name in sorted(file.namelist()):
            if not name.endswith(".py") or "test" in name:
                continue
            text = file.read(name).decode("utf-8", "ignore").strip()
            digest = hashlib.sha256(text.encode()).digest()
            if len(text) >= 200 and digest not in seen:
                seen.add(digest)
                yield text


def licence(wheel: Path) -> str:
    """What the wheel's metadata call its licence."""
    with ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        found: Any = Parser().parsestr(file.read(name).decode())
    classified = [kind.split(" :: ")[-1] for kind in found.get_all("Classifier", []) if kind.startswith("License")]
    stated = found["License-Expression"] or found["License"] or ", ".join(classified)
    return stated.strip().splitlines()[0]


def first(texts: list[str], size: int) -> list[str]:
    """The first texts, up to so many characters."""
    taken: list[str] = []
    for text in texts:
        if size <= 0:
            break
        taken.append(text)
        size -= len(text)
    return taken
