"""Compute the numbers of `benchmarks/truth.py`, each from the rows of one topic.

Every standing row counts, whether it flatters or not. A prediction counts only when its row stands
before its outcome's: files are appended to and never edited, so that order is the order of time.
A forecast counts only when forecasts_said.jsonl holds the same one, of that day or before; a
natural run only when natural_said.jsonl does. Abstaining is not being right. What has no rows is
null with n 0.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from headrace.core.errors import ConfigError
from headrace.core.statistics import Interval
from scoring.accuracy import coverage, kendall_tau, median_absolute_error, regret
from scoring.marks import MARKS
from scoring.natural import Run, natural
from scoring.number import (
    Number,
    as_errors,
    as_interval,
    as_mean,
    as_number,
    as_share,
    beside_retracted,
    pooled,
)
from scoring.pairs import Pairs, forecasts_ahead, paired, retracted, taken
from scoring.rows import (
    DOCTOR,
    OVERHEAD,
    PICKS,
    TRIALS,
    TUNER,
    Fault,
    Forecast,
    Healthy,
    Pick,
    Spread,
    Trial,
    Tuned,
    on_cpu,
)

T = TypeVar("T", Fault, Healthy)
TIERS = ("no_gpu", "after_probes", "after_20_steps")
QUIET = (None, "computation", "not measured")
"""Verdicts that name no fault."""
MILD = 0.10
"""Faults that take a smaller share of the step than this have a count of their own."""
RUNS = 40
"""The least number of forecasts of runs from which forecasts of plans no longer count with them."""
BUDGETS = {"small": 3.0, "demo": 3.0, "160m": 5.0, "1b": 8.0}
"""Maps a workload to the minutes of tuning on one GPU that must come near the best plan."""
OVERTIME = 1.1
"""The factor of its minutes that a tuning may take, since its last reading ends after them."""
LOSER_NATS, LOSER_STEPS = 0.01, 1000
"""An accepted approximate change is a loser when it loses more nats after that many steps."""
NO_GAIN = 1e-9
"""The least measured gain that an error is divided by."""


def compute(results: Path) -> dict[str, Number]:
    """Return every number by its name, with its value and n; value None and n 0 without rows.

    Args:
        results: the folder of TOPIC.jsonl files. A topic's file may be missing.

    Returns:
        Shares and errors as fractions (0.02 is 2%), false_fits, tuner_exact_rejected and
        tuner_losers_kept as counts, kendall_tau from -1 to 1, tuner_ratio and tuner_small_ratio as
        a speed over another. Beside value and n stand, where they are known,
        `low` and `high` (95% by Wilson for shares), `p95` (19 of 20 are within it), `worst`,
        `by_hardware` (device -> the number over its rows alone), `retracted` and `with_retracted`
        (how many rows were, and the number with them), `of` (the number of a part), and what else
        the mark asks for.

    Raises:
        ConfigError: no such folder, or a row that is wrong, by file and line.
    """
    if not results.is_dir():
        raise ConfigError(
            f"there is no folder {results}: receipts are a part of Headrace's repository, and not "
            "of the installed package",
            "--results DIR, the folder results of a checkout",
        )
    parts = (_doctor, _natural, _forecasts, _overhead, _plans, _picks, _tuner, _trials)
    numbers = {name: number for part in parts for name, number in part(results).items()}
    return {name: numbers[name] for name in MARKS}


def _doctor(results: Path) -> dict[str, Number]:
    """Return the share of planted faults that were named, and of healthy runs that were blamed."""
    topic = DOCTOR.read(results)
    every = [row for row in topic.rows if isinstance(row, Fault)]
    healthy = [row for row in topic.rows if isinstance(row, Healthy)]
    faults = [row for row in every if row.severity is None or row.severity >= MILD]
    gone = taken(DOCTOR, results)  # whatever their severity: it was wrong in many
    held_out = [row for row in faults if row.held_out]
    severities: dict[str, set[float | None]] = {}
    for row in faults:
        severities.setdefault(row.fault, set()).add(row.level)
    tuned_on = [row for row in faults if not row.held_out]
    return {
        "doctor_top1": as_share(
            sum(row.right for row in faults),
            len(faults),
            abstained=sum(row.abstained for row in faults),
            faults=len(severities),
            severities=min(map(len, severities.values()), default=0),
            workloads=len({row.workload for row in faults}),
            held_out=as_share(sum(row.right for row in held_out), len(held_out)),
            held_out_faults=len({r.fault for r in held_out} - {r.fault for r in tuned_on}),
            held_out_workloads=len({r.workload for r in held_out} - {r.workload for r in tuned_on}),
            mild=len(every) - len(faults),
            refused=topic.refused,
            severities_of={fault: len(levels) for fault, levels in severities.items()},
            by_hardware=_by_hardware(faults, _right),
            **beside_retracted(
                [row.right for row in gone if isinstance(row, Fault)], [row.right for row in faults]
            ),
        ),
        "doctor_false_alarms": as_share(
            sum(map(_alarm, healthy)),
            len(healthy),
            abstained=sum(row.abstained for row in healthy),
            by_hardware=_by_hardware(healthy, _alarm),
            **beside_retracted(
                [_alarm(row) for row in gone if isinstance(row, Healthy)], [*map(_alarm, healthy)]
            ),
        ),
    }


def _right(row: Fault) -> bool:
    return row.right


def _alarm(row: Healthy) -> bool:
    return not row.abstained and row.verdict not in QUIET


def _by_hardware(rows: Sequence[T], hit: Callable[[T], bool]) -> dict[str, Number]:
    """Return the share of each device, most rows first; rows without a device are left out."""
    hits_of: dict[str, list[bool]] = {}
    for row in rows:
        if row.hardware is not None:
            hits_of.setdefault(row.hardware, []).append(hit(row))
    ordered = sorted(hits_of.items(), key=lambda item: (-len(item[1]), item[0]))
    return {name: as_share(sum(hits), len(hits)) for name, hits in ordered}


def _natural(results: Path) -> dict[str, Number]:
    """Score natural runs: first remedies near the best, wrong "healthy", forecasts inside."""
    scored = natural(results)
    runs = scored.scored
    beside = {
        "open": len(scored.open),
        "late": len(scored.unanswered),
        "refused": scored.refused,
        "thin": len(scored.thin),
    }
    shares = {}
    for name, hit in (("first_remedy_near_best", _near), ("healthy_wrong", _wronged)):
        shares[f"doctor_{name}"] = as_share(
            sum(map(hit, runs)),
            len(runs),
            workloads=len({run.answer.workload for run in runs}),
            kinds=len({(run.answer.precision, run.answer.compiled) for run in runs}),
            devices=len({_kind(run.answer.hardware) for run in runs}),
            healthy_said=sum(run.answer.healthy for run in runs),
            unfinished=sum(bool(run.came.left) for run in runs),
            by_hardware=_parts(runs, lambda own, h=hit: as_share(sum(map(h, own)), len(own))),
            **beside,
            **beside_retracted([hit(run) for run in scored.retracted], [*map(hit, runs)]),
        )
    forecast = [run for run in [*runs, *scored.thin] if run.forecast]
    return {
        **shares,
        "forecast_natural_coverage": {
            **_natural_coverage(forecast),
            "by_hardware": _parts(forecast, _natural_coverage),
            "late": len(scored.unanswered),
            "retracted": sum(bool(run.forecast) for run in scored.retracted),
        },
    }


def _near(run: Run) -> bool:
    return run.right


def _wronged(run: Run) -> bool:
    return run.healthy_wrong


def _kind(hardware: str) -> str:
    """Return a GPU by its name; processors are one kind."""
    return "CPU" if on_cpu(hardware) else hardware


def _parts(runs: Sequence[Run], number: Callable[[list[Run]], Number]) -> dict[str, Number]:
    """Return a number for the runs of each device alone, most runs first."""
    own: dict[str, list[Run]] = {}
    for run in runs:
        own.setdefault(run.answer.hardware, []).append(run)
    ordered = sorted(own.items(), key=lambda item: (-len(item[1]), item[0]))
    return {name: number(those) for name, those in ordered}


def _natural_coverage(runs: Sequence[Run]) -> Number:
    """Return the share of first remedies whose gain lies in its interval, and the median error."""
    pairs = [run.forecast for run in runs if run.forecast]
    if not pairs:
        return as_number(0, 0)
    within = sum(
        gain_forecast.low <= gain.value <= gain_forecast.high for gain_forecast, gain in pairs
    )
    off = [
        abs(gain_forecast.value - gain.value) / max(abs(gain.value), NO_GAIN)
        for gain_forecast, gain in pairs
    ]
    return as_share(within, len(pairs), median_error=median(off))


def _forecasts(results: Path) -> dict[str, Number]:
    """Return the share of gains in their 80% intervals, the width of these, and the error.

    The doctor is asked about runs, so those of runs count alone once there are `RUNS` of them;
    until then those of plans count too. Each alone and both together stand beside it.
    """
    every, others = forecasts_ahead(results)
    if not every:
        none = as_number(0, 0, **others)
        return {"forecast_coverage": none, "forecast_median_error": none}
    parts = {of: [row for row in every if row.of == of] for of in ("run", "plan")}
    rows = parts["run"] if len(parts["run"]) >= RUNS else every
    off = median_absolute_error([r.forecast.value for r in rows], [r.measured for r in rows])
    return {
        "forecast_coverage": {
            **_covered(rows),
            **others,
            "of": {of: _covered(part) for of, part in parts.items() if part}
            | {"run or a plan": _covered(every)},
        },
        "forecast_median_error": as_number(off, len(rows), **others),
    }


def _covered(rows: Sequence[Forecast]) -> Number:
    """Return the share of forecasts whose interval contains the gain, and the median width."""
    gain_forecasts, measured = [row.forecast for row in rows], [row.measured for row in rows]
    within = coverage([Interval(f.low, f.value, f.high, 1) for f in gain_forecasts], measured)
    width = median((f.high - f.low) / abs(m) for f, m in zip(gain_forecasts, measured, strict=True))
    return as_interval(within, width=width)


def _overhead(results: Path) -> dict[str, Number]:
    """Return the mean overhead over shapes, between the outer ends of their intervals.

    Rows of one shape on one device, with profiler windows as far apart, are repeats, and count as
    one.
    """
    topic = OVERHEAD.read(results)
    numbers = {}
    for kind in ("always_on", "with_bursts"):
        rows = [row for row in topic.rows if row.measurement == kind]
        repeats: dict[tuple[Any, ...], list[Spread]] = {}
        for row in rows:
            same = (row.shape, row.hardware, row.every_steps)
            repeats.setdefault(same, []).append(row.metrics.overhead)
        numbers[f"overhead_{kind}"] = as_mean(
            [pooled(spreads) for spreads in repeats.values()],
            max,
            len(repeats),
            readings=sum(row.n for row in rows),
            refused=topic.refused,
        )
    return numbers


def _plans(results: Path) -> dict[str, Number]:
    """Score step time by tier, memory over all tiers, and plans predicted to fit that did not.

    Steps on a CPU have a number of their own, after a probe.
    """
    every, refused = paired(results)
    every_gone = Pairs([(p, o) for p, o, _ in retracted(results)])
    pairs, gone = every.on(cpu=False), every_gone.on(cpu=False)
    numbers = {"cpu_step_time_error": _on_cpu(every.on(cpu=True), every_gone.on(cpu=True))}
    for name in TIERS:
        tier = pairs.tier(name)
        numbers[f"step_time_error_{name}"] = as_errors(
            tier.errors("step_s"),
            fmean,
            open=len(tier.open),
            late=len(tier.after_outcome),
            refused=refused,
            **beside_retracted(gone.tier(name).errors("step_s"), tier.errors("step_s")),
        )
    for what in ("allocated", "reserved"):
        plans = {plan for plan, *_ in pairs.both(f"{what}_bytes")}
        errors = pairs.errors(f"{what}_bytes")
        numbers[f"memory_{what}_error"] = as_errors(errors, median, configurations=len(plans))
    return {**numbers, "false_fits": _false_fits(pairs)}


def _on_cpu(pairs: Pairs, gone: Pairs) -> Number:
    """Return the error of steps on a CPU after a probe, and of their memory."""
    tier, name = pairs.tier("after_probes"), "step_s"
    by: dict[str, list[float]] = {}
    for prediction, outcome in tier.scored:
        errors = Pairs([(prediction, outcome)]).errors(name)
        by.setdefault(str(outcome.hardware), []).extend(errors)
    memory = tier.errors("allocated_bytes")
    return as_errors(
        tier.errors(name),
        fmean,
        open=len(tier.open),
        late=len(tier.after_outcome),
        memory_error=median(memory) if memory else None,
        memory_n=len(memory),
        by_hardware={where: as_errors(errors, fmean) for where, errors in by.items() if errors},
        **beside_retracted(gone.tier("after_probes").errors(name), tier.errors(name)),
    )


def _false_fits(pairs: Pairs) -> Number:
    """Count plans that were predicted to fit and did not, of all with such a prediction.

    The risky ones must be run; one that was not run counts in n, as long as any was run.
    """
    predicted = [(p, o) for p, o in pairs.scored if p.fits is not None]
    waiting = sum(p.fits is not None for p in pairs.open)
    ran = [(p, o) for p, o in predicted if o.fits is not None]
    risky = [(p, o) for p, o in predicted if o.risky]
    return as_number(
        sum(bool(p.fits) and not o.fits for p, o in ran),
        len(predicted) + waiting if ran else 0,
        run=len(ran),
        risky_run=sum(o.fits is not None for _, o in risky),
        risky_not_run=sum(o.fits is None for _, o in risky),
        false_refusals=sum(not p.fits and bool(o.fits) for p, o in ran),
    )


def _picks(results: Path) -> dict[str, Number]:
    """Return the mean regret of choices, and how right the order of candidates is.

    A planner that gives all candidates one time has put them in no order: its tau is 0.
    """
    topic = PICKS.read(results)
    times, gone = _times(topic.rows), _times(taken(PICKS, results))
    lost = [regret(predicted, measured) for predicted, measured in times]
    taus = [kendall_tau(p, m) if min(p) < max(p) else 0.0 for p, m in times if min(m) < max(m)]
    compared = sum(len(predicted) for predicted, _ in times)
    return {
        "pick_regret": as_errors(
            lost,
            fmean,
            candidates=compared,
            refused=topic.refused,
            **beside_retracted([regret(p, m) for p, m in gone], lost),
        ),
        "kendall_tau": as_number(fmean(taus), len(taus), worst=min(taus))
        if taus
        else as_number(0, 0),
    }


def _times(rows: Sequence[Pick]) -> list[tuple[list[float], list[float]]]:
    """Return predicted and measured seconds of each choice's candidates."""
    return [
        ([c.predicted_s for c in row.candidates], [c.measured_s for c in row.candidates])
        for row in rows
    ]


def _tuner(results: Path) -> dict[str, Number]:
    """Return the mean speed of a tuned plan over that of the best row of its workload.

    All rows count, later tries at a workload beside earlier ones; the newest stands beside them.
    """
    topic = TUNER.read(results)
    newest = {row.workload: row for row in topic.rows}
    ratios = [row.metrics.ratio_to_best for row in topic.rows]
    gone = [row.metrics.ratio_to_best.value for row in taken(TUNER, results)]
    number = as_mean(
        ratios,
        min,
        len(ratios),
        workloads=len(newest),
        refused=topic.refused,
        of=_by_workload(newest),
        **beside_retracted(gone, [ratio.value for ratio in ratios]),
    )
    return {"tuner_ratio": number, "tuner_small_ratio": _small(topic.rows)}


def _by_workload(newest: Mapping[str, Tuned]) -> dict[str, Any]:
    """Return the ratio of the newest tuning of each workload, and where it is from."""
    return {
        name: {
            "value": row.metrics.ratio_to_best.value,
            "date": row.date,
            "commit": row.commit,
            "minutes": row.minutes,
        }
        for name, row in newest.items()
    }


def _small(rows: Sequence[Tuned]) -> Number:
    """Return the smallest of the newest ratios on a GPU within a workload's minutes."""
    newest = {row.workload: row for row in rows if not on_cpu(row.hardware) and _within_budget(row)}
    if not newest:
        return as_number(0, 0)
    least = min((row.metrics.ratio_to_best for row in newest.values()), key=lambda r: r.value)
    by = Counter(str(row.hardware) for row in newest.values() if row.hardware)
    return as_number(
        least.value,
        len(newest),
        low=least.low,
        high=least.high,
        of=_by_workload(newest),
        by_hardware={name: {"n": n} for name, n in by.items()},
    )


def _within_budget(row: Tuned) -> bool:
    """Return whether the plan was tuned within its workload's minutes, all calls together."""
    budget, tuning = BUDGETS.get(row.workload, 0.0), row.metrics.tuning
    asked = row.minutes is not None and row.minutes <= budget
    return asked and (tuning is None or tuning.value <= OVERTIME * 60 * budget)


def _trials(results: Path) -> dict[str, Number]:
    """Count exact changes rejected for their loss, and approximate losers that were accepted.

    Every exact trial that came to a verdict counts, and every training of a change that was kept;
    a change that was kept and not trained for long enough is counted apart: it may be a loser.
    """
    topic = TRIALS.read(results)
    judged = [row for row in topic.rows if row.verdict != "cut"]
    exact = [row for row in judged if row.equality == "exact"]
    kept = [row for row in judged if row.equality == "approximate" and row.verdict == "kept"]
    trained = [row for row in kept if row.nats is not None and row.steps >= LOSER_STEPS]
    waiting = {row.key for row in kept} - {row.key for row in trained}
    return {
        "tuner_exact_rejected": _counted(
            exact,
            lambda row: row.for_loss,
            refused=topic.refused,
            retracted=len(taken(TRIALS, results)),
        ),
        "tuner_losers_kept": {
            **_counted(trained, lambda row: (row.nats or 0.0) > LOSER_NATS),
            "untrained": len(waiting),
        },
    }


def _counted(rows: Sequence[Trial], hit: Callable[[Trial], bool], **more: Any) -> Number:
    """Return how many trials were hits, over how many workloads, and how many on each device."""
    by: dict[str, list[Trial]] = {}
    for row in rows:
        by.setdefault(row.hardware, []).append(row)
    return as_number(
        sum(map(hit, rows)),
        len(rows),
        workloads=len({row.workload for row in rows}),
        by_hardware={name: as_number(sum(map(hit, own)), len(own)) for name, own in by.items()},
        **more,
    )
