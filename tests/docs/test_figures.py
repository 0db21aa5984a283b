"""Figures of the documentation: each draws, is committed as drawn, is used, and is readable on light and dark pages."""

import functools
import re
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version

import make
import pages
import pytest
import style
from paths import ROOT

of_drawings = pytest.mark.slow  # Matplotlib draws each in a second


@functools.cache
def drawn(name: str) -> str:
    return style.render(name)


@of_drawings
@pytest.mark.parametrize("name", style.PICTURES)
def test_a_figure_draws(name):
    svg = drawn(name)
    root = ElementTree.fromstring(svg)
    assert root.find("{*}title").text == style.PICTURES[name].title
    assert len(svg) < 60_000
    body = svg[svg.index("</style>") :]
    assert not set(re.findall(r"#[0-9a-f]{6}\b", body)), "a colour that one of the two pages may not show"


@of_drawings
@pytest.mark.parametrize("name", style.PICTURES)
def test_a_figure_is_legible_on_a_phone(name):
    """In the 358 pixels that a page has there, no text is smaller than 9."""
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:bold )?([\d.]+)px", drawn(name))]
    assert min(sizes) * 358 / style.PICTURES[name].width >= 9


@of_drawings
@pytest.mark.parametrize("name", style.PICTURES)
def test_the_committed_file_is_what_is_drawn(name):
    pinned = re.search(r"^matplotlib==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)[1]
    if version("matplotlib") != pinned:
        pytest.skip(f"files are drawn by matplotlib {pinned}, this is {version('matplotlib')}")
    assert (make.IMAGES / f"{name}.svg").read_text() == drawn(name), "run `make figures`"


def test_committed_files_are_the_registered_and_the_frozen_ones():
    assert {path.stem for path in make.IMAGES.glob("*.svg")} == style.PICTURES.keys() | make.FROZEN


def test_every_figure_is_on_a_page():
    used = {
        name: alt
        for text in pages.PAGES.values()
        for alt, name in re.findall(r"!\[([^]]*)\]\(\S*images/([\w-]+)\.svg\)", text)
    }
    assert used.keys() == style.PICTURES.keys() | make.FROZEN
    assert all(len(alt) > 20 for alt in used.values()), "alt texts say what is seen"


@pytest.mark.parametrize("page", ["light", "dark"])
def test_contrast(page):
    """WCAG 2.2, 1.4.3 for text and 1.4.11 for graphics. The grid may be faint."""
    for name, *values in style.COLOURS.values():
        colour = values[("light", "dark").index(page)]
        for background in style.BACKGROUNDS[page]:
            needed = {"ink": 7, "grid": 1.2, "grey": 3}.get(name, 4.5)
            assert _contrast(colour, background) >= needed, (name, background)


def _contrast(one: str, other: str) -> float:
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
