"""tune.html: the way from the first plan to the last, one self-contained page."""

from pathlib import Path

import numpy as np

from headrace.core.units import format_bytes, format_seconds
from headrace.report.chart import Array, Axis, Line, line_chart
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
    write_page,
)
from headrace.report.words import NOT_MEASURED, dollars, seconds
from headrace.trials.path import PAGE, Step, Tuned, command, named, told

TONES = {"kept": "good", "reverted": "plain", "refused": "bad", "not tried": "plain"}
FOR = {"time": "the time of a step", "money": "money", "memory": "peak memory",
       "quality": "the time to a target"}  # fmt: skip
STAGES = {"screen": "screened", "accept": "measured again", "learning": "over seeds",
          "none": "not measured"}  # fmt: skip
MOST_LEFT = 40
"""Changes that were not tried and are named."""


def write_tune_page(tuned: Tuned, folder: Path) -> Path:
    """Write the page into the tuning's folder; returns its path."""
    name = tuned.first.name
    text = page(
        f"{name} tuned - Headrace",
        _header(tuned),
        section("What it came to", cards(_figures(tuned))),
        _chart(tuned),
        _changes(tuned),
        _trials(tuned),
        _left(tuned),
        section(
            "Run it",
            tag("pre", command(folder), class_="command"),
            tag("details", tag("summary", "The tuned plan"), tag("pre", named(tuned).to_toml())),
            muted("Every reading stands in trials.jsonl; the same command tunes on from there."),
        ),
    )
    return write_page(folder / PAGE, text)


def _header(tuned: Tuned) -> Safe:
    gain = "no change kept"
    if tuned.kept and tuned.ratio is not None:
        gain = f"{tuned.ratio.value:.2f}x as fast"
    if tuned.kept and tuned.aim == "memory" and tuned.memory is not None:
        gain = f"{tuned.memory:.2f} of the memory"
    return tag(
        "header",
        tag("p", f"Headrace tuning for {FOR[tuned.aim]}", class_="eyebrow"),
        tag("h1", tuned.first.name),
        tag("span", gain, class_=f"badge {'good' if tuned.kept else 'plain'}"),
        tag("p", tuned.sentence(), class_="verdict"),
        *([muted("Interrupted: this is as far as it came.")] if tuned.interrupted else []),
    )


def _figures(tuned: Tuned) -> list[tuple[str, str, str]]:
    one, two, back = tuned.before_s, tuned.after_s, tuned.break_even
    rate = f"{tuned.plan.batch.tokens / two:,.0f}" if two else NOT_MEASURED
    how = "first plan beside last" if tuned.whole else "product of the kept steps"
    price = "" if tuned.dollars is None else f", {dollars(tuned.dollars)}"
    return [
        ("A step before", seconds(one), "median, the first plan"),
        ("A step now", seconds(two), "median, the tuned plan"),
        ("Tokens per second now", rate, "of the tuned plan"),
        ("Speed", "1.000" if tuned.ratio is None else f"{tuned.ratio.value:.3f}x",
         "" if tuned.ratio is None else f"{told(tuned.ratio)}; {how}"),
        ("Peak memory", NOT_MEASURED if tuned.memory is None else f"{tuned.memory:.3f}x",
         "last over first"),
        ("Tuning took", seconds(tuned.seconds), f"{len(tuned.path)} plans{price}"),
        ("Won back after", "never" if back is None else f"{back:,.0f} steps",
         "" if back is None or not two else f"{format_seconds(back * two)} of training"),
    ]  # fmt: skip


def _chart(tuned: Tuned) -> Safe:
    """The best so far over the time that trials took, and each trial beside it."""
    memory = tuned.aim == "memory"
    measured = [s for s in tuned.path if s.stage in ("screen", "accept") and _gain(s, memory)]
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
        Line(*_points(dots["others"]), "c1", marks=True, faint=True),
        Line(np.array(x), np.array(y), "c0"),
        Line(*_points(dots["kept"]), "c2", marks=True),
    ]
    what = "peak memory, first = 1" if memory else "speed, first = 1"
    label = f"{what}: from 1 to {best:.3f} over {measured[-1].spent_s / 60:.1f} minutes of trials"
    chart = line_chart(
        "path", lines, label=label, axis=Axis("minutes of trials", lambda v: f"{v:g}"),
        y_label=what,
    )  # fmt: skip
    marks = [(swatch("c0", "line"), "best so far"), (swatch("c2", "dot"), "kept"),
             (swatch("c1", "dot"), "reverted")]  # fmt: skip
    return section("The way", figure("Each plan that was measured, when", chart), legend(marks))


def _gain(step: Step, memory: bool) -> float | None:
    if memory:
        return step.memory
    return None if step.ratio is None else step.ratio.value


def _points(dots: list[tuple[float, float]]) -> tuple[Array, Array]:
    """Points without lines between them."""
    x = [v for at, _ in dots for v in (at, np.nan)]
    y = [v for _, gain in dots for v in (gain, np.nan)]
    return np.array(x or [np.nan]), np.array(y or [np.nan])


def _changes(tuned: Tuned) -> Safe:
    """What lies between the plans, each word with the trial that brought it."""
    rows = []
    for word in tuned.changes:
        by = [str(step.number) for step in tuned.kept if word in step.changes]
        rows.append((tag("code", word), f"trial {by[-1]}" if by else ""))
    if not rows:
        return section("From the first plan to the last", muted("Nothing changed."))
    return section(
        "From the first plan to the last", table("Changes", ("Change", "Kept by"), rows, text=2)
    )


def _trials(tuned: Tuned) -> Safe:
    """A row for each plan that was tried: its receipt."""
    rows = []
    for step in tuned.path:
        what = join((tag("code", " ".join(step.changes)), muted(f"{step.number}. {_why(step)}")))
        badge = tag("span", step.verdict, class_=f"badge {TONES[step.verdict]}")
        rows.append((
            what, badge,
            "" if step.predicted is None else f"{step.predicted:.3f}",
            NOT_MEASURED if step.ratio is None else told(step.ratio),
            "" if step.memory is None else f"{step.memory:.3f}",
            "" if step.loss is None else f"{step.loss:+.2g}",
            str(step.steps or ""), format_seconds(step.seconds) if step.seconds else "",
        ))  # fmt: skip
    head = ("Change", "", "Predicted", "Measured", "Memory", "Loss", "Steps", "Took")
    return section(
        "Every trial",
        table("Trials", head, rows, text=2),
        muted(
            "Predicted and measured: time of a step before over after, with a 95% interval; above "
            "1 is faster. Memory: peak after over before. Loss: mean difference in nats per token "
            "on the same rows from the same weights."
        ),
    )


def _why(step: Step) -> str:
    """The reason, with what the receipt holds beside the columns."""
    more = [STAGES[step.stage]]
    if step.equality != "exact":
        more.append(f"{step.equality} gradients")
    if step.noise is not None:
        more.append(f"another seed moves the loss by {step.noise:.2g} nats")
    if step.peak_bytes is not None:
        more.append(f"peak {format_bytes(step.peak_bytes)}")
    return f"{step.reason} ({'; '.join(more)})"


def _left(tuned: Tuned) -> Safe:
    if not tuned.left:
        return Safe("")
    why = "time was up" if tuned.up else "predicted to lose, or to change nothing"
    names = "; ".join(tuned.left[:MOST_LEFT])
    rest = len(tuned.left) - MOST_LEFT
    more = f"; and {rest} more" if rest > 0 else ""
    return section("Not tried", muted(f"{why}: {names}{more}"))
