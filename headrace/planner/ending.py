"""What ends a run, and when: budgets, and a quality that another run's loss curve tells of.

No law says how low a loss is after so many tokens of a text that nobody trained on. A run that
learned as this one would, with the same text, model, recipe and horizon, tells it: the tokens after
which its validation was down at the target, between two validations in proportion. How it is
executed may differ. Beyond its end a curve is not drawn on; and it is one seed's.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.plan import Plan
from headrace.planner.intervals import Basis, Between, step_between

BY_STEPS = "step "
"""How an ending begins whose hours are those of its steps."""


@dataclass(frozen=True)
class Curve:
    """A run's validations.

    Args:
        run: its name.
        points: tokens and bits per byte of each, by tokens.
        why_not: why they do not tell of the plan that is asked for, if so.
    """

    run: str
    points: tuple[tuple[float, float], ...]
    why_not: str = ""

    @classmethod
    def of(cls, folder: Path, why_not: str = "") -> "Curve":
        """Of a run's report.json.

        Raises:
            ConfigError: it has none.
        """
        try:
            told = json.loads((folder / "report.json").read_text()).get("val") or ()
            points = sorted((float(one["tokens"]), one["bits_per_byte"]) for one in told)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"{folder} has no report.json with validations", "headrace train PLAN"
            ) from None
        known = tuple((tokens, float(bits)) for tokens, bits in points if bits is not None)
        return cls(folder.name, known, why_not)

    def tokens_to(self, bits: float) -> float | None:
        """Tokens after which it is down at `bits`; None where it never was, or tells nothing."""
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
        """Why it tells no tokens."""
        if self.why_not:
            return f"{self.run} {self.why_not}"
        best = min((low for _, low in self.points), default=None)
        told = "was not validated" if best is None else f"came down to {best:.4g} only"
        return f"{self.run} {told}"


def ending(
    plan: Plan, step_s: float | None, basis: Basis | None, curve: Curve | None = None
) -> tuple[str, float | None, dict[str, Between]]:
    """What ends the run, hours until then, and the intervals of all that a step's time decides.

    Args:
        plan: the run.
        step_s: of a step.
        basis: what its interval rests on; None where it has none.
        curve: of a run that learned as this one would.
    """
    between: dict[str, Between] = {}
    ends = None if step_s is None or basis is None else step_between(step_s, basis)
    if ends is not None:
        between["step_s"], tokens = ends, plan.batch.tokens
        between["tokens_per_s"] = Between(tokens / ends.high, tokens / ends.low)
    budgets = dict(_budgets(plan, step_s))
    target, loss = plan.goal.bits_per_byte, ""
    tokens = None if curve is None or target is None else curve.tokens_to(target)
    if curve is not None and tokens is not None:
        every = (
            plan.batch.tokens * plan.eval.every_steps
        )  # a run sees where it is when it validates
        steps = -(-tokens // every) * plan.eval.every_steps
        name = f"{BY_STEPS}{steps:.0f}, {target:g} bits per byte as in {curve.run}"
        if step_s is None:
            loss = f"{name}, nobody knows when: a step's time is not foreseen"
        else:
            budgets[name] = steps * step_s / 3600
    elif target is not None:
        loss = f"{target:g} bits per byte, nobody knows when: "
        loss += "no loss curve is measured yet" if curve is None else curve.unknown(target)
    if not budgets:
        return loss, None, between
    until, hours = min(budgets.items(), key=lambda item: item[1])
    if ends is not None and step_s:
        low, high = (ends.low / step_s, ends.high / step_s)
        scaled = [(low, high) if name.startswith(BY_STEPS) else (1.0, 1.0) for name in budgets]
        each = list(zip(budgets.values(), scaled, strict=True))
        between["hours"] = Between(min(h * s[0] for h, s in each), min(h * s[1] for h, s in each))
    elif not any(name.startswith(BY_STEPS) for name in budgets):
        between["hours"] = Between(hours, hours)
    return (f"{loss}; at the latest {until}" if loss else until), hours, between


def _budgets(plan: Plan, step_s: float | None) -> Iterator[tuple[str, float]]:
    """What may end the run -> hours until then. Minutes and dollars are exact."""
    goal, price = plan.goal, plan.hardware.dollars_per_hour
    by_tokens = -(-goal.tokens // plan.batch.tokens) if goal.tokens else None
    steps = min((n for n in (goal.steps, by_tokens) if n), default=None)
    if steps and step_s is not None:
        yield f"{BY_STEPS}{steps}", steps * step_s / 3600
    if goal.minutes:
        yield f"{goal.minutes:g} minutes", goal.minutes / 60
    if goal.dollars and price:
        yield f"${goal.dollars:,.2f}", goal.dollars / price
