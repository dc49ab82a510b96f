"""What each rank of the test of traffic does: count what a step sends beside what was foreseen."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import house
import torch
import torch.distributed as dist
from composition import Composition, batches, micros_of
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.assemble.build import make_build, make_ledgers
from headrace.costs.ledger import Ledger
from headrace.costs.links import sent
from headrace.data.ingest import prepare
from headrace.parallel import experts
from headrace.parallel.world import World, join
from headrace.plan.mesh_config import MeshConfig
from headrace.train.train import step

KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "send": "send",
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""Operations of c10d and of functional collectives -> how the ledger calls them."""
WITHOUT = ("wait_tensor", "recv_", "barrier")
"""What sends nothing."""
GATHERS = "all_gather"


def count(corpus: str, prepared: str, folder: str, cases: list[dict[str, Any]]) -> None:
    """Every rank writes what a step of each case sent, and what its ledger says."""
    house.put_data_in(corpus, prepared)
    dist.init_process_group("gloo")
    worlds: dict[str, World] = {}
    for case in cases:
        composition = Composition(**case)
        key = json.dumps(composition.mesh, sort_keys=True)
        if key not in worlds:
            worlds[key] = join(MeshConfig(**composition.mesh), torch.device("cpu"))
        world = worlds[key]
        told = _counted(composition, world)
        (Path(folder) / f"{composition.name}-{world.rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def _counted(composition: Composition, world: World) -> dict[str, Any]:
    plan = composition.plan()
    build = make_build(plan, prepare(plan), world, torch.device("cpu"))
    batch = batches(build.config.vocab, plan.data.sequence_length, 2)
    step(build, micros_of(build, batch[0]), 0)
    with Counted() as counted:
        step(build, micros_of(build, batch[1]), 1)
    ledger = make_ledgers(build.plan, build.context)[world.place("pipeline")]
    return {"sent": counted.bytes, "calls": counted.calls, **foreseen(ledger)}


def foreseen(ledger: Ledger) -> dict[str, Any]:
    """Bytes of a step and calls, by operation."""
    bytes, calls = Counter[str](), Counter[str]()
    for piece in ledger.work.values():
        if piece.kind == "collective":
            once = piece.last or piece.phase == "optimizer"
            times = piece.count * (1 if once else ledger.sizes["micro_batches"])
            bytes[piece.operation] += piece.bytes * times  # type: ignore[assignment]
            calls[piece.operation] += times * piece.kernels  # type: ignore[assignment]
    return {"foreseen": bytes, "foreseen_calls": calls}


class Counted(TorchDispatchMode):
    """Bytes that this rank sends round a ring, and calls, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.calls = Counter[str](), Counter[str]()

    def __enter__(self) -> Any:
        """What a custom operation sends no mode sees, so the call itself is watched."""
        self.plain, self.swap = dist.batch_isend_irecv, experts._swap
        dist.batch_isend_irecv = self._batch  # type: ignore[assignment]
        experts._swap = self._swap
        return super().__enter__()

    def __exit__(self, *given: Any) -> None:
        dist.batch_isend_irecv, experts._swap = self.plain, self.swap
        super().__exit__(*given)

    def _batch(self, ops: list[dist.P2POp]) -> list[dist.Work]:
        for one in ops:
            if one.op is dist.isend:
                self.bytes["send"] += one.tensor.nbytes
                self.calls["send"] += 1
        return self.plain(ops)

    def _swap(self, own: torch.Tensor, sends: list[int], *where: Any) -> torch.Tensor:
        self.bytes["all_to_all"] += sent("all_to_all", own.nbytes, len(sends))  # type: ignore[assignment]
        self.calls["all_to_all"] += 1
        return self.swap(own, sends, *where)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, then run."""
        room, _, name = str(op).removesuffix(".default").partition(".")
        made = op(*args, **(kwargs or {}))
        if room in ("c10d", "_c10d_functional") and name not in WITHOUT:
            kind = KINDS[name]
            group = next(
                _group(a)
                for a in args
                if isinstance(a, (str, torch.ScriptObject)) and _group(a) is not None
            )
            whole = sum(t.nbytes for t in _tensors(made if kind == GATHERS else args, kind))
            if kind == GATHERS and room == "c10d":
                whole = sum(t.nbytes for t in _tensors(args[:1], kind))
            self.bytes[kind] += sent(kind, whole, group.size())  # type: ignore[arg-type,assignment]
            self.calls[kind] += 1
        return made


def _tensors(given: Any, kind: str) -> list[torch.Tensor]:
    """The whole tensor that is summed, scattered or sent, or all that was gathered."""
    if isinstance(given, torch.Tensor):
        return [given]
    if not isinstance(given, (list, tuple)):
        return []
    inside = [t for one in given for t in _tensors(one, kind)]
    return [max(inside, key=lambda t: t.nbytes)] if kind == "reduce_scatter" and inside else inside


def _group(given: Any) -> Any:
    if isinstance(given, str):
        return None if given in ("sum", "max", "min") else _resolve_process_group(given)
    try:
        return dist.ProcessGroup.unbox(given)
    except (RuntimeError, TypeError):
        return None
