"""Compare what updates read and write with the constants that predictions price them by."""

from typing import Any

import pytest
import torch
from test_elementwise import MAKERS, grouped
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.costs.ledger import Ledger, Line, Matrix
from headrace.costs.work import Stream, Work
from headrace.model.head import Vocabulary
from headrace.optim.sophia import SophiaOptimizer
from headrace.plan.technique import installed
from headrace.techniques.optim.sophia import (
    CHUNK_TOKENS,
    DRAWN,
    ESTIMATED,
    STEPPED,
    Sophia,
    draw,
    noise_keys,
)

NUMBERS = 2000
VIEWS = ("view", "detach", "alias", "split", "unbind", "expand", "select", "slice", "unsqueeze")


class Traffic(TorchDispatchMode):
    """Add up the bytes of large tensors that operations read and write, and the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(word in str(func) for word in VIEWS):
            return out
        written: dict[int, int] = {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else (kwargs or {}).get(argument.name)
                written |= sizes(given)
        reads = sizes((args[1:] if "copy" in str(func) else args, kwargs))
        written = written or sizes(out)
        if reads or written:
            self.bytes += sum(reads.values()) + sum(written.values())
            self.kernels += 1
        return out


def sizes(tree: Any) -> dict[int, int]:
    """Return the bytes of each large tensor by where it lies."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {t.data_ptr(): t.nbytes for t in tensors if t.numel() >= NUMBERS}


def ledger(numbers: int) -> Ledger:
    """Return a ledger of one matrix that AdamW updates, and of logits."""
    lines = {
        "gradients": Line(4.0 * numbers, ("always",)),
        "optimizer": Line(8.0 * numbers, ("always",)),
        "logits": Line(1.0, ("loss",)),
    }
    work: dict[str, Work] = {
        "head/result": Stream("forward", 1, 8.0),
        "clip/optimizer": Stream("optimizer", 1, 12.0 * numbers, 2),
        "update/optimizer": Stream("optimizer", 1, 28.0 * numbers),
    }
    matrices = {"w": Matrix((numbers, 1))}
    flops = {"forward": 1.0, "backward": 2.0}
    return Ledger(lines, flops, {"tokens": 64.0, "vocab": 50.0}, work, matrices=matrices)


@pytest.mark.parametrize("name", MAKERS)
def test_an_update_moves_what_is_predicted(name: str) -> None:
    weight = nn.Parameter(torch.randn(NUMBERS, 1))
    optimizer = grouped(MAKERS[name], {"blocks.0.w.weight": weight})
    for _ in range(2):  # the first one makes the states
        weight.grad = torch.randn(NUMBERS, 1)
        with Traffic() as traffic:
            optimizer.step()
    piece = installed().find(name)().predict(ledger(NUMBERS)).work[f"update/{name}"]
    assert isinstance(piece, Stream) and piece.bytes == traffic.bytes
    assert traffic.kernels <= piece.kernels <= traffic.kernels + 5, "and some for each tensor"


def test_sophia_moves_what_is_predicted() -> None:
    weight = nn.Parameter(torch.randn(NUMBERS, 1))
    optimizer = SophiaOptimizer({"w": weight}, lr=0.1, betas=(0.9, 0.9), rho=0.1, weight_decay=0.1)
    for constant, work in (
        (STEPPED, optimizer.step),
        (ESTIMATED, lambda: optimizer.estimate(torch.tensor(3.0))),
    ):
        for _ in range(2):
            weight.grad = torch.randn(NUMBERS, 1)
            with Traffic() as traffic:
                work()
        assert (traffic.bytes / NUMBERS, traffic.kernels) == constant


def test_a_draw_moves_what_is_predicted() -> None:
    logits = torch.randn(CHUNK_TOKENS, NUMBERS)
    keys = noise_keys(0, 0, torch.arange(CHUNK_TOKENS))
    with Traffic() as traffic:
        draw(logits, keys, Vocabulary())
    assert traffic.bytes / logits.numel() == pytest.approx(DRAWN[0], rel=0.016)
    assert traffic.kernels == DRAWN[1]


def test_sophias_second_sweep_is_priced_as_often_as_it_is_due() -> None:
    before = ledger(NUMBERS)
    for technique, share in ((Sophia(every=4), 0.25), (Sophia(every=4, share=0.5), 0.125)):
        after = technique.predict(before)
        assert after.work["head/result"].count == 1 + share
        assert after.flops["curvature"] == 3 * share
        draws, update = after.work["curvature/draws"], after.work["update/sophia"]
        assert isinstance(draws, Stream) and isinstance(update, Stream)
        assert (draws.count, draws.bytes) == (share, DRAWN[0] * 64 * 50)
        assert draws.kernels == DRAWN[1] * 2, "two chunks of tokens"
        assert update.bytes == (STEPPED[0] + ESTIMATED[0] / 4) * NUMBERS
        assert after.work["clip/optimizer"].count == pytest.approx(1 + 0.25 / 3)
