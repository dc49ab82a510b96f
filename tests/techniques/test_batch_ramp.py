"""A growing batch reads the same rows in the same order, and resumes within its stages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import assert_same_run, metrics, report

from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.plan import Plan
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.schedule.batch_ramp import BatchRamp
from headrace.train.train import step
from headrace.tuner.lr_find import RangeTest

NAME = "batch_ramp"
RAMP = (f"techniques.{NAME}.divide=4", f"techniques.{NAME}.until=4.0")
"""A ramp of 128 tokens in 8 rows: two steps of 2 rows, two of 4, then 8."""
INTERLEAVED = (
    "mesh.pipeline=2",
    "techniques.pipeline_parallel.schedule=interleaved",
    "techniques.pipeline_parallel.chunks=2",
)
Make = Callable[..., Build]


def test_rows_come_once_in_their_order_whoever_reads_them(make_tiny: Make) -> None:
    """Compare with the rows of the whole batch, over two ranks and micro-batches of two rows."""
    grown, whole = make_tiny(*RAMP, "batch.micro_sequences=2"), make_tiny()
    assert grown.plan.batches.stages == ((0, 32), (2, 64), (4, 128))
    read, sizes = [], []
    for index in range(7):
        micros = grown.loader.step(index).micros
        assert [m.first_token for m in grown.loader.peek(index)] == [m.first_token for m in micros]
        sizes.append([len(micro.ids_BT) for micro in micros])
        assert micros[0].first_token == sum(len(ids) for ids in read) * 16
        read.append(torch.cat([micro.ids_BT for micro in micros]))
    assert sizes == [[2]] * 2 + [[2, 2]] * 2 + [[2] * 4] * 3
    rows = torch.cat(read)
    plain = torch.cat([whole.loader.step(n).micros[0].ids_BT for n in range(5)])
    assert rows.equal(plain[: len(rows)]) and len(rows) == 2 * 2 + 2 * 4 + 3 * 8


def test_a_small_step_is_a_step_of_the_small_batch(make_tiny: Make) -> None:
    """Loss and gradients of the first step are divided by its own targets, bit for bit."""
    grown, small = make_tiny(*RAMP), make_tiny("batch.tokens=32")
    micros = grown.loader.step(0).micros
    found = step(grown, micros, 0)
    assert torch.equal(found, step(small, micros, 0)) and found[3] == 32
    for one, two in zip(grown.model.parameters(), small.model.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None and torch.equal(one.grad, two.grad)
    assert BatchRamp(until=4.0).active(grown).active
    assert not BatchRamp(until=4.0).active(make_tiny()).active


def test_a_run_counts_what_it_reads_and_resumes_within_the_ramp(
    train: Callable[..., Path],
) -> None:
    words = (*RAMP, "eval.every_steps=3", "checkpoint.every_steps=3", "checkpoint.keep_last=9")
    whole = train("name=whole", "goal.steps=6", *words)
    train("name=parts", "goal.steps=3", *words)
    parts = train("name=parts", "goal.steps=6", *words, resume=True)
    assert_same_run(whole, parts)
    assert [row["tokens"] for row in metrics(whole)] == [32, 64, 128, 192, 320, 448]
    assert all(row["wasted_tokens"] == 0 for row in metrics(whole))
    by_tokens = train("name=tokens", "goal.steps=100", "goal.tokens=440", *words)
    assert report(by_tokens)["tokens"] == 448
    assert report(by_tokens)["stream_sha256"] == report(whole)["stream_sha256"]
    with pytest.raises(ConfigError, match="growing batch") as told:
        train(
            "name=parts",
            "goal.steps=9",
            *words,
            f"techniques.{NAME}.divide=2",
            resume=True,
            checkpoint="step-6",
        )
    assert "stages as they were" in told.value.remedy.text


def answer(plan: Plan, **knobs: Any) -> Supported | Unsupported:
    return BatchRamp(**knobs).supports(make_context(plan, torch.device("cpu")))


def test_refuses_what_does_not_divide_and_names_the_nearest(
    tiny_plan: Callable[..., Plan],
) -> None:
    plan = tiny_plan()
    assert isinstance(answer(plan), Supported), "a quarter of 128 tokens is two rows"
    split = plan.model_copy(update={"mesh": MeshConfig(data=4)})
    in_fours = tiny_plan("batch.tokens=192", "batch.micro_sequences=4")
    for refused, remedy in (
        (answer(plan, divide=16), f"techniques.{NAME}.divide=8"),
        (answer(split, divide=4), f"techniques.{NAME}.divide=2"),
        (answer(tiny_plan("batch.tokens=192"), divide=8), f"techniques.{NAME}.divide=4"),
        (answer(in_fours, divide=2), f"techniques.{NAME}.divide=4"),
        (answer(tiny_plan("batch.tokens=16")), "batch.tokens=64"),
    ):
        assert isinstance(refused, Unsupported) and refused.remedy.text == remedy
    assert isinstance(answer(tiny_plan("batch.tokens=256", "batch.micro_sequences=4")), Supported)
    for count, knobs, remedy in (
        (8, {"divide": 4}, None),
        (8, {"divide": 8}, f"techniques.{NAME}.divide=4"),
        (12, {"divide": 4}, f"techniques.{NAME}.divide=2"),
        (6, {"divide": 2}, "batch.tokens=128"),
    ):
        in_groups = tiny_plan(f"batch.tokens={16 * count}", "batch.micro_sequences=1", *INTERLEAVED)
        refused = answer(in_groups, **knobs)
        assert isinstance(refused, Unsupported) == (remedy is not None), count
        if isinstance(refused, Unsupported):
            assert refused.remedy.text == remedy and "a multiple of 2" in refused.reason
    smaller, fewer = "batch.micro_sequences=1", f"techniques.{NAME}.divide=2"
    for micro, remedy in ((0, smaller), (4, smaller), (2, fewer)):
        refused = answer(tiny_plan(f"batch.micro_sequences={micro}", *INTERLEAVED), divide=4)
        assert isinstance(refused, Unsupported) and refused.remedy.text == remedy
    endless = plan.replaced(schedule={"kind": "constant"}, goal={"minutes": 1})
    refused = answer(endless)
    assert isinstance(refused, Unsupported) and refused.remedy.text.startswith("schedule.steps=")
    doubt = BatchRamp(until=50.0).doubt(plan)
    assert doubt is not None and doubt.remedy.text == f"techniques.{NAME}.until=4"


@pytest.mark.parametrize(
    "split", [("mesh.data=2", "fsdp"), ("mesh.pipeline=2", "pipeline_parallel")]
)
def test_two_ranks_train_what_one_does(
    zygote: Any, plan_file: Path, split: tuple[str, str]
) -> None:
    words = ("guard=false", "goal.steps=5", "model.layers=2", *RAMP)
    ended = [zygote.run(plan_file.parent, "train", "tiny.toml", *words, "name=one")]
    two = (split[0], "--with", split[1], "name=two")
    ended += zygote.ranks(2, plan_file.parent, "train", "tiny.toml", *words, *two)
    assert not any(e.code for e in ended), ended[-1].err
    one, two = (plan_file.parent / "runs" / name for name in ("one", "two"))
    assert report(one)["stream_sha256"] == report(two)["stream_sha256"]
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4) and a["tokens"] == b["tokens"]


def test_what_is_counted_ahead_counts_the_ramp(tiny_plan: Callable[..., Plan]) -> None:
    """Check that four steps read 32, 32, 64 and 64 tokens, and the others read 128."""
    plan = tiny_plan(*RAMP, "schedule.steps=10")
    assert RangeTest(plan, [1.0], [1.0], 1).tokens == 192 + 6 * 128
