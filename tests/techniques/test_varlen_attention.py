"""Cumulative lengths are the one mask definition's; results are SDPA's, on a GPU bit by bit alone.

On a CPU torch's kernel is stood in for by a loop over the documents, which is as slow as it is
plain: what is laid end to end, padded, rounded up and told of the window is ours all the same.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pieces
import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from headrace.core.errors import RunError, UnsupportedError
from headrace.core.model_config import ModelConfig
from headrace.model.attention import Sdpa
from headrace.model.mask import MaskSpec, Rows, allowed
from headrace.plan.plan import Plan
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.attention import varlen_attention
from headrace.techniques.attention.varlen_attention import (
    Sequences,
    VarlenAttention,
    VarlenBackend,
    cumulative_lengths,
    window_of,
)

PLAN = Plan.model_validate({"goal": {"steps": 1}})
GPU = pieces.h200()
B = 3
qkv = partial(pieces.qkv, rows=B)
SPECS = {
    "causal": MaskSpec(),
    "document": MaskSpec(document=True),
    "window": MaskSpec(window=5),
    "window of one": MaskSpec(window=1),
    "document and window": MaskSpec(document=True, window=4),
    "documents both ways": MaskSpec(causal=False, document=True),
    "window both ways": MaskSpec(causal=False, window=3, document=True),
}
LENGTHS = (1, 2, 13, 130)


def rows_of(length: int, device: str = "cpu") -> Rows:
    """Make documents anywhere: one at a row's first token, a row of one, single tokens."""
    places = torch.arange(length).expand(B, -1)
    cuts = torch.tensor([[0, length // 3, length // 2], [length] * 3, [1, length - 2, length - 1]])
    segments = (places[:, :, None] >= cuts[:, None, :]).sum(-1).int()
    return Rows(places.to(device), segments.to(device))


def by_brute_force(segments: list[list[int]]) -> list[int]:
    """Walk over all tokens: a new row or another segment begins a document."""
    starts, token = [], 0
    for row in segments:
        for place, segment in enumerate(row):
            if place == 0 or segment != row[place - 1]:
                starts.append(token)
            token += 1
    return [*starts, token]


@pytest.mark.parametrize(
    "segments",
    [
        [[0]],
        [[0, 0, 0], [0, 0, 0]],  # the same index on both sides of a row's end
        [[0, 1, 2, 3]],
        [[1, 1, 1, 2], [0, 1, 1, 1]],  # one that begins at its row's first token
        [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 2]],
    ],
)
def test_cumulative_lengths(segments: list[list[int]]) -> None:
    found = cumulative_lengths(torch.tensor(segments, dtype=torch.int32))
    assert found.dtype == torch.int32
    assert found.tolist() == by_brute_force(segments)


@pytest.mark.parametrize("seed", range(20))
def test_cumulative_lengths_of_random_rows(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rows, length = (int(torch.randint(1, most, (), generator=draw)) for most in (5, 40))
    segments = (torch.rand(rows, length, generator=draw) < 0.2).cumsum(1)
    starts = cumulative_lengths(segments)
    assert starts.tolist() == by_brute_force(segments.tolist())
    document = torch.searchsorted(starts, torch.arange(rows * length), right=True)
    same = document[:, None] == document[None, :]
    right = allowed(MaskSpec(causal=False, document=True), Rows(segments, segments), length)
    for row in range(rows):
        part = slice(row * length, (row + 1) * length)
        assert same[part, part].equal(right[row, 0]) and same[part].sum() == right[row].sum()


def looped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """Compute what torch.nn.attention.varlen.varlen_attn promises, document by document."""
    assert starts_q is starts_k and longest_q == longest_k >= 2
    assert starts_q.dtype == torch.int32 and starts_q[-1] == len(query)
    assert query.size(-1) % 8 == 0
    left, right = (reach if reach >= 0 else len(query) for reach in window_size)
    parts = []
    for begin, end in zip(starts_q[:-1].tolist(), starts_q[1:].tolist(), strict=True):
        assert end - begin <= longest_q
        q, k, v = (x[begin:end] for x in (query, key, value))
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
        place = torch.arange(end - begin)
        behind = place[:, None] - place[None, :]
        scores = torch.einsum("qhk,shk->hqs", q, k) * scale
        scores = scores.masked_fill((behind > left) | (-behind > right), float("-inf"))
        parts.append(torch.einsum("hqs,shk->qhk", scores.softmax(-1), v))
    return torch.cat(parts)


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", looped)


def results(backend: Any, spec: MaskSpec, rows: Rows, given: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of queries, keys and values."""
    given = [x.detach().requires_grad_() for x in given]
    length, width = given[0].size(1), given[0].size(3)
    out = backend(*given, backend.prepare(spec, rows, length))
    weigh = torch.linspace(-1, 1, length * width, device=out.device).view(length, 1, width)
    return [out, *torch.autograd.grad((out * weigh.to(out.dtype)).sum(), given)]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("width", [8, 6])
def test_equals_the_dense_mask(spec: MaskSpec, length: int, width: int, on_a_cpu: None) -> None:
    rows = rows_of(length)
    found = results(VarlenBackend(), spec, rows, qkv(length, width))
    wanted = results(Sdpa(), spec, rows, qkv(length, width))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_rows_without_documents_are_its_sequences(on_a_cpu: None) -> None:
    backend, spec = VarlenBackend(), MaskSpec(document=True)
    mask = backend.prepare(spec, Rows(torch.arange(13)[None]), 13)  # one row of places serves all
    assert mask.starts_S1 is None
    torch.testing.assert_close(backend(*qkv(13), mask), Sdpa()(*qkv(13), None))


def test_shapes_grow_only_and_change_nothing(on_a_cpu: None) -> None:
    backend, spec = VarlenBackend(), MaskSpec(document=True)
    places = torch.arange(15).expand(B, -1)
    five = Rows(places, (places >= torch.tensor([[3], [9], [15]])).int())
    seen = [backend.prepare(spec, rows, 15) for rows in (five, Rows(places, places), five)]
    shapes = [(len(mask.starts_S1) - 1, mask.longest) for mask in seen]  # type: ignore[arg-type]
    assert shapes == [(8, 15), (64, 15), (64, 15)]
    assert backend.starts_S1 is not None and len(backend.starts_S1) - 1 == 5
    assert backend(*qkv(15), seen[0]).equal(backend(*qkv(15), seen[2]))


def test_a_query_over_a_cache_sees_all_of_it() -> None:
    q, k, v = qkv(13)
    found = VarlenBackend()(q[:, -1:], k, v, None)
    torch.testing.assert_close(found, Sdpa()(q[:, -1:], k, v, None))


def test_half_precision_follows_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotated queries and keys come in fp32 under autocast, which torch's operation ignores."""
    seen = []

    def look(q: Tensor, k: Tensor, v: Tensor, *args: Any, **how: Any) -> Tensor:
        seen.extend([q.dtype, k.dtype, v.dtype])
        return q

    monkeypatch.setattr(varlen, "varlen_attn", look)
    q, k, v = qkv(5)
    VarlenBackend()(q, k, v.bfloat16(), Sequences(None, 5, (-1, 0)))
    assert seen == [torch.bfloat16] * 3


def test_one_graph_holds_it() -> None:
    """Check that torch.compile traces it whole; tensors without storage stand in for a GPU's."""
    backend = VarlenBackend()
    compiled = torch.compile(backend.__call__, backend="eager", fullgraph=True, dynamic=False)
    q, k, v = (x.to("meta") for x in qkv(12))
    starts = torch.zeros(9, dtype=torch.int32, device="meta")
    for mask in (Sequences(starts, 8, (-1, 0)), Sequences(None, 12, (3, 0))):
        assert compiled(q, k, v, mask).shape == q.shape


def test_refuses_a_mask_that_the_kernel_lacks() -> None:
    assert window_of(MaskSpec(document=True)) == (-1, 0)
    with pytest.raises(UnsupportedError, match="no mask"):
        VarlenBackend().prepare(MaskSpec(prefix=True), rows_of(4), 4)


def test_too_many_documents_are_an_error() -> None:
    segments = torch.arange(varlen_attention.MOST_DOCUMENTS + 1)[None]
    for rows, remedy in ((1, "--without varlen_attention"), (3, "batch.micro_sequences=1")):
        ids_BT = segments.view(1, -1).expand(rows, -1)
        with pytest.raises(RunError, match="takes 65,535") as caught:
            VarlenBackend().prepare(MaskSpec(document=True), Rows(ids_BT, ids_BT), 65_536)
        assert caught.value.remedy.text == remedy, "one row cannot be halved"


def test_refuses_where_it_has_no_kernel() -> None:
    assert isinstance(VarlenAttention().supports(GPU), Supported)
    assert isinstance(VarlenAttention().supports(replace(GPU, precision="fp16")), Supported)
    wide = Plan.model_validate({"goal": {"steps": 1}, "model": {"head_dim": 264}})
    for how, says in (
        ({"device": "cpu"}, "not cpu"),
        ({"device": "mps"}, "not mps"),
        ({"capability": (7, 5)}, "Ampere"),
        ({"precision": "fp32"}, "half precision"),
        ({"plan": wide}, "have 264"),
    ):
        answer = VarlenAttention().supports(replace(GPU, **how))
        assert isinstance(answer, Unsupported) and says in answer.reason and answer.remedy.text


def test_its_evidence_is_the_operation_and_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in force before a forward pass, nor where the trunk attends or no kernel is launched."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    config = ModelConfig(dim=32, heads=4, kv_heads=2)
    names = [varlen_attention.OPERATION, "void pytorch_flash::flash_fwd_kernel<...>"]

    def launch(q: Tensor, *args: Any, **how: Any) -> Tensor:
        for name in names:
            with torch.profiler.record_function(name):
                pass
        return q

    def evidence(attend: Sdpa) -> Any:
        build: Any = SimpleNamespace(
            config=config,
            device=torch.device("cpu"),
            context=GPU,
            model=SimpleNamespace(attend=attend),
        )
        return VarlenAttention().active(build)

    monkeypatch.setattr(varlen, "varlen_attn", launch)
    assert not evidence(VarlenBackend()).active and not evidence(Sdpa()).active
    backend = VarlenBackend()
    backend.prepare(MaskSpec(document=True), rows_of(13), 13)
    found = evidence(backend)
    assert found.active and found.numbers == {"documents": 8.0, "longest_tokens": 13.0}
    names.pop()
    assert not evidence(backend).active


# --- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("length", [13, 200, 513])
@pytest.mark.parametrize("width", [8, 20, 64])
def test_the_kernel_equals_a_dense_reference(spec: MaskSpec, length: int, width: int) -> None:
    """Results are in bf16 within its rounding of the fp32 reference, forward and every gradient."""
    rows, given = rows_of(length, "cuda"), [x.bfloat16() for x in qkv(length, width, "cuda")]
    found = results(VarlenBackend(), spec, rows, given)
    wanted = results(Sdpa(), spec, rows, [x.float() for x in given])
    largest = max(float(right.norm()) for right in wanted)
    for one, right in zip(found, wanted, strict=True):
        if right.norm() < 1e-4 * largest:  # a window of one has gradients of values alone
            assert one.float().norm() < 1e-2 * largest
            continue
        off = (one.float() - right).norm() / right.norm()
        assert off < 0.02, f"off by {off}"


@pytest.fixture
def in_one_order() -> Iterator[None]:
    """Gradients of queries are added up in one order; otherwise runs differ in the last bit."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_document_does_not_feel_its_neighbours(
    changed: int, window: int | None, in_one_order: None
) -> None:
    """Outputs and gradients of other documents and other rows do not move by one bit."""
    length, spec = 300, MaskSpec(document=True, window=window)
    rows = rows_of(length, "cuda")
    assert rows.segments_BT is not None
    mine = torch.zeros(B, length, dtype=torch.bool, device="cuda")
    mine[0] = rows.segments_BT[0] == rows.segments_BT[0].unique()[changed]
    given = [x.bfloat16() for x in qkv(length, 64, "cuda")]
    other = [torch.where(mine[:, :, None, None], x + 1, x) for x in given]
    backend = VarlenBackend()
    before, after = (results(backend, spec, rows, x) for x in (given, other))
    for one, two in zip(before, after, strict=True):
        assert one[~mine].equal(two[~mine]) and not one[mine].equal(two[mine])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_empty_documents_change_no_bit(in_one_order: None) -> None:
    spec, rows = MaskSpec(document=True), rows_of(200, "cuda")
    given = [x.bfloat16() for x in qkv(200, 64, "cuda")]
    backend = VarlenBackend()
    before = results(backend, spec, rows, given)
    backend.room = 512
    assert all(a.equal(b) for a, b in zip(before, results(backend, spec, rows, given), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_query_over_a_cache_on_a_gpu() -> None:
    q, k, v = (x.bfloat16() for x in qkv(77, 64, "cuda"))
    found = VarlenBackend()(q[:, -1:], k, v, None)
    right = Sdpa()(q.float(), k.float(), v.float(), None)[:, -1:]
    torch.testing.assert_close(found.float(), right, rtol=0.02, atol=0.02)
