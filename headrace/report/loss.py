"""Draw the pair of loss charts, against time and against tokens, for one run or several.

Both charts share one vertical axis. It is cut where the first steps would flatten the rest, and the
page says how high they went. One run has a grey training curve with its range; of several, each has
a colour, thin for training and with points for validation.
"""

from collections.abc import Sequence

from headrace.report.chart import ChartLine, line_chart
from headrace.report.curves import (
    Column,
    LossCurve,
    ceiling,
    time_axis,
    token_axis,
    training_curve,
    validation_curve,
)
from headrace.report.page import Safe, figure, legend, muted, section, swatch, tag
from headrace.report.run_files import RunFiles
from headrace.report.words import NOT_MEASURED, bits


def loss_section(runs: Sequence[RunFiles], names: Sequence[str]) -> Safe:
    """Render the loss of one or more runs, with the goal and the limits that all of them share."""
    if not any(len(run.metrics["loss"]) or run.report.evaluated for run in runs):
        return section("Loss", muted(f"The loss was {NOT_MEASURED}: no step was recorded."))
    in_bits = all(run.tokens_per_byte is not None for run in runs)
    goal = _shared(runs, "bits_per_byte") if in_bits else None
    curves = [c for run in runs for c in _curves(run, "tokens", in_bits=in_bits)]
    top = ceiling(curves, goal)
    charts, limited = [], False
    for column in ("wall_s", "tokens"):
        chart, limit = _chart(runs, names, column, in_bits=in_bits, goal=goal, top=top)
        charts.append(chart)
        limited = limited or limit
    notes = [_units(runs, in_bits=in_bits)]
    if top is not None:
        highest = max(float(c.high.max()) for c in curves if len(c.y))
        notes.append(f"The first steps, up to {highest:.2f}, lie above the charts.")
    if limited:
        notes.append("The dotted line is the limit that was asked for.")
    body = tag("div", *charts, class_="charts")
    marks = legend(_marks(runs, names, in_bits=in_bits, goal=goal))
    return section("Loss", marks, body, muted(" ".join(notes)))


def _shared(runs: Sequence[RunFiles], key: str) -> float | None:
    """Return what every run was asked for, or None when they differ."""
    asked = {run.report.goal.asked.get(key) for run in runs}
    return asked.pop() if len(asked) == 1 else None


def _curves(run: RunFiles, column: Column, *, in_bits: bool) -> list[LossCurve]:
    """Return a run's training curve, and its validation curve where there is one."""
    train = training_curve(run, column, in_bits=in_bits)
    return [train, validation_curve(run, column)] if in_bits else [train]


def _marks(
    runs: Sequence[RunFiles], names: Sequence[str], *, in_bits: bool, goal: float | None
) -> list[tuple[Safe, str]]:
    """Return the legend's entries."""
    if len(runs) > 1:
        marks = [(swatch(f"c{i}", "line"), name) for i, name in enumerate(names)]
    else:
        marks = [(swatch("c7", "line"), "training, mean and range of neighbouring steps")]
        marks += [(swatch("c0", "line"), "validation")] if in_bits else []
    aim = [(swatch("goal", "dash"), f"goal, {goal:g} bits per byte")] if goal is not None else []
    return marks + aim


def _units(runs: Sequence[RunFiles], *, in_bits: bool) -> str:
    """Render what the vertical axes mean."""
    if not in_bits:
        text = "Training loss in nats per token, because validation was not measured"
        several = "; it does not compare runs with different tokenizers" if len(runs) > 1 else ""
        return f"{text}{' in every run' if several else ''}{several}."
    rates = ", ".join(dict.fromkeys(f"{run.tokens_per_byte:.3f}" for run in runs))
    points = "Points are validation. " if len(runs) > 1 else ""
    return (
        f"{points}The training loss is converted to bits per byte with the validation text's "
        f"tokens per byte ({rates})."
    )


def _chart(
    runs: Sequence[RunFiles],
    names: Sequence[str],
    column: Column,
    *,
    in_bits: bool,
    goal: float | None,
    top: float | None,
) -> tuple[Safe, bool]:
    """Draw the loss against `column`; return the chart and whether a limit was drawn into it."""
    pairs = [_curves(run, column, in_bits=in_bits) for run in runs]
    longest = max((float(c.x.max()) for pair in pairs for c in pair if len(c.x)), default=0.0)
    axis, unit = time_axis(longest) if column == "wall_s" else (token_axis(), 1.0)
    lines: list[ChartLine] = []
    for index, (train, *val) in enumerate(pairs):
        alone = len(runs) == 1
        band = (train.low, train.high) if alone else None
        colour = "c7" if alone else f"c{index}"
        lines.append(ChartLine(train.x / unit, train.y, colour, band=band, faint=in_bits))
        lines += [ChartLine(c.x / unit, c.y, f"c{index}", marks=True) for c in val]
    budget = _shared(runs, "minutes" if column == "wall_s" else "tokens")
    limit = budget and budget * (60 if column == "wall_s" else 1)
    near = limit is not None and 0 < limit <= 1.2 * longest
    against = "time" if column == "wall_s" else "tokens"
    chart = line_chart(
        f"loss-{against}",
        lines,
        label=f"Loss against {against}. {_in_words(runs, names, goal, in_bits=in_bits)}",
        axis=axis,
        y_label="bits per byte" if in_bits else "nats per token",
        top=top,
        goal=goal,
        limit=limit / unit if limit and near else None,
    )
    return figure(f"Against {against}", chart), near


def _in_words(
    runs: Sequence[RunFiles], names: Sequence[str], goal: float | None, *, in_bits: bool
) -> str:
    """Render what a loss chart shows, for those who cannot see it."""
    if not in_bits:
        return "Training loss in nats per token."
    aim = f" The goal is {goal:g}." if goal is not None else ""
    sentences = []
    for run, name in zip(runs, names, strict=True):
        first, last = run.report.evaluated[0], run.report.evaluated[-1]
        sentences.append(
            f"{name} went from {bits(first.bits_per_byte)} to {bits(last.bits_per_byte)}"
        )
    return f"Validation in bits per byte: {'; '.join(sentences)}.{aim}"
