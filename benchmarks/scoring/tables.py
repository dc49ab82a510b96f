"""Render the tables of the page "How right is it?" as Markdown."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from scoring.drawings import (
    ABSTAINED,
    HEALTHY,
    NAMES,
    Class,
)
from scoring.natural import Change, Run, Runs
from scoring.numbers import LOSER_NATS, LOSER_STEPS, TIERS
from scoring.pairs import Pairs
from scoring.rows import (
    Outcome,
    Pick,
    Prediction,
    RepeatedForecast,
    Spread,
    Trial,
    Tuned,
)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table; what would end a cell is escaped."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

    return "\n".join([line(head), "|---" * len(head) + "|", *map(line, rows)]) + "\n"


def verdict_table(faults: Sequence[Class]) -> str:
    """Render the confusion matrix in words, for those who cannot see it."""
    if not faults:
        return ""
    rows = []
    for one in faults:
        wrong = [
            f"{verdict} {times}"
            for verdict, times in sorted(
                one.verdict_counts.items(), key=lambda item: (-item[1], item[0])
            )
            if verdict not in one.expected
        ]
        healthy = one.fault == HEALTHY
        rows.append(
            (
                one.fault.replace("_", " "),
                f"none, or {ABSTAINED}" if healthy else " or ".join(one.expected),
                f"{one.right} of {one.n}",
                "" if healthy else str(one.severities),
                "" if healthy else str(one.held_out),
                ", ".join(wrong),
            )
        )
    return markdown(
        ("planted", "right verdict", "right", "severities", "held out", "said else"), rows
    )


def device_table(
    numbers: Mapping[str, Mapping[str, Any]], repeated: Mapping[str, RepeatedForecast]
) -> str:
    """Render the numbers of natural runs on each device alone.

    Args:
        numbers: of all rows.
        repeated: device -> what later code said of its runs.
    """
    near, wrong = (numbers[f"doctor_{n}"] for n in ("first_remedy_near_best", "healthy_wrong"))
    inside = numbers["forecast_natural_coverage"]["by_hardware"]
    rows = []
    for name, one in near["by_hardware"].items():
        contained = inside.get(name)
        rows.append(
            (
                name,
                str(one["n"]),
                f"{100 * one['value']:.3g}%",
                f"{100 * wrong['by_hardware'][name]['value']:.3g}%",
                f"{100 * contained['value']:.3g}% of {contained['n']}" if contained else "-",
                f"{100 * contained['median_error']:.3g}%" if contained else "-",
                _repeated(repeated.get(name)),
            )
        )
    head = (
        "on",
        "runs",
        "first remedy near the best",
        "healthy said wrongly",
        "gains in their interval",
        "median error of a forecast gain",
        "both, said again",
    )
    return f"{markdown(head, rows)}\n" if rows else ""


def _repeated(row: RepeatedForecast | None) -> str:
    """Render what later code said of a device's runs."""
    if row is None:
        return "-"
    inside, error = row.metrics.coverage.value, row.metrics.median_error.value
    return f"{100 * inside:.3g}% of {row.n}; {100 * error:.3g}% ({row.commit})"


def run_table(runs: Runs) -> str:
    """Render every natural run, the wrong ones first, and how many count in no number."""
    every = [*runs.scored, *runs.thin]
    if not every:
        return ""
    rows = [
        (
            run.answer.id,
            run.answer.hardware,
            run.answer.verdict or ABSTAINED,
            _first_remedy(run),
            "-" if run.first is None else _gain(run.first),
            _best(run.best),
            _gain(run.best.gain) if run.best else "-",
            "; ".join(_why(run)),
        )
        for run in sorted(every, key=lambda run: (run.right, run.answer.hardware, run.answer.id))
    ]
    wrong = sum(not run.right for run in every)
    head = ("run", "on", "verdict", "first remedy", "gained", "best", "gained", "so it was")
    summary = f"The doctor was wrong first in {wrong} of {len(every)}.\n"
    return "\n".join([summary, markdown(head, rows)])


def _why(run: Run) -> Iterator[str]:
    """Yield why a run was right or wrong, and what was not measured of it."""
    yield run.why
    if not run.counts:
        yield "too few others"
    if left := len(run.came.left):
        yield f"{left} change{'s were' if left > 1 else ' was'} left"


def _first_remedy(run: Run) -> str:
    """Render the remedy that was named first, or that the run was called healthy."""
    words = f"`{' '.join(run.answer.first.change)}`" if run.answer.first else "none"
    return f"healthy; {words}" if run.answer.healthy else words


def _best(change: Change | None) -> str:
    return f"`{' '.join(change.words)}`" if change else "none"


def _gain(gain: Spread) -> str:
    value, low, high = (f"{100 * v:+.3g}%" for v in (gain.value, gain.low, gain.high))
    return f"{value} ({low} to {high})"


def trial_table(trials: Sequence[Trial]) -> str:
    """Render the trials of each workload, then each exact one that was rejected and each loser."""
    if not trials:
        return ""
    rows, lines = [], list[str]()
    for name, where in dict.fromkeys((t.workload, t.hardware) for t in trials):
        own = [t for t in trials if (t.workload, t.hardware) == (name, where)]
        judged = [t for t in own if t.verdict != "cut"]
        exact = [t for t in judged if t.equality == "exact"]
        rejected = [t for t in exact if t.for_loss]
        kept = [t for t in judged if t.equality == "approximate" and t.verdict == "kept"]
        trained = [t for t in kept if t.nats is not None and t.steps >= LOSER_STEPS]
        losers = [t for t in trained if (t.nats or 0.0) > LOSER_NATS]
        shown = sorted({t.nats for t in trained if t.nats is not None})
        span = f"{shown[0]:+.3g} to {shown[-1]:+.3g}" if shown else "-"
        rows.append(
            (
                name,
                where,
                str(len(exact)),
                str(len(rejected)),
                str(len({t.key for t in kept})),
                str(len(trained)),
                str(len(losers)),
                span,
            )
        )
        lines += [
            f"- {name}: `{' '.join(t.change)}` is exact, and was rejected for its loss\n"
            for t in rejected
        ]
        lines += [
            f"- {name}: `{' '.join(t.change)}` was kept, and loses {t.nats:+.3g} nats\n"
            for t in losers
        ]
    head = (
        "workload",
        "on",
        "exact trials",
        "rejected for loss",
        "approximate kept",
        "trained",
        "lose over 0.01 nats",
        "nats after training",
    )
    return "\n".join(filter(None, [markdown(head, rows), "".join(lines)]))


def list_table(pairs: Pairs, taken: Sequence[tuple[Prediction, Outcome, str]]) -> str:
    """Render each held-out list by what the planner knew, then why predictions were retracted."""
    listed = [*((p, o, "") for p, o in pairs.scored), *taken]
    listed = [(p, o, why) for p, o, why in listed if p.step_s and o.step_s]
    rows, reasons = [], Counter[tuple[str, str, str]]()
    for name in sorted({o.list_name for _, o, _ in listed}):
        own = [(p, o, why) for p, o, why in listed if o.list_name == name]
        cells = [name, str(len({o.id for _, o, _ in own}))]
        for tier in TIERS:
            stand = Pairs([(p, o) for p, o, why in own if not why]).tier(tier).errors("step_s")
            gone = Pairs([(p, o) for p, o, why in own if why]).tier(tier).errors("step_s")
            texts = [_error(stand)] if stand else []
            texts += [f"retracted: {_error(gone)}"] if gone else []
            cells.append("; ".join(texts) or "-")
        rows.append(cells)
        reasons.update((name, NAMES[p.tier], why) for p, _, why in own if why)
    if not rows:
        return ""
    below = [
        f"- {name}, {tier}: {n} retracted: {why}\n" for (name, tier, why), n in reasons.items()
    ]
    head = ("list", "timed configurations", *(NAMES[tier] for tier in TIERS))
    return "\n".join(filter(None, [markdown(head, rows), "".join(below)]))


def _error(errors: Sequence[float]) -> str:
    return f"{100 * fmean(errors):.3g}%, worst {100 * max(errors):.3g}%, of {len(errors)}"


def choice_table(picks: Sequence[Pick], tuned: Sequence[Tuned]) -> str:
    rows = []
    for pick in picks:
        fastest = min(pick.candidates, key=lambda c: c.measured_s)
        chosen = min(pick.candidates, key=lambda c: (c.predicted_s, -c.measured_s))
        lost = chosen.measured_s / fastest.measured_s - 1
        best = f"{fastest.id} of {len(pick.candidates)}"
        what = ", ".join(["pick", pick.workload, *([NAMES[pick.tier]] if pick.tier else [])])
        rows.append((what, f"{chosen.id}", best, f"{100 * lost:.3g}% slower"))
    for one in tuned:
        ratio = one.metrics.ratio_to_best
        speed_text = f"{100 * ratio.value:.4g}% ({100 * ratio.low:.4g}% to {100 * ratio.high:.4g}%)"
        rows.append((f"tuner, {one.workload}", "", "", f"{speed_text} of its speed"))
    return markdown(("what", "chosen", "fastest", "beside the fastest"), rows) if rows else ""
