"""Measure how far one device goes: utilization at 7B, the longest sequence, the start, the memory.

    python benchmarks/limits.py mfu --variants none_rows2 none_once4
    python benchmarks/limits.py context --lengths 262144 524288
    python benchmarks/limits.py start --variants recipe compile_cache
    python benchmarks/limits.py memory --variants selective chunked --rounds 2
    python benchmarks/limits.py plan mfu context memory

`mfu`: tokens per second and model FLOPs utilization (the PaLM formula, and with the causal half of
attention) of a plan after warm-up, with its peak and the predicted one. `context`: full optimizer
steps with one row of each length; what does not fit gets a row that says so. `start`: `headrace
train` in a process of its own, with empty and then with warm caches, until the end of its first
step; with compile_cache only its own folder and Python's bytecode are kept between the two.
`memory`: speed and peak of `headrace train` beside torchtitan, alternating. `plan` trains nothing
and prints what is predicted for every variant, or refused, here or on `--device-name`.

A variant is a name from variants.py, or `NAME: +technique -technique key=value`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import receipts
import torch
from variants import VARIANTS, Variant

from headrace.assemble.build import make_context, make_ledger
from headrace.assemble.context import check_supported, choose_device, elsewhere
from headrace.core.errors import EXIT_INTERRUPTED, HeadraceError
from headrace.costs.count import linear_parameters, model_flops_per_token, total_parameters
from headrace.costs.hardware import lookup
from headrace.plan.plan import Plan
from headrace.plan.technique import Context
from headrace.tuner.readings import Reading, time_long_row, time_steps
from headrace.tuner.worker import Worker

PLANS = Path(__file__).parent / "plans"
GIB = 2**30
SHAPES = {"mfu": "7b", "context": "1b", "start": "1b", "memory": "1b"}


def context_of(plan: Plan, device_name: str = "") -> Context:
    """Return the place where a plan would run: here, or on a Hopper GPU that is not here."""
    if not device_name:
        return make_context(plan, choose_device(plan))
    return elsewhere(make_context(plan, torch.device("cpu")), device_name)


def checked(
    variant: Variant, path: Path, more: list[str], device_name: str = ""
) -> tuple[Plan | None, dict[str, Any]]:
    """Return the plan with what is predicted of it; or None and why it cannot run."""
    try:
        plan = variant.of(path, more)
        context = context_of(plan, device_name)
        check_supported(list(plan.techniques.values()), context)
        instant, peak_bytes = make_ledger(plan, context).peak()
    except HeadraceError as error:
        return None, {"refused": str(error)}
    return plan, {"predicted_bytes": peak_bytes, "predicted_at": instant}


def row(
    what: str,
    variant: str,
    plan: Plan | None,
    metrics: dict[str, Any],
    args: argparse.Namespace,
    topic: str = "limits",
    **facts: Any,
) -> None:
    """Append a receipt and print it."""
    if plan is not None:
        facts |= {
            "techniques": sorted(plan.techniques),
            "seeds": [plan.seed],
            "plan_sha256": receipts.sha256(plan.dump()),
            "batch": plan.batch.model_dump(),
            "length": plan.data.sequence_length,
        }
    facts = {"recipe": f"{what}: {variant}", "measurement": what, "variant": variant, **facts}
    receipts.append(topic, metrics, results=args.results, **facts)
    shown = {
        n: round(m["value"] / (GIB if m["unit"] == "bytes" else 1), 4) for n, m in metrics.items()
    }
    print(
        json.dumps(
            {
                "what": what,
                "variant": variant,
                **shown,
                "n": facts.get("n"),
                "predicted_GiB": round(facts.get("predicted_bytes", 0) / GIB, 2),
                "refused": facts.get("refused", ""),
            }
        ),
        flush=True,
    )


# --- mfu -------------------------------------------------------------------------------------


def utilization(plan: Plan, tokens_per_s: float) -> dict[str, float]:
    """Return shares of the device's peak by the PaLM formula, and with half of attention."""
    context = context_of(plan)
    peak = lookup(context.device_name).peak_flops(context.precision)
    if not peak:
        return {}
    whole = model_flops_per_token(plan.model, plan.data.sequence_length)
    matrices = 6.0 * linear_parameters(plan.model)
    causal = matrices + (whole - matrices) / 2
    return {"mfu": tokens_per_s * whole / peak, "mfu_causal": tokens_per_s * causal / peak}


def measure_mfu(args: argparse.Namespace) -> None:
    """Time variants of the plan, one after another."""
    path = plan_file(args, "mfu")
    for variant in variants(args, "mfu"):
        if out_of_time(args, f"mfu {variant.name}"):
            continue
        plan, facts = checked(variant, path, args.set)
        if plan is None:
            row("mfu", variant.name, None, {}, args, shape=path.stem, n=0, **facts)
            continue
        with Worker(here=args.here) as worker:
            reading = worker.ask(
                time_steps,
                plan,
                limit_s=args.child_s,
                text=False,
                warm=args.warm,
                timed=1,
                blocks=args.timed,
            )
        facts |= {
            "parameters": total_parameters(plan.model),
            "evidence": reading.evidence,
            "first_loss": reading.losses[:1],
        }
        metrics = {}
        if reading.refused:
            facts["refused"] = reading.refused
        else:
            rates = [plan.batch.tokens / s for s in reading.seconds]
            metrics = speed_metrics(reading, rates)
            shares = [utilization(plan, rate) for rate in rates]
            for name in shares[0]:
                metrics[name] = receipts.spread([s[name] for s in shares], "share of peak")
        row(
            "mfu",
            variant.name,
            plan,
            metrics,
            args,
            shape=path.stem,
            n=len(reading.seconds),
            **facts,
        )


def speed_metrics(reading: Reading, rates: list[float]) -> dict[str, Any]:
    """Return the metrics that every reading of steps has."""
    metrics = {
        "tokens_per_s": receipts.spread(rates, "tokens/s"),
        "step": receipts.spread(reading.seconds, "s"),
    }
    if reading.peak_bytes is not None:
        metrics["peak_memory"] = receipts.spread([reading.peak_bytes], "bytes")
    return metrics


# --- context ---------------------------------------------------------------------------------


def lengthened(length: int) -> list[str]:
    """Return the changes that make a step one row of `length` tokens."""
    return [f"data.sequence_length={length}", f"batch.tokens={length}", "batch.micro_sequences=0"]


def measure_context(args: argparse.Namespace) -> None:
    """Run every length with every variant."""
    path = plan_file(args, "context")
    for variant in variants(args, "context"):
        for length in args.lengths:
            name = f"{variant.name} {length}"
            if out_of_time(args, f"context {name}"):
                continue
            plan, facts = checked(variant, path, [*lengthened(length), *args.set])
            if plan is None:
                row("context", name, None, {}, args, shape=path.stem, n=0, **facts)
                continue
            with Worker(here=args.here) as worker:
                reading = worker.ask(
                    time_long_row,
                    plan,
                    limit_s=args.child_s,
                    brief_tokens=args.short,
                    steps=args.steps,
                )
            facts |= {"evidence": reading.evidence, "losses": reading.losses}
            metrics: dict[str, Any] = {}
            if reading.refused:
                facts["refused"] = reading.refused
            else:
                metrics = speed_metrics(reading, [length / s for s in reading.seconds])
                metrics["row"] = receipts.spread([length], "tokens")
            row(
                "context",
                name,
                plan,
                metrics,
                args,
                shape=path.stem,
                n=len(reading.seconds),
                **facts,
            )


# --- start -----------------------------------------------------------------------------------


def measure_start(args: argparse.Namespace) -> None:
    """Time `headrace train` with empty caches of kernels, data and bytecode, then warm."""
    for variant in variants(args, "start"):
        label = "" if variant.name == next(iter(VARIANTS["start"])) else f"{variant.name} "
        keeps = "compile_cache" in variant.with_
        with tempfile.TemporaryDirectory() as work:
            for index, caches in enumerate(("cold", *["kept" if keeps else "warm"] * args.rounds)):
                if not out_of_time(args, f"start {label}{caches}"):
                    own = Path(work, f"caches{index * keeps}")
                    _start(variant, label + caches, Path(work), own, args)


def _start(variant: Variant, caches: str, work: Path, own: Path, args: argparse.Namespace) -> None:
    path, more = plan_file(args, "start"), variant.command()
    if "compile_cache" in variant.with_:
        more.append(f"techniques.compile_cache.directory={work / 'kept'}")
    folders = {
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
        "XDG_CACHE_HOME": "cache",
        "CUDA_CACHE_PATH": "cuda",
    }
    given = {name: had for name, had in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    given["PYTHONPYCACHEPREFIX"] = str(work / "bytecode")  # of all the variant's starts
    began_s = time.monotonic()
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "headrace",
            "train",
            str(path),
            "--json",
            "goal.steps=2",
            f"directory={work / 'runs'}",
            f"data.directory={work / 'data'}",
            *more,
            *args.set,
        ],
        capture_output=True,
        text=True,
        timeout=args.child_s,
        check=False,
        env={**given, **{name: str(own / folder) for name, folder in folders.items()}},
    )
    whole_s = time.monotonic() - began_s
    if ended.returncode:
        row(
            "start",
            caches,
            None,
            {},
            args,
            shape=path.stem,
            n=0,
            refused=f"{ended.stdout[-500:]} {ended.stderr[-1500:]}",
        )
        return
    report = json.loads(ended.stdout)
    parts = report["start_s"]
    metrics = {"to_first_step": receipts.spread([sum(parts.values())], "s")}
    metrics |= {name: receipts.spread([spent], "s") for name, spent in parts.items()}
    metrics["whole_command"] = receipts.spread([whole_s], "s")
    row(
        "start",
        caches,
        None,
        metrics,
        args,
        shape=path.stem,
        n=1,
        seeds=[report["seed"]],
        techniques=sorted(report["techniques"]),
        guard=report["guard"],
        evidence={n: t["detail"] for n, t in report["techniques"].items()},
    )


# --- memory ----------------------------------------------------------------------------------


def measure_memory(args: argparse.Namespace) -> None:
    """Compare variants of `headrace train` with a peer, in rounds; write a row for each side."""
    from peers import spreads

    path, chosen = plan_file(args, "memory"), variants(args, "memory")
    if args.peer:
        check_peer(args.peer, path, [w for v in chosen for w in v.overrides] + args.set)
    units = {"tokens_per_s": ("tokens_per_s", "tokens/s"), "peak_memory": ("peak_bytes", "bytes")}
    by_side, refused, interrupted = read_memory(args, path, chosen)
    beside = by_side.pop("", [])
    if args.peer:
        facts = {"failed_later" if beside else "refused": refused[""]} if "" in refused else {}
        if beside or facts:
            row(
                "memory",
                args.peer,
                None,
                spreads(beside, units) if beside else {},
                args,
                "memory",
                shape=path.stem,
                n=len(beside),
                peer=args.peer,
                **facts,
            )
    for variant in chosen:
        plan, facts = checked(variant, path, args.set)
        readings, why = by_side[variant.name], refused.get(variant.name)
        facts["overrides"] = [*variant.overrides, *args.set]
        if not readings:
            if interrupted:
                continue
            facts["refused"] = why or facts.get("refused", "no time left")
            row("memory", variant.name, plan, {}, args, "memory", shape=path.stem, n=0, **facts)
            continue
        if why:
            facts["failed_later"] = why
        metrics = spreads(readings, units)
        pairs = list(zip(readings, beside, strict=False))
        for key, name in (("tokens_per_s", "ratio_to"), ("peak_bytes", "memory_ratio_to")):
            if ratios := [a[key] / b[key] for a, b in pairs if a[key]]:
                metrics[f"{name}_{args.peer}"] = receipts.spread(ratios, "x")
        row(
            "memory",
            variant.name,
            plan,
            metrics,
            args,
            "memory",
            shape=path.stem,
            n=len(readings),
            **facts,
        )
    if interrupted:
        raise SystemExit(EXIT_INTERRUPTED)


def check_peer(peer: str, path: Path, overrides: list[str]) -> None:
    """End the program where the peer is unknown, or would have another shape than Headrace."""
    from peers import PEERS, check_shape

    if peer not in PEERS:
        raise SystemExit(f"no peer {peer!r}; there are {', '.join(PEERS)}")
    if path.resolve().parent != PLANS.resolve():
        raise SystemExit(f"{path}: a peer reads benchmarks/plans/SIZE.toml; give one, or --peer ''")
    check_shape(overrides)


def read_memory(
    args: argparse.Namespace, path: Path, chosen: list[Variant]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str], bool]:
    """Return readings and the last error by variant, and whether an interrupt ended them.

    The peer's are under "". A side that fails is not read again, so readings are those of the
    rounds from the first on.
    """
    from peers import Peer, time_headrace

    peer = Peer(args.peer, path.stem)
    sides: dict[str, Variant | None] = {"": None} if args.peer else {}
    sides |= {v.name: v for v in chosen}
    readings: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    refused: dict[str, str] = {}
    interrupted = True
    with suppress(KeyboardInterrupt), tempfile.TemporaryDirectory() as work:
        for index in range(args.rounds):
            if out_of_time(args, f"memory round {index}"):
                break
            for name, variant in sides.items():
                label = f"memory {name or args.peer}"
                if name in refused or (variant and out_of_time(args, f"{label} round {index}")):
                    continue
                try:
                    if variant is None:
                        reading = peer.read()
                    else:
                        reading = time_headrace(
                            str(path.resolve().with_suffix("")),
                            Path(work),
                            [*variant.command(), *args.set],
                        )
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    refused[name] = str(error)[-1500:]
                    print(f"{label} is left out: {refused[name]}", flush=True)
                    continue
                readings[name].append(reading)
                rate = reading["tokens_per_s"] or 0
                peak_gib = (reading["peak_bytes"] or 0) / GIB
                print(f"{label}: {rate:,.0f} tokens/s {peak_gib:.2f} GiB", flush=True)
        interrupted = False
    peer.close()
    return readings, refused, interrupted


# --- what is predicted -----------------------------------------------------------------------


def print_plan(args: argparse.Namespace) -> None:
    """Print the predicted peaks of all variants, and refusals; nothing is trained."""
    for what in args.measurements:
        if what not in VARIANTS or what == "start":
            continue
        path = plan_file(args, what)
        for variant in variants(args, what):
            for more in map(lengthened, args.lengths) if what == "context" else [[]]:
                plan, facts = checked(variant, path, [*more, *args.set], args.device_name)
                peak = facts.get("predicted_bytes", 0) / GIB
                text = f"{peak:.1f} GiB at the {facts.get('predicted_at')}" if plan else ""
                print(what, variant.name, *more[:1], text or f"refused: {facts['refused']}")


def plan_file(args: argparse.Namespace, what: str) -> Path:
    """Return --plan, or the plan of the measurement's shape."""
    return args.plan or PLANS / f"{SHAPES[what]}.toml"


def variants(args: argparse.Namespace, what: str) -> list[Variant]:
    """Return the variants that are asked for, else the default: the first, or all for `plan`."""
    known = VARIANTS[what]
    every = "plan" in args.measurements
    asked = args.variants or (list(known) if every else list(known)[:1])
    return [Variant.parse(text, known) for text in asked]


def out_of_time(args: argparse.Namespace, what: str) -> bool:
    """Return whether no time is left to begin `what`."""
    if time.monotonic() < args.ends_s:
        return False
    print(f"left: {what}", flush=True)
    return True


MEASURES = {
    "mfu": measure_mfu,
    "context": measure_context,
    "start": measure_start,
    "memory": measure_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measurements", nargs="+", choices=["plan", *MEASURES])
    parser.add_argument("--plan", type=Path, help="a plan file instead of the measurement's own")
    parser.add_argument("--variants", nargs="+", default=[])
    parser.add_argument("--lengths", nargs="+", type=int, default=[262144, 524288])
    parser.add_argument("--short", type=int, default=4096, help="tokens of the first step's row")
    parser.add_argument("--steps", type=int, default=1, help="full steps of a long row")
    parser.add_argument("--warm", type=int, default=3, help="steps before those that are timed")
    parser.add_argument("--timed", type=int, default=6, help="steps that are timed, each alone")
    parser.add_argument("--rounds", type=int, default=1, help="of warm starts, of memory")
    parser.add_argument("--peer", default="torchtitan", help="beside memory; '' for none")
    parser.add_argument("--child-s", type=float, default=560, help="limit of each process")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--device-name", default="", help="plan: as on this GPU, as NVIDIA H200")
    parser.add_argument("--here", action="store_true", help="no process of its own, to debug")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--set", nargs="*", default=[], help="overrides for every plan")
    args = parser.parse_args()
    args.ends_s = time.monotonic() + args.limit_s
    if "plan" in args.measurements:
        print_plan(args)
        return
    for what in args.measurements:
        MEASURES[what](args)


if __name__ == "__main__":
    main()
