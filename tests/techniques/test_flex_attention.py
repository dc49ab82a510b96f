"""FlexAttention's mask is the one definition's; its results are SDPA's, gradients on a GPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from headrace.core.technique import Context, Supported, Unsupported
from headrace.model.attention import Sdpa
from headrace.model.mask import MaskSpec, Rows, allowed
from headrace.techniques.attention.flex_attention import (
    FlexAttention,
    FlexBackend,
    mask_mod,
    masked_rows,
)

B, H, G, K = 2, 4, 2, 8
SPECS = {
    "causal": MaskSpec(),
    "document": MaskSpec(document=True),
    "window": MaskSpec(window=5),
    "window both ways": MaskSpec(causal=False, window=5),
    "prefix": MaskSpec(prefix=True),
    "everything": MaskSpec(document=True, window=40, prefix=True),
}
LENGTHS = (13, 128, 200)


def rows_of(length: int) -> Rows:
    """Rows with documents at different places and prefixes of different lengths."""
    places = torch.arange(length).expand(B, -1)
    cuts = torch.tensor([[length // 3, length // 2], [1, length - 1]])
    segments = (places[:, :, None] >= cuts[:, None, :]).sum(-1)
    return Rows(places, segments, torch.tensor([0, length // 4]))


def qkv(length: int, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, length, heads, K).to(device) for heads in (H, G, G)]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_mask_and_the_forward_pass_on_a_cpu(spec: MaskSpec, length: int) -> None:
    rows = rows_of(length)
    may_see = mask_mod(spec, rows)
    b, q, k = torch.meshgrid(*map(torch.arange, (B, length, length)), indexing="ij")
    right = allowed(spec, rows, length).squeeze(1).expand(B, -1, -1)
    assert may_see(b, torch.zeros_like(b), q, k).equal(right)
    blocks = create_block_mask(may_see, masked_rows(spec, rows), None, length, length, device="cpu")
    query, key, value = (x.transpose(1, 2) for x in qkv(length))
    found = flex_attention(query, key, value, block_mask=blocks, enable_gqa=True)
    sdpa = Sdpa()
    wanted = sdpa(*qkv(length), sdpa.prepare(spec, rows, length))
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found.transpose(1, 2), wanted, rtol=1e-5, atol=1e-5)


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
    gpu = Context(
        plan=None, device="cuda", device_name="NVIDIA H200", capability=(9, 0), torch=(2, 13),
        has_triton=True, has_compiler=True, ranks=1, precision="bf16",
    )  # fmt: skip
    assert isinstance(FlexAttention().supports(gpu), Supported)
    for how, says in (
        ({"device": "cpu"}, "backward"),
        ({"device": "mps"}, "backward"),
        ({"capability": (7, 5)}, "Ampere"),
        ({"has_triton": False}, "Triton"),
    ):
        answer = FlexAttention().supports(replace(gpu, **how))
        assert isinstance(answer, Unsupported) and says in answer.reason and answer.remedy


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("length", [13, 200, 512])
def test_the_kernel_equals_sdpa(spec: MaskSpec, length: int) -> None:
    """In bf16 within its rounding of the fp32 reference, forward and every gradient."""
    rows = Rows(*(x if x is None else x.cuda() for x in rows_of(length)))
    seen = []
    for backend, dtype in ((FlexBackend(), torch.bfloat16), (Sdpa(), torch.float32)):
        given = [x.bfloat16().to(dtype).requires_grad_() for x in qkv(length, "cuda")]
        out = backend(*given, backend.prepare(spec, rows, length))
        weigh = torch.linspace(-1, 1, K, device="cuda").to(dtype)
        seen.append([out, *torch.autograd.grad((out * weigh).sum(), given)])
    for found, right in zip(*seen, strict=True):
        off = (found.float() - right).norm() / right.norm()
        assert off < 0.02, f"off by {off}"
