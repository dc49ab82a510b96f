"""Line charts: matplotlib draws, the page colours.

Artists get stand-in colours (`#ab00cd` is `--c0`) that become CSS variables in the SVG, so one
drawing serves the light and the dark scheme. Text stays text in the page's font. What matplotlib
would make differ from run to run (date, random ids) or would repeat on a page (group ids,
namespaces) is taken out. No word of the user reaches matplotlib, which would read `$` as a formula.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from headrace.report.page import Safe

Array = NDArray[np.float64]
NAMES = ("c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "soft", "grid", "goal")
WIDTH_IN, HEIGHT_IN = 5.2, 3.25
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],  # ships with matplotlib: the layout is equal everywhere
    "font.size": 11,
    "path.simplify": False,
}


@dataclass(frozen=True)
class ChartLine:
    """Hold one curve of a chart.

    Args:
        x, y: [N] its points; NaN leaves a gap.
        colour: a name of NAMES.
        band: [N] lows and highs around it, or None.
        marks: draw the points too.
        faint: thinner, behind the others.
    """

    x: Array
    y: Array
    colour: str
    band: tuple[Array, Array] | None = None
    marks: bool = False
    faint: bool = False


@dataclass(frozen=True)
class ChartAxis:
    """Hold a chart's horizontal axis: its label and how a tick is written."""

    label: str
    tick: Callable[[float], str]


def line_chart(
    name: str,
    lines: Sequence[ChartLine],
    *,
    label: str,
    axis: ChartAxis,
    y_label: str,
    top: float | None = None,
    goal: float | None = None,
    limit: float | None = None,
) -> Safe:
    """Draw curves as an inline SVG.

    Args:
        name: unique on the page; ids inside the drawing come from it.
        lines: curves, the last on top.
        label: the chart in words, for those who cannot see it.
        axis: the horizontal axis.
        y_label: the vertical axis's label.
        top: the upper end of the vertical axis, or None to show everything.
        goal: height of a dashed horizontal line.
        limit: place of a dotted vertical line.
    """
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
        axes = figure.add_subplot()
        for line in lines:
            _draw(axes, line)
        if goal is not None:
            axes.axhline(goal, color=_stand_in("goal"), lw=1.5, ls=(0, (5, 3)))
        if limit is not None:
            axes.axvline(limit, color=_stand_in("goal"), lw=1.2, ls=(0, (1, 2)))
        axes.set_xlim(left=0)
        if top is not None:
            axes.set_ylim(top=top)
        _dress(axes, axis, y_label)
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    return _clean(file.getvalue(), label)


def _stand_in(colour: str) -> str:
    """Return the hex colour that stands for a CSS variable while matplotlib draws."""
    return f"#ab{NAMES.index(colour):02x}cd"


def _draw(axes: Axes, line: ChartLine) -> None:
    """Draw one curve with its band and marks."""
    colour = _stand_in(line.colour)
    if line.band is not None:
        axes.fill_between(line.x, *line.band, color=colour, alpha=0.22, lw=0)
    axes.plot(
        line.x,
        line.y,
        color=colour,
        lw=1.1 if line.faint else 1.9,
        alpha=0.55 if line.faint else 1.0,
        marker="o" if line.marks else "",
        markersize=3.6 if len(line.x) <= 40 else 2.0,
    )


def _dress(axes: Axes, axis: ChartAxis, y_label: str) -> None:
    """Draw labels, ticks, a quiet grid, and one line at the bottom."""
    soft, grid = _stand_in("soft"), _stand_in("grid")
    axes.set_xlabel(axis.label, color=soft)
    axes.set_ylabel(y_label, color=soft)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: axis.tick(value)))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.tick_params(colors=soft, length=0, pad=5)
    axes.grid(axis="y", color=grid, lw=1)
    axes.set_axisbelow(True)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(grid)


def _clean(svg: str, label: str) -> Safe:
    """Return the bare <svg> element with CSS colours, page fonts and a text alternative."""
    body = svg[svg.index("<svg") :]
    viewbox = re.search(r'viewBox="[^"]*"', body)
    assert viewbox is not None, "matplotlib always writes a viewBox"
    body = body[body.index(">") + 1 :].replace("xlink:href", "href")
    body = re.sub(r"<!--.*?-->", "", body, flags=re.S)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r"#ab([0-9a-f]{2})cd", lambda m: f"var(--{NAMES[int(m[1], 16)]})", body)
    body = re.sub(r"\n\s*", "\n", body)
    return Safe(f'<svg {viewbox[0]} role="img" aria-label="{escape(label)}">{body.strip()}')
