"""Say where another layout of a run's ranks is predicted to be clearly faster.

Every layout of the ranks is predicted, as `mesh.auto` does before a run. The run adds what its step
took: another layout is named where its step, however far predictions of steps were off on one
device and a margin for links, is still below what was measured and what is predicted of the run's
own layout. How fast links are was not compared with steps of several GPUs, so the answer says that
it is predicted. Where no time is predicted, as of ranks on a CPU, nothing is said.
"""

from collections.abc import Iterator
from itertools import islice

from headrace.core.errors import HeadraceError
from headrace.core.statistics import Interval
from headrace.costs.machine import Machine
from headrace.doctor.findings import Finding, Kind
from headrace.doctor.forecast import Forecast, MeasuredRun, by_share
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Context
from headrace.predict.candidates import Asking, Candidate
from headrace.predict.intervals import STEP
from headrace.predict.mesh import layout_name

WRONG_LAYOUT = "wrong layout"
LINKS = 1.1
"""Times that a step may take of its prediction for its links alone. Chosen: no step of several GPUs
was measured."""
MOST = 64
"""Layouts that are predicted at most, so that the doctor stays quick."""


def wrong_layout(
    plan: Plan, context: Context, machine: Machine, catalogue: Catalogue, measured: MeasuredRun
) -> Finding | None:
    """Look for a layout of the same ranks that is clearly faster; None where none is known.

    Raises:
        ConfigError, UnsupportedError: the plan itself cannot run there.
    """
    if plan.mesh.ranks == 1 or measured.step_s is None:
        return None
    asking = Asking(plan, context, machine, catalogue, layouts=True)
    now = asking.answer(plan)
    own_s = now.prediction.time.step_s
    others = list(islice(_others(asking), MOST)) if own_s else []
    timed = [(one.prediction.time.step_s, one) for one in others]
    known = [(step_s, one) for step_s, one in timed if step_s is not None]
    if own_s is None or not known:
        return None
    other_s, best = min(known, key=lambda one: one[0])
    rates = now.prediction.rates
    times = LINKS * STEP[rates.basis].high * rates.widening.times
    if times * other_s >= min(own_s, measured.step_s):
        return None
    facts = {
        "change": best.changes,
        "layout": layout_name(best),
        "own_layout": layout_name(now),
        "ranks": plan.mesh.ranks,
        "predicted_s": own_s,
        "other_s": other_s,
        "step_s": measured.step_s,
        "times": times,
    }
    return Finding(Kind.WRONG_LAYOUT, 1 - other_s / own_s, facts, "inferred")


def _others(asking: Asking) -> Iterator[Candidate]:
    """Yield the other layouts of the ranks that can run and are predicted to fit."""
    for words in asking.singles(asking.start):
        if not any(word.startswith("mesh.") for word in words):
            continue
        try:
            one = asking.attempt(asking.start, words)
        except HeadraceError:
            continue
        if one.prediction.memory.fits == "yes" and one.plan.mesh != asking.start.mesh:
            yield one


def by_layouts(before: Candidate, after: Candidate) -> Forecast:
    """Forecast another layout by both predicted steps; half of the gain at least, all at most."""
    times = [one.prediction.time for one in (before, after)]
    if times[0].step_s is None or times[1].step_s is None:
        return Forecast(None, "none", times[1].unknown or times[0].unknown)
    same = Forecast(Interval(0.0, 0.0, 0.0, 0), "ledger")
    return by_share(1 - times[1].step_s / times[0].step_s, same)
