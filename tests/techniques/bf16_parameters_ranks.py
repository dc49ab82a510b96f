"""What each rank does of the test of slices in bf16: they stand beside one process's matrices."""

import zlib
from typing import Any

import house
import numpy as np
import torch
from torch import Tensor

from headrace.assemble.build import make_build, make_ledger
from headrace.assemble.sockets import Build
from headrace.data.ingest import prepare
from headrace.data.rows import Row
from headrace.parallel.layout import as_parameter, is_dtensor, local_of
from headrace.parallel.world import World, open_world
from headrace.plan.plan import Plan
from headrace.train.train import step

DEVICE = torch.device("cpu")
SHAPE: dict[str, Any] = {"dim": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 307, "layers": 2}
"""Some rows are not divided evenly by four ranks. Columns are whole vectors of the processor, whose
last numbers may else come out one bit apart."""
NAME = "bf16_parameters"
UPDATES = 3


def plan_of(ranks: int, rounding: str) -> Plan:
    """Return the plan over so many slices, or in one process."""
    knobs: dict[str, dict[str, Any]] = {NAME: {"rounding": rounding}}
    knobs |= {"fsdp": {}} if ranks > 1 else {}
    techniques = (house.Variant(name, given).technique() for name, given in knobs.items())
    batch = {"tokens": 4 * house.LENGTH}
    return house.make_plan(*techniques, model=SHAPE, mesh={"data": ranks}, batch=batch)


def drawn(name: str, shape: tuple[int, ...], update: int) -> Tensor:
    """Draw a whole gradient."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{name} {update}".encode()))
    return torch.randn(shape, generator=draw)


def take(build: Build, update: int) -> None:
    """Update a build's matrices by drawn gradients."""
    for name, p in build.model.named_parameters():
        layout = build.layouts[name]
        whole = drawn(name, tuple(layout.shape), update).to(p.dtype)
        p.grad = as_parameter(p, layout.part(build.world, p, whole).contiguous())
    build.optimizers[NAME].step()


def updates(ranks: int, rounding: str, corpus: str, prepared: str) -> None:
    """Check that by the same gradients slices become what whole matrices do, to the bit."""
    torch.set_num_threads(1)
    house.put_data_in(corpus, prepared)
    plan, alone = plan_of(ranks, rounding), plan_of(1, rounding)
    with open_world(plan.mesh, DEVICE) as world:
        sliced = make_build(plan, prepare(plan), world, DEVICE)
        whole = make_build(alone, prepare(alone), World(), DEVICE)
        for update in range(UPDATES):
            take(sliced, update)
            take(whole, update)
        named, compared = dict(whole.model.named_parameters()), 0
        for name, p in sliced.model.named_parameters():
            right, layout = named[name], sliced.layouts[name]
            assert is_dtensor(p) or p.ndim < 2, name
            assert local_of(p.detach()).equal(layout.part(world, p, right.detach())), name
            others = whole.optimizers[NAME].state.get(right, {})
            states = sliced.optimizers[NAME].state.get(p, {})
            assert states.keys() == others.keys(), name
            for key, state in states.items():
                wanted = others[key]
                mine = layout.part(world, p, wanted) if wanted.ndim else wanted
                assert local_of(state).equal(mine), (name, key)
                compared += bool(wanted.ndim)
        assert compared >= 2 * len([p for p in named.values() if p.dtype == torch.bfloat16])


def held(ranks: int, corpus: str, prepared: str) -> None:
    """Check that a rank has as many bytes of weights, gradients and states as predicted."""
    house.put_data_in(corpus, prepared)
    plan = plan_of(ranks, "master")
    with open_world(plan.mesh, DEVICE) as world:
        build = make_build(plan, prepare(plan), world, DEVICE)
        lines = make_ledger(plan, build.context).memory
        random = np.random.default_rng(0)
        rows = [Row(random.integers(0, SHAPE["vocab"], house.LENGTH + 1), np.array([3]))]
        step(build, house.make_micros(rows, micro_rows=1, segments=False), 0)
        parameters = [*build.model.parameters()]
        gradients = [p.grad for p in parameters if p.grad is not None]
        states = [
            t
            for optimizer in build.optimizers.values()
            for state in optimizer.state.values()
            for t in state.values()
            if t.ndim
        ]
        found = {"parameters": parameters, "gradients": gradients, "optimizer": states}
        for name, tensors in found.items():  # slices are uneven: their mean
            every = world.gather(sum(local_of(t).nbytes for t in tensors))
            assert abs(sum(every) / ranks - lines[name].bytes) < 8, (name, every, lines[name])
