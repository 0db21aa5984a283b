"""Figures of the page of claims, one for each paper: the mean of each difference that decides, with its interval."""

import statistics
from functools import partial

import claims_page
from matplotlib.figure import Figure
from results import RESULTS
from style import BLUE, GREEN, MUTED, ORANGE, picture

COLOURS = {claims_page.SEEN: BLUE, claims_page.NO_EFFECT: GREEN, claims_page.CONTRADICTED: ORANGE}
"""Of verdicts; others are grey."""

Row = tuple[str, float, float, str]
"""Label, mean, half of the interval and colour of a difference."""


def rows_of(section: claims_page.Section, results: claims_page.Results) -> list[Row]:
    """The differences that decide a paper's rows, from top to bottom."""
    found = []
    for claim in section.claims:
        colour = COLOURS.get(claims_page.judged(claim, results)[-1], MUTED)
        for place, ((one, other, *_), values) in enumerate(zip(claim.gaps, claims_page.differences(claim, results))):
            if claim.statistic and place in (claim.of or range(len(claim.gaps))):
                label = f"{claim.id}: {other.partition('/')[2]}\nover {one.partition('/')[2]}, {len(values)}"
                found.append((label, statistics.mean(values), claims_page.margin(values), colour))
    return found


def draw(rows: list[Row], figure: Figure) -> None:
    axis = figure.subplots()
    for place, (_, mean, error, colour) in enumerate(rows):
        axis.plot([mean - error, mean + error], [place, place], color=colour, linewidth=2)
        axis.plot(mean, place, "o", color=colour, markersize=6)
    axis.axvspan(-claims_page.LIMIT, claims_page.LIMIT, color=MUTED, alpha=0.12, linewidth=0)
    axis.axvline(0, color=MUTED, linewidth=1)
    axis.set_yticks(range(len(rows)), [label for label, *_ in rows], fontsize=11.5)
    means = [mean for _, mean, *_ in rows]  # the interval of two seeds may reach further
    axis.set(xlim=(min(means) - 0.03, max(means) + 0.03), ylim=(len(rows) - 0.5, -0.5), xlabel="nats")
    axis.locator_params(axis="x", nbins=5)
    axis.grid(axis="y", visible=False)


_RESULTS = claims_page.Results(RESULTS)
for _section in _RESULTS.sections():
    _rows = rows_of(_section, _RESULTS)
    picture(_section.image, claims_page.ALT, height=80 + 36 * len(_rows))(partial(draw, _rows))
