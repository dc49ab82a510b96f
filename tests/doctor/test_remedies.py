"""Remedies are found by their words, forecast by the ledger, and never guessed."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.assemble.context import elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.statistics import Interval
from headrace.core.units import format_bytes
from headrace.costs.host import UNPROBED
from headrace.costs.machine import Machine
from headrace.doctor import findings
from headrace.doctor.advice import NoRemedy, advise, advise_plan, advised
from headrace.doctor.change_words import sentence_of
from headrace.doctor.findings import KIND_OF, PASSES, Finding, Kind
from headrace.doctor.forecast import Forecast, MeasuredRun, between, by_ledger, by_share
from headrace.doctor.observation import Observation
from headrace.doctor.plan_keys import KEYS
from headrace.doctor.remedies import (
    PlanRemedy,
    _Asker,
    _does_it_all,
    _equality,
    _may_help,
    _order,
    helps,
    remedies,
)
from headrace.doctor.words import describe
from headrace.doctor.words.answer import findings_json, render_advice
from headrace.plan.changes import parse
from headrace.plan.gentler import gentler
from headrace.plan.plan import Plan
from headrace.plan.symptoms import BOTTLENECKS
from headrace.predict.candidates import Asking
from headrace.predict.prediction import NoInterval, predict

ROOT = Path(__file__).parents[2]
H200 = Machine.assumed("NVIDIA H200")
BARE = "-torch_compile -cudnn_attention -fused_swiglu -fused_cross_entropy -bf16_parameters"


def on_h200(shape: str, words: str = "") -> tuple[Plan, Any, Machine]:
    """Return a shape's recipe with changes, and where it would run."""
    text = (ROOT / "benchmarks" / "plans" / f"{shape}.toml").read_text()
    plan = parse(words.split()).plan(text, catalogue())
    return plan, elsewhere(make_context(plan, torch.device("cpu")), "NVIDIA H200"), H200


def asked(
    bottleneck: str, share: float, shape: str, words: str = "", measured: MeasuredRun | None = None
) -> dict[str, PlanRemedy]:
    """Return remedies of a finding by their words, the best first."""
    finding = Finding(KIND_OF.get(bottleneck, Kind.PHASE), share, {"bottleneck": bottleneck})
    where = on_h200(shape, words)
    found = remedies(finding, *where, catalogue(), measured or MeasuredRun())
    return {" ".join(remedy.change): remedy for remedy in found}


def seconds(shape: str, words: str) -> float:
    """Return the seconds of a step, as they are predicted."""
    found = predict(*on_h200(shape, words)).time.step_s
    assert found is not None
    return found


def test_a_new_technique_is_a_remedy_by_its_own_words(fewer_bytes: str) -> None:
    before, after = seconds("160m", BARE), seconds("160m", f"{BARE} +{fewer_bytes}")
    one = asked("memory bandwidth", 0.5, "160m", BARE)[f"+{fewer_bytes}"]
    assert one.forecast_from == "ledger" and one.gain is not None
    assert one.gain.value == pytest.approx(before / after - 1) and one.gain.value > 0.1
    assert one.gain.low < one.gain.value < one.gain.high
    assert (one.what, one.costs) == (catalogue().find(fewer_bytes).line(), "a thought")
    assert f"+{fewer_bytes}" not in asked("input", 0.5, "160m", BARE)


def test_the_best_forecast_is_first_and_nothing_that_loses_is_listed() -> None:
    found = asked("memory bandwidth", 0.5, "160m", BARE)
    gains = [r.gain.value for r in found.values() if r.gain and r.equality != "learning"]
    assert gains == sorted(gains, reverse=True) and min(gains) > 0
    assert next(iter(found)) == "+torch_compile" and "+flash_attention" not in found
    alone = found["+torch_compile"].gain
    both = [one.gain for words, one in found.items() if {"+torch_compile"} < {*words.split()}]
    assert alone and all(one and one.value > alone.value for one in both), "else it does it all"


def test_of_gains_that_are_nearly_alike_the_plainest_stands_first() -> None:
    """Check that of remedies with like gains the one goes first that changes less in the plan."""
    plan, context, machine = on_h200("160m", BARE)
    finding = Finding(Kind.PHASE, 0.9, {"bottleneck": "computation"})
    ask = _Asker(finding, Asking(plan, context, machine, catalogue()), MeasuredRun())

    def one(gain: float, equality: str, *change: str) -> PlanRemedy:
        ends = Interval(gain - 0.1, gain, gain + 0.1, 9)
        return PlanRemedy(change, "", ends, 0.0, "yes", "", equality, "ledger")

    best = one(1.0, "approximate", "+bf16_parameters", "+torch_compile")
    for plainer in (
        one(0.91, "exact", "+torch_compile", "+cuda_graphs"),
        one(0.91, "approximate", "+bf16_parameters"),
        one(0.91, "approximate", "+bf16_autocast", "+torch_compile"),
    ):
        assert ask.plainest_first([best, plainer]) == [plainer, best]
        less = replace(plainer, gain=Interval(0.8, 0.89, 1.0, 9))
        assert ask.plainest_first([best, less]) == [best, less]
    lost = one(-0.1, "approximate", "+tf32")
    assert ask.plainest_first([lost]) == [lost] and ask.plainest_first([]) == []


def test_a_needless_checkpoint_is_taken_out_for_what_it_cost_in_receipts() -> None:
    rows = map(json.loads, (ROOT / "results" / "techniques.jsonl").read_text().splitlines())
    ran = {
        (row["shape"], row["base"]): 1 / row["metrics"]["speed_ratio"]["value"] - 1
        for row in rows
        if row.get("technique") == "full_checkpoint" and "speed_ratio" in row["metrics"]
    }
    for shape in ("160m", "1b"):
        found = asked("unused memory", 0.6, shape, "+full_checkpoint")["-full_checkpoint"]
        assert found.gain is not None and found.gain.holds(ran[shape, "recipe"])
        assert found.memory_bytes > 0 and found.fits == "yes"


def test_rows_are_more_where_memory_is_unused_and_fewer_where_it_is_full() -> None:
    more = asked("unused memory", 0.6, "1b", "+full_checkpoint batch.micro_sequences=2")
    assert more["batch.micro_sequences=8"].gain.value > 0  # type: ignore[union-attr]
    found = asked("memory capacity", 0.95, "1b")
    sizes = [words for words in found if words.startswith("batch.")]
    assert sizes == ["batch.micro_sequences=4"]
    assert all(r.memory_bytes < 0 and r.fits != "no" for r in found.values())
    costs = [r.gain.value for r in found.values() if r.gain and r.equality != "learning"]
    assert costs == sorted(costs, reverse=True) and min(costs) < 0


def test_a_socket_changes_its_owner() -> None:
    (words,) = [w for w in asked("memory capacity", 0.95, "1b") if "chunked_cross" in w]
    assert words == "-fused_cross_entropy +chunked_cross_entropy"


def test_waits_are_left_as_they_were_measured() -> None:
    before, after = predict(*on_h200("160m", BARE)), predict(*on_h200("160m"))
    assert before.time.step_s and after.time.step_s
    whole_s = 2 * before.time.step_s
    run = MeasuredRun(whole_s, waits_s=0.25 * whole_s)
    forecast = by_ledger(before, after, run)
    left_s = 0.25 * whole_s + 0.75 * whole_s * after.time.step_s / before.time.step_s
    assert forecast.gain is not None and forecast.gain.value == pytest.approx(whole_s / left_s - 1)
    assert by_ledger(before, after, MeasuredRun(4 * before.time.step_s)).source == "none"
    assert (
        "4.0 times too short"
        in by_ledger(before, after, MeasuredRun(4 * before.time.step_s)).unknown
    )
    quick = by_ledger(before, after, MeasuredRun(before.time.step_s / 4))
    assert quick.gain is None and "4.0 times too long" in quick.unknown
    waits = by_ledger(before, after, MeasuredRun(before.time.step_s, waits_s=before.time.step_s))
    assert (waits.gain, waits.source) == (None, "none") and "all waiting" in waits.unknown
    window = Observation(step_s=(1.0, 3.0), input_s=(0.0, 1.0), communication_s=(0.5, 0.5))
    assert MeasuredRun.of(window) == MeasuredRun(2.0, 1.0)


@pytest.mark.parametrize(("before", "after"), [("", "8 ranks"), ("8 ranks", "")])
def test_nothing_is_forecast_between_one_device_and_several(before: str, after: str) -> None:
    one = predict(*on_h200("160m"))
    one = replace(one, time=replace(one.time, no_interval=NoInterval.RANKS))
    ranks = (replace(one.rates, between_ranks=where) for where in (before, after))
    plans = (replace(one, rates=rates) for rates in ranks)
    forecast = by_ledger(*plans, MeasuredRun())
    assert (forecast.gain, forecast.unknown) == (None, NoInterval.RANKS)


def test_the_hosts_pace_scales_no_step_of_the_device() -> None:
    words = "batch.micro_sequences=1 "
    slow, graphs, whole = (
        predict(*on_h200("160m", more))
        for more in (f"{words}techniques.torch_compile.scope=block", words, "")
    )
    assert (
        slow.time.waits_for_launches
        and graphs.time.waits_for_launches
        and not whole.time.waits_for_launches
    )
    assert slow.time.step_s and graphs.time.step_s and whole.time.step_s
    run = MeasuredRun(1.5 * slow.time.step_s)
    less, fewer = by_ledger(slow, graphs, run).gain, by_ledger(slow, whole, run).gain
    assert less is not None and less.value == pytest.approx(
        slow.time.step_s / graphs.time.step_s - 1
    )
    assert fewer is not None and fewer.value == pytest.approx(
        1.5 * slow.time.step_s / whole.time.step_s - 1
    )
    plan_alone = by_ledger(slow, whole, MeasuredRun()).gain
    assert plan_alone is not None
    assert log((1 + plan_alone.high) / (1 + plan_alone.low)) > 0.3  # a host that nobody measured


@pytest.mark.parametrize(
    "name", [pytest.param("full_checkpoint", marks=pytest.mark.slow), "selective_checkpoint"]
)
def test_blocks_that_run_again_are_left_out_where_the_host_is_slow(name: str) -> None:
    """Check that leaving recomputation out is forecast from the ledger where the host is slow."""
    out, eager = f"-{name}", f"{BARE} batch.micro_sequences=1"
    found = asked("launch", 0.5, "160m", f"{eager} +{name}")[out]
    before, after = seconds("160m", f"{eager} +{name}"), seconds("160m", eager)
    assert found.forecast_from == "ledger" and found.gain is not None
    assert found.gain.value == pytest.approx(before / after - 1) and found.gain.value > 0.8
    plan, _, _ = on_h200("160m", f"{BARE} +{name}")
    here = make_context(plan, torch.device("cpu"))
    finding = Finding(Kind.GPU_IDLES, 0.5)
    told_here = remedies(finding, plan, here, Machine.assumed("cpu"), catalogue(), MeasuredRun())
    assert all(out not in one.change for one in told_here)


def test_a_measured_share_is_taken_from_half_to_whole() -> None:
    found = asked("input", 0.2, "160m")
    assert {"+loader_workers", "data.workers=2", "data.prefetch=8"} <= {*found}
    gain = found["+loader_workers"].gain
    assert gain is not None and found["+loader_workers"].forecast_from == "share"
    assert (gain.low, gain.high) == (pytest.approx(1 / 0.9 - 1), pytest.approx(1 / 0.8 - 1))
    assert gain.value == pytest.approx(1 / 0.85 - 1), "the middle is at three quarters"
    same = predict(*on_h200("160m"))
    assert by_share(0.0, by_ledger(same, same, MeasuredRun())).gain is None
    faster = Forecast(Interval(0.0, 0.1, 0.2, 9), "ledger")
    both = by_share(0.2, faster).gain  # the rest of the step is as the ledger has it
    assert both is not None and both.high == pytest.approx(1.1 / 0.8 - 1)


def test_what_few_steps_tell_is_forecast_where_both_plans_have_it() -> None:
    """No interval was fitted to it, and beside itself it is no difference."""
    plain, muon, both = (
        predict(*on_h200("160m", words))
        for words in (BARE, f"{BARE} +muon", f"{BARE} +muon +fused_rope")
    )
    wide = [
        predict(*on_h200("160m", f"{BARE} model.precision=fp32 {more}")) for more in ("", "+muon")
    ]
    for one, other in ((plain, muon), (muon, plain), wide):
        told = by_ledger(one, other, MeasuredRun(one.time.step_s))
        assert told.gain is None and told.unknown is NoInterval.FEW
    assert by_ledger(muon, both, MeasuredRun(muon.time.step_s)).gain is not None


def test_what_is_not_known_is_not_forecast() -> None:
    found = asked("launch", 0.2, "160m")
    assert found["+cuda_graphs"].gain is not None
    assert found["+compile_cache"].gain is None and found["+compile_cache"].unknown
    known = [r.gain is not None for r in found.values()]
    assert known == sorted(known, reverse=True), "what is not forecast is last"
    learning = asked("instability", 1.0, "160m")
    assert learning["optimizer.lr=3.3e-05"].equality == "learning"
    assert all(r.gain is None and "seeds" in r.unknown for r in learning.values())
    exact = replace(learning["optimizer.lr=3.3e-05"], equality="exact", memory_bytes=-1.0)
    taught = replace(exact, equality="learning", memory_bytes=0.0)
    assert _order(taught, True) < _order(exact, True) and _order(exact, False) < _order(
        taught, False
    )
    assert asked("between steps", 0.5, "160m") == {}
    idle = MeasuredRun(inactive=("fused_swiglu",))
    assert [*asked("silent no-op", 1.0, "160m", measured=idle)] == ["-fused_swiglu"]


def test_of_computation_only_what_is_sure_or_large_is_a_remedy() -> None:
    sure = PlanRemedy(("+a",), "", Interval(0.01, 0.02, 0.03, 9), 0.0, "yes", "", "exact", "ledger")
    maybe = replace(sure, gain=Interval(-0.01, 0.02, 0.03, 9))
    assert helps("computation", sure) and not helps("computation", maybe)
    large = replace(sure, gain=Interval(-0.02, 0.08, 0.19, 9))
    assert helps("computation", large), "else a run is said to be healthy that may gain 8%"
    assert helps("launch", maybe) and not helps("memory capacity", sure)


@pytest.mark.parametrize(
    ("change", "equality"),
    [
        (("+full_checkpoint",), "exact"),
        (("+tf32", "batch.micro_sequences=2"), "approximate"),
        (("-tf32",), "exact"),
        (("-label_smoothing",), "learning"),
        (("+full_checkpoint", "-muon"), "learning"),
        (("optimizer.lr=1",), "learning"),
    ],
)
def test_a_change_is_what_its_strongest_part_is(change: tuple[str, ...], equality: str) -> None:
    assert _equality(catalogue(), change) == equality


def test_a_part_is_as_good_as_the_whole_where_it_wins_as_much_of_both() -> None:
    part = PlanRemedy(("+a",), "", between(0.1), -100.0, "yes", "", "exact", "ledger")
    whole = replace(part, change=("+a", "+b"))
    assert _does_it_all(part, whole) and not _does_it_all(whole, part)
    assert not _does_it_all(part, replace(whole, gain=between(0.2))), "the whole is faster"
    assert not _does_it_all(part, replace(whole, memory_bytes=-200.0)), "or smaller"
    assert _does_it_all(part, replace(whole, gain=None, memory_bytes=0.0))
    assert not _does_it_all(replace(part, gain=None), whole)


def test_the_interval_widens_with_the_change() -> None:
    none, small, large = (between(x) for x in (0.0, 0.02, -0.5))
    assert none.low < 0 < small.low < 0.0202 < small.high < 0.05 and large.high < 0
    widths = [log((1 + one.high) / (1 + one.low)) for one in (none, small, large)]
    assert widths[0] < widths[1] and widths[2] > 1.2 * widths[1]


def test_a_plan_is_told_what_would_hold_it_up() -> None:
    advice = advise_plan(*on_h200("1b", "+full_checkpoint"), catalogue())
    assert [one.finding.bottleneck for one in advice.findings] == ["unused memory", "computation"]
    text = render_advice(advice)
    assert "--without full_checkpoint: +2" in text and "(80%: +1" in text and "memory +" in text
    assert "datasheet" in text
    eager = advise_plan(*on_h200("160m", BARE), catalogue()).findings[-1]
    assert eager.finding.bottleneck == "memory bandwidth" and eager.remedies
    full = advise_plan(*on_h200("7b", "batch.micro_sequences=8"), catalogue()).findings[0]
    assert full.finding.bottleneck == "memory capacity" and full.finding.share > 1
    assert all(one.fits != "no" for one in full.remedies)


def test_a_plan_in_fp32_is_told_of_bf16() -> None:
    advice = advise_plan(*on_h200("160m", f"{BARE} model.precision=fp32"), catalogue())
    first = advice.findings[0]
    assert first.finding.bottleneck == "kernel efficiency"
    assert first.finding.kind is Kind.PLAN_IN_FP32
    assert first.finding.facts["fp32_s"] / first.finding.facts["bf16_s"] == pytest.approx(
        16, rel=0.03
    )
    told_first = first.remedies[0]
    assert told_first.change == ("model.precision=bf16",) and told_first.gain is not None
    assert told_first.gain.low < 5.788 - 1 < told_first.gain.high, "as techniques.jsonl has it"
    same = [
        one
        for finding in advice.findings
        for one in finding.remedies
        if "+bf16_autocast" in one.change
    ]
    assert not same, "which is what the key does"
    half = advise_plan(*on_h200("160m", BARE), catalogue())
    assert "fp32" not in render_advice(half)


def test_rows_that_memory_is_free_for_are_told_where_they_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = advise_plan(*on_h200("160m", "batch.micro_sequences=1"), catalogue()).findings[0]
    assert few.finding.kind is Kind.PLAN_MICRO_BATCHES and few.finding.facts["rows"] == 1
    (change,) = few.remedies[0].change
    assert change == "batch.micro_sequences=32" and few.remedies[0].gain.value > 0.2
    half = on_h200("160m", "batch.micro_sequences=16")  # which loses 1.7%
    assert advise_plan(*half, catalogue()).findings[0].finding.bottleneck == "unused memory"
    monkeypatch.setattr("headrace.doctor.advice.LEAST_GAIN", 0.05)
    assert advise_plan(*half, catalogue()).findings[0].finding.bottleneck == "computation"


def test_what_is_not_foreseen_is_said_once(tiny_plan: Callable[..., Plan]) -> None:
    plan, cpu = tiny_plan(), torch.device("cpu")
    advice = advise_plan(plan, make_context(plan, cpu), Machine.assumed("cpu"), catalogue())
    text = render_advice(advice)
    assert text.count(UNPROBED) == 1
    assert advice.no_remedy is NoRemedy.NOT_PREDICTED
    seen = predict(plan, make_context(plan, cpu), Machine.assumed("cpu"))
    owner, held = next(iter(seen.memory.owners.items()))
    memory, time = (one.finding for one in advice.findings)
    assert (memory.kind, time.kind) == (Kind.PLAN_MEMORY, Kind.PLAN_WITHOUT_TIME)
    assert memory.facts["owner"] == owner and memory.facts["peak_bytes"] == seen.memory.peak_bytes
    assert memory.facts["owner_share"] == held / seen.memory.peak_bytes
    words = describe(memory)
    assert text.startswith(
        f"memory: {words.sentence}\n  {words.evidence} (inferred)\nnot measured: "
    )
    assert owner in words.sentence and format_bytes(seen.memory.peak_bytes) in words.evidence
    timed = advise_plan(*on_h200("160m"), catalogue()).findings
    assert "memory" not in [one.finding.bottleneck for one in timed]
    finding = Finding(Kind.COMPUTES, 0.9, {"device": "cpu"})
    where = make_context(plan, cpu), Machine.assumed("cpu"), catalogue(), MeasuredRun()
    run = advised([finding], plan, *where)
    assert not run.findings[0].remedies
    assert run.no_remedy is NoRemedy.NOT_FORECAST and run.why in render_advice(run)


def test_intervals_of_another_gpu_are_wider_and_say_why() -> None:
    plan, context, machine = on_h200("160m", BARE)
    own = advise_plan(plan, context, machine, catalogue())
    assert "times off" not in render_advice(own)
    there = elsewhere(make_context(plan, torch.device("cpu")), "RTX 4090")
    other = advise_plan(plan, there, Machine.assumed("RTX 4090"), catalogue())
    text = render_advice(other)
    assert "(80%: " in text and "1.3 times off: " in text and "RTX 4090" in text
    widths = [
        [
            log((1 + r.gain.high) / (1 + r.gain.low)) / (0.02 + abs(log(1 + r.gain.value)))
            for one in advice.findings
            for r in one.remedies
            if r.gain
        ]
        for advice in (own, other)
    ]
    assert min(widths[1]) > 0.1 and median(widths[1]) > 1.5 * median(widths[0])


def test_a_run_is_told_what_to_do(train: Callable[..., Path], tmp_path: Path) -> None:
    folder = train()
    advice = advise(folder, catalogue())
    found = findings_json(advice)
    assert found[0]["bottleneck"] in {*BOTTLENECKS, "not measured"}, "the verdict"
    assert PASSES in {row["bottleneck"] for row in found}
    assert json.loads(json.dumps(found)) and all("remedies" in row for row in found)
    assert all(one["gain"] or one["unknown"] for row in found for one in row["remedies"])
    assert found[0]["sentence"] in render_advice(advice)
    environment = json.loads((folder / "environment.json").read_text())
    environment |= {"device": "cuda", "device_name": "Unheard Of 9000"}
    (folder / "environment.json").write_text(json.dumps(environment))
    unknown = advise(folder, catalogue())
    assert not any(one.remedies for one in unknown.findings)
    assert "Unheard Of 9000" in unknown.why and unknown.why in render_advice(unknown)
    assert all(unknown.why in row["unknown"] for row in findings_json(unknown))


@pytest.mark.parametrize(
    ("rows", "helps"),
    [(0, "unused memory"), (8, "unused memory"), (2, "memory capacity"), (8, "launch")],
)
def test_all_rows_at_a_time_are_more_rows(rows: int, helps: str) -> None:
    """A 0 in the plan is all rows of a step, in a change too."""
    start: Any = SimpleNamespace(micro_rows=4, batch=SimpleNamespace(micro_sequences=0))
    asking: Any = SimpleNamespace(start=start, catalogue=catalogue())
    words = (f"batch.micro_sequences={rows}",)
    assert _may_help(helps, words, asking)
    other = "unused memory" if helps == "memory capacity" else "memory capacity"
    assert not _may_help(other, words, asking) and not _may_help("input", words, asking)
    told = sentence_of(asking, words, words[0])
    assert told == f"Reads {rows or 'all'} rows at a time instead of 4."


def test_reading_without_workers_begins_with_two() -> None:
    plan: Any = SimpleNamespace(data=SimpleNamespace(workers=0, prefetch=2))
    assert KEYS["input"](plan) == [("data.workers=2",), ("data.prefetch=4",)]
    plan.data.workers = 3
    assert KEYS["input"](plan)[0] == ("data.workers=6",)


def test_all_that_is_far_off_comes_first_and_then_a_third_of_the_rate(
    tiny_plan: Callable[..., Plan],
) -> None:
    plan = tiny_plan("optimizer.lr=0.03", "optimizer.clip_norm=0")
    every, lower, clipped = KEYS["instability"](plan)
    assert every == gentler(plan) and len(every) == 3
    assert (lower, clipped) == (("optimizer.lr=0.01",), ("optimizer.clip_norm=1.0",))


@pytest.mark.parametrize("rate", ["0.04", "3", "1000000"])
def test_where_the_rate_is_far_off_no_single_step_is_a_remedy(
    rate: str, tiny_plan: Callable[..., Plan]
) -> None:
    plan = tiny_plan(f"optimizer.lr={rate}", "optimizer.clip_norm=0")
    assert KEYS["instability"](plan) == [gentler(plan)]


def test_the_cause_of_an_instability_is_told_before_what_bears_with_it(
    train: Callable[..., Path],
) -> None:
    steps = ("goal.steps=60", "schedule.steps=60", "eval.every_steps=60")
    advice = advise(train("optimizer.lr=3", "optimizer.clip_norm=0", *steps), catalogue())
    first = advice.findings[0]
    assert first.finding.bottleneck == "instability"
    changes = [" ".join(remedy.change) for remedy in first.remedies]
    every = "optimizer.clip_norm=1.0 optimizer.lr=0.004 schedule.warmup_steps=6"
    assert changes == [every]
    lines = render_advice(advice).splitlines()
    for key, value, before in (
        ("optimizer.clip_norm", "1.0", "0.0"),
        ("optimizer.lr", "0.004", "3.0"),
        ("schedule.warmup_steps", "6", "0"),
    ):
        assert f"{key} to {value} instead of {before}" in first.remedies[0].what
    assert lines[2].startswith(f"  {every}: ") and "--with" not in lines[2]


def test_the_longest_phase_stands_first_and_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("_peak_memory", "_tokens_without_target"):
        monkeypatch.setattr(findings, other, lambda report: [])
    told = findings.phase_findings({"phase_s": {"optimizer": 1.0, "eval": 3.0, "checkpoint": 0.0}})
    assert [(one.bottleneck, one.share) for one in told] == [
        ("evaluation", 0.75),
        ("optimizer", 0.25),
    ]
    sentences = [describe(one).sentence for one in told]
    assert sentences[0].startswith("Evaluation took 75.0%")
    assert sentences[1].startswith("Optimizer took 25.0%")
