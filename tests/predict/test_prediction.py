"""Memory as the allocator would hold it, intervals, and the held-out experiment."""

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import foresight as planner
import parts
import pytest
import residuals
import torch
from facts import tells
from scoring import compute

from headrace.assemble.build import make_ledger
from headrace.assemble.context import elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.errors import UnsupportedError
from headrace.costs.allocator import MIB, Allocator, OutOfMemory
from headrace.costs.footprint import RESTS, workspace_bytes
from headrace.costs.machine import Machine
from headrace.costs.reserved import reserve
from headrace.costs.step import step_time
from headrace.plan.plan import Plan
from headrace.predict.intervals import STEP
from headrace.predict.page import format_prediction
from headrace.predict.prediction import TIGHT, MemoryPrediction, NoInterval, predict

ROOT = Path(__file__).parents[2]
H200 = Machine.assumed("NVIDIA H200")
WORKSPACE = workspace_bytes((9, 0))


@pytest.fixture(scope="module")
def receipts() -> list[Any]:
    """Return every receipt of a step beside its prediction."""
    return residuals.rows()


def on_h200(shape: str, *overrides: str, **how: Any) -> tuple[Plan, Any]:
    """A plan of benchmarks/plans and where it would run."""
    text = (ROOT / "benchmarks" / "plans" / f"{shape}.toml").read_text()
    plan = Plan.read(text, catalogue(), overrides=list(overrides), **how)
    return plan, elsewhere(make_context(plan, torch.device("cpu")), "NVIDIA H200")


# --- the allocator ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (9 * MIB, 9 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (13 * MIB, 14 * MIB, 14 * MIB),  # the rest is too small to be cut off
        (13 * MIB - 512, 13 * MIB - 512, 14 * MIB),
    ],
)
def test_segments_are_as_torch_documents_them(bytes: int, allocated: int, reserved: int) -> None:
    one = Allocator()
    one.allocate(bytes)
    assert (one.allocated, one.reserved) == (allocated, reserved)


def test_free_blocks_are_taken_cut_and_joined() -> None:
    one = Allocator()
    large, small = one.allocate(100 * MIB), one.allocate(40 * MIB)
    one.release(large)
    one.release(small)
    assert one.allocate(30 * MIB) is small  # the smallest that is large enough
    part = one.allocate(60 * MIB)
    assert part is large and one.reserved == 140 * MIB
    rest = one.allocate(40 * MIB)
    assert rest.before is part and one.reserved == 140 * MIB
    one.release(part)
    one.release(rest)
    assert one.allocate(100 * MIB).after is None and one.reserved_peak == 140 * MIB


def test_what_is_free_goes_back_before_memory_is_out() -> None:
    one = Allocator(200 * MIB)
    one.release(one.allocate(100 * MIB))
    kept = one.allocate(90 * MIB)  # cut from those 100
    with pytest.raises(OutOfMemory):
        one.allocate(150 * MIB)
    one.release(kept)
    one.allocate(150 * MIB)
    assert one.retries == 2 and one.reserved == 150 * MIB
    grows = Allocator(200 * MIB, expandable=True)
    grows.release(grows.allocate(100 * MIB))
    grows.allocate(150 * MIB)
    assert grows.retries == 0 and grows.reserved == 150 * MIB


# --- memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [(), ("torch_compile",), ("bf16_parameters",)])
def test_a_replay_holds_what_the_ledger_says_and_little_more(changes: tuple[str, ...]) -> None:
    plan, context = on_h200("1b", without=list(changes))
    ledger = make_ledger(plan, context)
    free = reserve(ledger, capacity=math.inf, workspace=WORKSPACE)
    peak = ledger.peak()[1] + WORKSPACE
    assert free.allocated == pytest.approx(peak, rel=0.002)
    assert 0.999 < free.bytes / peak < 1.15 and free.fits and not free.retries
    grows = reserve(ledger, capacity=math.inf, workspace=WORKSPACE, expandable=True)
    assert 0.999 < grows.bytes / peak < 1.02
    assert not reserve(ledger, capacity=0.97 * peak, workspace=WORKSPACE).fits


def test_what_an_h200_reserved_is_foreseen(receipts: list[Any]) -> None:
    off = {(r.shape, r.what): 1 / r.reserved - 1 for r in receipts if r.reserved is not None}
    assert len(off) >= 36  # graphs' pools among them; one more is retracted
    assert median(map(abs, off.values())) < 0.01, off
    assert max(map(abs, off.values())) < 0.035, max(off.items(), key=lambda pair: abs(pair[1]))


def test_what_ran_fits_and_what_ran_out_of_memory_does_not(receipts: list[Any]) -> None:
    assert {row.fits for row in receipts} <= {"yes", "tight"}
    every = residuals.standing("techniques", ROOT / "results", full=False)
    full = [  # tf32 holds what its base holds
        row
        for row in every
        if "out of memory" in row.get("refused", "")
        and (row["technique"] == "tf32" or row["refused"].startswith("out of memory"))
    ]
    assert len(full) >= 4
    for row in full:
        plan = residuals.plan_of(row)
        assert predict(plan, residuals.on_device(plan), H200).memory.fits == "no", row["technique"]


def test_segments_that_grow_reserve_less() -> None:
    (plan, context), (grows, there) = on_h200("1b"), on_h200("1b", with_=["expandable_segments"])
    plain, less = predict(plan, context, H200), predict(grows, there, H200)
    assert plain.memory.reserved_bytes and less.memory.reserved_bytes
    rests = [seen.memory.owners[RESTS] for seen in (plain, less)]
    assert less.memory.peak_bytes - rests[1] == pytest.approx(plain.memory.peak_bytes - rests[0])
    assert less.memory.peak_bytes < less.memory.reserved_bytes < 0.99 * plain.memory.reserved_bytes


def test_a_run_in_its_own_process_holds_the_libraries_workspaces(receipts: list[Any]) -> None:
    rows = {r.what: r for r in receipts if r.what in ("peers", "mfu: selective_rows2")}
    assert len(rows) == 2  # the rest were read in a process that had them before
    assert all(row.allocated == pytest.approx(1, abs=5e-4) for row in rows.values()), rows


def test_nothing_is_said_to_fit_above_93_percent() -> None:
    plan, context = on_h200("1b")
    found = predict(plan, context, H200)
    assert found.memory.reserved_bytes and found.memory.fits == "yes"
    assert found.memory.peak_bytes < found.memory.reserved_bytes < 1.05 * found.memory.peak_bytes
    assert (
        found.memory.instants[found.memory.peak_at]
        == found.memory.peak_bytes
        == max(found.memory.instants.values())
    )
    assert found.memory.instants["forward"] < found.memory.instants["loss"]
    assert sum(found.memory.owners.values()) == pytest.approx(found.memory.peak_bytes)

    def on(capacity: float) -> MemoryPrediction:
        machine = replace(H200, memory_bytes=int(capacity) + H200.context_bytes)
        return predict(plan, context, machine).memory

    assert on(1.01 * found.memory.reserved_bytes / TIGHT).fits == "yes"
    assert on(0.99 * found.memory.peak_bytes / TIGHT).fits == "tight"
    near = on(1.001 * found.memory.peak_bytes)
    assert (
        near.fits == "tight" and near.reserved_bytes and near.reserved_bytes <= near.capacity_bytes
    )
    assert on(0.99 * found.memory.peak_bytes).fits == "no"
    assert "torch's allocator would reserve " in format_prediction(plan, found)


def test_scores_that_no_kernel_spares_do_not_fit() -> None:
    fp32 = ("model.precision=fp32", "batch.micro_sequences=4")
    names = [*on_h200("1b")[0].techniques]
    plan, context = on_h200("1b", *fp32, without=names)
    assert make_ledger(plan, context).peak()[1] < 100 * 2**30
    assert predict(plan, context, H200).memory.fits == "no"  # it ran out of memory
    plan, context = on_h200("1b", *fp32, "model.kv_heads=32", without=names)
    assert predict(plan, context, H200).memory.fits == "yes"


# --- intervals -------------------------------------------------------------------------------


def test_intervals_hold_80_percent_of_what_was_measured(receipts: list[Any]) -> None:
    rows = [row for row in receipts if row.ratio is not None]
    assert len(rows) > 60 and {row.shape for row in rows} == {"160m", "1b", "7b"}
    rows += residuals.outcomes()
    found = residuals.widths(rows)
    assert found.keys() == STEP.keys()
    for basis, (low, high, _) in found.items():
        width = STEP[basis]
        assert (width.low, width.high) == pytest.approx((low, high), abs=0.01), basis
    for row in rows:
        again = residuals.errors([row.parts], residuals.CONSTANTS)[0]
        assert again == pytest.approx(math.log(row.ratio), abs=1e-9)
    width = STEP["no_gpu"]
    assert sum(width.low <= r.ratio <= width.high for r in rows) / len(rows) >= 0.8


def test_steps_in_fp32_are_foreseen_and_claim_no_interval() -> None:
    rows = [
        row
        for row in residuals.standing("techniques", ROOT / "results")
        if row["technique"] == "tf32" and "speed_ratio" in row["metrics"]
    ]
    assert {(row["shape"], row["base"]) for row in rows} == {
        (shape, base) for shape in ("160m", "1b") for base in ("trunk", "recipe")
    }
    for row in rows:
        fast = residuals.plan_of(row)
        slow = residuals.plan_of(
            row | {"techniques": [t for t in row["techniques"] if t != "tf32"]}
        )
        rate, ratio = (row["metrics"][m]["value"] for m in ("tokens_per_s", "speed_ratio"))
        for plan, measured in ((fast, rate), (slow, rate / ratio)):
            seen = predict(plan, residuals.on_device(plan), H200)
            assert seen.time.tokens_per_s == pytest.approx(measured, rel=0.04)
            assert "fp32" in seen.time.no_interval and seen.time.step_between is None


@pytest.mark.parametrize(
    ("name", "count", "off"), [("optimizer_offload", 4, 0.065), ("linear_attention", 12, 0.045)]
)
def test_steps_that_few_rows_tell_are_foreseen_and_claim_no_interval(
    name: str, count: int, off: float
) -> None:
    rows = [
        row
        for row in residuals.standing("techniques", ROOT / "results")
        if row["technique"] == name and "tokens_per_s" in row["metrics"]
    ]
    assert len(rows) == count
    for row in rows:
        plan = residuals.plan_of(row)
        context = residuals.on_device(plan)
        ledger = make_ledger(plan, context)
        foreseen = step_time(ledger.work, H200, ledger.sizes["micro_batches"]).step_s
        measured = plan.batch.tokens / row["metrics"]["tokens_per_s"]["value"]
        assert foreseen == pytest.approx(measured, rel=off), row["knobs"]
        try:
            seen = predict(plan, context, H200)
        except UnsupportedError:  # a package that is not installed here
            continue
        assert seen.time.step_s == foreseen and (seen.time.no_interval, seen.time.step_between) == (
            NoInterval.FEW,
            None,
        )
        assert tells(format_prediction(plan, seen), "no interval", "too few")


def test_an_update_of_few_launches_is_foreseen() -> None:
    """Hold the forecast under the row of an update that launched each matrix's kernels apart."""
    rows = map(json.loads, (ROOT / "results" / "time_to_quality.jsonl").read_text().splitlines())
    (row,) = (r for r in rows if r["rows"] == 32 and "muon" in r["techniques"])
    words = ["goal.steps=500", "batch.tokens=32768", "model.vocab=16384"]
    plan, context = on_h200("novels", *words, with_=["muon"])
    seen, plain = (predict(p, context, H200) for p in (plan, on_h200("novels", *words)[0]))
    measured = plan.batch.tokens / row["metrics"]["tokens_per_s"]["value"]
    assert seen.time.step_s and plain.time.step_s
    assert plain.time.step_s < seen.time.step_s < 0.85 * measured
    assert seen.time.no_interval is NoInterval.FEW and not plain.time.no_interval
    assert plain.time.host_s < seen.time.host_s < seen.time.step_s


def test_attention_that_was_not_timed_in_fp32_is_not_foreseen() -> None:
    wide = ("-bf16_parameters", "-cudnn_attention", "+flex_attention", "model.precision=fp32")
    plan = residuals._changed("160m", wide)
    seen = predict(plan, residuals.on_device(plan), H200)
    assert seen.time.step_s is None and tells(
        seen.time.unknown, "flex attention", "not timed", "fp32"
    )


# --- the held-out experiment -----------------------------------------------------------------


def test_the_list_is_what_was_asked_for() -> None:
    every = list(planner.configurations())
    assert len({one.id for one in every}) == len(every) > 200
    choices: dict[str, list[Any]] = {}
    for one in every:
        if one.choice:
            choices.setdefault(one.choice, []).append(one.plan)
    plans = [plan for candidates in choices.values() for plan in candidates]
    assert len(plans) >= 40 and len({plan.name for plan in plans}) >= 5
    assert sum(len(candidates) >= 6 for candidates in choices.values()) >= 4
    lengths = {plan.data.sequence_length for plan in plans}
    assert min(lengths) <= 4096 and max(lengths) == 65536
    known = [on_h200(shape)[0].model for shape in ("160m", "1b", "7b")]
    sizes = {(m.dim, m.layers, m.vocab) for m in known}
    assert not sizes & {(p.model.dim, p.model.layers, p.model.vocab) for p in plans}
    assert all(t.timed for plan in plans for t in plan.techniques.values())


def test_parts_are_the_whole_and_alike() -> None:
    costs = {f"{n}": float(cost) for n, cost in enumerate([60, 50, 40, 30, 9, 9, 9, 9, 9])}
    found = [parts.share(costs, parts.part(f"{k}/3")) for k in (1, 2, 3)]
    assert sorted(name for one in found for name in one) == sorted(costs)
    assert max(sum(costs[n] for n in one) for one in found) <= 80
    assert parts.share(costs, (1, 1)) == set(costs)
    for wrong in ("0/4", "5/4", "2", "a/b"):
        with pytest.raises(argparse.ArgumentTypeError, match="no part"):
            parts.part(wrong)


TINY = """
[common]
device = "cpu"
goal = { steps = 9 }
[shapes]
tiny = { dim = 32, layers = 2, heads = 2, ffn = 48, vocab = 320, precision = "bf16" }
[sets]
recipe = ""
full = "+full_checkpoint"
[[choices]]
shape = "tiny"
length = 16
rows = 4
sets = ["recipe", "full"]
[memory]
shapes = ["tiny"]
length = 16
rows = [1, 2]
sets = ["recipe"]
"""


def test_predictions_then_outcomes_then_picks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list.toml").write_text(TINY)

    def go(*words: str) -> None:
        told = ["foresight.py", *words, "--list", f"{tmp_path / 'list.toml'}"]
        folders = ["--results", str(tmp_path), "--missing", str(tmp_path), "--here"]
        monkeypatch.setattr(sys, "argv", [*told, *folders])
        planner.main()

    def steady(*given: Any, **how: Any) -> Any:  # a CPU's own pace is no matter of this
        found = take(*given, **how)
        return replace(found, seconds=[0.012 for _ in found.seconds])

    take = planner.fresh_steps
    monkeypatch.setattr(planner, "fresh_steps", steady)
    monkeypatch.setattr(planner, "WARM", 1)
    monkeypatch.setattr(planner, "TIMED", 1)
    go("predict")
    go("predict")
    rows = planner.known(tmp_path)
    assert [row["kind"] for row in rows] == ["prediction"] * 4
    assert {row["says"] for row in rows} == {"yes"} and not any(row["risky"] for row in rows)
    assert [row["step_s"] is None for row in rows] == [False, False, True, True]
    go("picks")
    assert not (tmp_path / "picks.jsonl").exists()
    go("measure", "--part", "2/2")
    assert len(planner.known(tmp_path)) == 4  # its only choice falls to the first
    go("measure", "--part", "1/2", "--first")
    go("predict", "--calibrated")
    first, told = [
        r for r in planner.known(tmp_path) if r["kind"] == "outcome" or r["tier"] != "no_gpu"
    ]
    assert (first["id"], told["id"]) == ("tiny-16x4/recipe", "tiny-16x4/full")
    assert (first["timed"], told["tier"]) == (planner.ENOUGH, "after_20_steps")
    assert told["calibrated_by"] == "tiny"
    go("measure")
    outcomes = [row for row in planner.known(tmp_path) if row["kind"] == "outcome"]
    assert [row["id"] for row in outcomes] == ["tiny-16x4/recipe", "tiny-16x4/full"]
    assert all(row["step_s"] and row["fits"] for row in outcomes)
    go("picks")
    go("picks")
    gpu = tmp_path / "as_of_a_gpu"  # a CPU's rows are counted apart, and have no such tiers
    gpu.mkdir()
    for file in tmp_path.glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        as_gpu = [
            {
                **row,
                **{key: "a GPU" for key in ("hardware", "predicted_for") if row.get(key)},
                **({"device": "cuda"} if "device" in row else {}),
            }
            for row in rows
        ]
        (gpu / file.name).write_text("".join(json.dumps(row) + "\n" for row in as_gpu))
    assert compute(tmp_path)["step_time_error_no_gpu"]["n"] == 0
    found = compute(gpu)
    assert found["step_time_error_no_gpu"]["n"] == found["pick_regret"]["candidates"] == 2
    assert found["step_time_error_after_20_steps"]["n"] == 1
    assert found["false_fits"]["n"] == 5 and found["false_fits"]["value"] == 0
