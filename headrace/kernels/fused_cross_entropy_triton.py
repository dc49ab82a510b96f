"""This module holds the Triton kernels of fused_cross_entropy.py; the first to run imports it.

Shapes: N tokens, V vocabulary; a program does one token, BLOCK logits at a time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.launches import on_device_of

BLOCK = 4096
"""Logits that a program reads at once: 16 for each thread of 8 warps, 32 bytes in bf16."""
WARPS = 8
"""Warps of a program, 32 threads each."""


@triton.jit
def capped(x, softcap):
    """Return softcap x tanh(x / softcap)."""
    return softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)


@triton.jit
def cross_entropy_forward(
    logits_ptr,
    stride,
    targets_ptr,
    losses_ptr,
    norms_ptr,
    ignored,
    softcap,
    z_loss,
    smoothing,
    each,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one token's loss, largest logit, rest of its log-sum-exp, and what smoothing added."""
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + token)
    if target == ignored:
        tl.store(losses_ptr + token, 0.0)
        tl.store(norms_ptr + 3 * token, 0.0)
        tl.store(norms_ptr + 3 * token + 1, 0.0)
        tl.store(norms_ptr + 3 * token + 2, 0.0)
        return
    row_ptr = logits_ptr + token * stride
    most = -float("inf")
    total = 0.0
    plain = 0.0
    for start in range(0, VOCAB, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < VOCAB
        x = tl.load(row_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if CAPPED:
            x = capped(x, softcap)
        if SMOOTHED:
            plain += tl.sum(tl.where(inside, x, 0.0))
        x = tl.where(inside, x, -float("inf"))
        larger = tl.maximum(most, tl.max(x))
        total = total * tl.exp(most - larger) + tl.sum(tl.exp(x - larger))
        most = larger
    rest = tl.log(total)
    norm = most + rest
    # A target outside of the vocabulary makes the loss NaN.
    known = (target >= 0) & (target < VOCAB)
    picked = tl.load(row_ptr + target, mask=known, other=float("nan")).to(tl.float32)
    if CAPPED:
        picked = capped(picked, softcap)
    moved = 0.0
    if SMOOTHED:
        moved = smoothing * picked - each * plain
    tl.store(losses_ptr + token, most - picked + rest + z_loss * norm * norm + moved)
    # Apart, because their sum would lose the digits of large logits.
    tl.store(norms_ptr + 3 * token, most)
    tl.store(norms_ptr + 3 * token + 1, rest)
    tl.store(norms_ptr + 3 * token + 2, moved)


@triton.jit
def cross_entropy_backward(
    out_ptr,
    out_stride,
    logits_ptr,
    stride,
    targets_ptr,
    norms_ptr,
    grads_ptr,
    ignored,
    softcap,
    z_loss,
    smoothing,
    each,
    CAPPED: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient of one token's logits."""
    # Where out is logits every number is read and written by the same thread.
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + token)
    counts = target != ignored
    row_ptr = logits_ptr + token * stride
    most = tl.load(norms_ptr + 3 * token)
    rest = tl.load(norms_ptr + 3 * token + 1)
    grad = tl.load(grads_ptr + token)
    for start in range(0, VOCAB, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < VOCAB
        x = tl.load(row_ptr + place, mask=inside & counts, other=0.0).to(tl.float32)
        if CAPPED:
            bend = 2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0
            x = softcap * bend
        slope = tl.exp(x - most - rest) * (1.0 + 2.0 * z_loss * (most + rest)) - each
        slope -= tl.where(place == target, 1.0 - smoothing, 0.0)
        if CAPPED:
            slope *= 1.0 - bend * bend  # pyright: ignore
        slope = tl.where(counts, grad * slope, 0.0)
        out = out_ptr + token * out_stride + place
        tl.store(out, slope.to(out_ptr.dtype.element_ty), mask=inside)


def forward(
    logits_NV: Tensor,
    targets_N: Tensor,
    ignored: int,
    softcap: float,
    z_loss: float,
    smoothing: float,
    entries: int,
) -> tuple[Tensor, Tensor]:
    """Return losses [N], and [N, 3]: largest logit, rest of log-sum-exp, smoothing's part; fp32."""
    tokens, vocab = logits_NV.shape
    losses_N = torch.empty(tokens, device=logits_NV.device)
    norms_N3 = torch.empty(tokens, 3, device=logits_NV.device)
    launch: Any = cross_entropy_forward[(tokens,)]
    with on_device_of(logits_NV):
        launch(
            logits_NV,
            logits_NV.stride(0),
            targets_N.contiguous(),
            losses_N,
            norms_N3,
            ignored,
            softcap,
            z_loss,
            smoothing,
            smoothing / entries,
            CAPPED=softcap != 0,
            SMOOTHED=smoothing != 0,
            VOCAB=vocab,
            BLOCK=_block(vocab),
            num_warps=WARPS,
        )
    return losses_N, norms_N3


def backward(
    out_NV: Tensor,
    logits_NV: Tensor,
    targets_N: Tensor,
    norms_N3: Tensor,
    grad_N: Tensor,
    ignored: int,
    softcap: float,
    z_loss: float,
    smoothing: float,
    entries: int,
) -> None:
    """Write the gradient of logits into `out_NV`, which may be the logits."""
    tokens, vocab = logits_NV.shape
    launch: Any = cross_entropy_backward[(tokens,)]
    with on_device_of(logits_NV):
        launch(
            out_NV,
            out_NV.stride(0),
            logits_NV,
            logits_NV.stride(0),
            targets_N.contiguous(),
            norms_N3,
            grad_N,
            ignored,
            softcap,
            z_loss,
            smoothing,
            smoothing / entries,
            CAPPED=softcap != 0,
            VOCAB=vocab,
            BLOCK=_block(vocab),
            num_warps=WARPS,
        )


def _block(vocab: int) -> int:
    return min(BLOCK, 1 << (vocab - 1).bit_length())
