"""Compare compositions on GPUs (NCCL, inductor, bf16) with one process in fp32.

The compositions are those of the tests (tests/distributed/cases.py), with sizes 16 times as large
and meshes fitted to the ranks that were started. For each, the reference is the same plan without
its mesh and without what computes the baseline's numbers, uncompiled, in fp32, on rank 0's host. A
row has the distance of the loss, of every gradient of the first step (worst, and the embedding's),
and of the weights after five steps, as L2 over the reference's norm.

Half precision rounds, and some models magnify it: a router's near choices fall otherwise, fp8 and
norms of what is nearly zero answer to the last bit. So a row has `rounding` too: the distance of
the reference from itself with weights that are moved by what bf16 rounds by, the median of three.
The band is twice that, and 0.05 at least. Where it is more than 0.05, `beside` is the distance from
the same plan on rank 0's GPU alone, in the same precision, and has the band of 0.05, except under
tensor parallelism, which cuts sums and so rounds otherwise itself.

    torchrun --nproc-per-node 2 benchmarks/compositions.py --results results [--only NAME ...]
"""

import argparse
import faulthandler
import gc
import json
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(ROOT / f) for f in ("tests", "tests/contract", "tests/distributed", "benchmarks")
]

import house  # noqa: E402
import receipts  # noqa: E402
from cases import COMPOSITIONS, fitted  # noqa: E402
from cases_in_halves import IN_HALVES  # noqa: E402
from cases_of_adapters import OF_ADAPTERS  # noqa: E402
from cases_of_experts import SHARING_ROWS  # noqa: E402
from cases_of_recipes import RECIPES  # noqa: E402
from composition import Composition, Outcome, run  # noqa: E402

from headrace.assemble.filled import check_active  # noqa: E402
from headrace.core.errors import HeadraceError  # noqa: E402
from headrace.data.ingest import prepare  # noqa: E402
from headrace.parallel.world import World, join  # noqa: E402
from headrace.plan.mesh_config import MeshConfig  # noqa: E402

BAND = house.BAND_BF16
"""Largest distance that a gradient in bf16 may have from the reference, over its norm."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUDGES = 3
SCALE = 16 if DEVICE == "cuda" else 1
"""The factor on the sizes of the tests. It is 1 without GPUs, on gloo: to try the program only."""


def scale_of(composition: Composition) -> int:
    """Return the factor by which sizes are larger; `wide` is large already."""
    return 1 if composition.shape == "wide" else SCALE


def distances(outcome: Outcome, wanted: Outcome) -> dict[str, float]:
    """Return L2 distances over the reference's norm."""

    def far(kind: str) -> dict[str, float]:
        ours, theirs = getattr(outcome, kind), getattr(wanted, kind)
        assert ours.keys() == theirs.keys(), f"{kind} of {sorted(ours.keys() ^ theirs.keys())}"
        return {n: float((ours[n].float() - t).norm() / t.norm()) for n, t in theirs.items()}

    weights = far("weights")
    gradients = far("gradients") if outcome.gradients else {}  # freed by an update in backward
    norms = {
        "loss": max(
            abs(a - b) / abs(b) for a, b in zip(outcome.losses, wanted.losses, strict=True)
        ),
        "weights": max(weights.values()),
    }
    if gradients:
        norms["gradient"] = max(gradients.values())
        norms["worst"] = max(gradients, key=lambda n: gradients[n])  # type: ignore[assignment]
        norms["embedding_gradient"] = gradients.get("embed.weight", 0.0)
    return norms


def measure(composition: Composition, world: World) -> tuple[dict[str, Any], Outcome]:
    """Run it; evidence and cost, and the stages' parts put together."""
    began_s = time.perf_counter()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    build, outcome = run(composition, world, device=DEVICE, scale=scale_of(composition))
    evidence = {n: e.detail for n, e in check_active(build).items()}
    parts = world.gather(
        {
            kind: {n: t.cpu() for n, t in getattr(outcome, kind).items()}
            for kind in ("gradients", "weights")
        }
    )
    whole = Outcome(outcome.losses, {}, {})
    for part in parts:
        whole.gradients |= part["gradients"]
        whole.weights |= part["weights"]
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    return {"evidence": evidence, "seconds": time.perf_counter() - began_s, "peak": peak}, whole


def reference(composition: Composition) -> tuple[Outcome, list[float]]:
    """Run the same plan in one process in fp32; return it, and how far rounding moves it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(16 if DEVICE == "cuda" else threads)
    wanted, *nudged = (
        run(
            composition,
            World(),
            alone=True,
            scale=scale_of(composition),
            nudged=which,
            unit=house.UNIT_BF16,
        )[1]
        for which in range(NUDGES + 1)
    )
    torch.set_num_threads(threads)
    return wanted, [distances(moved, wanted).get("gradient", 0.0) for moved in nudged]


def beside(composition: Composition, outcome: Outcome) -> float:
    """Return the gradient's distance from that of the same plan on one GPU."""
    _, alone = run(composition, World(), alone=True, device=DEVICE, scale=scale_of(composition))
    alone.gradients, alone.weights = (
        {n: t.cpu() for n, t in kind.items()} for kind in (alone.gradients, alone.weights)
    )
    return distances(outcome, alone)["gradient"]


def urgency(composition: Composition) -> tuple[bool, bool]:
    """Return a key that sorts what once lost a gradient first, then what needs no compiling."""
    compiled = "torch_compile" in composition.techniques
    return not (compiled and "tensor_parallel" in composition.techniques), compiled


def main() -> None:
    """Measure every composition and write its row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--only", nargs="*", default=[], help="names of compositions")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after this long")
    parser.add_argument("--begun", type=Path, help="names of what was begun; it is not begun again")
    parser.add_argument("--patience", type=float, default=300, help="seconds for one composition")
    arguments = parser.parse_args()
    began_s = time.perf_counter()
    backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    ranks = dist.get_world_size()
    house.put_data_in(str(ROOT / "headrace"), str(Path(tempfile.gettempdir()) / "compositions"))
    begun = arguments.begun
    done = begun.read_text().split() if begun and begun.exists() else []
    dist.barrier()
    worlds: dict[str, World] = {}
    references: dict[str, tuple[Outcome, list[float]]] = {}
    every = (*COMPOSITIONS, *IN_HALVES, *OF_ADAPTERS, *SHARING_ROWS, *RECIPES)
    for case in sorted(every, key=urgency):
        composition = fitted(case, ranks)
        if composition is None or (arguments.only and case.name not in arguments.only):
            continue
        if case.name in done:
            continue
        out_of_time = torch.tensor([float(time.perf_counter() - began_s > arguments.seconds)])
        dist.all_reduce(out_of_time)
        if out_of_time.item():
            break
        if begun and dist.get_rank() == 0:
            with begun.open("a") as file:
                file.write(case.name + "\n")
        # Ranks that wait for each other for ever say where, and end.
        faulthandler.dump_traceback_later(arguments.patience, exit=True)
        key = json.dumps(composition.mesh, sort_keys=True)
        if key not in worlds:
            mesh = MeshConfig.model_validate(dict(composition.mesh))
            worlds[key] = join(mesh, torch.device(DEVICE))
        world = worlds[key]
        row: dict[str, Any] = {}
        outcome = wanted = None
        try:
            if world.rank == 0:
                prepare(composition.plan(device=DEVICE, scale=scale_of(composition)))
                alone = composition.plan(alone=True, scale=scale_of(composition)).to_toml()
                if alone not in references:
                    references[alone] = reference(composition)
                wanted = references[alone]
            world.barrier()
            row, outcome = measure(composition, world)
        except HeadraceError as error:
            print(f"rank {dist.get_rank()}: {error}", flush=True)
            row = {"refused": str(error)}
        except Exception:
            traceback.print_exc()
            row = {"refused": traceback.format_exc().strip().splitlines()[-1]}
        failed = world.gather("refused" in row)
        if world.rank == 0:
            if outcome is not None and wanted is not None:
                row |= distances(outcome, wanted[0]) | {"rounding": wanted[1]}
                if limit_of(row) > BAND:
                    row["beside"] = beside(composition, outcome)
            write(composition, row, ranks, arguments.results)
        if any(failed) and not all(failed):
            break  # the ranks are no longer at the same place
        torch._dynamo.reset()
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def limit_of(row: dict[str, Any]) -> float:
    """Return the distance from the reference that the worst gradient may have."""
    return max(BAND, house.MAGNIFIED_BF16 * median(row["rounding"]))


def is_inside(composition: Composition, row: dict[str, Any]) -> bool:
    """Return whether the worst gradient keeps to its bands."""
    near = composition.mesh.get("tensor", 1) > 1 or row.get("beside", 0.0) <= BAND
    return near and row.get("gradient", 0.0) <= limit_of(row)


def write(composition: Composition, row: dict[str, Any], ranks: int, results: Path) -> None:
    """Append one row to results/compositions.jsonl."""
    plan = composition.plan(device=DEVICE, scale=scale_of(composition))
    facts: dict[str, Any] = {
        "plan_sha256": receipts.sha256(plan.dump()),
        "baseline_sha256": receipts.sha256(
            composition.plan(alone=True, scale=scale_of(composition)).dump()
        ),
        "composition": composition.name,
        "mesh": dict(composition.mesh),
        "ranks": ranks,
        "technique": "",
        "techniques": {n: t.model_dump() for n, t in plan.techniques.items()},
        "shape": f"{composition.shape} x {scale_of(composition)}, {plan.model.layers} layers, "
        f"{plan.batch.tokens} tokens a step",
        "seeds": [plan.seed],
        "n": 1,
    }
    if "refused" in row:
        facts["refused"] = row["refused"]
        metrics = {}
    else:
        facts["evidence"], facts["worst_gradient"] = row["evidence"], row.get("worst", "")
        units = {
            "loss": "relative",
            "gradient": "relative L2",
            "embedding_gradient": "relative L2",
            "rounding": "relative L2",
            "beside": "relative L2",
            "weights": "relative L2",
            "seconds": "s",
            "peak": "bytes",
        }
        readings = {n: row[n] if n == "rounding" else [row[n]] for n in units if n in row}
        metrics = {n: receipts.spread(values, units[n]) for n, values in readings.items()}
        facts["band"], facts["inside"] = limit_of(row), is_inside(composition, row)
    receipts.append("compositions", metrics, results=results, **facts)
    shown = {n: m["value"] for n, m in metrics.items()}
    print(
        composition.name,
        dict(composition.mesh),
        facts.get("inside"),
        shown,
        facts.get("refused", ""),
        flush=True,
    )


if __name__ == "__main__":
    main()
