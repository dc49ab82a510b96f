"""Draw a technique's receipt: what each measured plan became by it, in speed and in memory."""

import math
from collections.abc import Sequence

from learning_page import Gain
from scoring.picture import Picture

from headrace.core.statistics import Interval
from sitepages.measured import MeasuredEffect

WIDTH, ROW, TOP = 640, 46, 44
"""Pixels across the picture, down one row of it, and above the first."""
HALVES = (24.0, 340.0)
"""Left ends of the two columns of bars, in pixels."""
COLUMN = 270.0
"""Width of a column of bars, with the number at its end, in pixels."""
WRITTEN = 58.0
"""Width that a number takes, in pixels."""
CLIPPED = 4.0
"""Ratio, or its inverse, beyond which a bar is cut."""
SEED = 26
"""Pixels down one side's seeds."""
LETTERS = 88
"""Letters that fit on one line."""
SAME = 0.01
"""Share by which a ratio is off 1 at least, to be coloured as better or worse."""


def receipt_picture(name: str, measured: Sequence[MeasuredEffect]) -> str:
    """Return an SVG of a technique's ratios of speed and memory.

    Args:
        name: the technique.
        measured: at least one effect.
    """
    label = f"Measured: speed and memory of {len(measured)} plans with {name}, over without it"
    draw = Picture(WIDTH, TOP + ROW * len(measured) + 22, label)
    draw.text(HALVES[0], 26, "speed, as a ratio", bold=True)
    draw.text(HALVES[1], 26, "peak memory, as a ratio", bold=True)
    speeds = [effect.speed for effect in measured]
    memories = [effect.memory for effect in measured]
    for at, effect in enumerate(measured):
        y = TOP + ROW * at + 18
        draw.text(HALVES[0], y, _one_line(effect.how, effect.where), colour="soft", size=12)
    for left, ratios, more_is_better in ((HALVES[0], speeds, True), (HALVES[1], memories, False)):
        _column(draw, left, ratios, more_is_better)
    return draw.svg()


def learning_picture(gain: Gain) -> str:
    """Return an SVG of how many times sooner a recipe is at its target with a technique.

    Below it stands which seeds reached the target at all.
    """
    top = TOP + ROW if gain.ratio is not None else TOP - 10
    draw = Picture(WIDTH, top + 2 * SEED + 26, f"Measured: time to a target with {gain.line}")
    hardware = gain.row["hardware"].removeprefix("NVIDIA ")
    head = f"{gain.change}: {gain.words}; {gain.n} seeds, {hardware}"
    draw.text(HALVES[0], 26, head, bold=True)
    if gain.ratio is not None:
        sooner = "times sooner at the target with it, and the interval of 95%"
        draw.text(HALVES[0], TOP + 18, sooner, colour="soft", size=12)
        low, high = gain.low or gain.ratio, gain.high or gain.ratio
        ratio = Interval(low, gain.ratio, high, gain.n)
        _column(draw, HALVES[0], [ratio], more_is_better=True, width=WIDTH - 2 * HALVES[0])
    sides = ((f"recipe, {gain.change}", gain.reached), ("recipe as it is", gain.base_reached))
    for at, (words, reached) in enumerate(sides):
        y = top + SEED * at + 24
        draw.text(HALVES[0], y + 4, words, colour="soft", size=12)
        for seed in range(gain.n):
            x = HALVES[0] + 150 + 22 * seed
            fill = "c2" if seed < reached else ""
            draw.box(x, y - 7, 14, 14, fill=fill, stroke="c2" if fill else "c7")
        x = HALVES[0] + 150 + 22 * gain.n + 8
        draw.text(x, y + 4, f"{reached} of {gain.n} seeds reached the target", size=12)
    return draw.svg()


def _column(
    draw: Picture,
    left: float,
    ratios: Sequence[Interval | None],
    more_is_better: bool,
    width: float = COLUMN,
) -> None:
    """Draw bars from 1, one below the other, on one scale of equal ratios."""
    read = [ratio for ratio in ratios if ratio]
    ends = [math.log(_cut(end)) for r in read for end in (r.low, r.value, r.high)] + [0.0]
    low, high = min(*ends, -0.05), max(*ends, 0.05)
    room = width - WRITTEN
    scale = room / (high - low)
    one, bottom = left - low * scale, TOP + ROW * len(ratios)
    draw.text(one, bottom + 14, "1", colour="soft", anchor="middle", size=12)
    for at, ratio in enumerate(ratios):
        y = TOP + ROW * at + 33
        draw.line(one, y - 9, one, y + 9, colour="ink")
        if ratio is None:
            draw.text(one + 8, y + 4, "not measured", colour="soft", size=12)
            continue
        first, x, last = (
            one + math.log(_cut(end)) * scale for end in (ratio.low, ratio.value, ratio.high)
        )
        better = ratio.value > 1 if more_is_better else ratio.value < 1
        colour = "c7" if abs(ratio.value - 1) < SAME else "c2" if better else "c1"
        draw.box(min(one, x), y - 6, max(abs(x - one), 1), 12, fill=colour, opacity=0.75)
        if last - first > 1:
            draw.line(first, y, last, y, colour="ink", width=1.4)
        draw.text(max(one, x, last) + 7, y + 4, f"{ratio.value:.2f}")


def _one_line(how: str, where: str) -> str:
    """Return what was measured and where, on one line of the picture."""
    room = LETTERS - len(where)
    return f"{how if len(how) <= room else how[: room - 3].rstrip() + '...'}; {where}"


def _cut(ratio: float) -> float:
    return min(CLIPPED, max(1 / CLIPPED, ratio))
