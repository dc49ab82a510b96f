"""Best-fit packing: an epoch's loss is that of its documents alone; evidence sees what lacks."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.assemble.sockets import Build, place
from headrace.data.loader import collate
from headrace.data.packing.best_fit import BestFit
from headrace.data.rows import Cut
from headrace.model.head import IGNORED
from headrace.model.mask import Rows

LENGTH = 200
ON = ("techniques.best_fit_packing={}", f"data.sequence_length={LENGTH}", f"batch.tokens={LENGTH}")


def summed(logits: Tensor, targets: Tensor) -> float:
    return float(
        F.cross_entropy(
            logits.flatten(0, -2).double(),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
    )


@torch.no_grad()
def test_an_epochs_loss_is_that_of_its_documents_alone(make_tiny: Callable[..., Build]) -> None:
    """Each document stands alone in rows that the packer had no part in."""
    build = make_tiny(*ON)
    packer, model = build.loader.packer, build.model
    assert isinstance(packer, BestFit)
    packed = 0.0
    for unit in range(packer.units[0]):
        work = place(build, collate([packer.row(0, unit)], segments=True))
        packed += summed(model.logits(work.ids_BT, work.rows), work.targets_BT)
    (part,) = build.prepared.train
    token, alone, pieces = part.manifest.document_token, 0.0, 0
    bounds = [*part.document_starts(0, part.tokens).tolist(), part.tokens]
    for begin, end in pairwise(bounds):
        stream = torch.from_numpy(part.read(begin, end - begin))
        after = torch.cat([stream[1:], stream.new_tensor([token])])
        for ids, targets in zip(stream.split(LENGTH), after.split(LENGTH), strict=True):
            alone += summed(model.logits(ids[None], Rows(torch.arange(len(ids))[None])), targets)
            pieces += 1
    assert packed == pytest.approx(alone, rel=1e-6)
    assert packer.units[0] < pieces, "several documents share a row"


def test_evidence_tells_rows_and_padding_and_what_lacks(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny(*ON)
    technique = build.plan.techniques["best_fit_packing"]
    packer = build.loader.packer
    assert isinstance(packer, BestFit)
    evidence = technique.active(build)
    assert evidence.active, evidence.detail
    inputs = packer.units[0] * LENGTH
    real = build.prepared.train[0].tokens
    assert evidence.numbers["padding_fraction"] == pytest.approx((inputs - real) / inputs)
    wasted = sum(
        int((row.targets == IGNORED).sum())
        for unit in range(packer.units[0])
        if (row := packer.row(0, unit)).targets is not None
    )
    assert wasted == inputs - real
    build.loader.packer = Cut(packer.shards, LENGTH)
    assert not technique.active(build).active
    build.loader.packer = packer
    build.model.mask = replace(build.model.mask, document=False)
    assert not technique.active(build).active
