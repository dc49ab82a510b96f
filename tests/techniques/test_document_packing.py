"""Packed documents: every token's loss is that of its document in a row of its own."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from headrace.assemble.sockets import Build, place
from headrace.data.loader import collate
from headrace.data.rows import Row
from headrace.model.mask import Rows

LENGTH = 16
STARTS = ([3, 4, 11], [], [0, 1], [LENGTH - 1, LENGTH])


def test_every_tokens_loss_is_its_documents(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny("techniques.document_packing={}")
    model, random = build.model, np.random.default_rng(0)
    rows = [
        Row(random.integers(0, build.config.vocab, LENGTH + 1), np.array(begins, dtype=np.int64))
        for begins in STARTS
    ]
    work = place(build, collate(rows, segments=True))
    with torch.no_grad():
        packed = model.logits(work.ids_BT, work.rows)
        for row, logits_TV in zip(rows, packed, strict=True):
            ids, targets = torch.from_numpy(row.ids[:-1]), torch.from_numpy(row.ids[1:])
            inner = [int(s) for s in row.starts if 0 < s < LENGTH]
            for begin, end in zip([0, *inner], [*inner, LENGTH], strict=True):
                own = ids[None, begin:end]
                alone = model.logits(own, Rows(torch.arange(end - begin)[None]))[0]
                found = F.cross_entropy(logits_TV[begin:end], targets[begin:end], reduction="none")
                right = F.cross_entropy(alone, targets[begin:end], reduction="none")
                torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def test_the_runs_own_rows_carry_documents(make_tiny: Callable[..., Build]) -> None:
    """Each document token begins a segment and restarts the positions."""
    build = make_tiny("techniques.document_packing={}")
    token = build.prepared.tokenizer.document_token
    found = 0
    for step in range(40):
        for micro in build.loader.step(step).micros:
            assert micro.segments_BT is not None and micro.positions_BT is not None
            begins = micro.ids_BT[:, 1:] == token
            found += int(begins.sum())
            assert (micro.segments_BT.diff(dim=1) == begins.int()).all()
            assert ((micro.positions_BT[:, 1:] == 0) == begins).all()
    assert found > 0


@pytest.mark.parametrize("seed", [1, 3])
def test_evidence_beside_prefixes_that_show_every_target(
    make_tiny: Callable[..., Build], seed: int
) -> None:
    build = make_tiny(
        "techniques.document_packing={}",
        "techniques.prefix_lm.tokens=15",
        "batch.micro_sequences=1",
        f"seed={seed}",
    )
    (technique,) = (t for t in build.techniques if t.name() == "document_packing")
    assert technique.active(build).active
    build.model.mask = replace(build.model.mask, document=False)
    assert not technique.active(build).active


@pytest.mark.parametrize("seed", [0, 7, 16])
def test_its_evidence_stands_beside_experts(make_tiny: Callable[..., Build], seed: int) -> None:
    """They multiply all documents' tokens together: another document may round a sum otherwise."""
    build = make_tiny(
        f"seed={seed}",
        "techniques.document_packing={}",
        "techniques.mixture_of_experts.experts=5",
        "techniques.mixture_of_experts.expert_ffn=7",
        "data.sequence_length=9",
        "batch.tokens=9",
    )
    evidence = build.plan.techniques["document_packing"].active(build)
    assert evidence.active, evidence.detail
