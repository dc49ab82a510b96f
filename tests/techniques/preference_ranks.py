"""What each rank of the preference test does: its part of a step's pairs."""

import pytest
import torch
from torch import Tensor

from headrace.assemble.build import make_build
from headrace.assemble.sockets import Build
from headrace.cli.catalogue import catalogue
from headrace.data.ingest import prepare
from headrace.parallel.world import World, open_world
from headrace.plan.plan import Plan
from headrace.train.evaluate import evaluate
from headrace.train.train import step

DEVICE = torch.device("cpu")


def share(ranks: int, text: str) -> None:
    """Loss, gradients and margins of a step are those of one process, with unequal pairs a rank.

    There are no adapters, so ranks read the reference together.
    """
    torch.set_num_threads(1)
    plan = Plan.read(text, catalogue(), with_=["preference"])
    alone = make_build(plan, prepare(plan), World(), DEVICE)
    right, wanted = _stepped(alone)
    held_out = evaluate(alone).more
    (kept,) = prepare(plan).directory.glob("reference-*")
    several = plan.replaced(mesh={"data": ranks})
    with open_world(several.mesh, DEVICE) as world:
        world.barrier()
        if world.rank == 0:
            kept.unlink()
        world.barrier()
        build = make_build(several, prepare(several), world, DEVICE)
        numbers, gradients = _stepped(build)
        pairs = world.gather(build.notes["preference"].counts[0].item())
        assert len({*pairs}) > 1, pairs
        torch.testing.assert_close(numbers, right, rtol=1e-5, atol=1e-6)
        for name, gradient in gradients.items():
            assert (gradient - wanted[name]).norm() <= 1e-5 * wanted[name].norm(), name
        assert kept.is_file()
        assert evaluate(build).more == pytest.approx(held_out, rel=1e-5, abs=1e-6)


def _stepped(build: Build) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the numbers and gradients of a first step, whose update is left out."""
    gradients: dict[str, Tensor] = {}

    def keep(build: Build, *_: Tensor) -> bool:
        named = build.model.named_parameters()
        gradients.update({name: p.grad.clone() for name, p in named if p.grad is not None})
        return False

    return step(build, build.loader.step().micros, 0, keep), gradients
