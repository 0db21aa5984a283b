"""Tables as text and Markdown, the base of reports that show themselves as one, and values in error messages."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

Row = Sequence[object]


class TableReport:
    """A report that shows itself as a table, in text and in notebooks; subclasses give it a title and rows."""

    _columns: tuple[str, ...] = ()

    def _title(self) -> str:
        raise NotImplementedError

    def _rows(self) -> Iterable[tuple[str, ...]]:
        raise NotImplementedError

    def _advice(self) -> str | None:
        """A sentence below the table."""
        return None

    def __str__(self) -> str:
        parts = [self._title(), text_table([self._columns, *self._rows()]), self._advice()]
        return "\n".join(part for part in parts if part)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # what IPython shows in a notebook


def shown_patterns(patterns: Iterable[object]) -> str:
    """Return which N:M layers have: `"8:16"`, or `"2:4 in 12 layers, 8:16 in 4 layers"`."""
    counts = Counter(map(str, patterns)).most_common()
    shown = [f"{pattern} in {count} layer{'s' * (count > 1)}" for pattern, count in counts]
    return ", ".join(shown) if len(counts) > 1 else "".join(pattern for pattern, _ in counts)


def text_table(rows: Iterable[Row], indent: str = "") -> str:
    """Return rows as aligned lines; the first row may be the head. Numbers stand on the right of their column."""
    columns = []
    for cells in zip_longest(*([str(cell) for cell in row] for row in rows), fillvalue=""):
        width = max(map(len, cells))
        is_number = all(cell[:1].isdigit() for cell in cells[1:])
        columns.append([cell.rjust(width) if is_number else cell.ljust(width) for cell in cells])
    return "\n".join((indent + "  ".join(line)).rstrip() for line in zip(*columns))


def markdown_table(head: Row, rows: Iterable[Row]) -> str:
    """Return a table in Markdown; a `|` within a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ([str(cell).replace("|", "&#124;") for cell in line] for line in lines)
    return "\n".join(" | ".join(["", *line, ""]).strip() for line in cells)


def shown(value: object) -> str:
    """A value in an error message: its repr, cut where it is long."""
    try:
        text = repr(value)
    except Exception as error:  # such as an int of more than 4300 digits
        text = f"<{type(value).__name__}, which cannot be printed: {error}>"
    return text if len(text) <= 200 else f"{text[:200]}..."
