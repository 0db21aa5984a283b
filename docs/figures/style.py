"""One style for every figure, and SVG files that suit a light and a dark page.

Figures are drawn by matplotlib in stand-in colours, which `render` replaces by CSS variables. They have one value for
light pages and one for dark ones (`prefers-color-scheme`, which in an image follows the `color-scheme` of the page
around it). The background is transparent.

Text stays text: files are small, and a changed number shows in a diff. Widths are measured with DejaVu Sans, which is
wider than the fonts that browsers use instead, so nothing overlaps there.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Stand-ins: no figure may mean these colours themselves.
INK, MUTED, GRID = "#fe0001", "#fe0002", "#fe0003"
BLUE, ORANGE, GREEN, PURPLE, GREY = "#fe0004", "#fe0005", "#fe0006", "#fe0007", "#fe0008"

# CSS variable, on a light page, on a dark one. Blue, orange, green and purple are those of Okabe and Ito (2008), made
# for readers who are colour-blind, in a darker and a lighter version.
COLOURS = {
    INK: ("ink", "#1f2328", "#e6e9ee"),
    MUTED: ("muted", "#59626d", "#a3acb8"),
    GRID: ("grid", "#d5dae0", "#3f4653"),
    BLUE: ("blue", "#0069b4", "#58b2f0"),
    ORANGE: ("orange", "#c8500a", "#f5934a"),
    GREEN: ("green", "#00795a", "#36c79c"),
    PURPLE: ("purple", "#96438f", "#d999d6"),
    GREY: ("grey", "#7a828c", "#8b95a3"),
}
BACKGROUNDS = {
    "light": ["#ffffff"],
    "dark": ["#0d1117", "#0b0c0f", "#1e2129"],
}  # of GitHub, of the site, and a lighter one

_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"

RC = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hf_sparse24",
    "font.family": "DejaVu Sans",
    "font.size": 13,
    "axes.titlesize": 13.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelsize": 12.5,
    "xtick.labelsize": 12,
    "ytick.labelsize": 12,
    "legend.fontsize": 12.5,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.8,
    "lines.linewidth": 2.2,
    "lines.solid_capstyle": "round",
    "text.color": INK,
    "axes.titlecolor": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "patch.linewidth": 0,
}


@dataclass(frozen=True)
class Picture:
    """A figure: what draws it, how large it is in CSS pixels, and its title for readers who do not see it."""

    title: str
    width: int
    height: int
    draw: Callable[[Figure], None]


WIDTH = 440
"""CSS pixels. A phone has 358 for a figure and shows text of 11 and more at 9 and more; a desktop shows it larger."""

PICTURES: dict[str, Picture] = {}
"""Every figure by the name of its file, without `.svg`."""


def picture(
    name: str, title: str, width: int = WIDTH, height: int = 300
) -> Callable[[Callable[[Figure], None]], Callable[[Figure], None]]:
    """Register a function that draws on an empty matplotlib Figure as `name`.svg."""

    def register(draw: Callable[[Figure], None]) -> Callable[[Figure], None]:
        if name in PICTURES:
            raise ValueError(f"two figures are called {name!r}")
        PICTURES[name] = Picture(title, width, height, draw)
        return draw

    return register


@contextmanager
def styled() -> Iterator[None]:
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        yield


def render(name: str) -> str:
    """The SVG file of a registered figure."""
    made = PICTURES[name]
    with styled():
        # 72 dots per inch: then a point, the unit of font sizes and lines, is a CSS pixel of the file.
        figure = Figure(figsize=(made.width / 72, made.height / 72), dpi=72, layout="constrained")
        made.draw(figure)
        text = svg_text(figure, {stand_in: variable for stand_in, (variable, _, _) in COLOURS.items()}, "i")
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', f'width="{made.width}" height="{made.height}"', text, count=1)
    text = text.replace(" font-family: 'DejaVu Sans';", "").replace("'DejaVu Sans Mono'", _MONO)
    end = text.index(">")
    head = f'{text[:end]} role="img">\n<title>{escape(made.title)}</title>\n<style>\n{_stylesheet()}</style>'
    return head + text[end + 1 :]


def svg_text(figure: Figure, colours: Mapping[str, str], prefix: str) -> str:
    """Matplotlib's SVG element of a figure; the same figure gives the same text.

    Args:
        colours: from colours as Matplotlib writes them to the CSS variables that replace them.
        prefix: of ids, so that they are unique in a page.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", text[text.index("<svg") :], flags=re.S)

    def rounded(number: re.Match) -> str:
        return f"{round(float(number[0]), 2) + 0.0:g}"  # never -0

    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"-?\d+\.\d{3,}", rounded, tag[0]), text)
    for colour, variable in colours.items():
        text = text.replace(colour, f"var(--{variable})")
    # Matplotlib hashes where objects are in memory; nothing refers to its other ids.
    referred = list(dict.fromkeys(re.findall(r"#([mpC][0-9a-f_]{10,})", text)))
    for number, identifier in enumerate(referred):
        text = text.replace(identifier, f"{prefix}{number}")
    text = re.sub(rf' id="(?!{prefix}\d+")[^"]*"', "", text)
    text = re.sub(r'(?<= d=")[^"]*', lambda path: " ".join(path[0].split()), text)
    return re.sub(r"\n\s*", "\n", text)


def _stylesheet() -> str:
    light = "; ".join(f"--{name}: {value}" for name, value, _ in COLOURS.values())
    dark = "; ".join(f"--{name}: {value}" for name, _, value in COLOURS.values())
    return (
        f":root {{ {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        f"text {{ font-family: {_FONTS} }}\n"
    )


# What several figures draw.


def bare(axis: Axes) -> None:
    """No ticks, spines or grid: for matrices and diagrams."""
    axis.set(xticks=[], yticks=[])
    axis.grid(False)
    for spine in axis.spines.values():
        spine.set_visible(False)


def matrix(
    axis: Axes,
    values,
    largest: float | None = None,
    at: tuple[float, float] = (0, 0),
    groups: str = "rows",
    colour: str | None = None,
    gap: float = 0.35,
) -> tuple[float, float]:
    """Draw a matrix as cells: blue above zero, orange below, stronger for larger magnitudes, zeros empty.

    Args:
        axis: y grows downwards (see `cells`).
        values: rows of numbers. largest: the magnitude of the full colour; by default the largest one.
        at: x and y of the upper left corner, in cells.
        groups: what stands apart: groups of four in `"rows"`, in `"columns"`, `"both"` or `"none"`.
        colour: one colour for both signs.

    Returns:
        x and y of the lower right corner.
    """
    from matplotlib.patches import Rectangle

    largest = largest or max(abs(value) for row in values for value in row)
    x_gap, y_gap = gap * (groups in ("rows", "both")), gap * (groups in ("columns", "both"))
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            x, y = at[0] + j + j // 4 * x_gap, at[1] + i + i // 4 * y_gap
            if value == 0:
                look = {"facecolor": "none", "edgecolor": GRID, "linewidth": 1}
            else:
                alpha = 0.22 + 0.73 * min(1.0, abs(value) / largest)
                look = {"facecolor": colour or (BLUE if value > 0 else ORANGE), "alpha": round(alpha, 2)}
            axis.add_patch(Rectangle((x + 0.05, y + 0.05), 0.9, 0.9, **look))
    rows, columns = len(values), len(values[0])
    return at[0] + columns + (columns - 1) // 4 * x_gap, at[1] + rows + (rows - 1) // 4 * y_gap


def cells(axis: Axes, width: float, height: float, left: float = 0, top: float = 0) -> None:
    """Make an axis of cells: square, y downwards, nothing but what is drawn."""
    bare(axis)
    axis.set(xlim=(left, left + width), ylim=(top + height, top), aspect="equal")


def arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = MUTED) -> None:
    style = {"arrowstyle": "-|>,head_width=0.3,head_length=0.5", "color": colour, "linewidth": 1.6}
    axis.annotate("", end, start, arrowprops=style | {"shrinkA": 0, "shrinkB": 0})
