"""Rows are padded to few lengths: the same loss and gradients, fewer shapes, fewer recompiles."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from crosses import crossed
from facts import in_order

from headrace.assemble.build import make_ledger
from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build, MicroBatch
from headrace.core.errors import ConfigError, RunError, UnsupportedError
from headrace.model.head import IGNORED
from headrace.model.mask import Rows
from headrace.plan.plan import Plan
from headrace.techniques.compile.shape_buckets import deal
from headrace.train.evaluate import evaluate
from headrace.train.train import step

Make = Callable[..., Build]
NAME = "shape_buckets"
COMPILE = "techniques.torch_compile.backend=eager"
LENGTHS = (COMPILE, "techniques.sequence_length_schedule.start=2")
UNTIL = "techniques.sequence_length_schedule.until=9.0"  # lengths 2, 4, 8, 16; three steps each


def watch(build: Build) -> list[tuple[int, ...]]:
    """The shapes that the model is given from now on."""
    seen: list[tuple[int, ...]] = []
    inner = build.engine

    def engine(build: Build, works: Sequence[MicroBatch], *rest: Any) -> Any:
        seen.extend(tuple(work.ids_BT.shape) for work in works)
        return inner(build, works, *rest)

    build.engine = engine
    return seen


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """What is compiled runs as it was written: dozens of shapes take minutes to trace."""
    with torch.compiler.set_stance("force_eager"):
        yield


@crossed(
    together=1,
    multiple=[3, 4, 8, 5, 16, 100],
    more={
        "alone": (),
        "packed": ("techniques.document_packing={}",),
        "learned": ("model.position=learned", "batch.micro_sequences=4"),
        "sophia": ("techniques.sophia={}",),
        "z": ("techniques.z_loss={}", "techniques.chunked_cross_entropy.chunk_tokens=7"),
    },
)
def test_loss_and_gradients_are_those_of_the_rows_as_they_were(
    multiple: int, more: tuple[str, ...], make_tiny: Make, uncompiled: None
) -> None:
    plain = make_tiny(*LENGTHS, UNTIL, *more)
    build = make_tiny(*LENGTHS, UNTIL, f"techniques.{NAME}.multiple={multiple}", *more)
    for index in (0, 3, 6, 9):
        micros = plain.loader.step(index).micros
        found, right = step(build, micros, index), step(plain, micros, index)
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
        assert found[3] == right[3], "as many targets"
        for one, two in zip(build.model.parameters(), plain.model.parameters(), strict=True):
            assert one.grad is not None and two.grad is not None
            off = (one.grad - two.grad).abs().max() / two.grad.abs().max()
            assert off < 1e-4
            one.data.copy_(two.data)  # so that roundings of updates do not add up
    evidence = build.plan.techniques[NAME].active(build)
    assert evidence.active and evidence.numbers["padding_tokens"] > 0


def test_lengths_of_a_bucket_share_one_shape(make_tiny: Make, uncompiled: None) -> None:
    build = make_tiny(*LENGTHS, UNTIL, f"techniques.{NAME}.multiple=8")
    seen = watch(build)
    for index in (0, 3, 6, 9):
        step(build, build.loader.step(index).micros, index)
    evaluate(build)
    assert set(seen) == {(16, 8), (8, 16)}
    assert seen[:7] == [(16, 8)] * 4 + [(16, 8)] * 2 + [(16, 8)]
    numbers = build.plan.techniques[NAME].active(build).numbers
    assert numbers["shapes_in"] == 4 and numbers["shapes_out"] == 2
    assert numbers["padding_tokens"] == (4 - 1) * 128 + (2 - 1) * 128


def test_a_compiler_compiles_fewer_shapes(make_tiny: Make) -> None:
    """Three lengths are two recompiles of each graph, and in two buckets they are one."""
    from torch._dynamo.utils import guard_failures

    again = []
    for bucket in ((), (f"techniques.{NAME}.multiple=8",)):
        build = make_tiny(*LENGTHS, UNTIL, *bucket)
        with ExitStack() as flags:
            for enter in build.runtime:
                flags.enter_context(enter())
            for index in (0, 3, 9):
                step(build, build.loader.step(index).micros, index)
        sizes = [why for found in guard_failures.values() for why in found if "size mis" in why]
        again.append(len(sizes))
    assert check_active(build)[NAME].numbers["recompiles"] == again[1] > 0
    assert again[1] < again[0]


def test_what_is_dealt_holds_every_token_once_and_no_other_target() -> None:
    R, L = 5, 3
    ids = torch.arange(1, R * L + 1).view(R, L)
    segments = torch.tensor([[0, 0, 1]] * R, dtype=torch.int32)
    positions = torch.tensor([[0, 1, 0]] * R)
    extras = {"teacher": ids.flatten()[:, None].float()}
    work = MicroBatch(ids, ids + 100, Rows(positions, segments), ids + 7, extras)
    parts = deal(work, 8, 2)
    assert [tuple(p.ids_BT.shape) for p in parts] == [(2, 8)] * 3
    for name, shift in (("ids_BT", 0), ("index_BT", 7)):
        whole = torch.cat([getattr(p, name) for p in parts])
        assert torch.equal(whole[:R, :L], ids + shift)
        assert not whole[:R, L:].any() and not whole[R:].any()
    targets = torch.cat([p.targets_BT for p in parts])
    assert torch.equal(targets[targets != IGNORED], (ids + 100).flatten())
    row = parts[0].rows
    assert row.segments_BT is not None
    assert row.segments_BT[0].tolist() == [0, 0, 1, 2, 2, 2, 2, 2]
    assert row.positions_BT[0].tolist() == [0, 1, 0, 0, 1, 2, 3, 4]
    taught = torch.cat([p.extras["teacher"].view(2, 8) for p in parts if p.extras])
    assert torch.equal(taught[:R, :L], ids.float()) and not taught[:, L:].any()


def test_refused_where_nothing_varies(make_tiny: Make) -> None:
    with pytest.raises(UnsupportedError, match="nothing varies") as caught:
        make_tiny(COMPILE, f"techniques.{NAME}={{}}")
    assert "--with sequence_length_schedule" in caught.value.remedy.text
    with pytest.raises(UnsupportedError, match="a multiple of 2 already") as caught:
        make_tiny(*LENGTHS, f"techniques.{NAME}.multiple=2")
    assert f"techniques.{NAME}.multiple=4" in caught.value.remedy.text
    make_tiny(*LENGTHS, f"techniques.{NAME}.multiple=4")


def test_refused_where_nothing_is_compiled(make_tiny: Make) -> None:
    """Padding would cost work, and no graph is there that a new length compiles again."""
    with pytest.raises(UnsupportedError, match="nothing is compiled") as caught:
        make_tiny(LENGTHS[1], f"techniques.{NAME}.multiple=8")
    assert "--with torch_compile" in caught.value.remedy.text
    assert f"--without {NAME}" in caught.value.remedy.text


def test_what_would_see_padding_or_a_part_is_refused(make_tiny: Make) -> None:
    for other in ("mixture_of_experts", "optimizer_in_backward"):
        with pytest.raises(ConfigError, match=f"{NAME} cannot stand beside {other}"):
            make_tiny(*LENGTHS, f"techniques.{NAME}.multiple=8", f"techniques.{other}={{}}")


def test_nothing_padded_is_no_evidence(make_tiny: Make) -> None:
    build = make_tiny(*LENGTHS, f"techniques.{NAME}.multiple=8")
    with pytest.raises(RunError, match="not in force"):
        check_active(build)
    build.enrich.clear()
    step(build, build.loader.step(0).micros, 0)
    with pytest.raises(RunError, match=in_order(NAME, "not in force")):
        check_active(build)


def test_a_run_that_resumes_after_rows_have_grown_goes_on(make_tiny: Make) -> None:
    build = make_tiny(*LENGTHS, UNTIL, f"techniques.{NAME}.multiple=8")
    step(build, build.loader.step(0).micros, 30)
    assert check_active(build)[NAME].numbers["padding_tokens"] == 0


def test_gradients_are_predicted_to_be_summed(
    make_tiny: Make, tiny_plan: Callable[..., Plan]
) -> None:
    context = make_tiny().context
    plan = tiny_plan(*LENGTHS, f"techniques.{NAME}.multiple=8")
    line = make_ledger(plan, context).memory["gradients"]
    assert line.instants == ("always",)
    assert line.bytes == make_ledger(tiny_plan(*LENGTHS), context).memory["gradients"].bytes
