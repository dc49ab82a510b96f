"""Cut the same stream into shorter rows: each target comes once, with its document and place."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.data.loader import Micro, collate
from headrace.data.rows import Row
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.plan import Plan
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.compile.torch_compile import _shapes
from headrace.techniques.schedule.sequence_length_schedule import (
    SequenceLengthSchedule,
    cut,
    lengths_to,
)
from headrace.train.train import step

NAME = "sequence_length_schedule"


def micro_of(starts: list[list[int]], length: int, *, segments: bool = True) -> Micro:
    random = np.random.default_rng(0)
    rows = [Row(random.integers(0, 99, length + 1), np.array(s, dtype=np.int64)) for s in starts]
    return collate(rows, segments=segments, first_token=700)


@pytest.mark.parametrize(
    ("whole", "start", "wanted"),
    [(256, 64, [64, 128, 256]), (15, 5, [5, 15]), (96, 4, [4, 8, 16, 32, 96]), (14, 7, [7, 14])],
)
def test_lengths_double_while_they_divide(whole: int, start: int, wanted: list[int]) -> None:
    assert lengths_to(whole, start) == wanted


@settings(max_examples=60, deadline=None)
@given(
    starts=st.lists(st.lists(st.integers(0, 12), max_size=4), min_size=1, max_size=3),
    length=st.sampled_from([1, 2, 3, 4, 6]),
)
def test_a_cut_row_is_what_the_loader_would_make_of_it(starts: list[Any], length: int) -> None:
    """Compare with `collate` of each piece as a row of its own."""
    whole = micro_of([sorted(set(s)) for s in starts], 12)
    found = cut(whole, length)
    random = np.random.default_rng(0)
    pieces = []
    for begins in starts:
        ids = random.integers(0, 99, 13)
        for at in range(0, 12, length):
            inner = [s - at for s in sorted(set(begins)) if at <= s <= at + length]
            pieces.append(Row(ids[at : at + length + 1], np.array(inner, dtype=np.int64)))
    right = collate(pieces, segments=True)
    assert torch.equal(found.ids_BT, right.ids_BT)
    assert torch.equal(found.targets_BT, right.targets_BT)
    assert found.positions_BT is not None and right.positions_BT is not None
    assert torch.equal(found.positions_BT, right.positions_BT)
    assert found.segments_BT is not None and right.segments_BT is not None
    for a, b in zip(found.segments_BT, right.segments_BT, strict=True):
        assert torch.equal(a - a[0], b), "the same tokens share a document"
    assert found.first_token == whole.first_token


def test_without_documents_only_the_shape_changes() -> None:
    whole = micro_of([[3]], 12, segments=False)
    found = cut(whole, 4)
    assert found.ids_BT.shape == (3, 4) and found.positions_BT is None
    assert torch.equal(found.ids_BT.flatten(), whole.ids_BT.flatten())


@pytest.mark.parametrize(
    "more", [(), ("techniques.document_packing={}",), ("techniques.best_fit_packing={}",)]
)
def test_a_step_of_short_rows_is_a_step_of_a_plan_with_short_rows(
    more: tuple[str, ...], make_tiny: Callable[..., Build]
) -> None:
    """Compare loss and gradients of 8 rows of 16 at length 4 with 32 rows of 4, bit for bit."""
    long = make_tiny(f"techniques.{NAME}.start=4", *more)
    short = make_tiny("data.sequence_length=4", "batch.tokens=128", *more)
    micros = long.loader.step(0).micros
    found = step(long, micros, 0)
    right = step(short, [cut(m, 4) for m in micros], 0)
    assert torch.equal(found, right)
    for one, two in zip(long.model.parameters(), short.model.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None and torch.equal(one.grad, two.grad)


def test_a_run_lengthens_and_keeps_its_stream(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny(f"techniques.{NAME}.start=4", f"techniques.{NAME}.until=4.0")
    baseline = make_tiny()
    shapes = []
    inner = build.place
    build.place = lambda b, micro: (shapes.append(tuple(micro.ids_BT.shape)), inner(b, micro))[1]
    for index in range(6):
        micros = build.loader.step(index).micros
        assert torch.equal(micros[0].ids_BT, baseline.loader.step(index).micros[0].ids_BT)
        step(build, micros, index)
    assert shapes == [(32, 4)] * 2 + [(16, 8)] * 2 + [(8, 16)] * 2
    places = inner(build, cut(micros[0], 4)).index_BT.flatten()
    assert torch.equal(places, inner(build, micros[0]).index_BT.flatten())


@pytest.mark.parametrize(("until", "ends"), [("1.0", 40), ("0.5", 20), ("1.5", 2), ("20.0", 20)])
def test_until_is_a_share_up_to_one_and_a_step_above(
    make_tiny: Callable[..., Build], until: str, ends: int
) -> None:
    """Rows are whole from the step that it names, of the 40 steps of the schedule."""
    build = make_tiny(f"techniques.{NAME}.start=8", f"techniques.{NAME}.until={until}")
    lengths = [build.values["sequence_length"](step) for step in range(41)]
    assert lengths == [8.0] * ends + [16.0] * (41 - ends)


def answer(plan: Plan, **knobs: Any) -> Supported | Unsupported:
    return SequenceLengthSchedule(**knobs).supports(make_context(plan, torch.device("cpu")))


def test_refuses_what_does_not_divide(tiny_plan: Callable[..., Plan]) -> None:
    plan = tiny_plan()
    assert isinstance(answer(plan, start=8), Supported)
    for knobs, remedy in (
        ({"start": 5}, f"techniques.{NAME}.start=4"),
        ({"start": 16}, f"techniques.{NAME}.start=8"),
    ):
        refused = answer(plan, **knobs)
        assert isinstance(refused, Unsupported) and refused.remedy.text == remedy
    prime = answer(tiny_plan("data.sequence_length=3", "batch.tokens=129"), start=2)
    assert isinstance(prime, Unsupported) and prime.remedy.text == "data.sequence_length=4"
    endless = tiny_plan("schedule.kind=constant").replaced(
        schedule={"kind": "constant"}, goal={"minutes": 1}
    )
    refused = answer(endless, start=8)
    assert isinstance(refused, Unsupported) and "until" in refused.remedy.text
    assert isinstance(answer(endless, start=8, until=50.0), Supported)


def test_under_context_parallelism_every_length_splits(tiny_plan: Callable[..., Plan]) -> None:
    context = make_context(tiny_plan(), torch.device("cpu"))
    split = replace(context, plan=context.plan.model_copy(update={"mesh": MeshConfig(context=2)}))
    assert isinstance(SequenceLengthSchedule(start=4).supports(split), Supported)
    refused = SequenceLengthSchedule(start=2).supports(split)
    assert isinstance(refused, Unsupported) and refused.remedy.text.endswith("start=4")


def test_more_lengths_than_torch_makes_graphs_of_are_compiled(
    make_tiny: Callable[..., Build],
) -> None:
    """Ten lengths: torch makes 8 graphs of a function before it gives up, and the run would end."""
    build = make_tiny(
        "data.sequence_length=1024",
        "batch.tokens=1024",
        f"techniques.{NAME}.start=2",
        f"techniques.{NAME}.until=10",
        "techniques.torch_compile.backend=eager",
    )
    with ExitStack() as flags:
        for enter in build.runtime:
            flags.enter_context(enter())
        for index in range(11):
            step(build, build.loader.step(index).micros, index)
    assert [*build.notes[NAME]] == [2**n for n in range(1, 11)]
    assert build.plan.techniques["torch_compile"].active(build).numbers["graphs"] == 11


def test_a_compiler_may_make_a_graph_of_each_shape(tiny_plan: Callable[..., Plan]) -> None:
    """Rows of 32 tokens have up to six lengths, and a batch that grows fourfold three sizes."""
    lengths, ramp = f"techniques.{NAME}.start=4", "techniques.batch_ramp.divide=4"
    until = (f"techniques.{NAME}.until=9", "techniques.batch_ramp.until=9")
    for more, shapes in (((), 1), ((lengths,), 6), ((ramp,), 3), ((lengths, ramp), 18)):
        keys = [until[("ramp" in one)] for one in more]
        plan = tiny_plan("data.sequence_length=32", "batch.tokens=256", *more, *keys)
        assert _shapes(plan) == shapes, more
