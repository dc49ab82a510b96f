"""What each rank of the test of collectives does: count them in steps of one and of several
micro-batches."""

from collections.abc import Sequence
from typing import Any

import house
import torch
import torch.distributed as dist
from composition import ROWS, Composition, batches, micros_of
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.assemble.build import make_build, make_ledger
from headrace.costs.count import FP32
from headrace.data.ingest import prepare
from headrace.parallel.world import join
from headrace.plan.mesh_config import MeshConfig
from headrace.train.train import step


def count(corpus: str, prepared: str, micro_rows: Sequence[int], layers: int) -> None:
    """Gradients are scattered once a step and group; weights are gathered for every micro-batch.

    Between micro-batches a rank holds the gradients that were predicted: all of them, whole.
    """
    house.put_data_in(corpus, prepared)
    dist.init_process_group("gloo")
    mesh = {"data": dist.get_world_size()}
    world = join(MeshConfig(**mesh), torch.device("cpu"))
    found: dict[int, dict[str, int]] = {}
    for rows in micro_rows:
        plan = Composition(
            "count", mesh, {"fsdp": {"reshard": True}}, layers=layers, micro_rows=rows
        ).plan()
        build = make_build(plan, prepare(plan), world, torch.device("cpu"))
        batch = batches(build.config.vocab, plan.data.sequence_length)[0]
        step(build, micros_of(build, batch), 0)  # the first one also prepares
        build.model.zero_grad()
        held, loss = list[int](), build.model.loss
        build.model.loss = lambda *a, m=build.model, f=loss, h=held: h.append(unsent(m)) or f(*a)
        with Counted() as counted:
            step(build, micros_of(build, batch), 1)
        found[rows] = counted.times
        lines = make_ledger(build.plan, build.context).memory
        more = lines["whole_gradients"].bytes if rows < ROWS // mesh["data"] else 0
        whole = FP32 * sum(p.numel() for p in build.model.parameters())
        assert held == [0] + [whole] * (len(held) - 1), (rows, held)
        assert not more or more + lines["gradients"].bytes == whole, (rows, more)
    dist.destroy_process_group()
    groups = layers + 3  # every block, both tables, and what else stands outside of them
    each = {rows: ROWS // mesh["data"] // rows for rows in micro_rows}
    for rows, counts in found.items():
        assert counts["reduce_scatter"] == groups, (rows, found)
        # A block twice a micro-batch; others once, for they are kept for the backward pass.
        assert counts["all_gather"] == each[rows] * (2 * layers + 3), (rows, found)


def unsent(model: nn.Module) -> int:
    """Bytes of whole gradients that wait to be scattered."""
    groups = [
        m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)
    ]
    weights = [p for group in groups if group is not None for p in group.fsdp_params]
    made = [w._unsharded_param.grad for w in weights if hasattr(w, "_unsharded_param")]
    return sum(gradient.nbytes for gradient in made if gradient is not None)


class Counted(TorchDispatchMode):
    """Counts collectives of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.times = {"reduce_scatter": 0, "all_gather": 0}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, then run."""
        name = str(op)
        if name.startswith("c10d."):
            self.times["reduce_scatter"] += "reduce_scatter" in name
            self.times["all_gather"] += "allgather" in name
        return op(*args, **(kwargs or {}))
