"""Write the page of `headrace extend`: what a run on longer rows gained, and what it lost."""

import numpy as np

from headrace.inference.extension import Extension, LengthReading, LossAtLength
from headrace.inference.needle import CANDIDATES
from headrace.report.chart import ChartAxis, ChartLine, line_chart
from headrace.report.page import (
    Safe,
    cards,
    figure,
    join,
    legend,
    muted,
    page,
    section,
    swatch,
    table,
    tag,
)

LENGTH_HEAD = (
    "tokens of a row",
    "loss before",
    "loss after",
    "change",
    "needles before",
    "needles after",
)
"""What `length_rows` holds."""
BEFORE, AFTER = "c1", "c0"
"""Colours of the weights that the run began from, and of the run."""


def length_rows(extension: Extension) -> list[list[str]]:
    """Return a row of each length: losses in nats, and the share of needles that were found."""
    rows = []
    for before, after in zip(extension.before.losses, extension.after.losses, strict=True):
        rows.append(
            [
                f"{before.length:,}",
                f"{before.loss_nats:.4f}",
                f"{after.loss_nats:.4f}",
                f"{100 * (after.loss_nats / before.loss_nats - 1):+.2f}%",
                _needle_share(extension.before, before.length),
                _needle_share(extension.after, before.length),
            ]
        )
    return rows


def extension_page(extension: Extension) -> str:
    """Return the whole page; everything that text or names could hold is escaped."""
    kept = extension.is_kept
    badge = tag("span", "kept" if kept else "lost", class_=f"badge {'good' if kept else 'bad'}")
    return page(
        f"{extension.run.name}: longer rows",
        tag(
            "header",
            tag("p", "headrace extend", class_="eyebrow"),
            tag("h1", f"{extension.run.name}: {extension.trained:,} to {extension.length:,}"),
            badge,
            tag("p", extension.verdict, class_="verdict"),
            _figures(extension),
        ),
        section(
            "By length of rows",
            table("Loss and needles by length", LENGTH_HEAD, length_rows(extension)),
            muted(f"Before: {extension.base}, with its own rotation. Losses are nats per token."),
        ),
        _places(extension),
        _needles(extension),
    )


def _needle_share(reading: LengthReading, length: int) -> str:
    """Return the share of needles that were found in rows of a length; "-" where none fit."""
    cells = [cell for cell in reading.needles if cell.length == length]
    asked = sum(cell.questions for cell in cells)
    return f"{sum(cell.right for cell in cells) / asked:.0%}" if asked else "-"


def _figures(extension: Extension) -> Safe:
    before, after = extension.before.losses, extension.after.losses
    return cards(
        [
            (
                "Short rows",
                f"{extension.change_percent:+.2f}%",
                f"loss at {extension.trained:,} tokens",
            ),
            (
                "Long rows",
                f"{after[-1].loss_nats:.3f}",
                f"nats at {extension.length:,} tokens; before {before[-1].loss_nats:.3f}",
            ),
            (
                "Needles",
                _needle_share(extension.after, extension.length),
                f"at {extension.length:,} tokens; before "
                f"{_needle_share(extension.before, extension.length)}, chance {1 / CANDIDATES:.0%}",
            ),
        ]
    )


def _line(loss: LossAtLength, colour: str) -> ChartLine:
    """Return the loss by place as a curve through the middles of the bins."""
    middles = np.array([(place["begin"] + place["end"]) / 2 for place in loss.places])
    nats = np.array([place["loss_nats"] for place in loss.places])
    return ChartLine(middles, nats, colour, marks=True)


def _places(extension: Extension) -> Safe:
    """Render the loss by place in the longest rows, before and after."""
    last = extension.before.losses[-1], extension.after.losses[-1]
    chart = line_chart(
        "places",
        [_line(last[0], BEFORE), _line(last[1], AFTER)],
        label="Loss by the tokens before a target, before and after",
        axis=ChartAxis("tokens before the target", lambda value: f"{value:,.0f}"),
        y_label="nats",
        limit=float(extension.trained),
    )
    key = legend([(swatch(BEFORE, "line"), "before"), (swatch(AFTER, "line"), "after")])
    rows = [
        [
            f"{before['begin']:,} to {before['end'] - 1:,}",
            f"{before['targets']:,}",
            f"{before['loss_nats']:.4f}",
            f"{after['loss_nats']:.4f}",
        ]
        for before, after in zip(last[0].places, last[1].places, strict=True)
    ]
    title = f"Rows of {extension.length:,} tokens"
    return section(
        "By place",
        tag(
            "div",
            figure(title, join((key, chart))),
            table("Loss by place", ("places", "targets", "before", "after"), rows),
            class_="charts",
        ),
        muted(f"The dotted line is the trained length, {extension.trained:,} tokens."),
    )


def _needles(extension: Extension) -> Safe:
    """Render the needles that were found as heat maps of depths and lengths."""
    if not extension.after.needles:
        return section("Needles", muted("No row is long enough for a needle and its question."))
    maps = join(
        (_heat_map("Before", extension.before), _heat_map("After", extension.after)),
    )
    questions = extension.after.needles[0].questions
    return section(
        "Needles",
        tag("div", maps, class_="charts"),
        muted(
            f"Share of {questions} questions a cell of which the right number of "
            f"{CANDIDATES} is the likeliest; chance is {1 / CANDIDATES:g}. At depth 0% the "
            "sentence stands at the beginning of the row, furthest from its question."
        ),
    )


def _heat_map(title: str, reading: LengthReading) -> Safe:
    """Render one model's needles: a row a depth, a column a length, darker where more are found."""
    share = {(cell.depth, cell.length): cell.share for cell in reading.needles}
    lengths = sorted({length for _, length in share})
    head = tag("tr", tag("th", "depth"), *(tag("th", f"{n:,}", class_="number") for n in lengths))
    rows = [
        tag(
            "tr",
            tag("th", f"{depth:.0%}", scope="row"),
            *(_cell(share[depth, length]) for length in lengths),
        )
        for depth in sorted({depth for depth, _ in share})
    ]
    grid = tag("table", tag("thead", head), tag("tbody", *rows))
    label = f"Needles found by depth and length: {title}"
    box = tag("div", grid, class_="scroll", role="region", aria_label=label, tabindex="0")
    return figure(title, box)


def _cell(share: float) -> Safe:
    """Return a cell of a heat map; text keeps the page's ink, so the colour stays light."""
    colour = f"color-mix(in srgb,var(--{AFTER}) {60 * share:.0f}%,transparent)"
    return tag("td", f"{share:.2f}", class_="number", style=f"background:{colour}")
