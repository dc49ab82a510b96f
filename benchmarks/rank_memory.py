"""Measure the peak memory of one rank of many on one GPU, whose other ranks are not there.

    python benchmarks/rank_memory.py --ranks 2 --sides fsdp pipeline tensor
    python benchmarks/rank_memory.py --ranks 8 --sides 8b_rows2 --groups 20
    python benchmarks/rank_memory.py --ranks 2 --sides fsdp --tiny --results DIR

The sides are those of scaling.py. A rank trains in a process of its own, in torch's fake process
group (torch.testing._internal.distributed.fake_pg): a collective allocates what a real one does
and moves nothing. So losses are wrong, and what torch's allocator holds is right; what NCCL takes
is outside of that allocator, here and in the rows of scaling.py. Of a pipeline, the first and the
last stage are measured, of other layouts the first rank. A row (kind "rank_memory") has the peak
beside the predicted one, which was of the rank that needs most. `--groups N` prints the N largest
groups of tensors that were held at the peak, each with the lines that asked for them.
"""

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import receipts
import scaling
import torch
import torch.distributed as dist
from scaling_ranks import NO_MULTICAST, opened, settle
from scaling_sides import SIDES
from torch.testing._internal.distributed.fake_pg import FakeStore

from headrace.assemble.filled import evidence_after
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.train import train
from headrace.tuner.readings import why

WARM = 2
"""Steps before the one whose peak is read: the first makes the optimizer's states."""
ENTRIES = 400_000
"""Allocations of the step whose tensors are told, at most."""
OURS = ("headrace", "fsdp", "inductor", "pipelin")
"""Parts of the paths of files whose lines say best what a tensor is for."""


@dataclass
class Peak:
    """Hold what a rank's memory was in one step."""

    bytes_: float | None = None
    reserved_bytes: float | None = None
    groups: list[tuple[float, int, str]] = field(default_factory=list)
    """bytes at the peak that the step itself had asked for, tensors, and lines of code"""
    evidence: dict[str, str] = field(default_factory=dict)
    """of every technique, that it is in force"""
    refused: str = ""


@contextmanager
def alone(ranks: int, place: int) -> Iterator[None]:
    """Join a group of which nobody else is there, as the rank `place` of `ranks`.

    What ranks tell each other on the host, they hear from themselves.
    """
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(place), "LOCAL_RANK": "0", **NO_MULTICAST}
    dist.init_process_group("fake", rank=place, world_size=ranks, store=FakeStore())
    answers = {
        "any": lambda _, flag: flag,
        "gather": lambda world, value: [value] * world.ranks,
        "barrier": lambda _: None,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(World, name, answer))
        yield
    dist.destroy_process_group()


def read_peak(plan: Plan, ranks: int, place: int, groups: int) -> Peak:
    """Train a few steps as one rank of many, and return the peak of the last one."""
    peak = Peak()
    try:
        with alone(ranks, place), opened(plan) as (build, micros):
            numbers = torch.zeros(0)
            for index in range(WARM):
                numbers = train.step(build, micros, index)
            peak.evidence = evidence_after(build, numbers, last=True) or {}
            settle(build)
            train.step(build, micros, WARM)
            if build.device.type == "cuda":
                torch.cuda.synchronize()
                peak.bytes_ = float(torch.cuda.max_memory_allocated())
                peak.reserved_bytes = float(torch.cuda.max_memory_reserved())
                if groups:
                    torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python")
                    train.step(build, micros, WARM + 1)
                    torch.cuda.synchronize()
                    snapshot = torch.cuda.memory._snapshot()
                    peak.groups = groups_at_peak(snapshot.get("device_traces", [[]])[0])[:groups]
    except Exception as error:
        peak.refused = why(error)
    return peak


def groups_at_peak(trace: Sequence[Mapping[str, Any]]) -> list[tuple[float, int, str]]:
    """Return what a step had asked for and held at its peak, the largest group first.

    Args:
        trace: entries of `torch.cuda.memory._snapshot()["device_traces"]` of one device.

    Returns:
        bytes, number of tensors, and lines of code, of each size and place.
    """
    live: dict[int, Mapping[str, Any]] = {}
    now = most = 0
    at_peak: dict[int, Mapping[str, Any]] = {}
    for entry in trace:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry
            now += entry["size"]
        elif entry["action"] == "free_completed":
            live.pop(entry["addr"], None)
            now -= entry["size"]
        if now > most:
            most, at_peak = now, dict(live)
    sizes: Counter[tuple[str, int]] = Counter()
    for entry in at_peak.values():
        sizes[lines_of(entry.get("frames", [])), entry["size"]] += 1
    groups = [(float(size * n), n, lines) for (lines, size), n in sizes.items()]
    return sorted(groups, reverse=True)


def lines_of(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost lines of code that say what a tensor is for."""
    telling = [f for f in frames if any(part in f["filename"] for part in OURS)]
    chosen = (telling or [*frames])[:3]
    return " < ".join(f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in chosen)


def places_of(plan: Plan) -> list[int]:
    """Return the ranks of a plan that are measured: the first one of each end of a pipeline."""
    stages = plan.mesh.sizes.get("pipeline", 1)
    return [0] if stages == 1 else [0, plan.mesh.ranks * (stages - 1) // stages]


def measure(args: argparse.Namespace, entry: scaling.Entry) -> None:
    """Measure a side's ranks, and write and print its row."""
    assert entry.plan is not None
    peaks: dict[int, Peak] = {}
    for place in places_of(entry.plan):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as own:
            given = (entry.plan, entry.ranks, place, args.groups)
            peaks[place] = own.submit(read_peak, *given).result()
        for bytes_, n, lines in peaks[place].groups:
            print(f"  {bytes_ / scaling.GB:7.3f} GB in {n:3d} of rank {place}: {lines}", flush=True)
    refused = next((peak.refused for peak in peaks.values() if peak.refused), "")
    metrics: dict[str, Any] = {}
    most = max((p for p in peaks.values() if p.bytes_), key=lambda p: p.bytes_ or 0, default=None)
    predicted = entry.facts.get("predicted", {})
    if most is not None and most.bytes_ and not refused:
        metrics["peak_memory"] = receipts.spread([most.bytes_], "bytes")
        metrics["reserved_memory"] = receipts.spread([most.reserved_bytes or 0.0], "bytes")
        error = predicted["peak_bytes"] / most.bytes_ - 1
        metrics["memory_error"] = receipts.spread([error], "share of the peak")
    receipts.append(
        "scaling",
        metrics,
        results=args.results,
        kind="rank_memory",
        side=entry.side.name,
        shape="tiny" if args.tiny else entry.side.shape,
        ranks=entry.ranks,
        n=1 if metrics else 0,
        peak_bytes_by_rank={str(place): peak.bytes_ for place, peak in peaks.items()},
        evidence=peaks[0].evidence,
        plan_sha256=receipts.sha256(entry.plan.dump()),
        predicted={k: predicted[k] for k in ("peak_bytes", "reserved_bytes") if k in predicted},
        **({"refused": refused} if refused else {}),
    )
    shown = {name: metric["value"] for name, metric in metrics.items()}
    print(json.dumps({"side": entry.side.name, "ranks": entry.ranks, **shown, "refused": refused}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    own = [side.name for side in SIDES if not (side.peer or side.saves or side.brief)]
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sides", nargs="+", choices=own, default=["fsdp", "pipeline", "tensor"])
    parser.add_argument("--groups", type=int, default=0, help="groups of tensors to print")
    parser.add_argument("--tiny", action="store_true", help="a dry run on the CPU, without peaks")
    parser.add_argument("--set", nargs="*", default=[], help="overrides for every plan")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--commit", help=receipts.COMMIT_HELP)
    args = parser.parse_args()
    receipts.given_commit = args.commit
    args.machine, args.device_name = None, "NVIDIA H200"
    if torch.cuda.is_available():
        args.device_name = torch.cuda.get_device_name()
    known = {side.name: side for side in SIDES}
    for name in args.sides:
        entry = scaling.entry_of(known[name], args, scaling.machine_of(args))
        if entry.refused:
            print(json.dumps({"side": name, "refused": entry.refused}))
            continue
        measure(args, entry)


if __name__ == "__main__":
    main()
