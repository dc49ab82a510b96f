"""Compute how far forecasts were off, and so the interval that the doctor gives a gain.

    python benchmarks/forecast_error.py

There are two kinds of pairs. Forecasts were recorded before anything was measured, and stand in
results/forecasts.jsonl. The interval is fitted to them, since no constant of the planner is: to
those whose step the device decides, because a slow host has an interval of its own. Receipts are
the other kind, changes whose forecast is made today: a technique added to a plan or taken
from it (results/techniques.jsonl), and what a candidate of a list written down before is beside the
first one of its workload (results/plans.jsonl). The planner's constants are fitted to receipts,
so receipts lie closer; they show how the interval does on more techniques and shapes. One workload
at a time is left out, to show how such an interval does on workloads that it was not fitted to. It
is wide enough when it holds `LEVEL` of these and `OF_RECEIPTS` of receipts. Its constants belong
into headrace.doctor.forecast.ERROR.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

import forecasts
import foresight
import numpy as np
import receipts
import torch
from residuals import DEVICE, PLANS, standing

from headrace.assemble.context import elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.errors import HeadraceError
from headrace.doctor.forecast import NOTHING, moved
from headrace.plan.changes import changed, parse
from headrace.plan.plan import Plan
from headrace.plan.technique import Context
from headrace.predict.candidates import Asking
from headrace.predict.prediction import Prediction

CATALOGUE, RESULTS = catalogue(), receipts.ROOT / "results"
LEVEL = 0.85
"""Share of gains that the interval shall contain: the middle of the 80 to 90% that are promised."""
OF_RECEIPTS = 0.9
"""Share of receipts that the interval shall contain. They lie closer: intervals that contained 85
to 90% of them contained 89 of the first 118 forecasts."""
SLOWEST_HOST = 3.15
"""Times as long as predicted that a host takes at most: eager steps on an H200 took 2.1 times as
long, and 1.5 times that some minutes later (forecasts.jsonl, natural.jsonl)."""
SMALL = 0.01
"""The least change that errors are a share of: a smaller one is near the measurement's noise."""


@dataclass(frozen=True)
class Pair:
    """Hold a change's predicted and measured ratio of step times, before over after, as logarithms.

    `moved` is the work that it adds and takes away (headrace.doctor.forecast).
    """

    workload: str
    what: str
    predicted: float
    measured: float
    moved: float = 0.0

    @property
    def off(self) -> float:
        """Return the difference of the logarithms of forecast and measured gain."""
        return self.measured - self.predicted

    @property
    def size(self) -> float:
        """Return the size that the interval of the pair grows with."""
        return max(abs(self.predicted), self.moved)


def recorded_pairs(results: Path = RESULTS) -> list[Pair]:
    """Return the pairs that were forecast and then measured, where the device sets the step."""
    return [
        Pair(
            row["workload"],
            row["remedy"],
            math.log1p(row["forecast"]["value"]),
            math.log1p(row["metrics"]["gain"]["value"]),
            moved(*seen),
        )
        for row in standing("forecasts", results)
        if by_device(seen := sides(row["workload"], row["remedy"]))
    ]


@cache
def sides(workload: str, remedy: str) -> tuple[Prediction, Prediction]:
    """Return the predictions of a planted plan without a remedy and with it."""
    shape, _, base = workload.partition(" ")
    before = forecasts.planted(PLANS / f"{shape}.toml", base)
    after = changed(before, remedy.split(), CATALOGUE)
    return _predicted(before, DEVICE), _predicted(after, DEVICE)


def by_device(both: Sequence[Prediction]) -> bool:
    """Return whether the device sets both steps, even beside the slowest host that was measured."""
    return all(SLOWEST_HOST * one.time.host_s < one.time.device_s for one in both)


def of_receipts() -> list[Pair]:
    """Return a pair for every receipt whose two plans the ledger prices differently."""
    rows = (r for r in standing("techniques", RESULTS) if "overrides" in r)  # not of older plans
    pairs = [_pair(row) for row in rows if "speed_ratio" in row["metrics"]]
    return [*(pair for pair in pairs if pair is not None), *_of_lists()]


def _of_lists() -> Iterator[Pair]:
    timed = (r for r in foresight.known(RESULTS) if r["kind"] == "outcome" and r.get("step_s"))
    came, first = {r["id"]: r["step_s"] for r in timed}, foresight.firsts(foresight.LISTS)
    for one in foresight.configurations():
        base = first.get(one.choice)
        if base is None or base == one or not {one.id, base.id} <= came.keys():
            continue
        pair = _receipt_pair(
            one.choice,
            one.id,
            [_predicted(c.plan, DEVICE) for c in (base, one)],
            came[base.id] / came[one.id],
        )
        if pair is not None:
            yield pair


def _pair(row: dict[str, Any]) -> Pair | None:
    name, shape = row["technique"], row["shape"]
    recipe = list(Plan.read((PLANS / f"{shape}.toml").read_text(), CATALOGUE).techniques)
    more = [w[1:] for w in row["overrides"] if w[0] == "+"]
    less = [w[1:] for w in row["overrides"] if w[0] == "-"]
    base = more if row["base"] == "trunk" else [n for n in (*recipe, *more) if n not in less]
    keys = [
        k if "." in k.partition("=")[0] else f"techniques.{name}.{k}"
        for k in row["knobs"].split(",")
        if k
    ]
    seen = []
    for on, sets in ((base, []), (row["techniques"], keys)):
        sets = [w for w in (*row["overrides"], *sets) if w[0] not in "+-"]
        sets = [w for w in sets if not w.startswith("techniques.") or w.split(".")[1] in on]
        words = [f"+{n}" for n in on if n not in recipe] + [f"-{n}" for n in recipe if n not in on]
        seen.append(_of_words(shape, (*words, *sets), row["hardware"]))
    what = f"{row['base']} {name} {row['knobs']}".strip()
    return _receipt_pair(shape, what, seen, row["metrics"]["speed_ratio"]["value"])


def _receipt_pair(
    workload: str, what: str, seen: Sequence[Prediction | None], ratio: float
) -> Pair | None:
    """Return a receipt's pair; None where the ledger prices only one plan, or no change."""
    before, after = seen
    if before is None or after is None or before.time.step_s is None or after.time.step_s is None:
        return None
    predicted = math.log(before.time.step_s / after.time.step_s)
    if abs(predicted) < NOTHING:
        return None
    return Pair(workload, what, predicted, math.log(ratio), moved(before, after))


@cache
def _of_words(shape: str, words: tuple[str, ...], device_name: str) -> Prediction | None:
    """Return the prediction of a shape's recipe with changes; None where there is none."""
    try:
        plan = parse(words).plan((PLANS / f"{shape}.toml").read_text(), CATALOGUE)
        return _predicted(plan, device_name)
    except HeadraceError:
        return None


def _predicted(plan: Plan, device_name: str) -> Prediction:
    asking = Asking(plan, _place(device_name), forecasts.assumed(device_name), CATALOGUE)
    return asking.answer(plan).prediction


def fit(pairs: Sequence[Pair], level: float = LEVEL) -> tuple[float, float]:
    """Return `least` (A) and `share` (B) of half-widths with the least mean score over pairs (P).

    The score of an interval is its width, and the distance to what lies outside of it, weighted so
    that `level` of all pairs should lie inside. Both are shares of the change: half a percent is
    much for a change of one percent, and little for a change of a half.
    """
    sizes_P = np.array([pair.size for pair in pairs])
    gains_P = np.array([abs(pair.predicted) for pair in pairs])
    offs_P = np.array([abs(pair.off) for pair in pairs])
    leasts_A, shares_B = np.arange(1, 60) / 2000, np.arange(101) / 100
    halves_ABP = leasts_A[:, None, None] + shares_B[:, None] * sizes_P
    outside_ABP = np.maximum(0.0, offs_P - halves_ABP) / (1 - level)
    score_AB = ((halves_ABP + outside_ABP) / np.maximum(SMALL, gains_P)).sum(-1)
    a, b = np.unravel_index(score_AB.argmin(), score_AB.shape)
    return float(leasts_A[a]), float(shares_B[b])


def covers(pair: Pair, least: float, share: float) -> bool:
    """Return whether the interval of the pair contains what was measured."""
    return abs(pair.off) <= least + share * pair.size


def left_out(pairs: Sequence[Pair], level: float) -> float:
    """Return the share of workloads left out of a fit that it contains."""
    inside: list[bool] = []
    for name in {pair.workload for pair in pairs}:
        others = fit([pair for pair in pairs if pair.workload != name], level)
        inside += [covers(pair, *others) for pair in pairs if pair.workload == name]
    return mean(inside)


def interval(pairs_ahead: Sequence[Pair], receipts: Sequence[Pair]) -> tuple[float, float, float]:
    """Return the fit that is wide enough and the level asked of it; else the fit to `LEVEL`."""
    for level in (LEVEL + step / 100 for step in range(round(100 * (1 - LEVEL)))):
        least, share = fit(pairs_ahead, level)
        known = covered_share(receipts, least, share) >= OF_RECEIPTS
        if known and left_out(pairs_ahead, level) >= LEVEL:
            return least, share, level
    return *fit(pairs_ahead), LEVEL


def residuals(pairs_ahead: Sequence[Pair], receipts: Sequence[Pair]) -> dict[str, Any]:
    """Return the fit to forecasts, and its score on workloads left out of it and on receipts."""
    least, share, level = interval(pairs_ahead, receipts)
    return {
        "least": least,
        "share": share,
        "n": len(pairs_ahead),
        "coverage": covered_share(pairs_ahead, least, share),
        "level": level,
        "coverage_left_out": left_out(pairs_ahead, level),
        "median_width_of_gain": median(_width(pair, least, share) for pair in pairs_ahead),
        "median_error_of_gain": median(_error(pair) for pair in pairs_ahead),
        "receipts": {
            "n": len(receipts),
            "coverage": covered_share(receipts, least, share),
            "median_error_of_gain": median(
                _error(pair) for pair in receipts if abs(pair.measured) >= SMALL
            ),
        },
        "worst": [
            [f"{p.workload} {p.what}", round(p.predicted, 4), round(p.measured, 4)]
            for p in sorted([*pairs_ahead, *receipts], key=lambda pair: -abs(pair.off))[:8]
        ],
    }


def covered_share(pairs: Sequence[Pair], least: float, share: float) -> float:
    """Return the share of pairs whose interval contains what was measured."""
    return mean(covers(pair, least, share) for pair in pairs)


def _width(pair: Pair, least: float, share: float) -> float:
    """Return the width of a gain's interval, in gains that were measured."""
    half = least + share * pair.size
    ends = (math.expm1(pair.predicted + half), math.expm1(pair.predicted - half))
    return (ends[0] - ends[1]) / abs(math.expm1(pair.measured))


def _error(pair: Pair) -> float:
    """Return the error of a gain's forecast, in gains that were measured."""
    came = math.expm1(pair.measured)
    return abs(math.expm1(pair.predicted) - came) / abs(came)


@cache
def _place(device_name: str) -> Context:
    """Return the context of a GPU that is not here, for any plan."""
    recipe = Plan.read((PLANS / "160m.toml").read_text(), CATALOGUE)
    return elsewhere(make_context(recipe, torch.device("cpu")), device_name)


if __name__ == "__main__":
    print(json.dumps(residuals(recorded_pairs(), of_receipts()), indent=1))
