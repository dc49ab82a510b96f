"""Predict a mixture of experts on ranks that share rows: its work, and who may divide experts."""

import pytest
import torch
from test_ranks_predicted import ledger_of, plan_of, seen

from headrace.assemble.context import make_context
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError
from headrace.costs.work import Collective, Matmul
from headrace.plan.changes import changed
from headrace.predict.layouts import groups

ROWS = ("batch.micro_sequences=4", "model.kv_heads=2")
"""Micro-batches of as many rows on every mesh, and heads that two ranks share."""


@pytest.mark.parametrize("technique", ["context_parallel", "ulysses"])
def test_ranks_that_share_rows_have_their_part_of_a_mixtures_work(technique: str) -> None:
    more = ("techniques.mixture_of_experts.experts=6", *ROWS)
    whole = plan_of("160m", *more, with_=("mixture_of_experts",))
    parts = changed(whole, ("mesh.context=2", f"+{technique}"), catalogue())
    one, two = (ledger_of(plan) for plan in (whole, parts))
    for name, piece in one.work.items():
        if isinstance(piece, Matmul) and name.startswith(("experts.", "router")):
            cut = two.work[name]
            assert isinstance(cut, Matmul) and cut.count == piece.count, name
            assert cut.flops == pytest.approx(piece.flops / 2), name
    assert two.work["experts_read/backward"] == one.work["experts_read/backward"]
    assert two.memory["0/routed"].bytes == one.memory["0/routed"].bytes / 2
    told = two.work["router/choices"]
    assert isinstance(told, Collective) and told.operation == "all_reduce"
    assert told.bytes == 8 * 6 * one.sizes["rows"] and told.count == one.sizes["layers"]
    assert "router/choices" not in one.work and seen(parts).time.step_s


def test_ranks_that_share_rows_may_divide_experts() -> None:
    known = catalogue()
    parts = plan_of(
        "160m", "mesh.context=4", with_=("mixture_of_experts", "fsdp", "context_parallel")
    )
    assert [*groups(parts, known, near=False)] == [
        ("mesh.expert=2", "+expert_parallel"),
        ("mesh.expert=4", "+expert_parallel"),
    ]
    divided = changed(parts, ("mesh.expert=4", "+expert_parallel"), known)
    assert seen(divided).time.step_s, seen(divided).time.unknown
    undone = make_context(divided, torch.device("cpu")).whole("context")
    (words,) = undone.changes
    assert "mesh.expert=1" in words and "-expert_parallel" in words
    assert changed(divided, words, known).mesh.ranks == 1
    with pytest.raises(ConfigError, match=r"4 ranks of mesh\.data x mesh\.context") as refused:
        changed(parts, ("mesh.expert=3", "+expert_parallel"), known)
    assert "mesh.expert=4" in str(refused.value) or "mesh.expert=2" in str(refused.value)
