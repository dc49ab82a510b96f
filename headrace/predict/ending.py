"""Predict what ends a run, and when: a budget, or a quality that another run's loss curve shows.

No law says how low a loss is after a number of tokens of a text that nobody trained on. A run that
learned as this one would, with the same text, model, recipe and horizon, shows it: the tokens after
which its validation was down at the target, in proportion between two validations. How that run is
executed may differ. A curve is not continued beyond its end, and it is of one seed.

Where no time of a step is predicted, as on a CPU, the clock of a run that was executed as this one
would be shows the time. Everything that run did is on its clock, evaluation too, and its stretches
between validations show how steady it was. Beyond its end the clock goes on at its mean pace.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.core.command import rerun_plan
from headrace.core.errors import ConfigError
from headrace.core.files import parse_json
from headrace.core.units import format_seconds
from headrace.plan.plan import Plan
from headrace.predict.intervals import Between
from headrace.predict.ranks import start_words

BY_STEPS = "step "
"""Prefix of an ending whose hours are those of its steps."""
BITS = "bits per byte"
Seconds = Callable[[float], float | None]
"""Function from a number of steps to their seconds; None where these are unavailable."""
Ending = tuple[str, float | None, str]
"""What may end a run, the hours until then (None where unavailable), and why they are
unavailable."""
STRETCHES = 3
"""Number of stretches between validations that a clock needs for its steadiness to be reported."""


@dataclass(frozen=True)
class Curve:
    """A curve holds the validations of a run, and its clock.

    Args:
        run: name of the run.
        points: tokens and bits per byte of each validation, in the order of tokens.
        why_not: why the curve does not apply to the plan that is asked for; "" where it does.
        clock: tokens, and seconds since the start, at each validation and at the end.
        otherwise: why the clock does not apply to that plan; "" where it does.
    """

    run: str
    points: tuple[tuple[float, float], ...]
    why_not: str = ""
    clock: tuple[tuple[float, float], ...] = ()
    otherwise: str = ""

    @classmethod
    def of(cls, folder: Path, why_not: str = "", otherwise: str = "") -> "Curve":
        """Read the curve of a run from its report.json.

        Raises:
            ConfigError: the run has no report.json with validations, or a damaged one.
        """
        try:
            report = parse_json((folder / "report.json").read_bytes())
            validations = report.get("val") or ()
            points = sorted((float(one["tokens"]), one["bits_per_byte"]) for one in validations)
            known = tuple((tokens, float(bits)) for tokens, bits in points if bits is not None)
            seconds = {
                o["tokens"]: o.get("wall_s") for o in (*validations, report) if "tokens" in o
            }
            clock = tuple((float(n), float(s)) for n, s in sorted(seconds.items()) if n and s)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"{folder} has no report.json with validations, or a damaged one",
                rerun_plan("train"),
            ) from None
        return cls(folder.name, known, why_not, clock, otherwise)

    def tokens_to(self, bits: float) -> float | None:
        """Return the tokens after which the run's validation is down at `bits`.

        It is None where the run never got there, or where the curve does not apply.
        """
        if self.why_not or not self.points:
            return None
        lower: list[tuple[float, float]] = []
        for tokens, low in self.points:
            if not lower or low < lower[-1][1]:
                lower.append((tokens, low))
        if lower[-1][1] > bits:
            return None
        return float(np.interp(-bits, [-low for _, low in lower], [tokens for tokens, _ in lower]))

    def unknown(self, bits: float) -> str:
        """Return why the tokens to `bits` are unavailable."""
        if self.why_not:
            return f"{self.run} {self.why_not}"
        low, tokens = min(((low, tokens) for tokens, low in self.points), default=(None, 0.0))
        if low is None:
            return f"{self.run} was not validated"
        spent_s = self.seconds_to(tokens)
        suffix = "" if spent_s is None else f", after {format_seconds(spent_s)}"
        return f"{self.run} came down to {low:.4g} only{suffix}"

    def seconds_to(self, tokens: float) -> float | None:
        """Return the seconds of a number of tokens on the run's clock.

        Beyond its end the clock goes on at its mean pace. It is None where the clock does not
        apply.
        """
        if self.otherwise or not self.clock:
            return None
        at, seconds = zip(*self.clock, strict=True)
        if tokens > at[-1]:
            return float(seconds[-1] + (tokens - at[-1]) * self._pace(0, -1))
        return float(np.interp(tokens, (0.0, *at), (0.0, *seconds)))

    def steadiness(self) -> tuple[float, float] | None:
        """Return the pace of the fastest and the slowest stretch, as ratios to the mean pace.

        It is None where there are too few stretches, or where the clock does not apply.
        """
        if self.otherwise or len(self.clock) <= STRETCHES:
            return None
        paces, mean = [self._pace(i, i + 1) for i in range(len(self.clock) - 1)], self._pace(0, -1)
        return min(paces) / mean, max(paces) / mean

    def _pace(self, first: int, last: int) -> float:
        """Return the seconds of one token between two points of the clock."""
        (before, began_s), (after, ended_s) = self.clock[first], self.clock[last]
        return (ended_s - began_s) / (after - before) if after > before else ended_s / after


def ending(
    plan: Plan,
    step_s: float | None,
    ends: Between | None,
    curve: Curve | None = None,
) -> tuple[str, float | None, Between | None]:
    """Return what ends the run, the hours until then, and their interval.

    Args:
        plan: the plan of the run.
        step_s: seconds of a step; None where no time is predicted.
        ends: interval of those seconds; None where there is none.
        curve: validations of a run that learned as this one would.
    """
    scale = None if curve is None or step_s is not None else curve.steadiness()
    if ends is not None and step_s:
        scale = ends.low / step_s, ends.high / step_s

    def seconds(steps: float) -> float | None:
        if step_s is not None:  # a step is predicted of the whole batch
            return plan.batches.whole(steps) * step_s
        return None if curve is None else curve.seconds_to(plan.batches.before(round(steps)))

    budgets: dict[str, float] = {}
    unknown: dict[str, str] = {}
    clauses = []
    for name, hours, why in (*_budgets(plan, seconds, curve), *_target(plan, seconds, curve)):
        if hours is None:
            unknown[name] = why
            continue
        if BITS in name and hours > min(budgets.values(), default=hours):
            clauses = [f"{name}, which takes {format_seconds(3600 * hours)}"]
        budgets[name] = hours
    if unknown:
        whys = ", and ".join(dict.fromkeys(unknown.values()))
        clauses.append(f"{' or '.join(unknown)}, nobody knows when: {whys} ({end_remedy(plan)})")
    message = "; ".join(clauses)
    if not budgets:
        return message, None, None
    until, hours = min(budgets.items(), key=lambda item: item[1])
    between = None
    by_steps = [name.startswith(BY_STEPS) for name in budgets]
    if scale is not None:
        each = [
            (h * scale[0], h * scale[1]) if steps else (h, h)
            for h, steps in zip(budgets.values(), by_steps, strict=True)
        ]
        between = Between(min(low for low, _ in each), min(high for _, high in each))
    elif not any(by_steps):
        between = Between(hours, hours)
    if step_s is None and curve is not None and until.startswith(BY_STEPS):
        until += f", on the clock of {curve.run}"
        if scale is not None:
            until += " (in brackets as in its fastest and its slowest stretch between validations)"
    return (f"{message}; at the latest {until}" if message else until), hours, between


def end_remedy(plan: Plan) -> str:
    """Return the remedy that is shown where the end of a plan's run is unavailable."""
    train = f"{start_words(plan)} train PLAN"
    return f"{train} until there, then headrace plan PLAN --after RUN, tell it"


def _target(plan: Plan, seconds: Seconds, curve: Curve | None) -> Iterator[Ending]:
    """Yield the ending of a run at its target, where the plan has one."""
    bits = plan.goal.bits_per_byte
    if bits is None:
        return
    name = f"{bits:g} {BITS}"
    if curve is None:
        yield name, None, "no loss curve is measured yet"
    elif (tokens := curve.tokens_to(bits)) is None:
        yield name, None, curve.unknown(bits)
    else:
        # A run learns its loss only when it validates.
        every = plan.batch.tokens * plan.eval.every_steps
        steps = -(-tokens // every) * plan.eval.every_steps
        yield _at(f"{BY_STEPS}{steps:.0f}, {name} as in {curve.run}", seconds(steps), curve)


def _budgets(plan: Plan, seconds: Seconds, curve: Curve | None) -> Iterator[Ending]:
    """Yield the other endings of a run: steps, minutes and dollars. The last two are exact."""
    goal, price = plan.goal, plan.hardware.dollars_per_hour
    by_tokens = plan.batches.steps_to(goal.tokens) if goal.tokens else None
    if steps := min((n for n in (goal.steps, by_tokens) if n), default=None):
        yield _at(f"{BY_STEPS}{steps}", seconds(steps), curve)
    if goal.minutes:
        yield f"{goal.minutes:g} minutes", goal.minutes / 60, ""
    if goal.dollars and price:
        yield f"${goal.dollars:,.2f}", goal.dollars / price, ""


def _at(name: str, took_s: float | None, curve: Curve | None) -> Ending:
    if took_s is not None:
        return name, took_s / 3600, ""
    why = "" if curve is None else f", and {curve.run} {curve.otherwise or 'has no clock'}"
    return name, None, f"a step's time is not predicted{why}"
