"""What each rank of the collectives' test does: the same sums split over ranks and in one place."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from headrace.assemble.teacher import likeliest
from headrace.kernels.chunked_loss import chunked_loss
from headrace.kernels.fused_cross_entropy import fused_cross_entropy, reference_cross_entropy
from headrace.model.head import IGNORED, Vocabulary
from headrace.model.sharded_vocabulary import ShardedVocabulary
from headrace.parallel.layout import share
from headrace.parallel.tensor import (
    Peers,
    copy,
    gather_sequence,
    local_length,
    peers_of,
    scatter_sequence,
    split_sequence,
    sum_forward,
)
from headrace.techniques.adapt.distillation import kept_divergence

LENGTHS = (1, 4, 5, 13)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@contextmanager
def group() -> Iterator[Peers]:
    """Open a group of all ranks of this test."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None
    yield peers_of(world)
    dist.destroy_process_group()


def draw(seed: int, *shape: int) -> Tensor:
    """Draw equal numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compiler(backend: str) -> Callable[[Any], Any]:
    """Return torch.compile with a backend, or what compiles nothing."""
    if not backend:
        return lambda f: f
    torch.compiler.reset()  # each case is a function of its own under the same name
    return partial(torch.compile, fullgraph=True, backend=backend, dynamic=False)


def sequences(backend: str) -> None:
    """Run every sequence collective, forward and backward, at lengths that divide nothing."""
    with group() as peers:
        for length in LENGTHS:
            _gather_and_scatter(peers, length, compiler(backend))
            _split_and_sum(peers, length, compiler(backend))
            _layer(peers, length, compiler(backend))


def mine(x_BTD: Tensor, peers: Peers) -> Tensor:
    """This rank's tokens, zeros where there are none."""
    each = local_length(x_BTD.size(1), peers)
    wide = F.pad(x_BTD, (0, 0, 0, each * peers.ranks - x_BTD.size(1)))
    return wide[:, peers.place * each : (peers.place + 1) * each]


def _gather_and_scatter(peers: Peers, length: int, compiled: Callable[[Any], Any]) -> None:
    whole = draw(1, 2, length, 3)
    local = mine(whole, peers).clone().requires_grad_()
    gathered = compiled(lambda x: gather_sequence(x, length, peers))(local)
    assert torch.equal(gathered, whole)
    gathered.backward(draw(2 + peers.place, 2, length, 3))
    sums = sum(draw(2 + r, 2, length, 3) for r in range(peers.ranks))
    assert isinstance(sums, Tensor)
    torch.testing.assert_close(local.grad, mine(sums, peers), **CLOSE)

    partial_sum = draw(2 + peers.place, 2, length, 3).requires_grad_()
    scattered = compiled(lambda x: scatter_sequence(x, peers))(partial_sum)
    torch.testing.assert_close(scattered, mine(sums, peers), **CLOSE)
    scattered.backward(mine(whole, peers))
    assert partial_sum.grad is not None and torch.equal(partial_sum.grad, whole)


def _split_and_sum(peers: Peers, length: int, compiled: Callable[[Any], Any]) -> None:
    whole = draw(1, 2, length, 3).requires_grad_()
    local = compiled(lambda x: split_sequence(x, peers))(whole)
    assert torch.equal(local, mine(whole, peers))
    local.backward(mine(whole.detach() ** 2, peers))
    assert whole.grad is not None and torch.equal(whole.grad, whole.detach() ** 2)

    same, own = draw(3, 5).requires_grad_(), draw(4 + peers.place, 5).requires_grad_()
    total = compiled(lambda a, b: sum_forward(copy(a, peers) * b, peers))(same, own)
    total.backward(draw(9, 5))
    every = sum(draw(4 + r, 5) for r in range(peers.ranks))
    torch.testing.assert_close(total, same * every, **CLOSE)
    torch.testing.assert_close(same.grad, every * draw(9, 5), **CLOSE)
    torch.testing.assert_close(own.grad, same.detach() * draw(9, 5), **CLOSE)


def _layer(peers: Peers, length: int, compiled: Callable[[Any], Any]) -> None:
    """Two column and row splits around work on a slice of the sequence."""
    up, down = draw(5, 8, 3), draw(6, 3, 8)
    rows = slice(*(peers.place * 8 // peers.ranks, (peers.place + 1) * 8 // peers.ranks))

    def plain(x: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> Tensor:
        for _ in range(2):
            x = x + F.linear(F.linear(x * scale, up).tanh(), down)
        return x

    def split(x: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> Tensor:
        x = split_sequence(x, peers)
        for _ in range(2):
            wide = gather_sequence(x * scale, length, peers)
            x = x + scatter_sequence(F.linear(F.linear(wide, up).tanh(), down), peers)
        return gather_sequence(x, length, peers) / peers.ranks

    results = []
    for make, up_part, down_part in (
        (plain, up, down),
        (compiled(split), up[rows].clone(), down[:, rows].clone()),
    ):
        leaves = [
            t.requires_grad_() for t in (draw(7, 2, length, 3), up_part, down_part, draw(8, 3))
        ]
        out = make(*leaves)
        out.backward(draw(10, 2, length, 3))
        results.append((out, [leaf.grad for leaf in leaves]))
    (right, (x, up_grad, down_grad, scale)), (found, grads) = results
    torch.testing.assert_close(found * peers.ranks, right, **CLOSE)
    dist.all_reduce(grads[3])  # used on a slice of the sequence: a partial sum
    wanted = (x, up_grad[rows], down_grad[:, rows], scale)
    for mine_, whole in zip(grads, wanted, strict=True):
        torch.testing.assert_close(mine_, whole, **CLOSE)


# --- the vocabulary --------------------------------------------------------------------------


def _distill(logits: Tensor, targets: Tensor, extras: Any, vocabulary: Vocabulary) -> Tensor:
    teacher = vocabulary.part(extras["teacher"])
    lse = vocabulary.logsumexp(logits)
    return (lse * vocabulary.sum(teacher) - vocabulary.sum(teacher * logits)).sum()


def _distill_kept(logits: Tensor, targets: Tensor, extras: Any, vocabulary: Vocabulary) -> Tensor:
    teacher_NV = 6 * extras["teacher"].log()  # it is sure: of a flat one the gradients cancel
    ids, logs, rest = likeliest(teacher_NV, min(5, teacher_NV.size(-1) - 1))
    logs = torch.cat([logs, rest[:, None]], -1)
    return kept_divergence(logits, ids, logs, 2.0, vocabulary, is_whole=False).sum()


OBJECTIVES: dict[str, Callable[[Tensor, Tensor, Any, Any], Tensor]] = {
    "nll": lambda logits, targets, extras, v: v.nll(logits, targets),
    "smoothed": lambda logits, targets, extras, v: v.nll(logits, targets, 0.3),
    "z_loss": lambda logits, targets, extras, v: (v.logsumexp(logits) ** 2).sum(),
    "pick": lambda logits, targets, extras, v: (v.pick(logits, targets.clamp(min=0)).sin()).sum(),
    "sum": lambda logits, targets, extras, v: (v.sum(logits**2).sqrt()).sum(),
    "distill": _distill,
    "distill_kept": _distill_kept,
    "all": lambda logits, targets, extras, v: (
        v.nll(logits, targets)
        + 0.1 * (v.logsumexp(logits) ** 2 * targets.ne(IGNORED)).sum()
        + _distill(logits, targets, extras, v)
    ),
}


def vocabularies(backend: str) -> None:
    """Compare every reduction and objective with the whole vocabulary, gradient by gradient."""
    with group() as peers:
        for size in (307, 64, peers.ranks + 1):
            _reductions(peers, size)
            for objective in OBJECTIVES.values():
                _objective(peers, size, objective, compiler(backend))
                if not backend:
                    _chunked(peers, size, objective)
        for size, how in product((peers.ranks, 307, 5001), [] if backend else OPTIONS):
            _by_kernels(peers, size, how)
        _trap(peers)


OPTIONS: tuple[dict[str, float], ...] = (
    {},
    {"label_smoothing": 0.2},
    {"z_loss": 0.1},
    {"softcap": 3.0},
    {"label_smoothing": 0.1, "z_loss": 0.05, "softcap": 5.0},
)
"""What the kernels know beside plain cross-entropy."""


def _by_kernels(peers: Peers, size: int, how: dict[str, float]) -> None:
    """Run the fused kernels on a shard, beside their reference over the whole vocabulary."""
    vocabulary, targets = sharded(size, peers), make_targets(size)
    for scale in (1.0, 50.0):
        values = draw(1, 17, size) * scale
        whole = values.double().requires_grad_()
        right = reference_cross_entropy(whole, targets, ignored=IGNORED, **how)
        (right * 0.3).backward()
        part = vocabulary.part(values).clone().requires_grad_()
        nats = {"z_nats": torch.zeros(()), "moved_nats": torch.zeros(())}
        found = vocabulary.nll_by_kernels(part * 1, targets, **how, **nats)
        (found * 0.3).backward()
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)
        assert whole.grad is not None and part.grad is not None
        off = (part.grad - vocabulary.part(whole.grad)).abs().max() / whole.grad.abs().max()
        assert off < 1e-5, (size, how, off)
        expected = {"z_nats": torch.zeros(()), "moved_nats": torch.zeros(())}
        fused_cross_entropy(values, targets, ignored=IGNORED, **how, **expected)
        for name, value in nats.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)
    targets[2] = size  # of no vocabulary
    assert vocabulary.nll_by_kernels(part.detach(), targets, **how).isnan()


def sharded(size: int, peers: Peers) -> ShardedVocabulary:
    """Return this rank's share of a vocabulary."""
    return ShardedVocabulary(*share(size, peers.ranks, peers.place), size, peers)


def make_targets(size: int) -> Tensor:
    """Make targets: some ignored, and the first and last id of every rank."""
    ids = torch.randint(0, size, (17,), generator=torch.Generator().manual_seed(3))
    ids[3], ids[4], ids[5], ids[11] = 0, size - 1, IGNORED, IGNORED
    ids[6], ids[7] = size // 2, (size + 1) // 2
    return ids


def _reductions(peers: Peers, size: int) -> None:
    vocabulary, whole = sharded(size, peers), draw(1, 17, size)
    whole[2] = 1.0  # all equal: the lowest id wins
    whole[8, [1, size - 1]] = 99.0
    part = vocabulary.part(whole)
    assert part.size(1) in (size // peers.ranks, size // peers.ranks + 1)
    assert torch.equal(vocabulary.argmax(part), whole.argmax(-1))
    assert torch.equal(vocabulary.ids(part), vocabulary.part(torch.arange(size)))
    assert vocabulary.argmax(part)[[2, 8]].tolist() == [0, 1]
    ids = make_targets(size).clamp(min=0)
    plain = Vocabulary()
    assert torch.equal(vocabulary.pick(part, ids), plain.pick(whole, ids))
    torch.testing.assert_close(vocabulary.sum(part), plain.sum(whole), rtol=1e-5, atol=1e-5)
    far = part + 1e4  # without the largest value, exp would overflow
    torch.testing.assert_close(vocabulary.logsumexp(far), plain.logsumexp(whole + 1e4))


def _objective(peers: Peers, size: int, objective: Any, compiled: Callable[[Any], Any]) -> None:
    vocabulary = sharded(size, peers)
    extras, targets = {"teacher": draw(2, 17, size).softmax(-1)}, make_targets(size)
    ours = compiled(lambda logits: objective(logits, targets, extras, vocabulary))
    for scale in (1.0, 200.0):
        values = draw(1, 17, size) * scale
        whole = values.double().requires_grad_()
        right = objective(whole, targets, extras, Vocabulary())
        (right * 0.3).backward()
        part = vocabulary.part(values).clone().requires_grad_()
        found = ours(part)
        (found * 0.3).backward()
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)
        assert whole.grad is not None and part.grad is not None
        off = (part.grad - vocabulary.part(whole.grad)).abs().max() / whole.grad.abs().max()
        assert off < 1e-6, off


def _chunked(peers: Peers, size: int, objective: Any) -> None:
    """Run the chunked head on a shard: hidden states get a partial sum, the matrix its own rows."""
    vocabulary, teacher = sharded(size, peers), draw(2, 17, size).softmax(-1)
    results = []
    for vocab, rows in ((Vocabulary(), slice(None)), (vocabulary, _rows(vocabulary))):
        hidden = draw(4, 17, 6).requires_grad_()
        weight = draw(5, size, 6)[rows].clone().requires_grad_()
        loss = chunked_loss(
            hidden,
            weight,
            make_targets(size),
            {"teacher": teacher},
            partial(_with, objective, vocab),
            5,
        )
        (loss * 0.3).backward()
        assert hidden.grad is not None and weight.grad is not None
        results.append((loss.detach(), hidden.grad, weight.grad))
    (right, hidden, weight), (found, partial_hidden, part) = results
    dist.all_reduce(partial_hidden)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    for a, b in ((partial_hidden, hidden), (part, weight[_rows(vocabulary)])):
        assert (a - b).abs().max() <= 2e-6 * b.abs().max()


def _with(objective: Any, vocabulary: Vocabulary, logits: Tensor, targets: Tensor, e: Any) -> Any:
    return objective(logits, targets, e, vocabulary)


def _rows(vocabulary: ShardedVocabulary) -> slice:
    return slice(vocabulary.offset, vocabulary.offset + vocabulary.count)


def _trap(peers: Peers) -> None:
    """An objective that mixes a reduced value with the shard is wrong, and this test can see it."""

    def mixed(logits: Tensor, targets: Tensor, extras: Any, v: Vocabulary) -> Tensor:
        return -v.sum(v.part(extras["teacher"]) * (logits - v.logsumexp(logits)[:, None])).sum()

    try:
        _objective(peers, 307, mixed, lambda f: f)
    except AssertionError:
        return
    raise AssertionError("the comparison did not see a wrong gradient")
