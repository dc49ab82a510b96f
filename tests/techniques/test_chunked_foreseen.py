"""The chunked loss that a CPU runs is the one that is foreseen."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from headrace.assemble.build import make_ledger
from headrace.assemble.context import make_context
from headrace.cli.catalogue import catalogue
from headrace.costs.ledger import Ledger
from headrace.kernels.chunked_loss import has_native, native_loss
from headrace.plan.plan import Plan

TOKENS, CHUNK = 256, 128


def ledger_of(vocab: int, dim: int, **techniques: dict[str, Any]) -> Ledger:
    """Return the ledger of a plan in fp32 on a CPU, with the loss in chunks."""
    plan = Plan.model_validate(
        {
            "name": "tiny",
            "model": {"dim": dim, "layers": 1, "heads": 4, "vocab": vocab},
            "data": {"sources": ["made-up.txt"], "sequence_length": 64},
            "batch": {"tokens": TOKENS},
            "goal": {"steps": 1},
            "techniques": {"chunked_cross_entropy": {"chunk_tokens": CHUNK}, **techniques},
        },
        context={"catalogue": catalogue()},
    )
    return make_ledger(plan, make_context(plan, torch.device("cpu")))


def peak_bytes(vocab: int, dim: int) -> int:
    """Return the bytes that torch's own loss and its backward pass hold at most.

    By the allocator: a dispatch mode does not see what that operation holds inside.
    """
    hidden, weight = (torch.randn(n, dim, requires_grad=True) for n in (TOKENS, vocab))
    targets = torch.randint(0, vocab, (TOKENS,))

    def step() -> Tensor:
        return native_loss(hidden, weight, targets, -100, CHUNK, scale=0.5)

    step().backward()
    hidden.grad = weight.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step().backward()
    results: Any = seen.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.skipif(not has_native(), reason="torch 2.13 has it")
@pytest.mark.parametrize(("vocab", "dim"), [(8192, 48), (2048, 192)], ids=["wide", "deep"])
def test_torchs_own_is_foreseen_where_nobody_asks_for_it(vocab: int, dim: int) -> None:
    """A chunk of logits once, or the gradient that is scaled into another tensor."""
    memory = ledger_of(vocab, dim).memory
    foreseen = memory["logits"].bytes + memory["head_gradients"].bytes
    assert foreseen == pytest.approx(peak_bytes(vocab, dim), rel=0.03)


@pytest.mark.parametrize(
    "techniques",
    [{"label_smoothing": {}}, {"chunked_cross_entropy": {"chunk_tokens": CHUNK, "native": False}}],
    ids=["another objective", "refused"],
)
def test_autograds_is_foreseen_where_torchs_own_does_not_run(
    techniques: dict[str, dict[str, Any]],
) -> None:
    """Check that a chunk's logits stay as the leaf of its own backward pass."""
    ledger = ledger_of(8192, 48, **techniques)
    assert ledger.sizes["logits_leaf"] == 4 * 8192
    assert ledger.memory["logits"].bytes > 2 * 4 * CHUNK * 8192 - 1
