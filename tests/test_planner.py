"""What the planner foresees, against what was measured on an H200 and by hand."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from headrace.build import predict
from headrace.cli import catalogue
from headrace.context import elsewhere, make_context
from headrace.core.errors import UnsupportedError
from headrace.core.machine import Machine
from headrace.core.plan import Plan
from headrace.core.work import EDGE_S, Work, step_time
from headrace.planner import foresee, told

ROOT = Path(__file__).parents[1]
H200 = Machine.assumed("NVIDIA H200")
FOUR_GPUS = "0841e19"
"""The commit whose rows were measured with the same batch as the plans in benchmarks/ have."""
LONG = (
    "-torch_compile +full_checkpoint -fused_cross_entropy +chunked_cross_entropy +chunked_mlp "
    "techniques.chunked_cross_entropy.chunk_tokens=4096 techniques.chunked_mlp.chunk_tokens=32768 "
    "data.sequence_length=262144 batch.tokens=262144"
)


def on_h200(text: str, *overrides: str, **how: Any) -> tuple[Plan, Any]:
    """A plan and where it would run."""
    plan = Plan.read(text, catalogue(), overrides=list(overrides), **how)
    return plan, elsewhere(make_context(plan, torch.device("cpu")), "NVIDIA H200")


def measured() -> Iterator[tuple[str, Plan, Any, dict[str, Any]]]:
    """Receipts that stand: what, the plan, where, and the metrics."""
    lines = (ROOT / "results" / "techniques.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    retracted = {row.get("retracts") for row in rows}
    for number, row in enumerate(rows, 1):
        if row["commit"] != FOUR_GPUS or number in retracted or not row["metrics"]:
            continue
        text = (ROOT / "benchmarks" / "plans" / f"{row['shape']}.toml").read_text()
        had = Plan.read(text, catalogue()).techniques
        on = row["techniques"]
        keys = [f"techniques.{row['technique']}.{k}" for k in row["knobs"].split(",") if k]
        sets = [change for change in row["overrides"] if change[0] not in "+-"]
        sets = [c for c in sets if not c.startswith("techniques.") or c.split(".")[1] in on]
        plan, context = on_h200(
            text, *sets, *keys, with_=[n for n in on if n not in had],
            without=[n for n in had if n not in on],
        )  # fmt: skip
        what = f"{row['shape']} {row['base']} {row['technique']} {row['knobs']}"
        yield what, plan, context, row["metrics"]


def test_peaks_of_an_h200_are_foreseen() -> None:
    off = {
        what: predict(plan, context).peak()[1] / metrics["peak_memory"]["value"] - 1
        for what, plan, context, metrics in measured()
    }
    assert len(off) > 120
    assert max(map(abs, off.values())) < 0.005, max(off.items(), key=lambda item: abs(item[1]))


@pytest.mark.parametrize(
    ("recipe", "shape", "changes"),
    [
        ("mfu: selective_rows2", "7b",
         "+selective_checkpoint techniques.selective_checkpoint.wide_every=1 "
         "batch.micro_sequences=2"),
        ("context: long 262144", "1b", LONG),
    ],
)  # fmt: skip
def test_peaks_of_large_plans_are_foreseen(recipe: str, shape: str, changes: str) -> None:
    rows = map(json.loads, (ROOT / "results" / "limits.jsonl").read_text().splitlines())
    (peak,) = {
        row["metrics"]["peak_memory"]["value"]
        for row in rows if row.get("recipe") == recipe and row["metrics"]
    }  # fmt: skip
    words = changes.split()
    plan, context = on_h200(
        (ROOT / "benchmarks" / "plans" / f"{shape}.toml").read_text(),
        *(w for w in words if w[0] not in "+-"), with_=[w[1:] for w in words if w[0] == "+"],
        without=[w[1:] for w in words if w[0] == "-"],
    )  # fmt: skip
    assert predict(plan, context).peak()[1] == pytest.approx(peak, rel=0.005)


def test_steps_of_an_h200_are_foreseen_from_its_datasheet() -> None:
    off = {}
    for what, plan, context, metrics in measured():
        if not all(technique.timed for technique in plan.techniques.values()):
            continue
        seconds = plan.batch.tokens / metrics["tokens_per_s"]["value"]
        ledger = predict(plan, context)
        time = step_time(ledger.work, H200, ledger.sizes["micro_batches"])
        off[what] = time.step_s / seconds - 1
    assert len(off) > 50
    assert mean(map(abs, off.values())) < 0.03, off
    assert max(map(abs, off.values())) < 0.06, max(off.items(), key=lambda item: abs(item[1]))


def test_a_plan_says_whether_it_fits_and_what_it_costs() -> None:
    text = (ROOT / "benchmarks" / "plans" / "1b.toml").read_text()
    plan, context = on_h200(text, "hardware.dollars_per_hour=4", "goal.steps=1000")
    found = foresee(plan, context, H200)
    assert found.fits == "yes" and found.step_s and found.hours
    assert found.tokens_per_s == pytest.approx(plan.batch.tokens / found.step_s)
    assert found.dollars == pytest.approx(4 * 1000 * found.step_s / 3600)
    assert sum(found.parts_s.values()) + EDGE_S == pytest.approx(found.step_s)
    assert "it fits: 65." in told(plan, found) and "$" in told(plan, found)
    assert json.loads(json.dumps(found.plain()))["rates"] == "datasheet"
    small = replace(H200, memory_bytes=40 * 2**30)
    assert foresee(plan, context, small).fits == "no"
    near = replace(H200, memory_bytes=int(found.peak_bytes / 0.95) + H200.context_bytes)
    assert foresee(plan, context, near).fits == "tight"


@pytest.mark.parametrize(
    ("with_", "overrides", "says"),
    [
        (["chunked_mlp"], [], "chunked_mlp does not say yet"),
        (["fsdp"], ["mesh.data=2", "techniques.torch_compile.scope=block"], "does not say yet"),
    ],
)
def test_what_is_not_priced_has_no_time(with_: list[str], overrides: list[str], says: str) -> None:
    text = (ROOT / "benchmarks" / "plans" / "160m.toml").read_text()
    plan, context = on_h200(text, *overrides, with_=with_, without=["bf16_parameters"])
    found = foresee(plan, context, H200)
    assert found.step_s is None and says in found.unknown and found.peak_bytes
    assert "not predicted" in told(plan, found)


def test_a_cpu_has_no_time(tiny_plan: Callable[..., Plan]) -> None:
    plan = tiny_plan()
    found = foresee(plan, make_context(plan, torch.device("cpu")), Machine.assumed("cpu"))
    assert found.tokens_per_s is None and "on a GPU" in found.unknown


def test_a_device_that_nobody_knows_is_refused(tiny_plan: Callable[..., Plan]) -> None:
    context = make_context(tiny_plan(), torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="MI300"):
        elsewhere(context, "AMD MI300")


def test_pieces_are_priced_by_what_they_move() -> None:
    stream = Work("forward", "stream", 3, bytes=8e9, kernels=4, fused=2e9)
    one = H200.traffic_s(2e9)
    assert stream.compiled().seconds(H200) == pytest.approx(3 * one)
    assert stream.whole(2e9) == stream.compiled()
    assert stream.seconds(H200) > 3 * 4 * one
    product = Work("forward", "product", 2, sizes=(4096, 4096, 4096))
    whole = step_time({"a": product, "b": replace(stream, phase="optimizer")}, H200, 5)
    assert whole.of("product") == pytest.approx(5 * product.seconds(H200))
    assert whole.of("optimizer") == pytest.approx(stream.seconds(H200))
    slow = replace(H200, launch_s=1.0)
    assert step_time({"a": product}, slow, 5).step_s == pytest.approx(10.0 + EDGE_S)
