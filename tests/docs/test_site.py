"""The built site: no warnings, no dead links, nothing from elsewhere."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import build_site
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site() -> Path:
    assert build_site.build_site() == 0
    return build_site.SITE


class Page(HTMLParser):
    """What a page links to and loads, and the anchors that it has."""

    def __init__(self, path: Path):
        super().__init__()
        self.targets: set[str] = set()
        self.anchors = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.targets |= {given[name] for name in ("href", "src") if given.get(name)}


def test_links(site):
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 50
    dead = []
    for path, page in pages.items():
        for target in page.targets:
            if re.match(r"https?:|mailto:|data:|javascript:", target):
                continue
            file, _, anchor = unquote(target).partition("#")
            there = (path.parent / file.split("?")[0]).resolve() if file else path
            assert not there.is_dir() or path.name == "404.html", f"{path}: {target} is a folder"
            if path.name == "404.html":  # its links are those of the root of a server
                there = (site / file.lstrip("/")).resolve() if file else path
            if there.is_dir():
                there = there / "index.html"
            if not there.exists() or (there in pages and anchor not in pages[there].anchors):
                dead.append(f"{path.relative_to(site.resolve())}: {target}")
    assert not dead


def test_formulas_are_typeset(site):
    """Each formula of a page is MathML on the site."""
    for path in build_site.DOCS.rglob("*.md"):
        text = re.sub(r"```.*?```|`[^`\n]+`", "", path.read_text(), flags=re.DOTALL)
        formulas = len(re.findall(r"\$\$.+?\$\$|\$[^$]+\$", text, re.DOTALL))
        html = (site / path.relative_to(build_site.DOCS)).with_suffix(".html").read_text()
        assert html.count("<math") == formulas, path
