"""Blocks of attention: every kernel equals the reference, the reference equals autograd."""

import math

import pytest
import torch
from torch import Tensor

from headrace.kernels.block_attention import (
    Kernel,
    Mask,
    block_attention,
    block_attention_backward,
    kernel_for,
)

MASKS = ("full", "causal", "dense", "blind", "shared")
SHAPES = {  # B, H, G, t, s, K
    "grouped": (3, 6, 2, 7, 9, 16),
    "one group": (1, 4, 1, 37, 70, 8),
    "own heads": (2, 3, 3, 5, 5, 24),
    "two queries": (2, 2, 2, 2, 11, 32),
    "long": (1, 2, 1, 130, 200, 64),
}
GPU = pytest.mark.gpu
KERNELS = [
    ("flash_cpu", "cpu", torch.float32),
    ("flash_cpu", "cpu", torch.bfloat16),
    pytest.param("cudnn", "cuda", torch.bfloat16, marks=GPU),
    pytest.param("cudnn", "cuda", torch.float16, marks=GPU),
    pytest.param("flash", "cuda", torch.bfloat16, marks=GPU),
    pytest.param("flash", "cuda", torch.float16, marks=GPU),
    pytest.param("efficient", "cuda", torch.float32, marks=GPU),
    pytest.param("efficient", "cuda", torch.bfloat16, marks=GPU),
    pytest.param("efficient", "cuda", torch.float16, marks=GPU),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.004}
"""Differences over the largest number: in fp32 a dot product's rounding, else a few ulps."""


def tensors(
    shape: str, dtype: torch.dtype, device: str, *, square: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradient of the output, queries, keys and values, as slices of larger tensors."""
    B, H, G, t, s, K = SHAPES[shape]
    s = t if square else s
    draw = torch.Generator().manual_seed(len(shape))
    sizes = ((t, H), (t, H), (s, G), (s, G))
    made = (torch.randn(B, n + 3, heads, K, generator=draw)[:, 3:] for n, heads in sizes)
    do, q, k, v = (x.to(device, dtype).transpose(1, 2) for x in made)
    return do, q, k, v


def make_mask(kind: str, q: Tensor, k: Tensor) -> Mask:
    """Make a mask; "blind" has queries that see nothing, "shared" serves all rows."""
    if kind in ("full", "causal"):
        return kind  # type: ignore[return-value]
    draw = torch.Generator().manual_seed(5)
    rows = 1 if kind == "shared" else q.size(0)
    mask = torch.rand(rows, q.size(2), k.size(2), generator=draw) > 0.4
    mask[:, :, 0] = True
    if kind == "blind":
        mask[0, 0] = mask[-1, -1] = False
    return mask.to(q.device)


def close(found: Tensor, right: Tensor, limit: float) -> None:
    """Compare by the largest difference over the largest number; infinities are equal."""
    assert found.shape == right.shape and found.dtype == right.dtype
    assert torch.equal(found.isinf(), right.isinf()) and not found.isnan().any()
    found, right = found[~found.isinf()].float(), right[~right.isinf()].float()
    assert float((found - right).abs().max()) <= limit * float(right.abs().max())


def both(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask, kernel: Kernel | None
) -> list[Tensor]:
    """Return output, lse and gradients of attention over one block alone."""
    o, lse = block_attention(q, k, v, mask, kernel=kernel)
    return [o, lse, *block_attention_backward(do, q, k, v, o, lse, mask, kernel=kernel)]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_equals_autograd(shape: str, kind: str) -> None:
    do, q, k, v = tensors(shape, torch.float64, "cpu", square=kind == "causal")
    found = both(*(x.float() for x in (do, q, k, v)), make_mask(kind, q, k), "plain")
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    each = q.size(1) // k.size(1)
    wide = [x.repeat_interleave(each, 1) for x in (k, v)]
    scores = q @ wide[0].mT / math.sqrt(q.size(-1))
    mask = make_mask(kind, q, k)
    if kind == "causal":
        mask = torch.ones(1, q.size(2), k.size(2), dtype=torch.bool).tril()
    if isinstance(mask, Tensor):
        scores = scores.masked_fill(~mask[:, None], -math.inf)
    sees = scores.isfinite().any(-1, keepdim=True)
    o = scores.masked_fill(~sees, 0).softmax(-1).where(sees, 0) @ wide[1]
    o.backward(do)
    right = [o.detach(), scores.detach().logsumexp(-1), q.grad, k.grad, v.grad]
    for x, y in zip(found, right, strict=True):
        assert y is not None
        close(x, y.float(), 1e-5)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kernel", "device", "dtype"), KERNELS)
def test_a_kernel_equals_the_reference(
    kernel: Kernel, device: str, dtype: torch.dtype, shape: str, kind: str
) -> None:
    do, q, k, v = tensors(shape, dtype, device, square=kind == "causal")
    mask = make_mask(kind, q, k)
    chosen = kernel_for(q, k, mask)
    if kernel in ("cudnn", "flash") and isinstance(mask, Tensor):
        assert chosen == "efficient"
        return
    if kernel == "cudnn" and chosen != "cudnn":  # too old a GPU, or too short a block
        assert chosen == "flash"
        return
    assert chosen == kernel or device == "cuda"
    wide = [x.float() for x in (do, q, k, v)]
    right = both(*wide, mask, "plain")  # type: ignore[arg-type]
    for x, y in zip(both(do, q, k, v, mask, kernel), right, strict=True):
        close(x.float(), y, TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["full", "dense", "blind"])
@pytest.mark.parametrize(("kernel", "device", "dtype"), [("plain", "cpu", torch.float32), *KERNELS])
def test_a_block_takes_the_statistics_of_the_whole(
    kernel: Kernel, device: str, dtype: torch.dtype, kind: str
) -> None:
    """Gradients of two blocks of keys, from the merged output and lse, are the whole's."""
    do, q, k, v = tensors("long", dtype, device)
    mask = make_mask(kind, q, k)
    if kernel in ("cudnn", "flash") and isinstance(mask, Tensor):
        return
    o, lse, *right = both(*(x.float() for x in (do, q, k, v)), mask, "plain")  # type: ignore[arg-type]
    parts = []
    for keys in (slice(0, 90), slice(90, 200)):
        part = mask[:, :, keys] if isinstance(mask, Tensor) else mask
        parts.append(
            block_attention_backward(
                do, q, k[:, :, keys], v[:, :, keys], o.to(dtype), lse, part, kernel=kernel
            )
        )
    (dq, dk, dv), (dq2, dk2, dv2) = parts
    found = (dq + dq2, torch.cat((dk, dk2), 2), torch.cat((dv, dv2), 2))
    for x, y in zip(found, right, strict=True):
        close(x.float(), y, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("features", "dtype", "kind", "kernel"),
    [
        (64, torch.bfloat16, "full", "flash"),
        (64, torch.float16, "causal", "flash"),
        (64, torch.bfloat16, "dense", "efficient"),
        (64, torch.float32, "causal", "efficient"),
        (12, torch.float32, "dense", "efficient"),
        (12, torch.bfloat16, "full", "plain"),
        (512, torch.bfloat16, "full", "efficient"),
        (6, torch.float32, "full", "plain"),
        (64, torch.float64, "full", "plain"),
    ],
)
@pytest.mark.gpu
def test_the_rule_on_a_gpu(features: int, dtype: torch.dtype, kind: str, kernel: str) -> None:
    q = torch.randn(2, 2, 5, features, device="cuda").to(dtype)
    mask = make_mask(kind, q, q)
    assert kernel_for(q, q, mask) == kernel
    o, lse, *gradients = both(q, q, q, q, mask, None)
    for x in (o, lse, *gradients):
        assert x.isfinite().all()


def test_autocast_leaves_the_reference_in_fp32() -> None:
    do, q, k, v = tensors("long", torch.float32, "cpu")
    right = both(do, q, k, v, "full", "plain")
    with torch.autocast("cpu", torch.bfloat16):
        found = both(do, q, k, v, "full", "plain")
    for x, y in zip(found, right, strict=True):
        assert torch.equal(x, y)
