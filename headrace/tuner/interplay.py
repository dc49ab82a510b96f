"""Compute from an ablation's rows the gain of each technique, and whether two of them add up.

A gain is seconds of a step without over seconds with, less 1: leaving out what gains 5% makes a
step 1.05 times as long. Two techniques that touch different parts of a step multiply their gains.
So the gain of both together is divided by the product of the single ones, all beside the plan
without techniques; the interval of that is theirs, put together as independent errors. With m the
margin that counts:

- adds: within m of 1;
- helps: above 1 by more than m, each gains more beside the other;
- cancels: below, each gains less (or costs more) beside the other: they remove the same waste;
- conflicts: below, and slower than the better one alone, though neither costs time alone;
- undecided: the interval is too wide to say.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.core.statistics import Interval

TrialNumbers = Mapping[str, Any]
Speed = Literal["faster", "slower", ""]
Says = Literal["adds", "helps", "cancels", "conflicts", "undecided", "not measured"]
LEFT_OUT, ADDED, PAIR = "left_out", "added", "pair"
"""Values of a row's `measurement`."""
MARGIN = 0.02
"""Share by which a product of gains must be missed to count: three ratios make it."""
MEMORY_MARGIN = 0.01
"""The share of the peak that counts."""
TABLE = ("technique", "gain in the plan", "memory", "gain on its own", "says")
PAIRS = ("pair", "single gains, multiplied", "gain of both", "says")
NOTHING = "not measured"


@dataclass(frozen=True)
class Interplay:
    """Hold how two techniques act beside each other.

    Args:
        names: of both.
        alone: product of their single ratios of time, without over with.
        both: the ratio of both.
        missed: `both` over `alone`.
        says: what follows.
        why: why it is not measured.
    """

    names: tuple[str, str]
    alone: Interval | None
    both: Interval | None
    missed: Interval | None
    says: Says
    why: str = ""


def ratio_of(row: TrialNumbers | None) -> Interval | None:
    """Return the seconds without a technique over those with it; None where not measured."""
    metric = (row or {}).get("metrics", {}).get("speed_ratio")
    if row is None or metric is None:
        return None
    low, value, high, n = metric["low"], metric["value"], metric["high"], row["n"]
    if row["measurement"] == LEFT_OUT:
        return Interval(1 / high, 1 / value, 1 / low, n)
    return Interval(low, value, high, n)


def memory_of(row: TrialNumbers | None) -> float | None:
    """Return the peak with a technique over that without it."""
    metric = (row or {}).get("metrics", {}).get("memory_ratio")
    if row is None or metric is None:
        return None
    return 1 / metric["value"] if row["measurement"] == LEFT_OUT else metric["value"]


def stand(
    row: TrialNumbers,
    first: TrialNumbers | None,
    second: TrialNumbers | None,
    names: tuple[str, str],
) -> Interplay:
    """Judge two techniques by rows beside the plan without techniques.

    Args:
        row: of both.
        first: of the first alone.
        second: of the second alone.
        names: of both.
    """
    both, one, two = ratio_of(row), ratio_of(first), ratio_of(second)
    if both is None:
        return Interplay(names, None, None, None, "not measured", _why(row))
    if one is None or two is None:
        lacking, name = (first, names[0]) if one is None else (second, names[1])
        why = f"{name} alone: {_why(lacking)}"
        return Interplay(names, None, both, None, "not measured", why)
    alone = _times(one, two)
    missed = _times(both, _inverse(alone))
    worse, better = sorted((one, two), key=lambda ratio: ratio.value)
    if missed.low > 1 + MARGIN:
        says: Says = "helps"
    elif missed.high < 1 / (1 + MARGIN):
        slower = _times(both, _inverse(better)).high < 1
        says = "conflicts" if slower and worse.value >= 1 else "cancels"
    else:
        adds = missed.low >= 1 / (1 + MARGIN) and missed.high <= 1 + MARGIN
        says = "adds" if adds else "undecided"
    return Interplay(names, alone, both, missed, says)


def _why(row: TrialNumbers | None) -> str:
    return NOTHING if row is None else row.get("refused", NOTHING)


def _times(one: Interval, two: Interval) -> Interval:
    """Return the product, its errors independent."""
    value = one.value * two.value
    low = math.hypot(math.log(one.value / one.low), math.log(two.value / two.low))
    high = math.hypot(math.log(one.high / one.value), math.log(two.high / two.value))
    return Interval(value * math.exp(-low), value, value * math.exp(high), min(one.n, two.n))


def _inverse(one: Interval) -> Interval:
    return Interval(1 / one.high, 1 / one.value, 1 / one.low, one.n)


# --- for a reader ----------------------------------------------------------------------------


def single_table(
    names: Sequence[str],
    left: Mapping[str, TrialNumbers],
    alone: Mapping[str, TrialNumbers],
    margin: float,
) -> list[list[str]]:
    """Return a row of text for each technique, under TABLE."""
    return [
        [
            name,
            _gain(left.get(name)),
            _memory(left.get(name)),
            _gain(alone.get(name)),
            worth(left.get(name), margin),
        ]
        for name in names
    ]


def pair_table(interplays: Sequence[Interplay]) -> list[list[str]]:
    """Return a row of text for each pair, under PAIRS."""
    return [
        [
            " + ".join(one.names),
            _percent(one.alone),
            _percent(one.both),
            f"{one.says}: {_abbreviate(one.why)}" if one.why not in ("", one.says) else one.says,
        ]
        for one in interplays
    ]


def speed_of(row: TrialNumbers | None, margin: float) -> Speed:
    """Return whether a technique makes a step faster or slower; "" where neither is sure."""
    ratio = ratio_of(row)
    if ratio is None:
        return ""
    return "faster" if ratio.low > 1 + margin else "slower" if ratio.high < 1 / (1 + margin) else ""


def worth(row: TrialNumbers | None, margin: float) -> str:
    """Render what leaving it out of the plan shows."""
    memory = memory_of(row)
    if ratio_of(row) is None:
        return ""
    saves = memory is not None and memory < 1 - MEMORY_MARGIN
    words = [
        speed_of(row, margin),
        "less memory" if saves else "",
        "learns otherwise" if row is not None and row.get("changes") == "learning" else "",
        "the device drifted" if row is not None and row.get("drifted") else "",
    ]
    return ", ".join(filter(None, words)) or "no difference seen"


def _gain(row: TrialNumbers | None) -> str:
    ratio = ratio_of(row)
    if ratio is not None:
        return _percent(ratio)
    why = "" if row is None else str(row.get("refused", ""))
    return "" if row is None else f"refused: {why if why == _abbreviate(why) else 'see below'}"


def _memory(row: TrialNumbers | None) -> str:
    ratio = memory_of(row)
    return "" if ratio is None else f"{100 * (ratio - 1):+.1f}%"


def _percent(ratio: Interval | None) -> str:
    if ratio is None:
        return ""
    low, value, high = (100 * (v - 1) for v in (ratio.low, ratio.value, ratio.high))
    return f"{value:+.1f}% ({low:+.1f} to {high:+.1f})"


def _abbreviate(words: str) -> str:
    first = (words.strip().splitlines() or [""])[0]
    return first if len(first) <= 60 else f"{first[:57]}..."
