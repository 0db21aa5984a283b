"""The command line: `hf-sparse24 doctor`, `tune`, `plan`, `report`, `export`, `inspect` and `verify`."""

from collections.abc import Iterable

from ..tables import Row, text_table


def print_table(rows: Iterable[Row]) -> None:
    """Print rows as aligned and indented lines."""
    print(text_table(rows, indent="  "))
