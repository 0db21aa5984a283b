"""The concept pages print what they say that they print."""

import re

import pages
import pytest

CONCEPTS = [page for page in pages.PAGES if page.startswith("docs/concepts/") and pages.blocks(page, "python")]


@pytest.mark.parametrize(
    "page",
    CONCEPTS,
)
def test_outputs_are_real(page, tmp_path, monkeypatch, capsys):
    """The block of text right after a block of Python is its output."""
    monkeypatch.chdir(tmp_path)
    names = pages.prepare(tmp_path)
    shown = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", pages.PAGES[page], re.S)
    for code, output in shown:
        capsys.readouterr()
        exec(compile(code, page, "exec"), names)
        assert capsys.readouterr().out == output
