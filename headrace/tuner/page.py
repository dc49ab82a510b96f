"""Write tune.html: the path from the first plan to the last, as one self-contained page."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

import numpy as np

from headrace.core.statistics import Interval
from headrace.core.units import format_bytes, format_seconds
from headrace.predict.sweep import NO_PRICE
from headrace.report.chart import Array, ChartAxis, ChartLine, line_chart
from headrace.report.page import (
    Safe,
    bar,
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
    write_page,
)
from headrace.report.words import NOT_MEASURED, dollars, seconds, whole
from headrace.tuner.path import PAGE, Tuned, command, named
from headrace.tuner.screen_page import codes, screen_section
from headrace.tuner.trial_row import UNCOUNTED, TrialRow, format_ratio, length_of

TONES = {
    "kept": "good",
    "reverted": "plain",
    "not shown": "plain",
    "refused": "bad",
    "not tried": "plain",
}
FOR = {
    "time": "the time of a step",
    "money": "money",
    "memory": "peak memory",
    "quality": "the time to a target",
}
STAGES = {
    "screen": "screened",
    "accept": "measured whole",
    "learning": "over seeds",
    "none": "not measured",
}
MOST_LEFT = 40
"""Most changes that were not tried and are named."""


def write_tune_page(tuned: Tuned, folder: Path) -> Path:
    """Write the page into the tuning's folder; returns its path."""
    name = tuned.first.name
    bought = {s.number: s.bought(length_of(tuned.first, s.after_s)) for s in tuned.kept}
    text = page(
        f"{name} tuned - Headrace",
        _header(tuned),
        section("What it came to", cards(_figures(tuned))),
        path_section(tuned.path, bought, memory=tuned.aim == "memory"),
        trials_section(tuned.path, counted=tuned.counted),
        *map(screen_section, tuned.screens),
        _left(tuned),
        section(
            "Run it",
            tag("pre", command(folder), class_="command"),
            tag("details", tag("summary", "The tuned plan"), tag("pre", named(tuned).to_toml())),
            tag("details", tag("summary", "The first plan"), tag("pre", tuned.first.to_toml())),
            muted("Readings that stand are in trials.jsonl; the same command tunes on from there."),
        ),
    )
    return write_page(folder / PAGE, text)


def _header(tuned: Tuned) -> Safe:
    gain = "no change kept"
    if tuned.kept and tuned.ratio is not None:
        gain = f"{tuned.ratio.value:.2f} times as fast"
    if tuned.kept and tuned.target is not None:
        gain = f"the target {tuned.target.ratio.value:.2f} times as soon"
    unsure = tuned.target is not None and not tuned.target.shown
    if tuned.kept and unsure and tuned.ratio is not None:
        gain = f"a step {tuned.ratio.value:.2f} times as fast, the target not shown to come sooner"
    if tuned.kept and tuned.aim == "memory" and tuned.memory is not None:
        gain = f"{tuned.memory:.2f} of the memory"
    if tuned.unmeasured and tuned.ratio is not None:
        gain = f"a step {tuned.ratio.value:.2f} times as fast, the target not measured"
    good = tuned.kept and not tuned.unmeasured and (not tuned.target or tuned.target.sooner)
    return tag(
        "header",
        tag("p", f"Headrace tuning for {FOR[tuned.aim]}", class_="eyebrow"),
        tag("h1", tuned.first.name),
        tag("span", gain, class_=f"badge {'good' if good else 'plain'}"),
        tag("p", tuned.sentence(), class_="verdict"),
        *([muted(f"{tuned.aim_why[0].upper()}{tuned.aim_why[1:]}.")] if tuned.aim_why else []),
        *([muted("Interrupted: this is as far as it came.")] if tuned.interrupted else []),
    )


def _figures(tuned: Tuned) -> list[tuple[str, str, str]]:
    """Return the figures of what it bought, then of what it cost."""
    one, two, back = tuned.before_s, tuned.now_s, tuned.break_even
    tokens, price = tuned.plan.batch.tokens, tuned.first.hardware.dollars_per_hour
    how = "first plan beside last" if tuned.whole else "product of the kept changes"
    memory = NOT_MEASURED if tuned.memory is None else f"{tuned.memory:.2f} times"
    counted = "measured" if tuned.counted else f"predicted: {UNCOUNTED}"
    figures = [
        ("A step", seconds(two), f"was {seconds(one)}" if one else ""),
        (
            "Tokens per second",
            whole(tokens / two if two else None),
            f"was {whole(tokens / one)}" if one else "",
        ),
        (
            "Speed",
            "as it was" if tuned.ratio is None else f"{tuned.ratio.value:.2f} times",
            "" if tuned.ratio is None else f"{_ends(tuned.ratio)}; {how}",
        ),
        ("Peak memory", memory, counted if tuned.memory is not None else ""),
    ]
    if price is not None and two:
        was = f"was {dollars(price * one / tokens / 3600 * 1e9)}" if one else ""
        each = dollars(price * two / tokens / 3600 * 1e9)
        figures.append(("A billion tokens", each, f"{was}, at {dollars(price)} an hour"))
    if price is None and tuned.aim == "money":
        figures.append(("A billion tokens", NOT_MEASURED, NO_PRICE))
    figures += _to_target(tuned)
    spent = "" if tuned.dollars is None else f", {dollars(tuned.dollars)}"
    won = "" if back is None or not two else f"{seconds(back * two)} of training"
    won += f"; this plan alone ends after {tuned.beyond}" if tuned.beyond else ""
    after = tuned.even_after or "never"
    if tuned.unmeasured or (tuned.target is not None and tuned.target.saved_s is None):
        after = "not shown" if tuned.target and not tuned.target.shown else NOT_MEASURED
    return [
        *figures,
        ("Tuning took", seconds(tuned.seconds), f"{tuned.count_measured}{spent}"),
        ("Breaks even after", after, won),
    ]


def _to_target(tuned: Tuned) -> list[tuple[str, str, str]]:
    """Return the figures of a run to the target: its time, and its price."""
    target, price = tuned.target, tuned.first.hardware.dollars_per_hour
    if tuned.no_run:
        return [("A run to the target", NOT_MEASURED, tuned.more)]
    if target is None or target.after_s is None or target.before_s is None:
        return []
    one, two, ratio = target.before_s, target.after_s, target.ratio
    then, now = (seconds(took) if isfinite(took) else "missed" for took in (one, two))
    sooner = f"{ratio.value:.2f} times ({_ends(ratio)})"
    figures = [("A run to the target", now, f"was {then}: {sooner}; {target.how}")]
    if price is not None and isfinite(one + two):
        was = f"was {dollars(price * one / 3600)}"
        figures.append(("Its price", dollars(price * two / 3600), was))
    return figures


def _ends(ratio: Interval) -> str:
    return "measured once" if ratio.n < 2 else f"{ratio.low:.2f} to {ratio.high:.2f}"


def path_section(path: Sequence[TrialRow], bought: Mapping[int, str], *, memory: bool) -> Safe:
    """Render every plan from the first to the last, and when each became the best.

    Args:
        path: every plan that was tried, in order.
        bought: number of a change that was kept -> what it buys, in words.
        memory: whether the peak was to become less; else a time.
    """
    chart, kept = _chart(path, memory=memory), [s for s in path if s.verdict == "kept"]
    title = "From the first plan to the last"
    if not kept:
        return section(title, muted("Nothing changed."), chart)
    return section(
        title,
        tag("div", _rungs(kept, bought), chart, class_="charts"),
        muted("Each row keeps all changes above it; the trials below are their receipts."),
    )


def _rungs(kept: Sequence[TrialRow], bought: Mapping[int, str]) -> Safe:
    """Render how fast each plan was that was the best for a while."""
    speeds = [1.0]
    for step in kept:
        own = step.ratio.value if step.ratio and step.stage != "learning" else 1.0
        speeds.append(speeds[-1] * own)
    names: list[Safe | str] = ["The first plan"]
    for step in kept:
        by = "" if step.ratio is None else f": {format_ratio(step.ratio)}"
        by += ", provisional" if step.provisional else ""
        by += " to the target" if step.stage == "learning" else ""
        buys = bought.get(step.number, "")
        by += f"; it buys {buys}" if buys else ""
        names.append(join((*codes(step.changes), muted(f"trial {step.number}{by}"))))
    rows = [
        (name, f"{speed:.2f}", bar(speed / max(speeds), "c0"))
        for name, speed in zip(names, speeds, strict=True)
    ]
    steps = table("The way", ("Plan", "Speed", ""), rows, text=2)
    return tag("figure", tag("figcaption", tag("strong", "Each plan that was the best")), steps)


def _chart(path: Sequence[TrialRow], *, memory: bool) -> Safe:
    """Draw the best so far over the time that trials took, and each trial beside it."""
    measured = [s for s in path if s.stage in ("screen", "accept") and _gain(s, memory)]
    if not measured:
        return Safe("")
    best, x, y = 1.0, [0.0], [1.0]
    dots: dict[str, list[tuple[float, float]]] = {"kept": [], "others": []}
    for step in measured:
        gain, at = _gain(step, memory), step.spent_s / 60
        assert gain is not None, "it was measured"
        kept = step.verdict == "kept"
        dots["kept" if kept else "others"].append((at, best * gain))
        x, y = [*x, at], [*y, best]
        if kept:
            best *= gain
            x, y = [*x, at], [*y, best]
    lines = [
        ChartLine(*_points(dots["others"]), "c1", marks=True, faint=True),
        ChartLine(np.array(x), np.array(y), "c0"),
        ChartLine(*_points(dots["kept"]), "c2", marks=True),
    ]
    what = "peak memory, first = 1" if memory else "speed, first = 1"
    label = f"{what}: from 1 to {best:.3f} over {measured[-1].spent_s / 60:.1f} minutes of trials"
    chart = line_chart(
        "path",
        lines,
        label=label,
        axis=ChartAxis("minutes of trials", lambda v: f"{v:g}"),
        y_label=what,
    )
    marks = [
        (swatch("c0", "line"), "best so far"),
        (swatch("c2", "dot"), "kept"),
        (swatch("c1", "dot"), "not kept"),
    ]
    return tag("div", figure("Each plan that was measured, when", chart), legend(marks))


def _gain(step: TrialRow, memory: bool) -> float | None:
    if memory:
        return step.memory
    return None if step.ratio is None else step.ratio.value


def _points(dots: list[tuple[float, float]]) -> tuple[Array, Array]:
    """Return points without lines between them."""
    x = [v for at, _ in dots for v in (at, np.nan)]
    y = [v for _, gain in dots for v in (gain, np.nan)]
    return np.array(x or [np.nan]), np.array(y or [np.nan])


def trials_section(path: Sequence[TrialRow], *, counted: bool) -> Safe:
    """Render a row for each trial: its receipt.

    Args:
        path: every plan that was tried, in order.
        counted: whether peaks were measured; else they are predicted.
    """
    rows, noises = [], [step.noise for step in path if step.noise]
    has_predictions = any(step.predicted_ratio is not None for step in path)
    for step in path:
        what = join((*codes(step.changes), muted(f"{step.number}. {_why(step)}")))
        verdict = f"{step.verdict}, provisional" if step.provisional else step.verdict
        badge = tag("span", verdict, class_=f"badge {TONES[step.verdict]}")
        rows.append(
            (
                what,
                badge,
                *(
                    ["" if step.predicted_ratio is None else f"{step.predicted_ratio:.3f}"]
                    if has_predictions
                    else []
                ),
                NOT_MEASURED if step.ratio is None else format_ratio(step.ratio),
                _peak(step),
                "" if step.loss is None else f"{step.loss:+.1e}" if step.loss else "same",
                str(step.steps or ""),
                format_seconds(step.seconds) if step.seconds else "",
            )
        )
    predicted_head = ("Predicted",) if has_predictions else ()
    head = ("Change", "", *predicted_head, "Measured", "Memory", "Loss", "Steps", "Took")
    noise = f"; another seed moves it by {max(noises):.1g}" if noises else ""
    both = "Predicted and measured" if has_predictions else "Measured"
    return section(
        "Every trial",
        table("Trials", head, rows, text=2),
        muted(
            f"{both}: time of a step before over after, with a 95% interval; above "
            "1 is faster. Memory: peak after over before, below 1 is less"
            f"{'' if counted else ', predicted'}. Loss: mean difference in nats per token "
            f"on the same rows from the same weights{noise}."
        ),
    )


def _peak(step: TrialRow) -> str:
    """Render the peak after over before, with its prediction where it was measured."""
    if step.memory is None:
        return ""
    predicted = step.predicted_memory if step.peak_bytes is not None else None
    return f"{step.memory:.3f}" + ("" if predicted is None else f", predicted {predicted:.3f}")


def _why(step: TrialRow) -> str:
    """Render the reason, with what the receipt holds beside the columns."""
    more = [STAGES[step.stage]]
    if step.equality != "exact":
        more.append(f"{step.equality} gradients")
    if step.peak_bytes is not None:
        more.append(f"peak {format_bytes(step.peak_bytes)}")
    return f"{step.reason} ({'; '.join(more)})"


def _left(tuned: Tuned) -> Safe:
    if not tuned.left and not tuned.no_gain:
        return Safe("")
    why = "Interrupted before" if tuned.interrupted else "Left"
    if tuned.up:
        why = f"Time was up; {tuned.more}" + ("" if tuned.unreached else " for all of these")
    lists = [*_named(why, tuned.left), *_named("No gain is predicted", tuned.no_gain)]
    return section("Not tried", *lists)


def _named(why: str, changes: Sequence[str]) -> list[Safe]:
    """Render changes in a list under why they were not tried; nothing where there are none."""
    names = [tag("li", tag("code", change)) for change in changes[:MOST_LEFT]]
    rest = len(changes) - MOST_LEFT
    more = [tag("li", f"and {rest} more")] if rest > 0 else []
    return [muted(f"{why}:"), tag("ul", *names, *more, class_="legend")] if changes else []
