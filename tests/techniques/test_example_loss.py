"""A loss by example is the mean over texts of the mean of each, over micro-batches and heads."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from headrace.assemble.sockets import Build
from headrace.data.loader import Micro
from headrace.model.head import IGNORED
from headrace.techniques.loss.example_loss import shares
from headrace.techniques.schedule.sequence_length_schedule import cut
from headrace.train.train import step

PACKED = (
    *("techniques.best_fit_packing={}", "optimizer.clip_norm=1e9", "batch.micro_sequences=2"),
    *("data.separator=mill", "data.sequence_length=128", "batch.tokens=1024"),
)
"""Short texts, of which several share a row."""
CHUNKED = "techniques.chunked_cross_entropy.chunk_tokens=7"


@pytest.mark.parametrize("more", [(), (CHUNKED,)])
def test_every_text_counts_alike(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]], more: tuple[str, ...]
) -> None:
    """Compare loss and gradients with logits of the same rows, weighed by hand."""
    build = make_tiny("techniques.example_loss={}", *PACKED, *more)
    plain = make_tiny(*PACKED)
    micros = batch(build)
    for micro in micros:
        micro.targets_BT[:, ::3] = IGNORED
    means = []
    for micro in micros:
        work = plain.place(plain, micro)
        assert work.rows.segments_BT is not None
        logits_BTV = plain.model.logits(work.ids_BT, work.rows).float()
        for row, segments_T in enumerate(work.rows.segments_BT):
            for number in segments_T.unique():
                own = segments_T == number
                targets = micro.targets_BT[row][own]
                if (targets != IGNORED).any():
                    given = logits_BTV[row][own], targets
                    means.append(cross_entropy(*given, ignore_index=IGNORED))
    wanted = torch.stack(means).mean()
    wanted.backward()
    gradients: dict[str, torch.Tensor] = {}

    def keep(build: Build, *_: torch.Tensor) -> bool:
        named = build.model.named_parameters()
        gradients.update({name: p.grad.clone() for name, p in named if p.grad is not None})
        return True

    assert len(means) > 10
    loss = float(step(build, micros, 0, keep)[0])
    assert loss == pytest.approx(float(wanted.detach()), rel=1e-5)
    for name, parameter in plain.model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
    by_target = float(step(make_tiny(*PACKED), micros, 0)[0])
    assert abs(by_target - loss) > 1e-4
    (technique,) = [t for t in build.techniques if t.name() == "example_loss"]
    evidence = technique.active(build)
    assert evidence.active and evidence.numbers["largest_weight"] > 1


def test_rows_that_are_cut_keep_their_texts(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    """Texts of a row that was cut have the numbers of the whole row, beyond the cut row's tokens.

    Each part of a text that a cut divides counts as a text.
    """
    short = "techniques.sequence_length_schedule.start=8"
    build = make_tiny("techniques.example_loss={}", *PACKED, short)
    micro = batch(build)[0]
    of_two_T = torch.arange(128, dtype=torch.int32).div(2, rounding_mode="floor")
    cut_micro = cut(replace(micro, segments_BT=of_two_T.expand(micro.ids_BT.shape).clone()), 8)
    work = build.place(build, cut_micro)
    assert work.rows.segments_BT is not None and work.rows.segments_BT.max() > 8
    counted = work.targets_BT != IGNORED
    pairs = counted.view(-1, 2).sum(dim=1, keepdim=True).clamp(min=1)
    wanted = (counted.view(-1, 2) / pairs).view_as(counted)
    assert torch.equal(shares(work), wanted)
