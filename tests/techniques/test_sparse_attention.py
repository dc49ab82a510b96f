"""A pattern of blocks is seen: who hears of whom, beside documents, in sampling, its density."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.inference.sample import generate
from headrace.model.mask import BlockPattern, MaskSpec, Rows, allowed
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.attention.sparse_attention import SparseAttention

KNOBS = {"block": 2, "local": 1, "stride": 3, "first": 1, "random": 1, "seed": 4}
ON = [f"techniques.sparse_attention.{key}={value}" for key, value in KNOBS.items()]
T = 13


def test_a_change_moves_those_that_see_it_and_no_other(make_tiny: Callable[..., Build]) -> None:
    """Look at one layer and its last query: exactly the tokens of the pattern's blocks move it."""
    build = make_tiny(*ON, "model.layers=1")
    assert build.mask == MaskSpec(blocks=BlockPattern(**KNOBS))
    rows, ids = Rows(torch.arange(T)[None]), torch.arange(T)[None]
    seen = allowed(build.mask, rows, T)[0, 0]
    assert 0.4 < seen.sum() / torch.ones(T, T).tril().sum() < 0.9
    with torch.no_grad():
        before = build.model.hidden(ids, rows)[0]
        for place in range(T):
            other = ids.clone()
            other[0, place] += 100
            moved = (build.model.hidden(other, rows)[0] != before).any(-1)
            assert moved.equal(seen[:, place])


def test_the_step_equals_a_dense_mask_by_hand(make_tiny: Callable[..., Build]) -> None:
    knobs = [f"techniques.sparse_attention.{k}={v}" for k, v in (KNOBS | {"random": 0}).items()]
    build, trunk = make_tiny(*knobs), make_tiny()
    rows, ids = Rows(torch.arange(T)[None]), torch.arange(T)[None]
    apart = torch.arange(T)[:, None] // 2 - torch.arange(T) // 2
    by_hand = (apart % 3 == 0) | (torch.arange(T) < 2)
    by_hand = by_hand & (torch.arange(T)[:, None] >= torch.arange(T))
    shared = trunk.model.share(rows, T)._replace(mask=by_hand[None, None])
    right, found = trunk.model.states(ids, shared), build.model.hidden(ids, rows)
    torch.testing.assert_close(found, right)
    weigh = torch.linspace(-1, 1, found.numel()).view_as(found)
    for states in (found, right):
        (states * weigh).sum().backward()
    for name, parameter in trunk.model.named_parameters():
        if parameter.grad is not None:
            other = build.model.get_parameter(name).grad
            torch.testing.assert_close(other, parameter.grad, rtol=1e-5, atol=1e-6)


def test_a_document_does_not_feel_its_neighbour(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny(*ON, "techniques.document_packing={}")
    ids, segments = torch.arange(T)[None], (torch.arange(T) >= 5).int()[None]
    rows = Rows(torch.arange(T)[None] - 5 * segments, segments)
    with torch.no_grad():
        before = build.model.hidden(ids, rows)
        after = build.model.hidden(ids.where(segments == 1, ids + 50), rows)
    assert before[:, 5:].equal(after[:, 5:]) and not before[:, :5].equal(after[:, :5])


def test_sampling_sees_the_pattern_too(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny(*ON)
    found = generate(build.model, torch.arange(5)[None], new_tokens=14, temperature=0)
    for end in range(5, 19):
        logits = build.model.logits(found[:, :end], Rows(torch.arange(end)[None]))
        assert int(logits[0, -1].argmax()) == int(found[0, end])


def test_evidence_counts_the_blocks_that_are_visited(make_tiny: Callable[..., Build]) -> None:
    technique, build = SparseAttention(**KNOBS), make_tiny(*ON)  # type: ignore[arg-type]
    evidence = technique.active(build)
    assert evidence.active
    assert evidence.numbers["density"] == pytest.approx(technique.pattern.density(16))
    assert 0.4 < evidence.numbers["density"] < 0.9
    window = make_tiny(*ON, "techniques.sliding_window.window=2")
    less = technique.active(window)  # beside another limit it visits fewer
    assert less.active and less.numbers["density"] < evidence.numbers["density"]
    for spec in (MaskSpec(), MaskSpec(blocks=BlockPattern(**KNOBS | {"seed": 5}))):
        build.model.mask = spec
        assert not technique.active(build).active


def test_a_pattern_that_leaves_nothing_out_is_refused(tiny_plan: Callable[..., Any]) -> None:
    context = make_context(tiny_plan(), torch.device("cpu"))
    assert isinstance(SparseAttention(block=2).supports(context), Supported)
    for technique in (SparseAttention(), SparseAttention(block=2, stride=1)):
        answer = technique.supports(context)
        assert isinstance(answer, Unsupported) and "rows of 16" in answer.reason
        keys = dict(part.split("=") for part in answer.remedy.changes[0])
        stride = int(keys.pop("techniques.sparse_attention.stride", technique.stride))
        mended = technique.model_copy(update={"stride": stride})
        (length,) = keys.values()
        longer = tiny_plan(f"data.sequence_length={length}", f"batch.tokens={length}")
        answer = mended.supports(make_context(longer, torch.device("cpu")))
        assert isinstance(answer, Supported)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flex_attention_skips_the_blocks_on_a_gpu(make_tiny: Callable[..., Build]) -> None:
    """What its block mask leaves out is what the pattern leaves out of the whole square."""
    build = make_tiny(
        "techniques.sparse_attention={}",
        "techniques.flex_attention={}",
        "device=cuda",
        "model.head_dim=16",
        "data.sequence_length=2048",
        "batch.tokens=2048",
    )
    technique = SparseAttention()
    assert technique.active(build).active
    blocks = build.model.attend.blocks  # type: ignore[attr-defined]
    visited = technique.pattern.seen(16).tril().float().mean().item()
    assert float(blocks.sparsity()) == pytest.approx(100 * (1 - visited), abs=0.1)
