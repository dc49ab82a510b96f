"""The busiest resource of a device binds a step: small runs on an H100, and a grid."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.assemble.context import elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.cli.plans import named_plan
from headrace.core.statistics import Interval
from headrace.costs.machine import Machine
from headrace.costs.work import HOST_S
from headrace.doctor.advice import Advice, Advised, _by_gain, advised
from headrace.doctor.findings import KIND_OF, Finding, Kind
from headrace.doctor.forecast import REST, MeasuredRun
from headrace.doctor.observation import Observation
from headrace.doctor.physics import (
    DRY_SHARE,
    LEAST_PEAK,
    SLACK_SHARE,
    SURE_PEAK,
    TOO_SLOW,
    Step,
    binding,
    host_binds,
    lead,
    slack_share,
)
from headrace.doctor.plan_keys import concerns_halves
from headrace.doctor.remedies import PlanRemedy, _Asker, remedies
from headrace.doctor.rules import busy_in, faults
from headrace.doctor.use import Use
from headrace.doctor.words import describe
from headrace.doctor.words.answer import closing_verdict, findings_json, render_advice
from headrace.plan.plan import Plan
from headrace.predict.candidates import Asking
from headrace.predict.prediction import predict

H100 = "NVIDIA H100 80GB HBM3"
SMALL = str(Path(__file__).parents[2] / "benchmarks" / "plans" / "small.toml")
"""A 14M decoder by plain AdamW, whose steps were measured."""
STEPS = 40
PAIR = ("+cuda_graphs", "+torch_compile")


def judge(seen: Observation, use: Use, trace: tuple[Finding, ...] = ()) -> list[Finding]:
    """Return what is wrong with a run, else what binds its steps."""
    seen = replace(seen, use=use, traced=trace)
    return faults(seen) or [binding(seen, busy_in(trace))]


def steady(step_s: float, *, device: str = "cuda", **shares: float | None) -> Observation:
    """Return equal steps; shares of a step by signal, and `dry` of the steps; None was not read."""

    def series(name: str) -> tuple[float, ...] | None:
        share = shares.get(name)
        return None if share is None else (share * step_s,) * STEPS

    dry = shares.get("dry")
    return Observation(
        step_s=(step_s,) * STEPS,
        device=device,
        useful_share=1.0,
        input_s=series("input"),
        communication_s=series("sent"),
        slack_s=series("slack"),
        dry=None if dry is None else tuple(float(n < dry * STEPS) for n in range(STEPS)),
    )


def on_h100(
    name: str,
    step_s: float,
    peak: float | None,
    *overrides: str,
    with_: tuple[str, ...] = (),
    **shares: float | None,
) -> Advice:
    """Return the advice on a run of a recipe or a plan's file, by its step on an H100."""
    plan = named_plan(name, list(overrides), list(with_))
    context = elsewhere(make_context(plan, torch.device("cpu")), H100)
    machine = Machine.assumed(H100)
    use = Use.of(predict(plan, context, machine), peak)
    window = steady(step_s, **{"slack": 0.0, "dry": 1.0, "input": 0.03, **shares})
    findings = judge(window, use)
    measured = MeasuredRun.of(replace(window, use=use))
    return advised(findings, plan, context, machine, catalogue(), measured)


@pytest.fixture(scope="module")
def small() -> Advice:
    """Return advice on the plan `small` at 125k tokens a second, 1.0% of the peak."""
    return on_h100(SMALL, 0.0328, 0.0101)


def test_a_small_run_waits_for_launches_and_is_told_of_both(small: Advice) -> None:
    verdict, first = small.verdict, small.first
    assert verdict is not None and verdict.bottleneck == "launch"
    assert verdict.kind is Kind.GPU_IDLES and verdict.share == pytest.approx(0.83, abs=0.005)
    assert verdict.facts["peak_share"] == 0.0101
    assert first is not None and first.change == PAIR and small.healthy is False
    assert first.gain is not None and first.gain.low < 2.2 < 2.81 < first.gain.high
    rows = findings_json(small)
    assert rows[0]["healthy"] is False and rows[0]["first"]["change"] == PAIR
    assert "--with cuda_graphs --with torch_compile" in rows[0]["first"]["command"]
    closing = closing_verdict(small)
    assert (
        closing["sentence"] == describe(verdict).sentence and closing["remedy"] and closing["gain"]
    )
    assert "omputation" not in render_advice(small) + closing["sentence"] + closing["evidence"]


def test_compiling_alone_gains_less_than_with_graphs(small: Advice) -> None:
    known = {one.change: one.gain for one in small.findings[0].remedies}
    alone, both = known["+torch_compile",], known[PAIR]
    assert alone is not None and both is not None and both.value > 3 * alone.value


@pytest.mark.parametrize(
    ("slack", "dry"), [(0.0, None), (0.06, 0.3), (0.0, 0.2), (0.3, 0.0), (None, None)]
)
def test_no_signal_makes_a_device_busy_that_has_nothing_to_do(
    slack: float | None, dry: float | None
) -> None:
    found = on_h100("demo", 0.03, 0.001, slack=slack, dry=dry)
    assert found.verdict is not None and found.verdict.bottleneck == "launch"
    assert found.verdict.share == pytest.approx(0.928, abs=0.005)
    assert found.first is not None and found.first.change == PAIR


def test_a_share_that_the_ledger_left_over_forecasts_nothing_that_it_does_not() -> None:
    """No half of the rest is promised of a step four times as long as the ledger can describe."""
    found = on_h100(SMALL, 0.4, 0.001)
    assert found.verdict is not None and found.verdict.share > 0.9
    known = found.findings[0].remedies
    assert known and all(one.gain is None and one.unknown for one in known)
    assert found.healthy is None, "nobody knows what a change gains there"


def test_what_no_remedy_helps_is_healthy_though_it_waits() -> None:
    found = on_h100(SMALL, 0.0086, 0.04, with_=("torch_compile", "cuda_graphs"))
    assert found.verdict is not None and found.verdict.bottleneck == "launch"
    assert found.healthy is True and closing_verdict(found)["remedy"] is None
    assert render_advice(found).count("healthy: ") == 1


def test_a_host_that_is_slow_in_launches_is_not_in_all_that_it_does() -> None:
    """Twice as long for each launch leaves the rest of a recorded step as it is predicted."""
    found = on_h100(SMALL, 0.0328, 0.0101).first
    assert found is not None and found.gain is not None
    after_s = 0.0328 / (1 + found.gain.value)
    assert after_s == pytest.approx(REST * HOST_S + 0.0025 + 0.0021 + 0.03 * 0.0328, rel=0.1)


def test_a_finding_whose_remedy_gains_more_stands_before_one_that_takes_more() -> None:
    """What is wrong stands before both; what has no forecast keeps its place behind them."""

    def one(name: str, share: float, *gains: float | None, equality: str = "exact") -> Advised:
        intervals = (None if g is None else Interval(g, g, g, 9) for g in gains)
        known = [PlanRemedy(("+a",), "", i, 0.0, "yes", "", equality, "ledger") for i in intervals]
        kind = KIND_OF.get(name, Kind.PHASE)
        return Advised(Finding(kind, share, {"bottleneck": name}), tuple(known))

    found = [
        one("input", 0.4, 0.2),
        one("launch", 0.3, None, 0.9),
        one("evaluation", 0.2),
        one("instability", 0.1, None),
        one("computation", 0.1, 3.0, equality="learning"),
    ]
    names = [advised.finding.bottleneck for advised in _by_gain(found)]
    assert names == ["instability", "launch", "input", "evaluation", "computation"]
    both = Advice(tuple(found[:3]), timed=True)
    assert both.first is found[1].remedies[1] and both.healthy is False
    assert Advice((one("launch", 0.3, 0.05),), timed=True).healthy is True
    assert Advice((one("launch", 0.3, None),)).healthy is None
    wrong = Advice((found[3], found[1]), timed=True)
    assert wrong.healthy is False and wrong.first is found[3].remedies[0]
    empty = Advice((one("launch", 0.3, None),), timed=True)
    assert empty.first is None and empty.healthy is True, "nothing is known to gain"


def test_no_half_precision_is_told_of_to_a_cpu_that_emulates_it(
    tiny_plan: Callable[..., Plan],
) -> None:
    plan = tiny_plan()
    context, guessed = make_context(plan, torch.device("cpu")), Machine.assumed("cpu")
    finding = Finding(Kind.SLOW_KERNELS, 0.5)
    for machine, told_of in ((guessed, False), (Machine.assumed(H100), True)):
        place = replace(context, device="cuda" if told_of else "cpu")
        ask = _Asker(finding, Asking(plan, place, machine, catalogue()), MeasuredRun())
        assert ask.halves_are_slow is not told_of
    known = remedies(finding, plan, context, guessed, catalogue(), MeasuredRun())
    assert not any("bf16" in word for one in known for word in one.change)


@pytest.mark.parametrize(
    ("words", "concerns"),
    [
        ("+bf16_autocast", True),
        ("-bf16_parameters +muon", True),
        ("+fp16_loss_scaling", True),
        ("techniques.float8_linear.recipe=rowwise", True),
        ("model.precision=bf16", True),
        ("techniques.fsdp.reduce=bf16", True),
        ("techniques.fsdp.reduce=fp32", False),
        ("+tf32 model.precision=fp32", False),
        ("batch.micro_sequences=2 -muon", False),
    ],
)
def test_a_change_concerns_halves_by_its_technique_or_value(words: str, concerns: bool) -> None:
    assert concerns_halves(words.split(), catalogue()) is concerns


# --- a grid ----------------------------------------------------------------------------------

GRID = [
    (Use(computes, moves, host, peak), steady(0.1, slack=slack, dry=dry, input=wait, device=device))
    for computes, moves, host, peak, slack, dry, wait, device in product(
        (None, 0.0, 0.001, 0.03, 0.09, 0.3),
        (0.0, 0.01, 0.08),
        (0.0, 0.05, 0.3),
        (None, 0.001, 0.01, 0.049, 0.1, 0.4),
        (None, 0.0, 0.1, 0.9),
        (None, 0.0, 1.0),
        (0.0, 0.3),
        ("cuda", "cpu"),
    )
]


@cache
def judged() -> list[list[Finding]]:
    """Return what is found in each place of the grid."""
    return [judge(window, use) for use, window in GRID]


def test_no_sentence_says_computation_of_a_device_that_computes_nothing() -> None:
    said = 0
    for (use, window), judgement in zip(GRID, judged(), strict=True):
        seen = replace(window, use=use)
        found = [*judgement, binding(seen), binding(seen, busy=0.97)]
        for one in found:
            if "omputation" not in describe(one).sentence and one.bottleneck != "computation":
                continue
            said += 1
            assert use.peak is None or use.peak >= LEAST_PEAK, (use, window)
            if use.computes_s is None:
                assert use.peak is not None and use.peak >= SURE_PEAK, (use, window)
            else:
                step = Step.of(seen)
                assert step.computes >= max(step.moves, 0.25), (use, window)
    assert said > 1000


def test_shares_of_a_step_are_no_more_than_all_of_it() -> None:
    for (use, window), judgement in zip(GRID, judged(), strict=True):
        step = Step.of(replace(window, use=use))
        waits = window.share(window.input_s) or 0.0
        assert step.computes + step.moves + step.idle + waits <= 1 + 1e-9
        for one in judgement:
            words = describe(one)
            assert 0 <= one.share <= 1 and words.sentence and words.evidence


def test_where_nothing_prices_the_work_and_the_peak_is_low_nothing_is_said() -> None:
    for peak in (None, 0.01, 0.2):
        (found,) = judge(steady(0.1, slack=0.5), Use(peak=peak, unknown="no rates"))
        assert found.kind is Kind.UNPRICED and found.facts["why"] == "no rates"
    (found,) = judge(steady(0.1, slack=0.5), Use(peak=0.4))
    assert found.kind is Kind.NEAR_THE_PEAK and found.share == 0.4


@pytest.mark.parametrize(
    ("use", "shares", "name"),
    [
        (Use(0.07, 0.02, 0.02, 0.4), {"slack": 0.8}, "computation"),
        (Use(0.02, 0.07, 0.02, 0.1), {"slack": 0.8}, "memory bandwidth"),
        (Use(0.02, 0.01, 0.02, 0.1), {"slack": 0.8}, "kernel efficiency"),
        (Use(0.07, 0.02, 0.02, 0.01), {"slack": 0.8}, "kernel efficiency"),
        (Use(0.02, 0.01, 0.08, 0.1), {"slack": 0.0, "dry": 1.0}, "launch"),
        (Use(0.03, 0.02, 0.08, 0.1), {"slack": 0.0, "dry": 1.0, "input": 0.3}, "input"),
        (Use(0.05, 0.02, 0.08, 0.1), {"slack": 0.0, "dry": 0.0}, "launch"),
        (Use(0.07, 0.02, 0.08, 0.1), {"slack": 0.0, "dry": 0.0}, "computation"),
        (Use(0.05, 0.02, 0.08, 0.1), {"slack": 0.1, "dry": 0.0}, "computation"),
        (Use(0.03, 0.01, 0.01), {"device": "cpu"}, "launch"),
        (Use(0.06, 0.01, 0.01), {"device": "cpu"}, "computation"),
        (Use(0.01, 0.06, 0.01), {"device": "cpu"}, "memory bandwidth"),
    ],
)
def test_the_busiest_resource_is_named(use: Use, shares: dict[str, Any], name: str) -> None:
    assert judge(steady(0.1, **shares), use)[0].bottleneck == name


def test_a_trace_that_saw_the_device_busy_is_believed() -> None:
    window, use = steady(0.1, slack=0.0, dry=1.0), Use(0.07, 0.02, 0.09, 0.4)
    assert judge(window, use)[0].bottleneck == "launch"
    calm = Finding(Kind.TRACE_COMPUTATION, 0.97)
    assert judge(window, use, (calm,))[0].bottleneck == "computation"
    assert not faults(replace(window, use=use, traced=(calm,)))


def test_the_host_is_ahead_by_the_median_step_and_the_share_of_dry_ones() -> None:
    assert lead(steady(0.1)) is None and lead(steady(0.1, slack=0.0, device="cpu")) is None
    assert lead(steady(0.1, slack=1.5 * SLACK_SHARE)) is True
    assert lead(steady(0.1, slack=0.0)) is False
    assert lead(steady(0.1, slack=0.0, dry=DRY_SHARE / 2)) is None
    few = Observation(step_s=(0.1,) * 9, slack_s=(0.0,) * 8 + (5.0,), device="cuda")
    assert slack_share(few) == 0.0 and lead(few) is False, "one step that another thread held"
    broken = Observation(step_s=(0.1,) * 9, slack_s=(float("nan"),) * 9, device="cuda")
    assert lead(broken) is None and not host_binds(Observation(device="cuda", use=Use(1.0, 1.0)))


# --- a run -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
def test_a_small_plan_waits_for_launches_on_a_gpu(tmp_path: Path) -> None:
    """An eager run leads from its folder to the remedy, on any data-centre GPU."""
    from headrace.doctor.advice import advise
    from headrace.train import train

    plan = named_plan(
        SMALL,
        [
            f"directory={tmp_path / 'runs'}",
            f"data.directory={tmp_path / 'data'}",
            "goal.steps=60",
            "eval.every_steps=1000",
            "eval.tokens=4096",
            "checkpoint.every_steps=0",
        ],
    )
    result = train.run(plan, catalogue=catalogue())
    found = advise(result.folder, catalogue())
    assert found.verdict is not None and found.first is not None
    assert found.verdict.kind is Kind.GPU_IDLES
    assert found.verdict.share > 0.5 and found.healthy is False
    assert {*PAIR} <= {*found.first.change}
    assert result.verdict is not None
    assert result.verdict.sentence == describe(found.verdict).sentence


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("times", [1.9, 2.1, 5.0])
def test_rates_that_are_not_of_this_run_name_nothing(device: str, times: float) -> None:
    """A probe of a busy machine says that a step's work takes longer than the step did."""
    use = Use(computes_s=0.4 * times, moves_s=0.6 * times, rates="rates of a probe")
    found = binding(replace(steady(1.0, device=device, slack=0.5, dry=0.0), use=use))
    if times < TOO_SLOW:
        assert found.bottleneck == "memory bandwidth"
    else:
        assert found.kind is Kind.UNPRICED and found.share == 0.0
        assert found.facts["median_s"] == 1.0 and found.facts["work_s"] == times
        assert "`headrace probe`" in describe(found).not_measured
