"""FlexAttention's mask and scores are the one definition's; its results SDPA's, all on a GPU."""

from dataclasses import replace

import pytest
import torch
from pieces import h200, qkv
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from headrace.model.attention import Sdpa
from headrace.model.mask import BlockPattern, MaskSpec, Rows, allowed, bias
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.attention.flex_attention import (
    FlexAttention,
    FlexBackend,
    Scored,
    mask_mod,
    masked_rows,
    score_mod,
)

B, H, K = 2, 4, 8  # of qkv
SPECS = {
    "causal": MaskSpec(),
    "document": MaskSpec(document=True),
    "window": MaskSpec(window=5),
    "window both ways": MaskSpec(causal=False, window=5),
    "prefix": MaskSpec(prefix=True),
    "everything": MaskSpec(document=True, window=40, prefix=True),
    "blocks": MaskSpec(blocks=BlockPattern(16, random=1, first=1)),
    "blocks by document": MaskSpec(document=True, blocks=BlockPattern(5, stride=3)),
    "slopes": MaskSpec(alibi=H),
    "slopes of some heads": MaskSpec(alibi=2 * H, alibi_share=(1, 2)),
    "cap": MaskSpec(soft_cap=0.7),
    "all": MaskSpec(True, True, 90, True, BlockPattern(16, 2, 3), H, 0.7),
}
LENGTHS = (13, 128, 140)
QUICK = {*((name, 140) for name in SPECS), ("document", 13), ("document", 128), ("all", 13)}
"""Masks of rows that are no whole number of blocks, and a mask that knows nothing of the length."""


def rows_of(length: int) -> Rows:
    """Make rows with documents at different places and prefixes of different lengths."""
    places = torch.arange(length).expand(B, -1)
    cuts = torch.tensor([[length // 3, length // 2], [1, length - 1]])
    segments = (places[:, :, None] >= cuts[:, None, :]).sum(-1)
    return Rows(places, segments, torch.tensor([0, length // 4]))


@pytest.mark.parametrize(
    ("length", "spec"),
    [
        pytest.param(
            length,
            spec,
            id=f"{length}-{name}",
            marks=[pytest.mark.slow] * ((name, length) not in QUICK),
        )
        for length in LENGTHS
        for name, spec in SPECS.items()
    ],
)
def test_the_mask_and_the_forward_pass_on_a_cpu(spec: MaskSpec, length: int) -> None:
    rows = rows_of(length)
    may_see, change = mask_mod(spec, rows, length), score_mod(spec, torch.device("cpu"))
    b, q, k = torch.meshgrid(*map(torch.arange, (B, length, length)), indexing="ij")
    right = allowed(spec, rows, length).squeeze(1).expand(B, -1, -1)
    assert may_see(b, torch.zeros_like(b), q, k).equal(right)
    blocks = create_block_mask(may_see, masked_rows(spec, rows), None, length, length, device="cpu")
    query, key, value = (x.transpose(1, 2) for x in qkv(length))
    found = flex_attention(query, key, value, change, block_mask=blocks, enable_gqa=True)
    sdpa = Sdpa()
    wanted = sdpa(*qkv(length), sdpa.prepare(spec, rows, length))
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found.transpose(1, 2), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_change_of_a_score_is_the_definitions(spec: MaskSpec) -> None:
    change = score_mod(spec, torch.device("cpu"))
    assert (change is None) == (spec.alibi == 0 and spec.soft_cap == 0)
    if change is None:
        return
    h, q, k = torch.meshgrid(*map(torch.arange, (H, 9, 9)), indexing="ij")
    score = torch.linspace(-3, 3, h.numel()).view_as(h)
    right = spec.soft_cap * (score / spec.soft_cap).tanh() if spec.soft_cap else score
    right = right + (bias(spec, 9)[0] if spec.alibi else 0.0)
    torch.testing.assert_close(change(score, torch.zeros_like(h), h, q, k), right)


def test_blocks_that_the_pattern_leaves_out_are_not_visited() -> None:
    """In units of 128 tokens; blocks of 256 are two of them each way."""
    length, rows = 2048, Rows(torch.arange(2048)[None])
    for block in (128, 256):
        spec = MaskSpec(blocks=BlockPattern(block, 2, 0, 1, 1))
        assert spec.blocks is not None
        may_see = mask_mod(spec, rows, length)
        made = create_block_mask(may_see, None, None, length, length, device="cpu")
        seen = spec.blocks.seen(length // block).repeat_interleave(block // 128, 0)
        seen = seen.repeat_interleave(block // 128, 1).tril()
        assert made.to_dense()[0, 0].bool().equal(seen)
        assert float(made.sparsity()) == pytest.approx(100 * (1 - seen.float().mean().item()))
        assert seen.sum() < 0.8 * torch.ones_like(seen).tril().sum()


@pytest.mark.parametrize("spec", [SPECS["all"], SPECS["cap"], MaskSpec()], ids=["all", "cap", "no"])
def test_the_backend_hands_scores_on(spec: MaskSpec) -> None:
    """Uncompiled on a CPU: what `prepare` makes, also through a compiled caller."""
    backend, length = FlexBackend(), 200
    backend._blocks, backend._attend = create_block_mask, flex_attention  # type: ignore[assignment]
    rows = rows_of(length)
    mask, again = (backend.prepare(spec, rows, length) for _ in range(2))
    assert isinstance(mask, Scored) == (score_mod(spec, torch.device("cpu")) is not None)
    if isinstance(mask, Scored):
        assert mask.change is again.change
    wanted = Sdpa()(*qkv(length), Sdpa().prepare(spec, rows, length))
    torch.testing.assert_close(backend(*qkv(length), mask), wanted, rtol=1e-5, atol=1e-5)
    counter = CompileCounter()
    compiled = torch.compile(backend.__call__, backend=counter, fullgraph=True, dynamic=False)
    for given in (mask, again):
        torch.testing.assert_close(compiled(*qkv(length), given), wanted, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


def test_rows_share_a_mask_where_they_can() -> None:
    rows = rows_of(13)
    assert masked_rows(MaskSpec(window=3), rows) is None
    assert masked_rows(MaskSpec(document=True), rows) == B
    assert masked_rows(MaskSpec(prefix=True), rows) == B
    assert masked_rows(MaskSpec(document=True), Rows(rows.positions_BT)) is None


def test_a_query_over_a_cache_sees_all_of_it() -> None:
    q, k, v = qkv(13)
    found = FlexBackend()(q[:, -1:], k, v, None)
    torch.testing.assert_close(found, Sdpa()(q[:, -1:], k, v, None))


def test_refuses_where_it_cannot_train() -> None:
    gpu = h200()
    assert isinstance(FlexAttention().supports(gpu), Supported)
    for how, says in (
        ({"device": "cpu"}, "NVIDIA GPU"),
        ({"device": "mps"}, "NVIDIA GPU"),
        ({"capability": (7, 5)}, "Ampere"),
        ({"has_triton": False}, "Triton"),
    ):
        answer = FlexAttention().supports(replace(gpu, **how))
        assert isinstance(answer, Unsupported) and says in answer.reason and answer.remedy.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("length", [13, 200, 512])
def test_the_kernel_equals_sdpa(spec: MaskSpec, length: int) -> None:
    """Results are in bf16 within its rounding of the fp32 reference, forward and every gradient."""
    torch.compiler.reset()  # a run has one mask; dozens in one process reach the compiler's limit
    rows = Rows(*(x if x is None else x.cuda() for x in rows_of(length)))
    seen = []
    for backend, dtype in ((FlexBackend(), torch.bfloat16), (Sdpa(), torch.float32)):
        given = [x.bfloat16().to(dtype).requires_grad_() for x in qkv(length, device="cuda")]
        out = backend(*given, backend.prepare(spec, rows, length))
        weigh = torch.linspace(-1, 1, K, device="cuda").to(dtype)
        seen.append([out, *torch.autograd.grad((out * weigh).sum(), given)])
    for found, right in zip(*seen, strict=True):
        off = (found.float() - right).norm() / right.norm()
        assert off < 0.02, f"off by {off}"
