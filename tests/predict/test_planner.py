"""What the planner foresees, against what was measured on an H200 and by hand."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from facts import tells

from headrace.assemble.build import make_ledger
from headrace.assemble.context import elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.errors import UnsupportedError
from headrace.costs.ledger import DERIVED
from headrace.costs.machine import Machine
from headrace.costs.mask_work import share_of_causal
from headrace.costs.rates import SOFTMAX, START
from headrace.costs.step import step_time
from headrace.costs.work import (
    CAP,
    COMPILED,
    EAGER,
    EDGE_S,
    HOST_COPY_IN_STEP,
    HOST_S,
    REGION,
    TILE,
    Attention,
    HostCopy,
    HostWork,
    Matmul,
    ScoreMask,
    Stream,
    Work,
)
from headrace.model.mask import BlockPattern
from headrace.plan.plan import Plan
from headrace.predict.page import format_prediction
from headrace.predict.prediction import predict
from headrace.recipes import read_recipe
from headrace.techniques.attention.sparse_attention import skipped

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
residuals = import_module("residuals")
H200 = Machine.assumed("NVIDIA H200")
SETTLED = ("56479e0", "586c0f1")
"""Commits whose trainings to a target were steady."""
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
    """Yield receipts of today's plans that stand: name, plan, where it ran, and metrics."""
    for number, (what, row, plan) in enumerate(residuals.plans(ROOT / "results")):
        if row["shape"] != "7b":
            where = residuals.on_device(plan)
            yield f"{number}: {row['shape']} {what}", plan, where, row["metrics"]


def step_of(plan: Plan, context: Any) -> float | None:
    """Seconds of a step as the planner tells them, whatever is installed here."""
    timed = all(technique.timed for technique in plan.techniques.values())
    if not timed or context.precision == "fp32":
        return None
    ledger = make_ledger(plan, context)
    if ledger.sizes.get(DERIVED):
        return None
    try:
        return step_time(ledger.work, H200, ledger.sizes["micro_batches"]).step_s
    except UnsupportedError:
        return None


def test_peaks_of_an_h200_are_foreseen() -> None:
    off = {
        what: make_ledger(plan, context).peak()[1] / metrics["peak_memory"]["value"] - 1
        for what, plan, context, metrics in measured()
        if "peak_memory" in metrics
        and not (context.precision == "fp32" and plan.model.kv_heads)  # the planner adds scores
    }
    assert len(off) > 150 and sum("fp16" in what for what in off) == 4
    assert max(map(abs, off.values())) < 0.005, max(off.items(), key=lambda item: abs(item[1]))


@pytest.mark.parametrize("name", ["full_checkpoint", "selective_checkpoint"])
def test_the_stream_is_fp32_beside_fp16_and_no_weight_that_is_bf16_is_cast(name: str) -> None:
    text = (ROOT / "benchmarks" / "plans" / "1b.toml").read_text()
    narrow = make_ledger(*on_h200(text, with_=[name]))
    wide = make_ledger(
        *on_h200(
            text,
            "model.precision=fp16",
            with_=[name, "fp16_loss_scaling"],
            without=["bf16_parameters"],
        )
    )
    line = "3/residual"
    assert wide.memory[line].bytes == 2 * narrow.memory[line].bytes == 4 * 2048 * 32768
    assert "weight_cast/forward/again" in wide.work
    assert not any("weight_cast/forward" in piece for piece in narrow.work)


@pytest.mark.parametrize(
    ("recipe", "shape", "changes"),
    [
        (
            "mfu: selective_rows2",
            "7b",
            "+selective_checkpoint techniques.selective_checkpoint.wide_every=1 "
            "batch.micro_sequences=2",
        ),
        ("context: long 262144", "1b", LONG),
    ],
)
def test_peaks_of_large_plans_are_foreseen(recipe: str, shape: str, changes: str) -> None:
    rows = map(json.loads, (ROOT / "results" / "limits.jsonl").read_text().splitlines())
    (peak,) = {
        row["metrics"]["peak_memory"]["value"]
        for row in rows
        if row.get("recipe") == recipe and row["metrics"]
    }
    words = changes.split()
    plan, context = on_h200(
        (ROOT / "benchmarks" / "plans" / f"{shape}.toml").read_text(),
        *(w for w in words if w[0] not in "+-"),
        with_=[w[1:] for w in words if w[0] == "+"],
        without=[w[1:] for w in words if w[0] == "-"],
    )
    assert make_ledger(plan, context).peak()[1] == pytest.approx(peak, rel=0.005)


def test_steps_of_an_h200_are_foreseen_from_its_datasheet() -> None:
    off = {}
    for what, plan, context, metrics in measured():
        rate = metrics.get("tokens_per_s")
        if rate and (step_s := step_of(plan, context)) is not None:
            seconds = plan.batch.tokens / rate["value"]
            off[what] = step_s / seconds - 1
    assert len(off) > 130
    assert mean(map(abs, off.values())) < 0.02, off
    assert max(map(abs, off.values())) < 0.05, max(off.items(), key=lambda item: abs(item[1]))


def test_steps_of_a_small_model_are_foreseen() -> None:
    lines = (ROOT / "results" / "time_to_quality.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["commit"] in SETTLED]
    off = {}
    for row in rows:
        if row["rows"] == 32 and "muon" not in row["techniques"]:
            plan, context = on_h200(
                (ROOT / "benchmarks" / "plans" / "novels.toml").read_text(),
                "goal.steps=500",
                f"batch.tokens={32 * 1024}",
                "model.vocab=16384",
            )
            seconds = plan.batch.tokens / row["metrics"]["tokens_per_s"]["value"]
            off[len(off)] = (step_of(plan, context) or 0.0) / seconds - 1
    assert len(off) > 5 and max(map(abs, off.values())) < 0.05, off


def test_a_long_row_is_foreseen() -> None:
    lines = (ROOT / "results" / "limits.jsonl").read_text().splitlines()
    (step_s,) = (
        row["metrics"]["step"]["value"]
        for row in map(json.loads, lines)
        if row.get("recipe") == "context: long 262144"
    )
    words = LONG.split()
    plan, context = on_h200(
        (ROOT / "benchmarks" / "plans" / "1b.toml").read_text(),
        *(w for w in words if w[0] not in "+-"),
        with_=[w[1:] for w in words if w[0] == "+"],
        without=[w[1:] for w in words if w[0] == "-"],
    )
    assert step_of(plan, context) == pytest.approx(step_s, rel=0.05)


def test_a_plan_says_whether_it_fits_and_what_it_costs() -> None:
    text = (ROOT / "benchmarks" / "plans" / "1b.toml").read_text()
    plan, context = on_h200(text, "hardware.dollars_per_hour=4", "goal.steps=1000")
    found = predict(plan, context, H200)
    assert found.memory.fits == "yes" and found.time.step_s and found.run.hours
    assert found.time.tokens_per_s == pytest.approx(plan.batch.tokens / found.time.step_s)
    assert found.run.dollars == pytest.approx(4 * 1000 * found.time.step_s / 3600)
    assert sum(found.time.parts_s.values()) == pytest.approx(found.time.step_s)
    assert "it fits: 65." in format_prediction(plan, found) and "$" in format_prediction(
        plan, found
    )
    assert json.loads(json.dumps(found.to_dict()))["rates"] == "datasheet"
    small = replace(H200, memory_bytes=40 * 2**30)
    assert predict(plan, context, small).memory.fits == "no"
    near = replace(H200, memory_bytes=int(found.memory.peak_bytes / 0.95) + H200.context_bytes)
    assert predict(plan, context, near).memory.fits == "tight"


@pytest.mark.parametrize(
    ("with_", "overrides", "says"),
    [
        (
            ["sliding_window", "window_schedule"],
            ["schedule.steps=100"],
            "window_schedule does not say yet",
        ),
        (
            ["sparse_attention", "flex_attention"],
            ["techniques.sparse_attention.block=64"],
            "not known before",
        ),
        (["logit_soft_cap"], [], "over plain products"),
        (
            ["float8_linear"],
            ["model.dim=2304", "techniques.float8_linear.recipe=rowwise"],
            "rowwise scales",
        ),
        (["fsdp"], ["mesh.data=16", "techniques.torch_compile.scope=block"], "16 ranks"),
    ],
)
def test_what_is_not_priced_has_no_time(with_: list[str], overrides: list[str], says: str) -> None:
    text = (ROOT / "benchmarks" / "plans" / "160m.toml").read_text()
    beside = {"flex_attention": "cudnn_attention"}
    without = ["bf16_parameters", *(beside[name] for name in with_ if name in beside)]
    plan, context = on_h200(text, *overrides, with_=with_, without=without)
    found = predict(plan, context, H200)
    assert found.time.step_s is None and says in found.time.unknown and found.memory.peak_bytes
    assert "not predicted" in format_prediction(plan, found)


def test_rows_that_lengthen_take_the_time_of_whole_ones() -> None:
    """A run of the recipe `124m` has a time before its rows are whole."""
    text = read_recipe("124m")
    plan, context = on_h200(text)
    assert "sequence_length_schedule" in plan.techniques
    long = predict(plan, context, H200)
    same = predict(*on_h200(text, without=["sequence_length_schedule"]), H200)
    assert long.time.step_s and long.time.step_s == same.time.step_s
    assert long.time.parts_s == same.time.parts_s
    assert long.memory.peak_bytes == same.memory.peak_bytes


def test_a_cpu_has_no_time_before_a_probe(tiny_plan: Callable[..., Plan]) -> None:
    plan = tiny_plan()
    found = predict(plan, make_context(plan, torch.device("cpu")), Machine.assumed("cpu"))
    assert found.time.tokens_per_s is None and tells(
        found.time.unknown, "CPU", "rates", "not known"
    )
    assert tells(found.time.unknown, "headrace probe", "--device cpu", "--seconds 20")
    name = "window_schedule"  # is silent too, and not the reason here
    other = tiny_plan(f"techniques.{name}.start=8", "techniques.sliding_window.window=12")
    assert not other.techniques[name].timed
    silent = predict(other, make_context(other, torch.device("cpu")), Machine.assumed("cpu"))
    assert silent.time.unknown == found.time.unknown


def test_a_device_that_nobody_knows_is_refused(tiny_plan: Callable[..., Plan]) -> None:
    context = make_context(tiny_plan(), torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="MI300"):
        elsewhere(context, "AMD MI300")


def test_pieces_are_priced_by_what_they_move() -> None:
    stream = Stream("forward", 3, bytes=8e9, kernels=4, fused=2e9)
    one = H200.traffic_s(2e9)
    assert stream.compiled().seconds(H200) == pytest.approx(3 * one)
    assert replace(stream.whole(2e9), launch=COMPILED) == stream.compiled()
    assert stream.seconds(H200) > 3 * 4 * one
    product = Matmul("forward", 2, (4096, 4096, 4096))
    whole = step_time({"a": product, "b": replace(stream, phase="optimizer")}, H200, 5)
    assert whole.of("product") == pytest.approx(5 * product.seconds(H200))
    assert whole.of("optimizer") == pytest.approx(stream.seconds(H200))
    slow = replace(H200, launch_s=1.0)
    many_s = EAGER * 10.0
    assert step_time({"a": product}, slow, 5).step_s == pytest.approx(many_s + HOST_S + EDGE_S)
    called = {"a": product.compiled(), "b": HostWork("forward", 13, launch=REGION)}
    found = step_time(called, slow, 5)
    assert found.host_s == pytest.approx(HOST_S + 5 * (2 * COMPILED + 13 * REGION))
    assert found.device_s == step_time({"a": product}, slow, 5).device_s


def flops(piece: Work) -> float:
    """As the ledger counts them: attention whole, and twice as much backward."""
    if isinstance(piece, Matmul):
        m, n, k = piece.sizes
        return 2.0 * m * n * k * piece.count
    if isinstance(piece, Attention):
        rows, heads, _, length, features = piece.sizes
        each = 4.0 * rows * heads * length**2 * features
        return each * piece.count * (2 if piece.phase == "backward" else 1)
    return 0.0


@pytest.mark.parametrize(
    "changes",
    [
        "",
        "+chunked_mlp",
        "+full_checkpoint",
        "+full_checkpoint +chunked_mlp",
        "+memory_budget",
        "+selective_checkpoint techniques.selective_checkpoint.every_matmul=2",
        "+short_convolution",
        "+stochastic_depth",
        "-fused_cross_entropy +chunked_cross_entropy",
        "-bf16_parameters +lora",
    ],
)
def test_pieces_compute_what_the_ledger_counts(changes: str) -> None:
    words = changes.split()
    plan, context = on_h200(
        (ROOT / "benchmarks" / "plans" / "160m.toml").read_text(),
        *(w for w in words if w[0] not in "+-"),
        with_=[w[1:] for w in words if w[0] == "+"],
        without=[w[1:] for w in words if w[0] == "-"],
    )
    ledger = make_ledger(plan, context)
    counted = ledger.flops_per_token() * ledger.sizes["tokens"]
    assert sum(map(flops, ledger.work.values())) == pytest.approx(counted, rel=1e-3)


def test_a_mask_costs_what_its_kernel_makes_of_it() -> None:
    plain = Attention("forward", sizes=(4, 8, 8, 4096, 64), kernel="flex")
    masked = replace(plain, mask=ScoreMask(1.0, 0.25))
    starts = START / (64 + SOFTMAX)
    share = (16.5 / 4 + starts) / (16.5 + starts)  # blocks of a row, of 32 rows
    assert masked.seconds(H200) == pytest.approx(plain.seconds(H200) * share)
    assert replace(masked, mask=ScoreMask(1.0)).seconds(H200) == pytest.approx(plain.seconds(H200))
    half = replace(masked, mask=ScoreMask(0.5, 0.25))
    assert half.seconds(H200) == pytest.approx(plain.seconds(H200) * (1 + share) / 2)
    skipped = replace(masked, kernel="varlen")
    flash_s = replace(plain, kernel="flash").seconds(H200)
    assert skipped.seconds(H200) == pytest.approx(flash_s * share)
    dense = replace(masked, kernel="cudnn")
    assert dense.seconds(H200) > replace(plain, kernel="cudnn", causal=False).seconds(H200)
    with pytest.raises(UnsupportedError, match="not known before"):
        replace(masked, mask=ScoreMask(1.0, None)).seconds(H200)
    assert replace(dense, mask=ScoreMask(1.0, None)).seconds(H200) == dense.seconds(H200)
    assert replace(dense, mask=ScoreMask(1.0, 0.25, extra=20.0)).seconds(H200) == dense.seconds(
        H200
    )
    assert replace(plain, mask=ScoreMask(extra=24.0)).seconds(H200) == pytest.approx(
        1.25 * plain.seconds(H200)
    )
    cap = replace(plain, capped=True)
    assert cap.seconds(H200) == replace(plain, mask=ScoreMask(extra=CAP)).seconds(H200)
    with pytest.raises(UnsupportedError, match="soft cap"):
        replace(cap, kernel="cudnn").seconds(H200)
    with pytest.raises(UnsupportedError, match="nobody timed"):
        replace(plain, unknown="nobody timed it").seconds(H200)


@pytest.mark.parametrize(("window", "length"), [(1, 512), (129, 1024), (1000, 1024), (300, 640)])
def test_a_window_leaves_the_blocks_that_hold_anything(window: int, length: int) -> None:
    at = torch.arange(length)
    before = at[:, None] - at[None, :]
    held = ((before >= 0) & (before < window)).unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE))
    count = length // TILE
    blocks = held.any(3).any(1).sum().item() / (count * (count + 1) / 2)
    assert share_of_causal(window, length) == pytest.approx(blocks)


def test_a_pattern_leaves_whole_blocks_and_its_longest_column_ends_last() -> None:
    assert skipped(BlockPattern(64), 1024) == (None, 0)
    share, column = skipped(BlockPattern(256, local=1, first=1), 1024)
    assert (share, column) == (pytest.approx((3 * 4 + 3 * 4) / 36), 8)
    work = Attention("backward", sizes=(1, 8, 2, 1024, 64), kernel="flex")
    pieces = [replace(work, mask=ScoreMask(1.0, share, blocks)) for blocks in (1, 8, 15)]
    one, longer, longest = (piece.seconds(H200) for piece in pieces)
    assert longest - longer == pytest.approx(longer - one) and longer > one
    forward = [replace(piece, phase="forward").seconds(H200) for piece in pieces]
    assert (
        forward[0]
        == forward[1]
        > replace(work, phase="forward", mask=ScoreMask(1.0, share)).seconds(H200)
    )


def test_copies_hide_behind_their_phase_and_recordings_are_one_launch() -> None:
    product = Matmul("forward", 2, (4096, 4096, 4096))
    computed_s, one_byte_s = product.seconds(H200), HOST_COPY_IN_STEP / H200.to_host.bytes_per_s
    for share, left in ((0.5, 0.0), (3.0, 2.0)):
        link = HostCopy("forward", bytes=share * computed_s / one_byte_s)
        work = {"a": product, "b": link, "c": Stream("backward", bytes=1e6)}
        assert step_time(work, H200, 3).of("host link") == pytest.approx(
            3 * left * computed_s, abs=1e-4
        )
    many = {"a": replace(product, count=1000.0), "b": Stream("optimizer", 10, bytes=1e3)}
    taken = {"a": replace(many["a"], recorded=True), "b": many["b"]}
    assert step_time(many, H200, 2).host_s == pytest.approx(HOST_S + 2010 * EAGER * H200.launch_s)
    recorded = step_time(taken, H200, 2).host_s
    few_s = 2 * H200.graph_launch_s + 10 * EAGER * H200.launch_s
    assert recorded == pytest.approx(HOST_S + few_s)
