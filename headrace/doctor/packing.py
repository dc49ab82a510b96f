"""Forecast remedies for wasted tokens by the packing ledger of the run's own text.

What another way of making rows gains is what its padding is less than theirs: a count, and no
share of a step. It is counted from the offsets of the run's shards, where they still are.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.statistics import Interval
from headrace.data.packing.ledger import PackingLedger, packing_ledger
from headrace.data.shards import Shards
from headrace.doctor.findings import Finding
from headrace.doctor.forecast import Forecast
from headrace.plan.plan import Plan
from headrace.predict.candidates import Words
from headrace.train.run_folder import RunFolder

PADDED = "wasted tokens"
"""The bottleneck that the packing ledger forecasts."""


def packing_of(
    run: RunFolder, plan: Plan, findings: Sequence[Finding], worth: float
) -> PackingLedger | None:
    """Return the packing ledger of a run's text where tokens are wasted and its shards are there.

    Only the offsets of documents are read.

    Args:
        run: the run's folder.
        plan: its plan.
        findings: the doctor's.
        worth: share of the tokens below which nothing is counted.

    Raises:
        RunError: the record of its data is damaged.
    """
    if not any(f.bottleneck == PADDED and f.share >= worth for f in findings):
        return None
    record = run.read_data() or {}
    for folder in (record.get("directory"), record.get("absolute")):
        parts = [Path(str(folder)) / f"train-{i:02d}" for i in range(len(plan.source_list))]
        try:
            return packing_ledger(map(Shards.open, parts), plan.data.sequence_length)
        except ConfigError:  # they are gone, or of another version: the share forecasts
            continue
    return None


def with_packing(finding: Finding, packing: PackingLedger | None, plan: Plan) -> Finding:
    """Return a finding of wasted tokens with the padding of the plan's rows, and of the best."""
    if packing is None or finding.bottleneck != PADDED:
        return finding
    now, (best, _) = packing.in_force(plan.techniques), packing.choose()
    counted = {
        "policy": str(now),
        "policy_padding": packing.padding_fraction(now),
        "best_policy": str(best),
        "best_padding": packing.padding_fraction(best),
    }
    return replace(finding, facts={**finding.facts, "packing": counted})


def by_packing(
    packing: PackingLedger, before: Iterable[str], after: Iterable[str], ledger: Forecast
) -> Forecast:
    """Forecast a change of how rows are made, by the padding that was counted of the run's text.

    Args:
        packing: what each policy makes of it.
        before: techniques of the plan.
        after: those after the change.
        ledger: what the change does to a step, where that is known.
    """
    shares = [packing.useful_share(packing.in_force(names)) for names in (before, after)]
    times = shares[1] / shares[0]
    if ledger.gain is None:
        gain = Interval(times - 1, times - 1, times - 1, 0)
        return Forecast(gain, "share", f"the rest of the step: {ledger.unknown}")
    ends = (ledger.gain.low, ledger.gain.value, ledger.gain.high)
    low, value, high = ((1 + end) * times - 1 for end in ends)
    return Forecast(Interval(low, value, high, ledger.gain.n), "ledger", ledger.unknown)


def repacked(plan: Plan, packing: PackingLedger) -> Iterator[Words]:
    """Yield the change to the policy that the packing ledger chooses, if it is another one."""
    now, (best, _) = packing.in_force(plan.techniques), packing.choose()
    if now == best:
        return
    taken_out = [f"-{name}" for name in packing.makers() if name in plan.techniques]
    put_in = [f"+{name}" for name in packing.makers() if name == best]
    yield *taken_out, *put_in
