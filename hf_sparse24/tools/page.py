"""An HTML page of figures and tables in one file, light or dark as the reader's system is, and light on paper.

Every string is escaped. The page's own policy lets a browser run no script, and load nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
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
    warnings = "".join(f'<p class="warning">{escape(note)}</p>' for note in notes)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
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


_LIGHT = COLOURS | {"text": "#1b2430", "card": "#f6f8fa", "warning": "#fff4d6"}
_DARK = {
    "page": "#12161d",
    "text": "#e6e9ef",
    "quiet": "#9aa6b6",
    "grid": "#2a323d",
    "band": "#2d291f",
    "card": "#1a2029",
    "sparse": "#6ea8ff",
    "dense": "#f2a654",
    "heat": "#9fd0ff",
    "warning": "#3a2f12",
}


def _variables(colours: Mapping[str, str]) -> str:
    return f":root {{ {' '.join(f'--{name}: {value};' for name, value in colours.items())} }}"


_STYLE = f"""
{_variables(_LIGHT)}
@media screen and (prefers-color-scheme: dark) {{ {_variables(_DARK)} }}"""
_STYLE += """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 0 0 .4rem; }
.warning { background: var(--warning); padding: .6rem .8rem; border-radius: 6px; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: .75rem; margin: 0 0 1.5rem; }
.cards div { background: var(--card); border-radius: 6px; padding: .6rem .8rem; }
dt, small, figcaption, .none { color: var(--quiet); font-size: .8rem; }
dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
small { display: block; min-height: 1.2em; }
main, .tables { display: grid; grid-auto-flow: dense; gap: 1.75rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.tables { margin-top: 1.75rem; align-items: start; }
.wide { grid-column: 1 / -1; }
figure, section { margin: 0; min-width: 0; break-inside: avoid; }
.chart { overflow-x: auto; }
.wide .chart svg { min-width: 40rem; }
.chart svg { display: block; width: 100%; height: auto; }
.chart text { font-family: system-ui, sans-serif !important; }
.tips rect { fill: transparent; }
.tips rect:hover { fill: var(--quiet); fill-opacity: .12; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--grid); padding: .25rem .6rem .25rem 0; text-align: left; vertical-align: top;
  overflow-wrap: anywhere; }
th { font-weight: 500; color: var(--quiet); }
@media print { body { max-width: none; padding: 0; font-size: 12px; print-color-adjust: exact; }
  main, .tables { grid-template-columns: 1fr 1fr; } .wide .chart svg { min-width: 0; } }
"""
