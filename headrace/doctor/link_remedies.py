"""Propose other sending between ranks, and forecast what it leaves exposed.

The run says what share of a step nothing hides of what ranks send. The planner says of both plans
how long that is, and how long the rest: how much less is exposed is what a remedy takes of the
measured share. How far off the planner's links are is not known, so the ends are half and all of
that. Where no time is predicted, only techniques whose symptoms name the bottleneck are proposed.
"""

from collections.abc import Iterator

from headrace.core.statistics import Interval
from headrace.doctor.forecast import Forecast, by_share
from headrace.predict.candidates import Asking, Candidate, Words
from headrace.predict.layouts import groups
from headrace.predict.prediction import PART_NAMES

INTERCONNECT = "interconnect"
ROOM = "parallel"
EXPOSED = PART_NAMES["collective"]


def of_links(asking: Asking) -> Iterator[Words]:
    """Yield knobs of the techniques that send between ranks, and other groups of the ranks."""
    plan = asking.start
    if plan.mesh.ranks == 1 or asking.answer(plan).prediction.time.step_s is None:
        return
    own = tuple(f"techniques.{n}." for n, t in plan.techniques.items() if t.room == ROOM)
    yield from (words for words in asking.singles(plan) if words[0].startswith(own))
    yield from groups(plan, asking.catalogue, near=True)


def by_links(share: float, before: Candidate, after: Candidate) -> Forecast | None:
    """Forecast what a change takes of the exposed share of a step; None where nothing tells.

    Args:
        share: measured share of a step in which nothing hides what ranks send.
        before: the run's plan.
        after: the changed plan.
    """
    times = [one.prediction.time for one in (before, after)]
    if before.plan.mesh.ranks == 1 or times[0].step_s is None:
        return None
    if times[1].step_s is None:
        return Forecast(None, "none", times[1].unknown)
    exposed_s = [time.parts_s.get(EXPOSED, 0.0) for time in times]
    rest_s = [(time.step_s or 0.0) - sent_s for time, sent_s in zip(times, exposed_s, strict=True)]
    if not exposed_s[0] or not all(rest_s):
        return None
    taken = share * (1 - exposed_s[1] / exposed_s[0])
    rest = rest_s[0] / rest_s[1] - 1
    if taken <= 0:
        return Forecast(Interval(0.0, 0.0, 0.0, 0), "share")
    return by_share(taken, Forecast(Interval(rest, rest, rest, 0), "ledger"))
