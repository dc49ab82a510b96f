"""Measure where a step's device time goes, by family and by kernel.

    python benchmarks/kernel_table.py 1b --with fused_swiglu

A row has the kernels of three profiled steps, by family and the longest by name, and the longest
times that the device waited for the host. Names decide the family, as the doctor does in a trace:
matmuls, attention, the optimizer, elementwise work, copies, the rest. Inductor names a kernel by
all operations that it fused, so the beginning of the name decides for its own. A row also has
the work that the plan's ledger gives each family (`kernel_gaps.py`), or why there is none. With
`--host` a row has what the host did in another step, by operation: most of a step that waits for
launches is there, though the profiler adds to each operation. Where copies go between host and
device, `over_link` is how long in a step, and `beside_kernels` how much of that a kernel ran too.
"""

import json
import time
from pathlib import Path
from typing import Any

import receipts
import torch
from kernel_gaps import parser, plan_from, work_of

from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.core.errors import UnsupportedError
from headrace.data.loader import Micro
from headrace.doctor.trace.kernels import family_of
from headrace.doctor.trace.steps import Union
from headrace.plan.plan import Plan
from headrace.train import train
from headrace.tuner.readings import opened

STEPS = 3
LINK_DIRECTIONS = ("HtoD", "DtoH")


def idle_between(events: list[Any]) -> list[tuple[float, str, str]]:
    """Return times without a kernel, longest first: (milliseconds, kernel before, kernel after)."""
    ran = sorted((e.time_range.start, e.time_range.end, e.name) for e in events)
    gaps, (_, until, last) = [], ran[0]
    for start, end, name in ran[1:]:
        if start > until:
            gaps.append(((start - until) / 1e3, last[:60], name[:60]))
        if end > until:
            until, last = end, name
    return sorted(gaps, reverse=True)


def over_link(events: list[Any]) -> dict[str, float]:
    """Return the milliseconds a step that copies took over the link, and those beside kernels."""
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in events:
        copied = any(direction in event.name for direction in LINK_DIRECTIONS)
        if copied or family_of(event.name) != "copies":
            spans[copied].append((event.time_range.start, event.time_range.end))
    copies, kernels = Union(spans[True]), Union(spans[False])
    lasting = list(zip(copies.starts, copies.ends, strict=True))
    times = {
        "over_link": sum(end - start for start, end in lasting),
        "beside_kernels": sum(kernels.inside(start, end) for start, end in lasting),
    }
    return {name: us / STEPS / 1e3 for name, us in times.items() if lasting}


def profiled(
    build: Build, micros: list[Micro]
) -> tuple[dict[str, tuple[float, int]], float, list[Any]]:
    """Return (milliseconds, launches) of each kernel, the step's milliseconds, its events."""
    for index in range(4):
        train.step(build, micros, index)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for index in range(STEPS):
        train.step(build, micros, index)
    torch.cuda.synchronize()
    step_ms = (time.perf_counter() - begin) / STEPS * 1e3
    devices = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=devices, acc_events=True) as profile:
        for index in range(STEPS):
            train.step(build, micros, index)
        torch.cuda.synchronize()
    kernels: dict[str, tuple[float, int]] = {}
    for event in profile.key_averages():
        spent_ms = event.self_device_time_total / STEPS / 1e3
        if spent_ms > 0:
            kernels[event.key] = (spent_ms, event.count // STEPS)
    events = [e for e in profile.events() or [] if str(e.device_type).endswith("CUDA")]
    return kernels, step_ms, events


def on_the_host(build: Build, micros: list[Micro], longest: int) -> list[dict[str, Any]]:
    """Return the host's operations of a step with their own milliseconds, longest first."""
    devices = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=devices, acc_events=True) as profile:
        train.step(build, micros, 0)
        torch.cuda.synchronize()
    operations = sorted(profile.key_averages(), key=lambda e: -e.self_cpu_time_total)
    return [
        {"name": e.key[:90], "ms": round(e.self_cpu_time_total / 1e3, 3), "calls": e.count}
        for e in operations[:longest]
    ]


def work_facts(plan: Plan) -> dict[str, Any]:
    """Return the work of the plan by family, as a row stores it."""
    try:
        pieces = work_of(plan, make_context(plan, torch.device("cuda")))
    except UnsupportedError as error:
        return {"no_work": error.message}
    return {"work": [piece.plain() for piece in pieces]}


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--longest", type=int, default=24)
    words.add_argument("--host", action="store_true", help="what the host does, too")
    words.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = words.parse_args()
    plan = plan_from(args)
    work = work_facts(plan)
    with opened(plan) as (build, micros):
        by_kernel, step_ms, events = profiled(build, micros(0))
        if args.host:
            work["host"] = on_the_host(build, micros(0), args.longest)
    idle = idle_between(events) if events else []
    families: dict[str, float] = {}
    for name, (spent_ms, _) in by_kernel.items():
        families[family_of(name)] = families.get(family_of(name), 0.0) + spent_ms
    metrics: dict[str, Any] = {"step": receipts.spread([step_ms], "ms")}
    metrics["idle"] = receipts.spread([sum(gap for gap, *_ in idle) / STEPS], "ms")
    metrics |= {
        name.replace(" ", "_"): receipts.spread([ms], "ms") for name, ms in families.items()
    }
    metrics |= {name: receipts.spread([ms], "ms") for name, ms in over_link(events).items()}
    longest = sorted(by_kernel.items(), key=lambda item: -item[1][0])[: args.longest]
    rows = [{"name": n[:90], "ms": round(ms, 3), "launches": k} for n, (ms, k) in longest]
    receipts.append(
        "kernels",
        metrics,
        results=args.results,
        shape=args.shape,
        n=1,
        seeds=[plan.seed],
        recipe=" ".join(["recipe", *args.with_, *(f"-{n}" for n in args.without), *args.set]),
        techniques=sorted(plan.techniques),
        longest=rows,
        plan_sha256=receipts.sha256(plan.dump()),
        **work,
    )
    print(json.dumps({k: round(v["value"], 2) for k, v in metrics.items()}))
    for row in rows:
        print(f"{row['ms']:9.3f} ms {row['launches']:5d} x {row['name']}")
    for gap_ms, before, after in idle[:12]:
        print(f"{gap_ms:9.3f} ms idle between {before} and {after}")
    for row in work.get("host", ()):
        print(f"{row['ms']:9.3f} ms {row['calls']:5d} x {row['name']} on the host")


if __name__ == "__main__":
    main()
