"""Tables in notebooks: what reports show of themselves."""

from collections.abc import Iterable, Sequence
from html import escape


def html_table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A small HTML table, without colours of its own, so that light and dark notebooks show it in theirs.

    Args:
        title: a line above the table.
        head: the columns' names.
        rows: the cells, as `str` shows them; everything is escaped.

    Returns:
        For `_repr_html_`.
    """
    lines = [_row("th", head), *(_row("td", row) for row in rows)]
    return f"<p>{escape(title)}</p><table>{''.join(lines)}</table>"


def _row(tag: str, cells: Sequence[object]) -> str:
    return "<tr>" + "".join(f'<{tag} style="text-align: left">{escape(str(cell))}</{tag}>' for cell in cells) + "</tr>"
