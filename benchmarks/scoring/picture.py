"""Draw pictures for the documentation: SVG text, readable in light and dark.

A picture is a file of its own, which a page shows as an image: it has its own background and its
own colours, those of the report, and follows the reader's scheme and not the page's. Places are
rounded to a tenth of a pixel, so that the same rows give the same text everywhere. Colour never
stands alone: a series has a mark of its own shape, and a cell has its number.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from headrace.report.style import STYLE

Colours = dict[str, str]
SCHEMES: tuple[Colours, Colours] = tuple(  # type: ignore[assignment]
    dict(re.findall(r"--([a-z0-9-]+):(#[0-9a-f]+)", part))
    for part in STYLE.partition("*{box-sizing")[0].split("@media(prefers-color-scheme:dark)")
)
"""The report's light and dark palettes, each of which maps a name to a colour."""
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',Arial,sans-serif"
Shape = Literal["circle", "square", "diamond"]
TICKS = 6
"""The most ticks of an axis."""


class Picture:
    """Collect the elements of an SVG; places are in pixels from the upper left corner."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height, self.label = width, height, label
        self._drawn: list[str] = []
        self._used: set[tuple[str, str]] = {("fill", "card"), ("fill", "ink")}

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        colour: str = "ink",
        anchor: str = "start",
        size: float = 13,
        angle: float = 0,
        bold: bool = False,
    ) -> None:
        """Draw words that begin, or have their middle or end, at (x, y); `angle` in degrees."""
        more = f' font-size="{_at(size)}"' if size != 13 else ""
        more += f' text-anchor="{anchor}"' if anchor != "start" else ""
        more += ' font-weight="600"' if bold else ""
        more += f' transform="rotate({_at(angle)} {_at(x)} {_at(y)})"' if angle else ""
        place = f'x="{_at(x)}" y="{_at(y)}"'
        self._add(f"<text {place}{self._class(fill=colour)}{more}>{escape(words)}</text>")

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "",
        stroke: str = "",
        opacity: float = 1,
        line: float = 1,
    ) -> None:
        """Draw a rectangle."""
        more = f' fill-opacity="{opacity:.2f}"' if opacity != 1 else ""
        more += f' stroke-width="{_at(line)}"' if stroke else ""
        more += "" if fill else ' fill="none"'
        size = f'width="{_at(width)}" height="{_at(height)}"'
        colours = self._class(fill=fill, stroke=stroke)
        self._add(f'<rect x="{_at(x)}" y="{_at(y)}" {size} rx="3"{colours}{more}/>')

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        *,
        colour: str,
        width: float = 1,
        dash: str = "",
        opacity: float = 1,
    ) -> None:
        """Draw a straight line; `dash` as in SVG."""
        more = f' stroke-dasharray="{dash}"' if dash else ""
        more += f' stroke-opacity="{opacity:.2f}"' if opacity != 1 else ""
        ends = f'x1="{_at(x1)}" y1="{_at(y1)}" x2="{_at(x2)}" y2="{_at(y2)}"'
        colours = self._class(stroke=colour)
        self._add(f'<line {ends}{colours} stroke-width="{_at(width)}"{more}/>')

    def mark(self, x: float, y: float, shape: Shape, colour: str, title: str = "") -> None:
        """Draw a point."""
        how = f'{self._class(fill=colour)} fill-opacity="0.85"'
        end = f"><title>{escape(title)}</title></" if title else "/"
        if shape == "circle":
            form, place = "circle", f'cx="{_at(x)}" cy="{_at(y)}" r="4"'
        elif shape == "square":
            form, place = "rect", f'x="{_at(x - 3.5)}" y="{_at(y - 3.5)}" width="7" height="7"'
        else:
            ends = ((x, y - 5.2), (x + 5.2, y), (x, y + 5.2), (x - 5.2, y))
            form = "polygon"
            place = f'points="{" ".join(f"{_at(a)},{_at(b)}" for a, b in ends)}"'
        self._add(f"<{form} {place}{how}{end}{form if title else ''}>")

    def legend(self, x: float, y: float, entries: Sequence[tuple[Shape, str, str]]) -> None:
        """Draw marks with their meanings in a row: (shape, colour, words)."""
        for shape, colour, words in entries:
            self.mark(x + 5, y - 4.5, shape, colour)
            self.text(x + 16, y, words)
            x += 40 + 7.2 * len(words)

    def svg(self) -> str:
        """Return the file's text."""
        size = f"{_at(self.width)} {_at(self.height)}"
        light, dark = (
            "".join(
                f".{paint[0]}-{name}{{{paint}:{scheme[name]}}}"
                for paint, name in sorted(self._used)
            )
            for scheme in SCHEMES
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
            f'width="{_at(self.width)}" height="{_at(self.height)}" role="img" '
            f'aria-label="{escape(self.label)}" font-size="13" font-family="{FONT}">'
        )
        style = f"<style>{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"
        ground = '<rect width="100%" height="100%" rx="8" class="f-card"/>'
        return "\n".join([head, style, ground, *self._drawn, "</svg>\n"])

    def _class(self, **colours: str) -> str:
        used = [(paint, name) for paint, name in colours.items() if name]
        self._used.update(used)
        names = " ".join(f"{paint[0]}-{name}" for paint, name in used)
        return f' class="{names}"' if names else ""

    def _add(self, element: str) -> None:
        self._drawn.append(element)


def _at(value: float) -> str:
    """Format a place or a size, to a tenth of a pixel."""
    return f"{round(value, 1) + 0.0:g}"


# --- axes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """Describe one direction of a panel.

    Args:
        low, high: the values at its ends.
        label: what is measured along it.
        tick: how a value is written.
        log: equal distances are equal ratios.
    """

    low: float
    high: float
    label: str
    tick: Callable[[float], str]
    log: bool = False

    def share(self, value: float) -> float:
        """Return how far along the axis `value` lies: 0 at `low`, 1 at `high`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return round values along the axis."""
        return _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high)


def around(
    values: Sequence[float], label: str, tick: Callable[[float], str], *, log: bool = False
) -> Axis:
    """Return an axis that holds all values, with a little room at both ends."""
    low, high = min(values), max(values)
    if log:
        room = max(1.15, (high / low) ** 0.06)
        return Axis(low / room, high * room, label, tick, log=True)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return Axis(low - room, high + room, label, tick)


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / TICKS
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * k for k in (1, 2, 2.5, 5, 10) if unit * k >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        inside = [k * 10.0**d for d in decades for k in steps if low <= k * 10.0**d <= high]
        if len(inside) > TICKS and len(ticks) > 1:
            break
        ticks = inside
    return ticks or [low, high]


@dataclass(frozen=True)
class Panel:
    """Place two axes in a box of a picture: `left`, `top`, `width`, `height` in pixels."""

    picture: Picture
    x: Axis
    y: Axis
    left: float
    top: float
    width: float
    height: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the place of two values."""
        return (
            self.left + self.x.share(x) * self.width,
            self.top + (1 - self.y.share(y)) * self.height,
        )

    def draw(self) -> None:
        """Draw grid, ticks and labels."""
        draw, right, bottom = self.picture, self.left + self.width, self.top + self.height
        for value in self.x.ticks():
            x, _ = self.at(value, self.y.low)
            draw.line(x, self.top, x, bottom, colour="grid")
            draw.text(x, bottom + 18, self.x.tick(value), colour="soft", anchor="middle", size=12)
        for value in self.y.ticks():
            _, y = self.at(self.x.low, value)
            draw.line(self.left, y, right, y, colour="grid")
            draw.text(
                self.left - 7, y + 4, self.y.tick(value), colour="soft", anchor="end", size=12
            )
        draw.text(
            self.left + self.width / 2, bottom + 38, self.x.label, colour="soft", anchor="middle"
        )
        draw.text(self.left, self.top - 10, self.y.label, colour="soft")

    def level(self, y: float) -> None:
        """Draw a dashed line across."""
        (x1, at), (x2, _) = self.at(self.x.low, y), self.at(self.x.high, y)
        self.picture.line(x1, at, x2, at, colour="goal", width=1.3, dash="5 4", opacity=0.7)

    def diagonal(self) -> None:
        """Draw a dashed line where both axes have the same value."""
        low, high = max(self.x.low, self.y.low), min(self.x.high, self.y.high)
        (x1, y1), (x2, y2) = self.at(low, low), self.at(high, high)
        self.picture.line(x1, y1, x2, y2, colour="goal", width=1.3, dash="5 4", opacity=0.7)

    def whisker(self, x: float, low: float, high: float, colour: str) -> None:
        """Draw an interval of y at x."""
        (at, y1), (_, y2) = self.at(x, low), self.at(x, high)
        self.picture.line(at, y1, at, y2, colour=colour, width=1.6, opacity=0.55)
