"""What the site adds to Markdown: formulas as MathML, which browsers typeset without a script, and inline code that
breaks only between words.

Formulas are written as on GitHub: `$...$` within a line, `$$...$$` as a paragraph.
"""

import re
from xml.etree import ElementTree

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString

INLINE = r"(?<![\\$])\$(?![\s$])([^$\n]*\n?[^$\n]*?)(?<![\s\\])\$(?![\w$])"
DISPLAY = r"\$\$(.+?)\$\$"
LONG_WORD, LONGEST_WORD = 20, 36
"""Characters of code that fit a cell of a table on a phone, and a line there; longer words may break."""


class Formula(InlineProcessor):
    def __init__(self, pattern: str, md: Markdown, display: str):
        super().__init__(pattern, md)
        self.display = display

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
        formula = convert(m[1], display=self.display)
        if self.display == "block":  # one that is wider than the screen scrolls
            formula = f'<div class="formula">{formula}</div>'
        return self.md.htmlStash.store(formula), m.start(0), m.end(0)


class UnbrokenWords(Treeprocessor):
    """Each word of inline code becomes a `<span>`, which the style sheet keeps on one line: a browser would else break
    `hf-sparse24` after its hyphen."""

    def run(self, root: ElementTree.Element) -> None:
        for code in [element for element in root.iter("code") if not len(element) and element.text]:
            words, code.text = re.split(r"(\s+)", code.text or ""), None
            for word in words:
                if word.strip() and len(word) <= LONGEST_WORD:
                    span = ElementTree.SubElement(code, "span", {"class": "long"} if len(word) > LONG_WORD else {})
                    span.text = AtomicString(word)
                elif len(code):
                    code[-1].tail = AtomicString((code[-1].tail or "") + word)
                else:
                    code.text = AtomicString((code.text or "") + word)


class SiteExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        # After code in backticks (190), before backslashes escape anything (180).
        md.inlinePatterns.register(Formula(DISPLAY, md, "block"), "formula-display", 187)
        md.inlinePatterns.register(Formula(INLINE, md, "inline"), "formula", 186)
        md.treeprocessors.register(UnbrokenWords(md), "unbroken-words", 15)  # after inline patterns (20)


def makeExtension(**options: object) -> Extension:
    return SiteExtension(**options)
