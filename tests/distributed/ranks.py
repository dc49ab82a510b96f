"""What each rank does: join once, then run many compositions in one process group."""

import faulthandler
import json
import time
import traceback
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import house
import torch
import torch.distributed as dist
from composition import Composition, run
from safetensors.torch import save_file

from headrace.assemble.filled import check_active
from headrace.core.errors import HeadraceError
from headrace.parallel.world import World, join
from headrace.plan.mesh_config import MeshConfig

LATE_S = 120
"""Seconds that a rank may come later than another: one may compile, on a busy machine."""
PATIENCE_S = 240
"""Seconds after which a rank that still waits says where, and ends."""


def serve(folder: str, corpus: str, prepared: str, cases: list[dict[str, Any]]) -> None:
    """Run every case and write its outcome under `folder`, rank by rank."""
    house.put_data_in(corpus, prepared)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LATE_S))
    worlds: dict[str, World] = {}
    for case in cases:
        composition = Composition(**case)
        key = json.dumps(composition.mesh, sort_keys=True)
        if key not in worlds:
            worlds[key] = join(MeshConfig(**composition.mesh), torch.device("cpu"))
        into = Path(folder) / composition.name
        into.mkdir(parents=True, exist_ok=True)
        _run(composition, worlds[key], into)
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def _run(composition: Composition, world: World, into: Path) -> None:
    began_s = time.perf_counter()
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    told: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    try:
        build, outcome = run(composition, world)
        evidence = {
            n: asdict(e) | {"numbers": dict(e.numbers)} for n, e in check_active(build).items()
        }
        told = {"losses": outcome.losses, "evidence": evidence}
        tensors = {f"gradients {n}": t for n, t in outcome.gradients.items()}
        tensors |= {f"weights {n}": t for n, t in outcome.weights.items()}
    except HeadraceError as error:
        told = {"refused": str(error)}
    except Exception:
        told = {"error": traceback.format_exc()}
    told["seconds"] = time.perf_counter() - began_s
    failed = world.gather("error" in told or "refused" in told)  # the ranks go on together
    if not any(failed) and world.place("shard") == world.place("tensor") == 0:
        save_file(tensors, into / f"{world.rank}.safetensors")
    (into / f"{world.rank}.json").write_text(json.dumps(told))
    torch._dynamo.reset()
