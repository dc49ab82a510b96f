"""Draw the rows: verdicts on planted faults and natural runs, forecasts, predictions.

Each function draws the rows that it is given, and returns None when there is nothing to draw.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.plan.symptoms import BOTTLENECKS
from scoring.natural import NEAR, Run
from scoring.numbers import MILD, QUIET, TIERS
from scoring.pairs import Pairs
from scoring.picture import Axis, Panel, Picture, Shape, around
from scoring.rows import DOCTOR, Fault, Forecast, Healthy

ORDER = tuple(BOTTLENECKS)
"""Verdicts in the order of a confusion matrix; other verdicts follow them, by name."""
ABSTAINED = "abstained"
HEALTHY = "(healthy)"
CELL, LABELS, HEADS = 46, 220, 116
"""Pixels of a cell's side, of the names of faults, and of the names of verdicts."""
SERIES: tuple[tuple[Shape, str], ...] = (("circle", "c0"), ("square", "c1"), ("diamond", "c2"))
NAMES = {
    "no_gpu": "without a GPU",
    "after_probes": "after probes",
    "after_20_steps": "after 20 steps",
}
GIB = 2**30


# --- the doctor ------------------------------------------------------------------------------


@dataclass
class Class:
    """Count the verdicts on one fault.

    Args:
        fault: the name of the fault, or HEALTHY.
        expected: the right verdict; several are right for a healthy run.
        verdict_counts: maps a verdict to how often it was given.
        right: how many verdicts were right.
        held_out: how many runs were never used to set a threshold.
        severities: how many different severities there were.
    """

    fault: str
    expected: tuple[str, ...]
    verdict_counts: Counter[str]
    right: int
    held_out: int
    severities: int

    @property
    def n(self) -> int:
        """Return how often the fault was planted and judged."""
        return self.verdict_counts.total()


def classes(results: Path) -> list[Class]:
    """Return faults in the order of their verdicts, healthy runs last.

    Those below MILD do not count, as in the numbers.
    """
    rows = DOCTOR.read(results).rows
    faults = [r for r in rows if isinstance(r, Fault)]
    faults = [r for r in faults if r.severity is None or r.severity >= MILD]
    faults_seen = []
    for name in dict.fromkeys(r.fault for r in faults):
        own = [r for r in faults if r.fault == name]
        faults_seen.append(
            Class(
                name,
                tuple(sorted({r.expected for r in own})),
                Counter(map(_verdict, own)),
                sum(r.right for r in own),
                sum(r.held_out for r in own),
                len({r.level for r in own}),
            )
        )
    faults_seen.sort(key=lambda c: (_place(c.expected[0]), c.fault))
    healthy = [r for r in rows if isinstance(r, Healthy)]
    if healthy:
        right = sum(r.abstained or r.verdict in QUIET for r in healthy)
        quiet = ("computation", ABSTAINED)
        faults_seen.append(Class(HEALTHY, quiet, Counter(map(_verdict, healthy)), right, 0, 0))
    return faults_seen


def _verdict(row: Fault | Healthy) -> str:
    return ABSTAINED if row.abstained or row.verdict in (None, "not measured") else row.verdict


def _place(verdict: str) -> tuple[int, str]:
    """Return a key that sorts verdicts; abstaining comes last."""
    if verdict == ABSTAINED:
        return len(ORDER) + 1, ""
    return (ORDER.index(verdict), "") if verdict in ORDER else (len(ORDER), verdict)


def confusion(faults: Sequence[Class]) -> str | None:
    """Draw faults by verdicts: how often each verdict was given for each fault."""
    if not faults:
        return None
    verdicts = {v for c in faults for v in (*c.expected, *c.verdict_counts)}
    columns = sorted(verdicts, key=_place)
    width = LABELS + CELL * len(columns) + 84
    height = HEADS + 34 * len(faults) + 26
    right, n = sum(c.right for c in faults), sum(c.n for c in faults)
    label = f"What the doctor said of {n} runs, by what was planted; {right} verdicts were right"
    draw = Picture(width, height, label)
    for at, name in enumerate(columns):
        draw.text(LABELS + CELL * (at + 0.5) + 4, HEADS - 10, name, angle=-40, size=12)
    draw.text(16, HEADS - 10, "planted \\ said", colour="soft", size=12)
    draw.text(width - 16, HEADS - 10, "right", colour="soft", anchor="end", size=12)
    for row, one in enumerate(faults):
        top = HEADS + 34 * row
        draw.text(16, top + 21, one.fault.replace("_", " ") + ("*" if one.held_out else ""))
        draw.text(width - 16, top + 21, f"{one.right} of {one.n}", anchor="end", size=12)
        for at, name in enumerate(columns):
            _cell(draw, LABELS + CELL * at, top, one, name)
    if any(c.held_out for c in faults):
        draw.text(
            16,
            height - 9,
            "* held out, wholly or in part: no threshold was set with it",
            colour="soft",
            size=12,
        )
    return draw.svg()


def _cell(draw: Picture, left: float, top: float, one: Class, verdict: str) -> None:
    """Draw how often a verdict was given, darker the more; right ones have a frame."""
    times, right = one.verdict_counts[verdict], verdict in one.expected
    colour = "c0" if right else "c7" if verdict == ABSTAINED else "c1"
    if times:
        draw.box(left + 2, top + 2, CELL - 4, 30, fill=colour, opacity=0.15 + 0.45 * times / one.n)
        draw.text(left + CELL / 2, top + 21, str(times), anchor="middle", bold=right)
    if right:
        draw.box(left + 2, top + 2, CELL - 4, 30, stroke="c0", line=1.6)
    elif not times:
        draw.box(left + 2, top + 2, CELL - 4, 30, fill="grid", opacity=0.5)


# --- natural runs ----------------------------------------------------------------------------


def natural_runs(runs: Sequence[Run]) -> str | None:
    """Draw what each run's first remedy gained, against the best measured gain there."""
    shown = [run for run in runs if run.measured]
    if not shown:
        return None
    right = sum(run.right for run in shown)
    draw = Picture(
        560,
        500,
        f"Gains of the first remedy and of the best in {len(shown)} natural "
        f"runs; {right} verdicts were right",
    )
    draw.legend(
        60,
        26,
        [
            ("circle", "c0", f"right: {right}"),
            ("square", "c1", f"wrong: {len(shown) - right}"),
            ("diamond", "soft", "no remedy, or healthy said"),
        ],
    )
    best = [1 + _best_of(run) for run in shown]
    first = [1 + _first_of(run) for run in shown]
    panel = Panel(
        draw,
        around(best, "what the best change gained", _gain, log=True),
        around([*first, *best], "what the first remedy gained", _gain, log=True),
        60,
        74,
        470,
        350,
    )
    panel.draw()
    panel.diagonal()
    draw.text(
        16,
        488,
        f"Right is at least {100 * NEAR:.0f}% of the best gain; the dashed line is all of it.",
        colour="soft",
        size=12,
    )
    for run, x, y in sorted(zip(shown, best, first, strict=True), key=lambda one: not one[0].right):
        silent = run.answer.healthy or run.first is None
        colour = "c0" if run.right else "c1"
        shape: Shape = "diamond" if silent else "circle" if run.right else "square"
        title = f"{run.answer.id}, {run.answer.hardware}: {run.why}; "
        title += f"first {_gain(y)}, best {_gain(x)}"
        draw.mark(*panel.at(x, y), shape, colour, title)
    return draw.svg()


def _best_of(run: Run) -> float:
    return run.best.gain.value if run.best else 0.0


def _first_of(run: Run) -> float:
    """Return the gain of the first remedy; zero where there was none or it did not run."""
    return 0.0 if run.answer.healthy or run.first is None else run.first.value


# --- forecasts -------------------------------------------------------------------------------


def forecasts(rows: Sequence[Forecast]) -> str | None:
    """Draw the forecast gain of each remedy with its interval, against the measured gain."""
    if not rows:
        return None
    inside_of = [r.forecast.low <= r.measured <= r.forecast.high for r in rows]
    forecast_ends = [v for r in rows for v in (r.forecast.low, r.forecast.high)]
    measured = [r.measured for r in rows]
    draw = Picture(
        560,
        470,
        f"Forecast and measured gains of {len(rows)} remedies; "
        f"{sum(inside_of)} lie in their 80% interval",
    )
    draw.legend(
        60,
        26,
        [
            ("circle", "c0", f"inside its interval: {sum(inside_of)}"),
            ("square", "c1", f"outside: {len(rows) - sum(inside_of)}"),
        ],
    )
    panel = Panel(
        draw,
        around(measured, "measured gain", _percent),
        around([*forecast_ends, *measured], "forecast gain, with its 80% interval", _percent),
        60,
        74,
        470,
        330,
    )
    panel.draw()
    panel.diagonal()
    for row, inside in sorted(zip(rows, inside_of, strict=True), key=lambda pair: not pair[1]):
        shape, colour = SERIES[0 if inside else 1]
        panel.whisker(row.measured, row.forecast.low, row.forecast.high, colour)
        title = f"{row.remedy}, {row.workload}: {_percent(row.forecast.value)} forecast, "
        draw.mark(
            *panel.at(row.measured, row.forecast.value),
            shape,
            colour,
            title + f"{_percent(row.measured)} measured",
        )
    return draw.svg()


# --- plans -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dot:
    """Hold a prediction and its outcome, both above 0."""

    plan: str
    predicted: float
    measured: float


def step_times(pairs: Pairs) -> str | None:
    """Draw predicted against measured seconds of a step, by what the planner knew."""
    series = {NAMES[name]: _dots(pairs.on(cpu=False).tier(name), "step_s") for name in TIERS}
    return _against(series, "step time", _seconds)


def step_times_cpu(pairs: Pairs) -> str | None:
    """Draw predicted against measured seconds of a step on processors, after a probe."""
    dots = _dots(pairs.on(cpu=True).tier("after_probes"), "step_s")
    return _against({NAMES["after_probes"]: dots}, "step time on a CPU", _seconds)


def memory(pairs: Pairs) -> str | None:
    """Draw predicted against measured peaks of all predictions, allocated and reserved."""
    gpu = pairs.on(cpu=False)
    series = {what: _dots(gpu, f"{what}_bytes", GIB) for what in ("allocated", "reserved")}
    return _against(series, "peak memory, GiB", lambda v: f"{v:.3g}")


def _dots(pairs: Pairs, what: str, unit: float = 1.0) -> list[Dot]:
    return [Dot(str(plan), p / unit, m / unit) for plan, p, m in pairs.both(what)]


def _against(series: dict[str, list[Dot]], what: str, tick: Callable[[float], str]) -> str | None:
    """Draw two panels: both values, and how far the prediction is off."""
    series = {name: dots for name, dots in series.items() if dots}
    every = [dot for dots in series.values() for dot in dots]
    if not every:
        return None
    n = ", ".join(f"{len(dots)} {name}" for name, dots in series.items())
    draw = Picture(860, 420, f"Predicted against measured {what}: {n}")
    names = [(*SERIES[i], f"{name}: {len(dots)}") for i, (name, dots) in enumerate(series.items())]
    draw.legend(64, 26, names)
    across = around([d.measured for d in every], f"measured {what}", tick, log=True)
    both = [v for d in every for v in (d.predicted, d.measured)]
    left = Panel(draw, across, around(both, f"predicted {what}", tick, log=True), 64, 74, 330, 280)
    off = [d.predicted / d.measured - 1 for d in every]
    right = Panel(draw, across, _level_axis(off), 470, 74, 360, 280)
    left.draw()
    left.diagonal()
    right.draw()
    right.level(0.0)
    for (shape, colour), (name, dots) in zip(SERIES, series.items(), strict=False):
        for dot in dots:
            far = dot.predicted / dot.measured - 1
            title = f"{dot.plan}, {name}: {tick(dot.predicted)} predicted, "
            title += f"{tick(dot.measured)} measured, {far:+.1%}"
            draw.mark(*left.at(dot.measured, dot.predicted), shape, colour)
            draw.mark(*right.at(dot.measured, far), shape, colour, title)
    return draw.svg()


def _level_axis(off: Sequence[float]) -> Axis:
    """Return an axis of errors with 0 in its middle."""
    most = max(0.01, *map(abs, off)) * 1.1
    return Axis(-most, most, "predicted over measured, less 1", _off)


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def _gain(ratio: float) -> str:
    """Render a gain from its ratio of times: 1.5 is +50%."""
    return f"{100 * (ratio - 1):+.3g}%" if abs(ratio - 1) > 1e-9 else "0"


def _off(value: float) -> str:
    return f"{100 * value:+.3g}%" if abs(value) > 1e-9 else "0"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
