"""How error messages show a value."""

from typing import Any


def shown(value: Any) -> str:
    """A value in an error message: its repr, cut where it is long."""
    try:
        text = repr(value)
    except Exception as error:  # such as an int of more than 4300 digits
        text = f"<{type(value).__name__}, which cannot be printed: {error}>"
    return text if len(text) <= 200 else f"{text[:200]}..."
