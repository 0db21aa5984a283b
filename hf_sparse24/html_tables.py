"""Tables of reports, as text and as HTML for notebooks."""

from collections.abc import Iterable, Sequence
from html import escape


class TableReport:
    """A report that shows itself as a table, in text and in notebooks; subclasses give it a title and rows."""

    _columns: tuple[str, ...] = ()

    def _title(self) -> str:
        raise NotImplementedError

    def _rows(self) -> Iterable[tuple[str, ...]]:
        raise NotImplementedError

    def _advice(self) -> str | None:
        """A sentence below the table; None for none."""
        return None

    def __str__(self) -> str:
        columns = []
        for head, *cells in zip(self._columns, *self._rows()):
            width = max(map(len, (head, *cells)))
            is_number = all(cell[:1].isdigit() for cell in cells)
            columns.append([cell.rjust(width) if is_number else cell.ljust(width) for cell in (head, *cells)])
        lines = [self._title(), *("  ".join(line).rstrip() for line in zip(*columns)), self._advice()]
        return "\n".join(line for line in lines if line is not None)

    def _repr_html_(self) -> str:
        advice = self._advice()
        return html_table(self._title(), self._columns, self._rows()) + (f"<p>{escape(advice)}</p>" if advice else "")


def html_table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a small HTML table, without colours of its own, so that light and dark notebooks show it in theirs.

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
