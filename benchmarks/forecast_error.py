"""How far forecasts of receipts were off: the interval that the doctor gives a remedy's gain.

    python benchmarks/forecast_error.py

A receipt is a change that was measured: a technique added to a plan or taken from it
(results/techniques.jsonl), what a candidate of a list written down before is beside the first one
of its workload (results/plans.jsonl), and what came of forecasts that were said before
(results/forecasts.jsonl, as they were said). The interval that this asks for is
headrace.doctor.forecast.ERROR, to be written there; a technique at a time is left out to say how
such an interval does on techniques that it was not fitted to.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, median
from typing import Any

import foresight
import numpy as np
import receipts
import torch
from residuals import DEVICE, PLANS, standing

from headrace.changes import parse
from headrace.cli import catalogue
from headrace.context import elsewhere, make_context
from headrace.core.errors import HeadraceError
from headrace.core.machine import Machine
from headrace.core.plan import Plan
from headrace.core.technique import Context
from headrace.doctor.forecast import NOTHING
from headrace.planner.candidates import Asking

CATALOGUE, RESULTS = catalogue(), receipts.ROOT / "results"
LEVEL = 0.9
"""Of gains that the fitted interval shall hold: 80% are promised, and the planner's own constants
are from these receipts too. Of the first 11 forecasts an interval for 0.88 held 8."""
SMALL = 0.01
"""A smaller change counts as this one: it is near the noise of a measurement."""


@dataclass(frozen=True)
class Pair:
    """A change that was measured: the logarithms of both ratios of a step before over after."""

    technique: str
    what: str
    predicted: float
    measured: float

    @property
    def off(self) -> float:
        """By how much."""
        return self.measured - self.predicted


def measured_pairs() -> list[Pair]:
    """Of every receipt whose two plans the ledger prices, and where it sees a change."""
    rows = (r for r in standing("techniques", RESULTS) if "overrides" in r)  # not of older plans
    found = [_pair(row) for row in rows if "speed_ratio" in row["metrics"]]
    seen = [pair for pair in found if pair is not None]
    return [*seen, *_of_lists(), *_of_forecasts()]


def _of_forecasts() -> Iterator[Pair]:
    for row in standing("forecasts", RESULTS):
        said, came = row["forecast"]["value"], row["metrics"]["gain"]["value"]
        what = f"{row['workload']} {row['remedy']}"
        yield Pair(row["remedy"], what, math.log1p(said), math.log1p(came))


def _of_lists() -> Iterator[Pair]:
    timed = (r for r in foresight.known(RESULTS) if r["kind"] == "outcome" and r.get("step_s"))
    came, first = {r["id"]: r["step_s"] for r in timed}, foresight.firsts(foresight.LISTS)
    for one in foresight.configurations():
        base = first.get(one.choice)
        if base is None or base == one or not {one.id, base.id} <= came.keys():
            continue
        before, after = (_foreseen_s(c.plan, DEVICE) for c in (base, one))
        if before and after and abs(math.log(before / after)) >= NOTHING:
            yield Pair(one.id.rpartition("/")[2], one.id, math.log(before / after),
                       math.log(came[base.id] / came[one.id]))  # fmt: skip


def _pair(row: dict[str, Any]) -> Pair | None:
    name, shape = row["technique"], row["shape"]
    recipe = list(Plan.read((PLANS / f"{shape}.toml").read_text(), CATALOGUE).techniques)
    more = [w[1:] for w in row["overrides"] if w[0] == "+"]
    less = [w[1:] for w in row["overrides"] if w[0] == "-"]
    base = more if row["base"] == "trunk" else [n for n in (*recipe, *more) if n not in less]
    keys = [k if "." in k.partition("=")[0] else f"techniques.{name}.{k}"
            for k in row["knobs"].split(",") if k]  # fmt: skip
    steps = []
    for on, sets in ((base, []), (row["techniques"], keys)):
        sets = [w for w in (*row["overrides"], *sets) if w[0] not in "+-"]
        sets = [w for w in sets if not w.startswith("techniques.") or w.split(".")[1] in on]
        words = [f"+{n}" for n in on if n not in recipe] + [f"-{n}" for n in recipe if n not in on]
        steps.append(_step_s(shape, (*words, *sets), row["hardware"]))
    before, after = steps
    if before is None or after is None or abs(math.log(before / after)) < NOTHING:
        return None
    what = f"{shape} {row['base']} {name} {row['knobs']}".strip()
    return Pair(name, what, math.log(before / after),
                math.log(row["metrics"]["speed_ratio"]["value"]))  # fmt: skip


@cache
def _step_s(shape: str, words: tuple[str, ...], device_name: str) -> float | None:
    """Of a shape's recipe with changes, as it is foreseen; None where it is not."""
    try:
        plan = parse(words).plan((PLANS / f"{shape}.toml").read_text(), CATALOGUE)
        return _foreseen_s(plan, device_name)
    except HeadraceError:
        return None


def _foreseen_s(plan: Plan, device_name: str) -> float | None:
    asking = Asking(plan, _place(device_name), assumed(device_name), CATALOGUE)
    return asking.answer(plan).foresight.step_s


def fit(pairs: Sequence[Pair]) -> tuple[float, float]:
    """`least` (A) and `share` (B) of half-widths with the least mean score over pairs (P).

    The score of an interval is its width and what lies outside of it, as shares of the change:
    half a percent is much of a change by one percent, and nothing of one by half.
    """
    sizes_P = np.array([abs(pair.predicted) for pair in pairs])
    offs_P = np.array([abs(pair.off) for pair in pairs])
    leasts_A, shares_B = np.arange(1, 60) / 2000, np.arange(101) / 100
    halves_ABP = leasts_A[:, None, None] + shares_B[:, None] * sizes_P
    outside_ABP = np.maximum(0.0, offs_P - halves_ABP) / (1 - LEVEL)
    score_AB = ((halves_ABP + outside_ABP) / np.maximum(SMALL, sizes_P)).sum(-1)
    a, b = np.unravel_index(score_AB.argmin(), score_AB.shape)
    return float(leasts_A[a]), float(shares_B[b])


def covers(pair: Pair, least: float, share: float) -> bool:
    """Whether its interval holds what was measured."""
    return abs(pair.off) <= least + share * abs(pair.predicted)


def residuals(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The fit, and how it does on techniques that were left out of it."""
    least, share = fit(pairs)
    held: list[bool] = []
    for name in {pair.technique for pair in pairs}:
        others = fit([pair for pair in pairs if pair.technique != name])
        held += [covers(pair, *others) for pair in pairs if pair.technique == name]
    gains = [pair for pair in pairs if abs(pair.measured) >= 0.01]
    widths = [2 * (least + share * abs(p.predicted)) / abs(p.measured) for p in gains]
    worst = sorted(pairs, key=lambda pair: -abs(pair.off))[:8]
    return {
        "least": least, "share": share, "n": len(pairs),
        "coverage": mean(covers(pair, least, share) for pair in pairs),
        "coverage_left_out": mean(held),
        "median_width_of_gain": median(widths),
        "median_error_of_gain": median(abs(p.off / p.measured) for p in gains),
        "worst": {p.what: [round(p.predicted, 4), round(p.measured, 4)] for p in worst},
    }  # fmt: skip


@cache
def _place(device_name: str) -> Context:
    """A GPU that is not here, for any plan."""
    recipe = Plan.read((PLANS / "160m.toml").read_text(), CATALOGUE)
    return elsewhere(make_context(recipe, torch.device("cpu")), device_name)


assumed = cache(Machine.assumed)
"""One machine of a name, which remembers what it was asked."""


if __name__ == "__main__":
    print(json.dumps(residuals(measured_pairs()), indent=1))
