"""The command line, `hf-sparse24`: a function for each command."""

from collections.abc import Iterable

from ..tables import Row, text_table


def print_table(rows: Iterable[Row]) -> None:
    """Print rows as aligned and indented lines."""
    print(text_table(rows, indent="  "))
