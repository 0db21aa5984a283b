"""The built site: no warnings, no dead links, nothing from elsewhere, and pages that fit a phone."""

import re
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

import browser
import build_site
import pytest


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


PAGES = [
    "index.html",
    "concepts/gemms.html",
    "guides/logs.html",
    "measured/methods.html",
    "concepts/mvue.html",
    "methods/s-ste.html",
    "reference/patching.html",
    "measured/plan.html",
]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=site)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser(address, width):
    """Nothing is loaded from elsewhere, nothing fails, every picture is there, and no page is wider than its screen."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    with browser.new_page() as page:
        page.call("Emulation.setDeviceMetricsOverride", **size)
        for name in PAGES:
            page.open(f"{address}/{name}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            words = (
                "[...document.querySelectorAll(':not(pre) > code > span')].filter(s => s.getClientRects().length > 1)"
            )
            assert page.evaluate(f"{words}.map(s => s.textContent)") == [], f"{name}: code is broken inside a word"
            broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
            assert page.evaluate(broken) == [], name
            assert not [url for url in page.requests() if not url.startswith((address, "data:", "blob:"))], name
            assert not page.problems(), name
