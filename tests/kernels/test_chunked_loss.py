"""The chunked loss equals its plain reference: loss and both gradients, whatever the chunk."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.chunked_loss import (
    Loss,
    chunked_loss,
    has_native,
    native_loss,
    reference_loss,
)
from headrace.kernels.fused_cross_entropy import loss_and_gradient_

N, D, V = 23, 7, 31
CHUNKS = (1, 5, 22, 23, 24, 1000)


def nll(logits_nV: Tensor, targets_n: Tensor, extras: Any) -> Tensor:
    """Compute cross-entropy that ignores some targets."""
    return F.cross_entropy(logits_nV, targets_n, ignore_index=-100, reduction="sum")


def wide_nll(logits_nV: Tensor, targets_n: Tensor, extras: Any) -> Tensor:
    """Compute `nll` in fp32."""
    return nll(logits_nV.float(), targets_n, extras)


def with_z(logits_nV: Tensor, targets_n: Tensor, extras: Any) -> Tensor:
    """Compute cross-entropy and a term of the partition."""
    partition_n = logits_nV.logsumexp(-1)
    return nll(logits_nV, targets_n, extras) + 0.1 * partition_n.square()[targets_n >= 0].sum()


def distilled(logits_nV: Tensor, targets_n: Tensor, extras: Any) -> Tensor:
    """Compute cross-entropy with a teacher's probabilities in `extras`."""
    return -(extras["teacher"] * logits_nV.log_softmax(-1)).sum()


LOSSES: dict[str, Loss] = {"nll": nll, "with_z": with_z, "distilled": distilled}


def inputs(dtype: torch.dtype = torch.float32, *, ignored: bool = True) -> list[Any]:
    """Return hidden states, weight, targets and extras."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=draw).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=draw)
    if ignored:
        targets[[0, 1, 2, 3, 4, 11]] = -100  # a whole chunk of five, and one more
    return [hidden, weight, targets, {"teacher": torch.rand(N, V, generator=draw)}]


def compare(found: Tensor, right: Tensor, *, rtol: float) -> None:
    """Compare by the largest difference over the largest number."""
    assert found.dtype == right.dtype
    assert float((found - right).abs().max()) <= rtol * float(right.abs().max())


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", LOSSES)
def test_equals_the_reference(name: str, chunk: int) -> None:
    results = []
    for function in (reference_loss, lambda *a: chunked_loss(*a, chunk_tokens=chunk)):
        hidden, weight, targets, extras = inputs()
        loss = function(hidden, weight, targets, extras, LOSSES[name])
        (0.37 * loss).backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    for found, right in zip(results[1], results[0], strict=True):
        compare(found, right, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_gradient_is_autograds(dtype: torch.dtype) -> None:
    """`both` by the fused cross-entropy, ignored targets and a last chunk that is not full."""
    results = []
    for both in (None, loss_and_gradient_):
        hidden, weight, targets, _ = inputs(dtype)
        low = weight.detach().to(dtype).requires_grad_()
        loss = chunked_loss(hidden, low, targets, None, wide_nll, 5, scale=2.0, both=both)
        (0.37 * loss).backward()
        results.append((loss.detach(), hidden.grad, low.grad))
    for found, right in zip(results[1], results[0], strict=True):
        compare(found, right, rtol=1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("both", [None, loss_and_gradient_])
def test_a_scale_saves_small_gradients_in_fp16(both: Any) -> None:
    """A probability of 2e-8 rounds to nothing in fp16 unless it is scaled first."""
    hidden = torch.full((4, 2), 3.0, dtype=torch.float16, requires_grad=True)
    weight = torch.tensor([[3.0, 3.0], [0.0, 0.0]], dtype=torch.float16, requires_grad=True)
    scale = 2.0**14
    targets = torch.zeros(4, dtype=torch.long)
    total = chunked_loss(hidden, weight, targets, None, wide_nll, 3, scale=scale, both=both)
    total.backward()
    small = weight.grad[1].double() / scale  # type: ignore[index]
    right = 4 * 3.0 / (1 + math.exp(18.0))
    assert small.tolist() == pytest.approx([right, right], rel=0.01)


def test_all_targets_ignored_gives_zeros() -> None:
    hidden, weight, targets, _ = inputs()
    loss = chunked_loss(hidden, weight, torch.full_like(targets, -100), None, nll, 5)
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not weight.grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_without_gradients_it_is_the_same_sum(chunk: int) -> None:
    hidden, weight, targets, extras = inputs()
    with torch.no_grad():
        found = chunked_loss(hidden, weight, targets, extras, with_z, chunk)
        right = reference_loss(hidden, weight, targets, extras, with_z)
        scaled = chunked_loss(hidden, weight, targets, extras, with_z, chunk, scale=0.25)
    assert not found.requires_grad
    compare(found, right, rtol=1e-6)
    compare(scaled, 0.25 * right, rtol=1e-6)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    hidden, weight, targets, _ = inputs()
    still, moves = (hidden, weight) if frozen == "hidden" else (weight, hidden)
    still.requires_grad_(False)
    chunked_loss(hidden, weight, targets, None, nll, 5).backward()
    assert still.grad is None and moves.grad is not None and moves.grad.any()


def test_gradients_add_up_over_micro_batches() -> None:
    hidden, weight, targets, _ = inputs()
    for part in (slice(0, 9), slice(9, N)):
        chunked_loss(hidden[part], weight, targets[part], None, nll, 4).backward()
    found = weight.grad
    hidden, weight, targets, _ = inputs()
    reference_loss(hidden, weight, targets, None, nll).backward()
    assert found is not None and weight.grad is not None
    compare(found, weight.grad, rtol=1e-6)


def test_autocast_computes_in_bf16_as_the_reference_does() -> None:
    """The products are in bf16 in both; the chunked gradient of the weight adds up in fp32."""
    results = []
    for function in (reference_loss, lambda *a: chunked_loss(*a, chunk_tokens=5)):
        hidden, weight, targets, extras = inputs(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            loss = function(hidden, weight, targets, extras, nll)
        loss.backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    compare(results[1][0], results[0][0], rtol=1e-6)
    for found, right in zip(results[1][1:], results[0][1:], strict=True):
        compare(found, right, rtol=2**-7)


def test_the_weight_takes_the_gradient_without_a_copy_and_once() -> None:
    hidden, weight, targets, _ = inputs()
    loss = chunked_loss(hidden, weight, targets, None, nll, 5)
    made = loss.grad_fn.gradients[1].data_ptr()  # type: ignore[union-attr]
    loss.backward(retain_graph=True)
    assert weight.grad is not None and weight.grad.data_ptr() == made
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


def test_it_never_holds_more_than_a_chunk_of_logits() -> None:
    hidden, weight, targets, _ = inputs()
    held: list[int] = []

    def watched(logits_nV: Tensor, targets_n: Tensor, extras: Any) -> Tensor:
        held.append(len(logits_nV))
        return nll(logits_nV, targets_n, extras)

    chunked_loss(hidden, weight, targets, None, watched, 6).backward()
    assert held == [6, 6, 6, 5]


# --- torch's own ------------------------------------------------------------------------------


needs_native = pytest.mark.skipif(not has_native(), reason="torch 2.13 has it")


@needs_native
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_torchs_own_equals_the_reference(chunk: int, scale: float) -> None:
    results = []
    for native in (False, True):
        hidden, weight, targets, _ = inputs()
        if native:
            loss = native_loss(hidden, weight, targets, -100, chunk, scale=scale)
        else:
            loss = scale * reference_loss(hidden, weight, targets, None, nll)
        (0.37 * loss).backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    for found, right in zip(results[1], results[0], strict=True):
        compare(found, right, rtol=1e-6)


@needs_native
def test_torchs_own_ignores_all_targets_and_leaves_what_is_frozen() -> None:
    hidden, weight, targets, _ = inputs()
    weight.requires_grad_(False)
    loss = native_loss(hidden, weight, torch.full_like(targets, -100), -100, 5)
    loss.backward()
    assert loss == 0 and weight.grad is None and not hidden.grad.any()
    with torch.no_grad():
        found = native_loss(hidden, weight, targets, -100, 5)
    assert not found.requires_grad
    compare(found, reference_loss(hidden, weight, targets, None, nll).detach(), rtol=1e-6)


@needs_native
def test_torchs_own_rounds_the_sum_in_half_precision_so_it_is_for_fp32_alone() -> None:
    """Check that torch's loss returns bf16 for bf16; if it no longer does, allow it in bf16 too."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=draw, dtype=torch.bfloat16) for n in (600, 40))
    targets = torch.randint(0, 40, (600,), generator=draw)
    assert native_loss(hidden, weight, targets, -100, 100).dtype == torch.bfloat16
