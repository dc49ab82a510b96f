"""The fused cross-entropy equals torch's own in fp32; on a CPU it runs in Triton's interpreter."""

from typing import Any

import pytest
import torch
from crosses import crossed
from torch import Tensor

from headrace.kernels.fused_cross_entropy import (
    fused_cross_entropy,
    loss_and_gradient_,
    reference_cross_entropy,
)
from headrace.kernels.launches import COUNTS

triton = pytest.importorskip("triton")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS: dict[str, dict[str, float]] = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "z_loss": {"z_loss": 0.1},
    "smoothed": {"label_smoothing": 0.2},
    "all": {"softcap": 3.0, "z_loss": 0.1, "label_smoothing": 0.2},
}
IGNORED = {"none": [], "some": [0, 3, 4, -1], "all": slice(None)}
WEIGHT = 0.37
"""What the loss is multiplied by, as a trainer's scale does."""


def given(
    tokens: int, vocab: int, dtype: torch.dtype, ignored: str = "some", device: str = DEVICE
) -> tuple[Tensor, Tensor]:
    """Draw logits as large as they come, and targets, one of them the last id."""
    draw = torch.Generator().manual_seed(tokens + vocab)
    logits = 4 * torch.randn(tokens, vocab, generator=draw)
    targets = torch.randint(0, vocab, (tokens,), generator=draw)
    targets[1] = vocab - 1
    targets[IGNORED[ignored]] = -100
    return logits.to(device, dtype), targets.to(device)


def wanted(logits: Tensor, targets: Tensor, **how: float) -> tuple[Tensor, Tensor]:
    """Return the reference's loss and gradient of these logits in fp64, rounded at the end.

    Torch's own smoothing adds up a share for each of the vocabulary: 2e-5 of 262,144 in fp32.
    """
    logits = logits.detach().double().clone().requires_grad_()
    loss = reference_cross_entropy(logits, targets, **how)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(WEIGHT * loss, logits)
    return loss.detach().float(), grad.float()


def found(
    logits: Tensor, targets: Tensor, function: Any = fused_cross_entropy, **how: Any
) -> tuple[Tensor, Tensor]:
    """Return our loss and gradient, behind an operation whose result nobody else reads."""
    leaf = logits.clone().requires_grad_()
    loss = function(leaf * 1, targets, **how)
    (grad,) = torch.autograd.grad(WEIGHT * loss, leaf)
    return loss.detach(), grad


def compare(ours: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """Losses are fp32; a gradient is rounded once to the logits' dtype."""
    assert ours[0].dtype == torch.float32 and ours[0].shape == ()
    assert ours[1].dtype == dtype
    torch.testing.assert_close(ours[0], right[0], rtol=2e-6, atol=1e-6)
    info = torch.finfo(dtype)
    least = max(2e-7, info.smallest_normal)
    torch.testing.assert_close(ours[1].float(), right[1], rtol=max(info.eps, 1e-5), atol=least)


@crossed(together=2, vocab=(2, 307, 4096, 9001), ignored=tuple(IGNORED), dtype=DTYPES)
def test_equals_torchs_own(vocab: int, ignored: str, dtype: torch.dtype) -> None:
    logits, targets = given(6, vocab, dtype, ignored)
    right = wanted(logits, targets)
    for in_place in (False, True):
        compare(found(logits, targets, in_place=in_place), right, dtype)
    if ignored == "all":
        assert right[0] == 0 and not right[1].any()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("how", OPTIONS.values(), ids=OPTIONS)
def test_what_changes_the_loss_equals_the_reference(
    how: dict[str, float], dtype: torch.dtype
) -> None:
    logits, targets = given(7, 5003, dtype)
    right = wanted(logits, targets, **how)
    assert not how or abs(right[0] / wanted(logits, targets)[0] - 1) > 0.01
    compare(found(logits, targets, **how), right, dtype)


@pytest.mark.parametrize("ignored", ["some", "all"])
def test_the_z_loss_is_reported(ignored: str) -> None:
    """Check that both functions add the z-loss's part of the sum to the given tensor."""
    logits, targets = given(7, 5003, torch.float32, ignored)
    (plain, _), (loss, grad) = wanted(logits, targets), wanted(logits, targets, z_loss=0.1)
    z_nats = torch.ones((), device=DEVICE)
    ours = found(logits, targets, z_loss=0.1, z_nats=z_nats)
    compare(ours, (loss, grad), torch.float32)
    scale = torch.tensor(WEIGHT, device=DEVICE)
    nats, over = loss_and_gradient_(logits, targets, scale, z_loss=0.1, z_nats=z_nats)
    compare((nats, over), (loss, grad), torch.float32)
    torch.testing.assert_close(z_nats, 1 + 2 * (loss - plain), rtol=1e-5, atol=1e-6)
    assert (z_nats > 1) == (ignored == "some")


@pytest.mark.parametrize("how", [{}, {"softcap": 3.0, "z_loss": 0.1}], ids=["alone", "beside"])
@pytest.mark.parametrize("ignored", ["some", "all"])
def test_what_smoothing_moves_is_reported(ignored: str, how: dict[str, float]) -> None:
    """What it changes of the sum is added to what is there, by both functions."""
    logits, targets = given(7, 5003, torch.float32, ignored)
    smoothed = {**how, "label_smoothing": 0.2}
    (plain, _), right = wanted(logits, targets, **how), wanted(logits, targets, **smoothed)
    moved = torch.ones((), device=DEVICE)
    compare(found(logits, targets, **smoothed, moved_nats=moved), right, torch.float32)
    scale = torch.tensor(WEIGHT, device=DEVICE)
    over = loss_and_gradient_(logits, targets, scale, **smoothed, moved_nats=moved)  # type: ignore
    compare(over, right, torch.float32)
    torch.testing.assert_close(moved, 1 + 2 * (right[0] - plain), rtol=1e-5, atol=1e-6)
    assert (moved != 1) == (ignored == "some")


def test_writes_the_gradient_over_the_logits_and_only_where_asked() -> None:
    logits, targets = given(6, 307, torch.float32)
    for in_place in (False, True):
        read = logits.clone().requires_grad_() * 1
        held = read.detach()
        loss = fused_cross_entropy(read, targets, in_place=in_place)
        (grad,) = torch.autograd.grad(loss, read)
        assert (grad.data_ptr() == held.data_ptr()) == in_place
        assert held.equal(logits) != in_place


def test_a_second_backward_pass_over_written_logits_is_an_error() -> None:
    logits, targets = given(6, 307, torch.float32)
    leaf = logits.requires_grad_()
    loss = fused_cross_entropy(leaf * 1, targets, in_place=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_reads_rows_of_a_wider_tensor_and_columns() -> None:
    logits, targets = given(6, 307, torch.float32)
    wide = torch.zeros(6, 311, device=DEVICE)
    wide[:, :307] = logits
    right = wanted(logits, targets)[0]
    for strided in (wide[:, :307], logits.T.contiguous().T):
        torch.testing.assert_close(fused_cross_entropy(strided, targets), right)


def test_extreme_logits_are_finite_and_infinite_ones_give_no_number() -> None:
    logits, targets = given(6, 307, torch.float32)
    logits[1, :5] = 1e4
    logits[2, 7] = -float("inf")
    compare(found(logits, targets), wanted(logits, targets), torch.float32)
    logits[1, 0] = float("inf")
    assert not fused_cross_entropy(logits, targets).isfinite()


@pytest.mark.parametrize("target", [307, -1, 1 << 40])
def test_a_target_outside_of_the_vocabulary_gives_no_number(target: int) -> None:
    logits, targets = given(6, 307, torch.float32)
    targets[1] = target
    assert fused_cross_entropy(logits, targets).isnan()


def test_no_tokens_and_no_gradient() -> None:
    logits, targets = given(6, 307, torch.float32)
    assert fused_cross_entropy(logits[:0], targets[:0]) == 0
    before = COUNTS["cross_entropy_backward"]
    with torch.no_grad():
        loss = fused_cross_entropy(logits.requires_grad_(), targets, in_place=True)
    assert not loss.requires_grad and COUNTS["cross_entropy_backward"] == before


def test_the_operations_keep_torchs_contract() -> None:
    """Check schemas, fakes, and gradients under AOT dispatch by torch's own function."""
    logits, targets = given(6, 307, torch.float32)
    for smoothing in (0.0, 0.2):
        how = (-100, 0.0, 0.0, smoothing, 307, False)
        leaf = logits.clone().requires_grad_()
        torch.library.opcheck(torch.ops.headrace.cross_entropy, (leaf, targets, *how))  # type: ignore
    most = logits.amax(-1)
    norms = torch.stack([most, logits.logsumexp(-1) - most, torch.zeros_like(most)], -1)
    more = (targets, norms, torch.ones(len(logits), device=DEVICE), *how[:5])
    for name in ("cross_entropy_gradient", "cross_entropy_gradient_"):
        torch.library.opcheck(getattr(torch.ops.headrace, name), (logits, *more))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="plain", marks=[] if CUDA else pytest.mark.slow),
        pytest.param(OPTIONS["all"], id="all"),
    ],
)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiled_with_ignored_targets(backend: str, how: dict[str, float], in_place: bool) -> None:
    """Liger's pull request 1338 has this case: it gave 61.7 in the place of 21.4."""
    if backend == "inductor" and not CUDA:
        pytest.skip("needs a CUDA device")
    tokens, dim, vocab = (256, 32, 4096) if CUDA else (16, 32, 521)
    torch.compiler.reset()
    torch.manual_seed(0)
    hidden = torch.randn(tokens, dim, device=DEVICE)
    weight = torch.randn(vocab, dim, device=DEVICE)

    def loss_of(leaves: list[Tensor], targets: Tensor, function: Any) -> Tensor:
        return function((leaves[0] * 2) @ leaves[1].T, targets, **how)

    def ours(logits: Tensor, targets: Tensor, **how: Any) -> Tensor:
        return fused_cross_entropy(logits, targets, **how, in_place=in_place)

    compiled: Any = torch.compile(loss_of, backend=backend, fullgraph=True)
    for ignored in (0, tokens // 4, tokens):
        targets = torch.randint(0, vocab, (tokens,), device=DEVICE)
        targets[torch.randperm(tokens)[:ignored]] = -100
        _agree(loss_of, compiled, ours, (hidden, weight), targets)


def _agree(
    loss_of: Any, compiled: Any, ours: Any, given: tuple[Tensor, Tensor], targets: Tensor
) -> None:
    """Compare losses and gradients of the reference, of the kernels, and of them compiled."""
    seen = []
    for run, function in ((loss_of, reference_cross_entropy), (loss_of, ours), (compiled, ours)):
        leaves = [x.clone().requires_grad_() for x in given]
        with torch.no_grad():
            alone = run(leaves, targets, function)
        loss = run(leaves, targets, function)
        seen.append([alone, loss.detach(), *torch.autograd.grad(WEIGHT * loss, leaves)])
    for other in seen[1:]:
        for one, right in zip(other, seen[0], strict=True):
            torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [32_000, 128_256, 262_144, 262_147])
@pytest.mark.parametrize("how", OPTIONS.values(), ids=OPTIONS)
def test_large_vocabularies(how: dict[str, float], vocab: int, dtype: torch.dtype) -> None:
    logits, targets = given(64, vocab, dtype)
    right = wanted(logits, targets, **how)
    for in_place in (False, True):
        compare(found(logits, targets, **how, in_place=in_place), right, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_more_numbers_than_32_bits_count() -> None:
    tokens, vocab = 8_200, 262_144  # 2**31 and some more
    logits = torch.zeros(tokens, vocab, device="cuda", dtype=torch.bfloat16).requires_grad_()
    targets = torch.full((tokens,), -100, device="cuda")
    targets[-1] = vocab - 1
    loss = fused_cross_entropy(logits * 1, targets, in_place=True)
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(torch.tensor(float(vocab)).log().item())
    assert grad[-1, -1].item() == pytest.approx(-1, rel=0.01) and not grad[:-1].any()
    assert grad[-1, :-1].float().sum().item() == pytest.approx(1, rel=0.01)
