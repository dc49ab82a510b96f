"""Propose other layers and schedules for a pipeline whose ranks are not alike, and forecast them.

The run says what each rank's passes take, and so what a layer takes there. A change is forecast by
moving the seconds of its layers, under the waits that its own schedule has. What messages take is
not moved. Fewer rows of a micro-batch also change how fast they are computed, which the planner
alone knows: the smaller gain of both counts.
"""

from collections.abc import Iterator
from dataclasses import replace

from headrace.assemble.build import make_ledgers
from headrace.core.statistics import Interval
from headrace.costs.ledger import Ledger
from headrace.costs.work import IDLE
from headrace.doctor.forecast import Forecast, MeasuredRun, by_share
from headrace.doctor.stages import StageTimes
from headrace.plan.changes import word
from headrace.predict.candidates import MICRO, Asking, Candidate, Words
from headrace.predict.prediction import at

IMBALANCED = "pipeline imbalance"
AXIS, LAYERS = "pipeline", "layers"
"""The axis of the mesh whose ranks have layers of their own, and the knob that says how many."""
HEAD = ("head", "loss")
"""How the names of the work of a head begin."""
NOTHING_ELSE = Forecast(Interval(0.0, 0.0, 0.0, 0), "ledger")
"""What a change does to the rest of the step."""


def rebalanced(asking: Asking, stages: StageTimes) -> Iterator[Words]:
    """Yield changes of what ranks of a pipeline have, and of the order of their passes."""
    plan = asking.start
    for name, technique in plan.techniques.items():
        if AXIS not in technique.axes:
            continue
        knobs, me = technique.model_dump(), f"techniques.{name}."
        layers = stages.even().layers
        if LAYERS in knobs and knobs.get("chunks", 1) == 1 and layers != stages.layers:
            yield (f"{me}{LAYERS}={word([*layers])}",)
        freed = (f"{me}{LAYERS}=[]",) if knobs.get(LAYERS) else ()
        for words in asking.singles(plan):
            if words[0].startswith(me):  # another schedule has other stages
                yield (*words, *freed)
            elif words[0].startswith(f"{MICRO}="):
                yield words


def by_stages(
    asking: Asking, before: Candidate, after: Candidate, measured: MeasuredRun
) -> Forecast:
    """Forecast a change by what each rank's passes took."""
    stages = measured.stages
    if stages is None or measured.step_s is None:
        return Forecast(None, "none", "what each rank's passes take was not measured")
    ledgers = make_ledgers(after.plan, at(asking.context, after.plan))
    each, ends = [one.sizes for one in ledgers], [has_head(one) for one in ledgers]
    if len(each) != len(stages.layers) or True not in ends:
        return Forecast(None, "none", "another number of ranks shares the layers then")
    layers = [int(sizes["layers"]) for sizes in each]
    micros, idle_share = each[0]["micro_batches"], each[0].get(IDLE, 0.0)
    there = stages.with_layers(layers, micros, idle_share, ends.index(True))
    saved = (stages.passes_s - there.passes_s) / measured.step_s
    if after.plan.micro_rows != before.plan.micro_rows:
        steps_s = before.prediction.time.step_s, after.prediction.time.step_s
        if steps_s[0] is None or steps_s[1] is None:
            return Forecast(None, "none", after.prediction.time.unknown)
        saved = min(saved, 1 - steps_s[1] / steps_s[0])
    if saved <= 0:
        return replace(NOTHING_ELSE, source="share")
    return by_share(saved, NOTHING_ELSE)


def has_head(ledger: Ledger) -> bool:
    """Return whether a rank computes the loss."""
    return any(name.startswith(HEAD) for name in ledger.work)
