"""Forecasts of a run whose host may be slow, or was."""

from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch

from headrace.assemble.context import elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.costs.machine import Machine
from headrace.costs.work import EDGE_S, HOST_S, SLOW_HOST
from headrace.doctor.forecast import (
    ERROR,
    FEW_S,
    HOSTS,
    REST,
    MeasuredRun,
    between,
    by_ledger,
    moved,
)
from headrace.doctor.observation import Observation
from headrace.plan.changes import changed, parse
from headrace.predict.prediction import Prediction, predict

SHAPES = Path(__file__).parents[2] / "benchmarks" / "plans"
BARE = "-torch_compile -cudnn_attention -fused_swiglu -fused_cross_entropy -bf16_parameters"


def seen(words: str, more: str = "") -> Prediction:
    """The 160m recipe with changes and then more of them, on an H200."""
    plan = parse(words.split()).plan((SHAPES / "160m.toml").read_text(), catalogue())
    plan = changed(plan, more.split(), catalogue())
    here = make_context(plan, torch.device("cpu"))
    return predict(plan, elsewhere(here, "NVIDIA H200"), Machine.assumed("NVIDIA H200"))


def paced(one: Prediction, pace: float, rest: float = REST) -> float:
    """Return the seconds of a step whose launches take `pace` times as long as usual."""
    host_s = rest * HOST_S + pace * one.time.usual_launches_s
    return max(one.time.device_s, host_s) + EDGE_S


def differing(before: Prediction, after: Prediction, pace: float, other: float) -> float:
    """Return the pace at what both plans launch, and another at what one of them lacks."""
    least, most = sorted(one.time.usual_launches_s for one in (before, after))
    return pace + (1 - least / most) * (other - pace)


def test_an_interval_is_around_what_a_slow_host_would_make_of_it() -> None:
    """Kernels that take less of the device and more of the host may gain nothing there."""
    words = f"{BARE} +full_checkpoint batch.micro_sequences=8"
    before, after = (seen(w) for w in (words, f"{words} +fused_rms_norm"))
    assert before.time.step_s and after.time.step_s and not before.time.waits_for_launches
    assert (
        before.time.host_s < after.time.host_s < after.time.step_s < SLOW_HOST * after.time.host_s
    )
    value = before.time.step_s / after.time.step_s - 1
    alone = by_ledger(before, after, MeasuredRun()).gain
    of_run = by_ledger(before, after, MeasuredRun(before.time.step_s)).gain
    assert alone is not None and of_run is not None
    assert alone.value == pytest.approx(value)
    limit = (before.time.step_s - EDGE_S - REST * HOST_S) / before.time.usual_launches_s
    usual_s = max(after.time.step_s, paced(after, min(1.0, limit)))
    assert of_run.value == pytest.approx(before.time.step_s / usual_s - 1)
    slow = [max(x.time.step_s or 0, SLOW_HOST * x.time.host_s + EDGE_S) for x in (before, after)]
    lost = log(slow[0] / slow[1])
    work = moved(before, after)
    assert alone.low == pytest.approx(between(lost, moved=work).low) and alone.low < 0 < alone.value
    assert alone.high == pytest.approx(between(log(1 + value), moved=work).high)
    # A host that took no longer than the step that was measured was that slow at most, and may be
    # slower later: with either plan, or with what it has of the first.
    late = min(HOSTS.spread, HOSTS.drift * limit)
    first_s = max(before.time.step_s, paced(before, late))
    slowest = log(first_s / max(after.time.step_s, paced(after, late)))
    assert of_run.low == pytest.approx(between(slowest, moved=work).low) and of_run.low < 0
    quick_s = max(after.time.step_s, paced(after, min(1.0, limit) / HOSTS.spread))
    pace = differing(before, after, late, 1 / HOSTS.spread)
    most = log(first_s / max(after.time.step_s, paced(after, pace)))
    ends = [between(x, moved=work).high for x in (log(before.time.step_s / quick_s), most)]
    assert of_run.high == pytest.approx(max(ends))


def test_a_run_that_waited_for_launches_is_scaled_by_its_host() -> None:
    """Check that a run that waited for launches is scaled by host time, against the ledger."""
    words = f"{BARE} +full_checkpoint batch.micro_sequences=8"
    out = words.replace("+full_checkpoint ", "")
    before, less, compiled = seen(words), seen(out), seen(words, "+torch_compile")
    assert (
        before.time.step_s
        and not before.time.waits_for_launches
        and before.time.device_s > before.time.host_s
    )
    step_s = paced(before, 1.2)
    run = MeasuredRun(step_s, by_host=True)
    gains = [by_ledger(before, after, run).gain for after in (less, compiled)]
    for after, gain in zip((less, compiled), gains, strict=True):
        after_s = paced(after, 1.2)
        assert gain is not None and gain.value == pytest.approx(step_s / after_s - 1)
        ratios = [log(step_s / after_s)]
        for drift in (HOSTS.drift, 1 / HOSTS.drift):  # as quick as later, or as slow
            ratios.append(log(paced(before, 1.2 * drift) / paced(after, 1.2 * drift)))
        for spread in (HOSTS.spread, 1 / HOSTS.spread):  # of what only one of them launches
            pace = differing(before, after, 1.2, 1.2 * spread)
            ratios.append(log(step_s / paced(after, pace)))
        # All of what the host does at one pace.
        whole = (step_s - EDGE_S) / (HOST_S + before.time.usual_launches_s)
        ratios.append(log(step_s / paced(after, whole, whole)))
        work = moved(before, after)
        assert gain.low == pytest.approx(between(min(ratios), moved=work).low)
        assert gain.high == pytest.approx(between(max(ratios), moved=work).high)
    blind = by_ledger(before, less, MeasuredRun(step_s)).gain
    assert blind is not None and gains[0] is not None and gains[0].value > 1.5 * blind.value
    quick = by_ledger(before, less, MeasuredRun(5 * before.time.host_s + EDGE_S, by_host=True))
    assert (quick.gain, quick.source) == (None, "none")
    assert "host" in quick.unknown and "5.0 times too short" in quick.unknown


@pytest.mark.parametrize("share", [0.4, 0.9, 1.0, 1.9])
def test_a_change_that_changes_nothing_gains_nothing(share: float) -> None:
    """It is so however long the run took, and whatever it waited for."""
    one = seen(f"{BARE} +full_checkpoint batch.micro_sequences=8")
    assert one.time.step_s
    for run in (
        MeasuredRun(share * one.time.step_s, by_host=True),
        MeasuredRun(share * one.time.step_s + 0.1, 0.1),
        MeasuredRun(share * one.time.step_s + 0.1, 0.1, by_host=True),
        MeasuredRun(),
    ):
        gain = by_ledger(one, one, run).gain
        if gain is None:
            assert share == 0.4 and not run.by_host
        else:
            none = between(0.0)
            assert (gain.low, gain.value, gain.high) == pytest.approx((none.low, 0.0, none.high))


def test_a_host_s_pace_has_its_limits_and_waits_are_not_its() -> None:
    before = seen(f"{BARE} +full_checkpoint batch.micro_sequences=8")
    for times, known in ((3.9, True), (4.1, False), (0.26, True), (0.24, False)):
        run = MeasuredRun(times * before.time.host_s + EDGE_S, by_host=True)
        assert (by_ledger(before, before, run).gain is not None) == known
    after = seen(f"{BARE} batch.micro_sequences=8")
    step_s = paced(before, 1.8)
    gain = by_ledger(before, after, MeasuredRun(step_s + 0.1, 0.1, by_host=True)).gain
    after_s = paced(after, 1.8)
    assert gain is not None and gain.value == pytest.approx((step_s + 0.1) / (after_s + 0.1) - 1)
    norms = seen(f"{BARE} +full_checkpoint batch.micro_sequences=8 +fused_rms_norm")
    assert before.time.step_s
    gain = by_ledger(before, norms, MeasuredRun(before.time.step_s + 0.2, 0.2)).gain
    limit = (before.time.step_s - EDGE_S - REST * HOST_S) / before.time.usual_launches_s
    pace = min(HOSTS.spread, HOSTS.drift * limit)
    slow_s = [max(one.time.step_s or 0.0, paced(one, pace)) + 0.2 for one in (before, norms)]
    lost = log(slow_s[0] / slow_s[1])
    work = (
        moved(before, norms) * before.time.step_s / (before.time.step_s + 0.2)
    )  # waits are no work
    assert gain is not None and gain.low == pytest.approx(between(lost, moved=work).low)


@pytest.mark.parametrize("more", ["+fused_swiglu", "+full_checkpoint"])
def test_where_no_host_is_as_slow_as_the_device_the_host_is_no_matter(more: str) -> None:
    before, after = seen(BARE), seen(BARE, more)
    assert (
        SLOW_HOST * after.time.host_s < after.time.device_s
        and before.time.step_s
        and after.time.step_s
    )
    alone = between(log(before.time.step_s / after.time.step_s), moved=moved(before, after))
    for run in (MeasuredRun(), MeasuredRun(before.time.step_s)):
        gain = by_ledger(before, after, run).gain
        assert gain is not None and (gain.low, gain.high) == pytest.approx((alone.low, alone.high))


def test_a_run_unlike_its_ledger_is_refused_where_only_the_other_plan_waits_too() -> None:
    words = f"{BARE} +full_checkpoint batch.micro_sequences=8"
    before, after = seen(words), seen(words, "+fused_rms_norm +fused_rope +fused_swiglu")
    assert (
        before.time.step_s and after.time.waits_for_launches and not before.time.waits_for_launches
    )
    for times, why in ((3.0, "3.0 times too short"), (0.3, "3.3 times too long")):
        found = by_ledger(before, after, MeasuredRun(times * before.time.step_s))
        assert found.gain is None and why in found.unknown
    waits = by_ledger(before, after, MeasuredRun(before.time.step_s, waits_s=before.time.step_s))
    assert (waits.gain, waits.source) == (None, "none") and "all waiting" in waits.unknown


def test_an_interval_grows_with_the_work_that_moves_and_not_with_what_is_left_of_it() -> None:
    """Half of a block computed again takes back what compiling gained, and is not sure for it."""
    before, compiled, again, chunked = (
        seen(BARE, more)
        for more in (
            "",
            "+torch_compile",
            "+torch_compile +memory_budget",
            "+chunked_cross_entropy",
        )
    )
    assert sum(again.time.work_s.values()) == pytest.approx(again.time.device_s)
    gross = moved(before, compiled) + moved(compiled, again)
    net = log(before.time.device_s / again.time.device_s)
    assert moved(before, again) == pytest.approx(gross, rel=0.15) and gross > 1.5 * net
    assert moved(before, before) == 0 and moved(again, before) == moved(before, again)
    # The head's products go forward with the loss: they are the same work.
    assert moved(before, chunked) < 1.2 * abs(log(before.time.device_s / chunked.time.device_s))
    gain = by_ledger(before, again, MeasuredRun(before.time.step_s)).gain
    assert gain is not None
    assert log((1 + gain.high) / (1 + gain.value)) == pytest.approx(
        ERROR.least + ERROR.share * moved(before, again)
    )


def test_what_waits_for_data_is_no_work_of_the_device() -> None:
    one = seen(BARE)
    for name, counts in (("waiting for data", 0.0), ("waiting for other ranks' layers", 1.0)):
        longer = replace(one, time=replace(one.time, parts_s={**one.time.parts_s, name: 1.0}))
        assert longer.time.device_s == pytest.approx(one.time.device_s + counts)


def test_signals_say_what_a_run_waited_for() -> None:
    late = Observation(step_s=(1.0, 3.0), slack_s=(0.0, 0.02), dry=(1.0, 0.0), device="cuda")
    assert MeasuredRun.of(late) == MeasuredRun(2.0, slack_s=pytest.approx(0.01), by_host=True)
    for other in (
        replace(late, dry=None),
        replace(late, dry=(0.0, 0.0)),
        replace(late, slack_s=None),
        replace(late, slack_s=(0.1, 0.1)),
        replace(late, device="cpu"),
        replace(late, slack_s=()),
        replace(late, slack_s=(float("nan"),) * 2),
        replace(late, input_s=(0.3, 0.3)),
    ):
        assert not MeasuredRun.of(other).by_host
    assert MeasuredRun.of(replace(late, slack_s=(0.5, 0.5))).slack_s == pytest.approx(0.5)


def test_a_host_that_ran_ahead_is_no_slower_than_that() -> None:
    words = f"{BARE} +full_checkpoint batch.micro_sequences=8"
    before, after = (seen(w) for w in (words, f"{words} +fused_rms_norm"))
    assert before.time.step_s and after.time.step_s
    ahead = by_ledger(
        before, after, MeasuredRun(before.time.step_s, slack_s=before.time.step_s / 2)
    ).gain
    alone = between(log(before.time.step_s / after.time.step_s), moved=moved(before, after))
    assert ahead is not None and ahead.low == pytest.approx(alone.low)
    assert by_ledger(before, after, MeasuredRun(before.time.step_s)).gain.low < 0  # type: ignore[union-attr]


def test_a_plan_that_launches_little_says_nothing_of_its_host() -> None:
    """Graphs leave a host idle, and eager code in their place is launched at the usual pace."""
    recorded, eager = seen("+cuda_graphs"), seen("-torch_compile")
    assert recorded.time.step_s and eager.time.step_s
    assert recorded.time.usual_launches_s < FEW_S < eager.time.usual_launches_s
    run = MeasuredRun(recorded.time.step_s, slack_s=0.9 * recorded.time.step_s)
    small = replace(eager, time=replace(eager.time, parts_s={"matrix products": 1e-3}, step_s=1e-3))
    gain = by_ledger(recorded, small, run).gain
    wanted_s = REST * HOST_S + eager.time.usual_launches_s
    assert gain is not None and gain.value == pytest.approx(recorded.time.step_s / wanted_s - 1)
