"""Short and long sequences in one batch: their loss is that of the same sequences apart."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from pieces import h200

from headrace.assemble.build import make_ledger
from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.costs.work import Attention
from headrace.data.loader import Micro
from headrace.plan.plan import Plan
from headrace.plan.technique import Unsupported
from headrace.techniques.data.length_mixing import LengthMixing, deal_lengths
from headrace.techniques.schedule.sequence_length_schedule import cut
from headrace.train.train import step

PACKED = "techniques.document_packing={}"
MIXED = "techniques.length_mixing={lengths=[4,0],shares=[0.25,0.75]}"


@pytest.mark.parametrize("shares", [(1, 1), (1, 3), (7, 2), (1, 1, 1), (5, 2, 3, 6)])
def test_any_rows_that_follow_each_other_have_the_shares(shares: tuple[int, ...]) -> None:
    parts = [Fraction(share, sum(shares)) for share in shares]
    dealt = torch.tensor([deal_lengths(row, parts) for row in range(400)])
    off = max(1, len(shares) - 1)
    for first in range(0, 400, 7):
        for size in (1, 8, 37, 400 - first):
            window = dealt[first : first + size]
            for index, part in enumerate(parts):
                count = int((window == index).sum())
                assert abs(count - part * len(window)) < off, (first, size)
    assert deal_lengths(10**15 + 1, parts) in range(len(parts)), "any row can be asked for first"


def part_of(micro: Micro, rows: list[int]) -> Micro:
    names = ("ids_BT", "targets_BT", "segments_BT", "positions_BT")
    return replace(micro, **{name: getattr(micro, name)[rows] for name in names})


@pytest.mark.parametrize("at", [0, 3])
def test_a_step_is_one_of_separate_sequences(at: int, make_tiny: Callable[..., Build]) -> None:
    """Compare loss, gradients and targets with short rows and whole rows as micro-batches apart."""
    mixed, plain = make_tiny(PACKED, MIXED), make_tiny(PACKED)
    (micro,) = plain.loader.step(at).micros
    assert torch.equal(mixed.loader.step(at).micros[0].ids_BT, micro.ids_BT)
    parts = [Fraction(1, 4), Fraction(3, 4)]
    which = [deal_lengths(at * len(micro.ids_BT) + row, parts) for row in range(len(micro.ids_BT))]
    assert sorted(which) == [0, 0, 1, 1, 1, 1, 1, 1], "both are in every batch"
    short, whole = (part_of(micro, [n for n, w in enumerate(which) if w == i]) for i in (0, 1))
    found = step(mixed, [micro], 0)
    right = step(plain, [cut(short, 4), whole], 0)
    torch.testing.assert_close(found, right, rtol=2e-6, atol=1e-6)
    for one, two in zip(mixed.model.parameters(), plain.model.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-7)
    evidence = mixed.plan.techniques["length_mixing"].active(mixed)
    assert evidence.active and evidence.numbers["share_of_4"] == 0.25
    assert evidence.numbers["longest_of_4"] == 4 < evidence.numbers["longest_of_16"]


def test_ranks_micro_batches_and_a_length_schedule_cut_alike(
    make_tiny: Callable[..., Build],
) -> None:
    """Compare pieces and places of one stream, which is read in other parts and cut further."""
    wanted: dict[int, tuple[int, int]] = {}
    for more in ((), ("batch.micro_sequences=2",)):
        build = make_tiny(PACKED, MIXED, *more)
        for micro in build.loader.step(2).micros:
            (recut,) = build.recut
            placed = recut(build, micro)
            assert placed.positions_BT is not None and placed.segments_BT is not None
            begins = torch.cat(
                [torch.ones(len(placed.ids_BT), 1), placed.segments_BT.diff(dim=1)], 1
            )
            for row, (places, starts) in enumerate(zip(placed.positions_BT, begins, strict=True)):
                number = micro.first_token // 16 + row
                value = hash((*places.tolist(),)), hash((*starts.tolist(),))
                assert wanted.setdefault(number, value) == value
    assert len(wanted) == 8
    build = make_tiny(PACKED, MIXED, "techniques.sequence_length_schedule.start=8")
    (micro,) = build.loader.step(0).micros
    step(build, [micro], 0)
    evidence = build.plan.techniques["length_mixing"].active(build)
    assert evidence.active and evidence.numbers["longest_of_16"] <= 8


def test_no_effect_is_no_evidence(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny(PACKED, MIXED)
    technique = build.plan.techniques["length_mixing"]
    assert technique.active(build).active is False, "nothing was trained"
    build.notes["length_mixing"][:] = [[64, 16], [64, 16]]
    assert technique.active(build).active is False, "a short piece of 16 tokens"
    build.notes["length_mixing"][:] = [[0, 0], [128, 16]]
    assert technique.active(build).active is False, "no short piece"


@pytest.mark.parametrize(
    ("words", "reason", "remedy"),
    [
        ((), "kept apart by the mask", "--with document_packing"),
        ((PACKED, "shares=[0.5,0.6]"), "add up to 1", "techniques.length_mixing.shares=[0.5,0.5]"),
        (
            (PACKED, "shares=[0.5,0.2,0.3]"),
            "2 lengths",
            "techniques.length_mixing.shares=[0.5,0.5]",
        ),
        (
            (PACKED, "lengths=[5,0]"),
            "[5, 0] do not all cut",
            "techniques.length_mixing.lengths=[4,16]",
        ),
        ((PACKED, "shares=[0.05,0.95]"), "8 rows of a rank", "batch.tokens=384"),
    ],
)
def test_what_cannot_be_mixed_is_refused(
    words: tuple[str, ...], reason: str, remedy: str, tiny_plan: Callable[..., Plan]
) -> None:
    techniques = [word for word in words if word.startswith("techniques")]
    knobs = [f"techniques.length_mixing.{word}" for word in words if word not in techniques]
    plan = tiny_plan(*techniques, "techniques.length_mixing.lengths=[4,0]", *knobs)
    technique: Any = plan.techniques["length_mixing"]
    answer = technique.supports(make_context(plan, torch.device("cpu")))
    assert isinstance(answer, Unsupported) and reason in answer.reason
    assert answer.remedy.text.replace("'", "") == remedy


def test_attention_is_priced_by_the_pieces(tiny_plan: Callable[..., Plan]) -> None:
    """Flex attention under packing has no price, and half of the rows in pieces of 4 have one."""

    def seen(*more: str) -> set[float | None]:
        ledger = make_ledger(plan := tiny_plan(PACKED, *more), h200(plan))
        return {w.mask.seen for w in ledger.work.values() if isinstance(w, Attention)}

    assert seen() == {None}
    (mixed,) = seen(MIXED)
    assert mixed == pytest.approx(0.25 * 5 / 17 + 0.75)
    assert LengthMixing(lengths=(0, 4)).tokens(16) == [16, 4]
