"""An HTML page of figures and tables in one file, light or dark as the reader's system is, and light on paper.

Every string is escaped. The page's own policy lets a browser run no script, and load nothing.
"""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from ..charts import COLOURS


class Figure(NamedTuple):
    """A chart with its title.

    Attributes:
        id: of the title's element, for `aria-labelledby`.
        svg: empty where there is nothing to draw; `note` then says why.
        is_wide: whether it takes the whole width of the page.
    """

    id: str
    title: str
    svg: str
    note: str
    is_wide: bool = False


def page(
    title: str, notes: Iterable[str], numbers: Iterable[Sequence[str]], figures: Iterable[Figure], tables: Iterable[str]
) -> str:
    """The page.

    Args:
        notes: what a reader must know first.
        numbers: the main ones: what it is, the number, a remark.
        tables: by `table`.
    """
    cards = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(number)}<small>{escape(remark)}</small></dd></div>"
        for what, number, remark in numbers
    )
    colours = " ".join(f"--{name}: {value};" for name, value in COLOURS.items())
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    warnings = "".join(f'<p class="warning">{escape(note)}</p>' for note in notes)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>:root {{ {colours} }}
{style}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{warnings}
<dl class="cards">{cards}</dl>
<main>
{"".join(map(_figure, figures))}</main>
<section class="tables">
{"".join(tables)}</section>
</body>
</html>
"""


def table(title: str, rows: Iterable[Sequence[str]], header: Sequence[str] = (), is_wide: bool = False) -> str:
    """A table with a title; empty where it has no rows. Without a header, the first cell of each row heads it."""
    rows = list(rows)
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    lines = [] if not header else [f"<tr>{head}</tr>"]
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    wide = ' class="wide"' if is_wide else ""
    return f"<section{wide}><h2>{escape(title)}</h2><table>{''.join(lines)}</table></section>\n"


def _figure(figure: Figure) -> str:
    wide = ' class="wide"' if figure.is_wide else ""
    drawn = f'<div class="chart">{figure.svg}</div>' if figure.svg else '<p class="none">Nothing to draw.</p>'
    return (
        f'<figure{wide}><h2 id="{escape(figure.id)}">{escape(figure.title)}</h2>{drawn}'
        f"<figcaption>{escape(figure.note)}</figcaption></figure>\n"
    )
