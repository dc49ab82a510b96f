"""A step over many micro-batches has the gradient of the one big batch, wherever targets are."""

from collections.abc import Callable

import pytest
import torch

from headrace.assemble.build import make_build
from headrace.data.ingest import prepare
from headrace.data.loader import Micro
from headrace.model.head import IGNORED
from headrace.observe.signals import Signals
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.train import train as trainer

ROWS, LENGTH = 8, 16


@pytest.fixture(scope="module")
def big() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets of eight rows; ignored targets lie unevenly, one row has none left."""
    source = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(300, (ROWS, LENGTH), generator=source)
    targets_BT = torch.randint(300, (ROWS, LENGTH), generator=source)
    for row in range(ROWS):
        targets_BT[row, : 2 * row + 2] = IGNORED
    return ids_BT, targets_BT


def gradients(
    plan: Plan, big: tuple[torch.Tensor, torch.Tensor], micro_rows: int
) -> tuple[dict[str, torch.Tensor], float]:
    """Return the unclipped gradients of a step by parameter name, and the step's loss."""
    build = make_build(plan, prepare(plan), World(), torch.device("cpu"))
    build.phases = Signals(build.device)
    ids, targets = (t.split(micro_rows) for t in big)
    numbers = trainer.step(build, [Micro(i, t) for i, t in zip(ids, targets, strict=True)], 0)
    return {n: p.grad for n, p in build.model.named_parameters() if p.grad is not None}, numbers[0]


@pytest.mark.parametrize("micro_rows", [1, 2, 4])
@pytest.mark.parametrize("shape", ["model.tied_embeddings=true", "model.qk_norm=true"])
def test_gradients_equal_the_big_batchs(
    tiny_plan: Callable[..., Plan],
    big: tuple[torch.Tensor, torch.Tensor],
    micro_rows: int,
    shape: str,
) -> None:
    plan = tiny_plan("optimizer.clip_norm=0", "model.layers=2", shape)
    whole, loss = gradients(plan, big, ROWS)
    parts, loss_of_parts = gradients(plan, big, micro_rows)
    assert parts.keys() == whole.keys()
    for name, gradient in whole.items():
        error = (parts[name] - gradient).norm() / gradient.norm()
        assert error < 1e-6, (name, float(error))
    assert float(loss_of_parts) == pytest.approx(float(loss), rel=1e-6)


def test_the_loss_is_the_mean_over_the_targets_that_count(
    tiny_plan: Callable[..., Plan], big: tuple[torch.Tensor, torch.Tensor]
) -> None:
    plan = tiny_plan()
    build = make_build(plan, prepare(plan), World(), torch.device("cpu"))
    build.phases = Signals(build.device)
    ids_BT, targets_BT = big
    with torch.no_grad():
        hidden = build.model.hidden(ids_BT, build.place(build, Micro(*big)).rows)
        logits = torch.nn.functional.linear(hidden, build.model.head.weight)
    counted = targets_BT != IGNORED
    mean = torch.nn.functional.cross_entropy(logits[counted], targets_BT[counted])
    loss = trainer.step(build, [Micro(i[None], t[None]) for i, t in zip(*big, strict=True)], 0)[0]
    assert float(loss) == pytest.approx(float(mean), rel=1e-6)


def test_a_step_without_any_target_changes_no_weight_by_a_gradient(
    tiny_plan: Callable[..., Plan], big: tuple[torch.Tensor, torch.Tensor]
) -> None:
    nothing = torch.full_like(big[1], IGNORED)
    grads, loss = gradients(tiny_plan(), (big[0], nothing), 4)
    assert float(loss) == 0.0
    assert all(not gradient.any() for gradient in grads.values())
