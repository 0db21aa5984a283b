"""describe_settings: what each setting of a method means."""

import dataclasses
import textwrap
from collections.abc import Mapping

from ..tables import html_table
from .registry import method_class


class SettingTexts(dict[str, str]):
    """The settings of a method by name, each with its meaning. A dict that prints, and shows in a notebook, as a table.

    Args:
        method: the method's name.
        texts: name to meaning.
    """

    def __init__(self, method: str, texts: Mapping[str, str]):
        super().__init__(texts)
        self.method = method

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        lines = (
            textwrap.fill(text, 100, initial_indent=f"{name:<{width}}  ", subsequent_indent=" " * (width + 2))
            for name, text in self.items()
        )
        return "\n".join([f"settings of {self.method}", *lines])

    def _repr_html_(self) -> str:
        return html_table(f"settings of {self.method}", ("setting", "meaning"), self.items())


def describe_settings(method: str) -> SettingTexts:
    """What each setting of a method means, with its default: the keywords that `Sparse24Config(method=...)` takes.

    Args:
        method: the name of a registered method.

    Returns:
        A dict of name to meaning, with the default. Print it, or show it in a notebook, for a table.

    Raises:
        ValueError: no method is registered by that name; the message lists those that are.

    Examples:
        >>> describe_settings("sr-ste")["masked_decay"]
        "lambda_W >= 0, the pull of pruned weights towards zero, ... (default 0.0002)"
        >>> print(describe_settings("t-sr-ste"))
        settings of t-sr-ste
        ...
    """
    fields = dataclasses.fields(method_class(method).Settings)
    return SettingTexts(
        method, {field.name: f"{field.metadata.get('text', '')} (default {field.default!r})" for field in fields}
    )
