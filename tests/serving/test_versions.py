"""The page of engines names the versions that the tests run."""

import serving
from pages import PAGES


def test_the_page_names_the_versions():
    for line in serving.ENGINES.read_text().splitlines():
        assert line.startswith("#") or line.replace("==", " ") in PAGES["docs/engines.md"].lower(), line
