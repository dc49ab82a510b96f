"""Draw line charts as inline SVG in the page's colours and font, the same from run to run.

Strokes and fills are CSS variables, so one drawing serves the light and the dark scheme. The
drawing is written directly: a plotting library takes longer to load and draw than a short run.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from headrace.report.page import Safe

Array = NDArray[np.float64]
WIDTH, HEIGHT = 374.0, 234.0
"""Size of the drawing in its own pixels; the page scales it to a column."""
TOP, RIGHT, BOTTOM = 8.0, 10.0, 40.0
"""Margins around the curves, for tick labels and the axis's label."""
LETTER = 6.4
"""Width of a digit at 11 pixels."""
TICKS = 6
"""Most intervals between the ticks of an axis."""


@dataclass(frozen=True)
class ChartLine:
    """Hold one curve of a chart.

    Args:
        x, y: [N] its points; NaN leaves a gap.
        colour: a name of a colour of the page's style sheet, such as `c0`.
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


@dataclass(frozen=True)
class Frame:
    """Map values to pixels: the ends of both axes, and where the curves begin on the left."""

    right: float
    low: float
    high: float
    left_px: float

    def x(self, value: float) -> float:
        """Return the horizontal pixel of a value; the axis begins at zero."""
        return self.left_px + value / self.right * (WIDTH - RIGHT - self.left_px)

    def y(self, value: float) -> float:
        """Return the vertical pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    def path(self, x: Array, y: Array) -> str:
        """Return points as the commands of an SVG path."""
        return "L".join(f"{self.x(a):.1f} {self.y(b):.1f}" for a, b in zip(x, y, strict=True))


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
        name: unique on the page; the id inside the drawing comes from it.
        lines: curves, the last on top.
        label: the chart in words, for those who cannot see it.
        axis: the horizontal axis.
        y_label: the vertical axis's label.
        top: the upper end of the vertical axis, or None to show everything.
        goal: height of a dashed horizontal line.
        limit: place of a dotted vertical line.
    """
    low, high = _ends([*_heights(lines), *([goal] if goal is not None else [])])
    high = top if top is not None and top > low else high
    widest = max([float(v) for line in lines for v in line.x[np.isfinite(line.x)]], default=0.0)
    right = 1.03 * max(widest, limit or 0.0) or 1.0
    y_ticks, y_words = _ticks(low, high)
    frame = Frame(right, low, high, 26 + LETTER * max(map(len, y_words), default=1))
    x0, x1, y0, y1 = frame.left_px, WIDTH - RIGHT, HEIGHT - BOTTOM, TOP
    middle = (x0 + x1) / 2, (y0 + y1) / 2
    parts = [
        f'<clipPath id="{escape(name)}-area"><rect x="{x0:.1f}" y="{y1:.1f}" '
        f'width="{x1 - x0:.1f}" height="{y0 - y1 + 1:.1f}"/></clipPath>',
        *(_rule(x0, frame.y(v), x1, frame.y(v), "grid", 1.0) for v in y_ticks),
        *(
            _text(x0 - 5, frame.y(v) + 4, word, "end")
            for v, word in zip(y_ticks, y_words, strict=True)
        ),
        _rule(x0, y0, x1, y0, "grid", 1.0),
        *(_text(frame.x(v), y0 + 16, axis.tick(v), "middle") for v in _ticks(0.0, right)[0]),
        _text(middle[0], HEIGHT - 6, axis.label, "middle"),
        _text(11, middle[1], y_label, "middle", turned=True),
        f'<g clip-path="url(#{escape(name)}-area)">',
        *(part for line in lines for part in _curve(frame, line)),
    ]
    if goal is not None:
        parts.append(_rule(x0, frame.y(goal), x1, frame.y(goal), "goal", 1.5, "7 5"))
    if limit is not None:
        parts.append(_rule(frame.x(limit), y0, frame.x(limit), y1, "goal", 1.2, "1.2 2.4"))
    return Safe(
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(label)}">'
        + "\n".join([*parts, "</g></svg>"])
    )


def _heights(lines: Sequence[ChartLine]) -> Iterator[float]:
    """Yield every finite height of curves and their bands."""
    for line in lines:
        for values in (line.y, *(line.band or ())):
            yield from (float(v) for v in values[np.isfinite(values)])


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis that shows `values`, a twentieth of their range beyond them."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = (high / 20 - low / 20) or max(abs(high) / 20, 0.05)
    return low - margin, high + margin


def _ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Return round numbers between two ends of an axis, and each as it is written."""
    rough = (high - low) / TICKS
    if not math.isfinite(rough) or rough <= 0:
        return [], []
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10, 20) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step), math.floor(high / step)
    values = [n * step for n in range(first, last + 1)]
    digits = next((d for d in range(6) if math.isclose(round(step, d), step)), None)
    plain = digits is not None and max(abs(low), abs(high)) < 1e6
    return values, [f"{v:.{digits}f}" if plain else f"{v:.6g}" for v in values]


def _pieces(line: ChartLine) -> Iterator[slice]:
    """Yield the stretches of a curve that have no gap."""
    there = np.isfinite(line.x) & np.isfinite(line.y)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], there.astype(np.int8), [0]])))
    yield from (slice(int(a), int(b)) for a, b in edges.reshape(-1, 2))


def _curve(frame: Frame, line: ChartLine) -> Iterator[str]:
    """Yield the elements of one curve: its band, its line and its points."""
    colour, width = f"var(--{line.colour})", 1.1 if line.faint else 1.9
    opacity = "; stroke-opacity: 0.55" if line.faint else ""
    for piece in _pieces(line):
        x, y = line.x[piece], line.y[piece]
        if line.band is not None:
            low, high = (np.where(np.isfinite(b[piece]), b[piece], y) for b in line.band)
            around = frame.path(np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]]))
            yield f'<path d="M{around}Z" style="fill: {colour}; fill-opacity: 0.22"/>'
        if len(x) > 1:
            style = f"fill: none; stroke: {colour}; stroke-width: {width}{opacity}"
            yield f'<path d="M{frame.path(x, y)}" style="{style}; stroke-linejoin: round"/>'
        if line.marks:
            radius = 1.8 if len(line.x) <= 40 else 1.0
            for a, b in zip(x, y, strict=True):
                place = f'cx="{frame.x(a):.1f}" cy="{frame.y(b):.1f}"'
                yield f'<circle {place} r="{radius}" style="fill: {colour}; stroke: {colour}"/>'


def _rule(
    x0: float, y0: float, x1: float, y1: float, colour: str, width: float, dashes: str = ""
) -> str:
    """Return a straight line between two pixels."""
    dashed = f"; stroke-dasharray: {dashes}" if dashes else ""
    ends = f'x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"'
    return f'<line {ends} style="stroke: var(--{colour}); stroke-width: {width}{dashed}"/>'


def _text(x: float, y: float, words: str, anchor: str, *, turned: bool = False) -> str:
    """Return words at a pixel, from bottom to top where they are turned."""
    upright = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    style = f"font-size: 11px; fill: var(--soft); text-anchor: {anchor}"
    return f'<text x="{x:.1f}" y="{y:.1f}"{upright} style="{style}">{escape(words)}</text>'
