"""How near the tuner comes to the best plan that is known, from one that nobody tuned.

    python benchmarks/tuner.py 160m 1b lora long --minutes 8
    python benchmarks/tuner.py mine --plan naive.toml --best best.toml

A workload is a shape's plan with changes: the naive one, as a first script has it (eager kernels,
small micro-batches, every block's activations computed again), and the best one that `results/` has
a row of at that shape; for the LoRA fine-tune, which has none, the shape's recipe. Where the best
needs a package that is not installed, it is the best without. The tuner knows nothing of it. When
it has ended, its plan and the best are timed in turn in one call, on 50 steps or more, and the row
tells the speed of the tuned plan over the best one's. torchtitan's rows at these shapes are slower
than the best ones here (`results/peers.jsonl`).
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import receipts
from variants import FLASH4, KERNELS

from headrace import probes
from headrace.changes import parse
from headrace.cli import catalogue
from headrace.context import check_supported, choose_device, make_context
from headrace.core.errors import HeadraceError, UnsupportedError
from headrace.core.machine import Machine
from headrace.core.plan import Plan
from headrace.core.statistics import Interval
from headrace.trials.command import MINUTES, tune_command
from headrace.trials.judge import Compared, Rules, compare
from headrace.trials.pairs import ACCEPT, Size, measure_with
from headrace.trials.path import Tuned
from headrace.trials.worker import Worker

PLANS = Path(__file__).parent / "plans"
RECIPE = "-torch_compile -cudnn_attention -fused_swiglu -fused_cross_entropy -bf16_parameters"
LONG = "data.sequence_length=32768 batch.tokens=65536"
FASTEST = KERNELS + FLASH4
"""At both shapes, beside the recipe's own techniques; for a machine that has FlashAttention 4."""
WORKLOADS = {
    "160m": ("160m", f"{RECIPE} batch.micro_sequences=8", (FASTEST, "")),
    "1b": (
        "1b", f"{RECIPE} +full_checkpoint batch.micro_sequences=1",
        (f"+float8_linear {FASTEST}", "+float8_linear"),
    ),
    "lora": ("1b", f"{RECIPE} +lora +full_checkpoint batch.micro_sequences=1", ("+lora",)),
    "long": ("1b", f"{LONG} {RECIPE} +full_checkpoint batch.micro_sequences=1",
             (f"{LONG} +float8_linear {FLASH4}", f"{LONG} +float8_linear")),
}  # fmt: skip
"""name -> (shape, changes that make it naive, those that make it the best, the best first)"""
LIMIT_S = 600.0
"""Of the last comparison."""


def plans_of(name: str, args: argparse.Namespace) -> tuple[Plan, Plan]:
    """The naive plan and the best that can run here."""
    if args.plan:
        if not args.best:
            raise SystemExit("--plan goes with --best")
        texts, naive, best = (args.plan.read_text(), args.best.read_text()), "", ("",)
    elif name in WORKLOADS:
        shape, naive, best = WORKLOADS[name]
        texts = ((PLANS / f"{shape}.toml").read_text(),) * 2
    else:
        raise SystemExit(f"no workload {name!r}; there are {', '.join(WORKLOADS)}, or --plan FILE")
    known = catalogue()
    plans = [parse(words.split()).plan(texts[1], known, args.set) for words in best]
    first = next((plan for plan in plans[:-1] if runs_here(plan)), plans[-1])
    return parse(naive.split()).plan(texts[0], known, args.set), first


def runs_here(plan: Plan) -> bool:
    """Whether nothing that it asks for is refused."""
    try:
        check_supported(list(plan.techniques.values()), make_context(plan, choose_device(plan)))
    except UnsupportedError:
        return False
    return True


def beside_best(tuned: Plan, best: Plan, args: argparse.Namespace) -> Compared:
    """The tuned plan beside the best one: a ratio above 1 is a tuned plan that is faster."""
    device = choose_device(best)
    rules = Rules(device=device.type, precision=make_context(best, device).precision)
    with Worker(here=args.here) as worker:
        return compare(
            best, tuned, measure_with(worker), rules, size=Size(steps=args.steps, rounds=3),
            together=not args.apart, limit_s=LIMIT_S,
        )  # fmt: skip


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Tune a workload's naive plan and write its row."""
    naive, best = plans_of(name, args)
    device = choose_device(naive)
    context = make_context(naive, device)
    machine = probes.cached(device)
    if machine is None and args.probe:
        machine = probes.measure(device)
    machine = machine or Machine.assumed(context.device_name)
    folder = args.folder / f"{name}-tune" if args.folder else Path(tempfile.mkdtemp())
    facts: dict[str, Any] = {
        "workload": name, "shape": naive.name, "seeds": [naive.seed], "minutes": args.minutes,
        "rates": machine.source, "plan_sha256": receipts.sha256(naive.dump()),
        "baseline_sha256": receipts.sha256(best.dump()), "best": sorted(best.techniques),
    }  # fmt: skip
    try:
        tuned = tune_command(
            naive, aim="time", minutes=args.minutes, catalogue=catalogue(), context=context,
            machine=machine, folder=folder, tell=lambda line: print(line, flush=True),
            in_process=args.here,
        )  # fmt: skip
    except HeadraceError as error:
        return receipts.append("tuner", {}, results=args.results, refused=str(error), n=0, **facts)
    facts |= {
        "techniques": sorted(tuned.plan.techniques), "changes": list(tuned.changes),
        "tuned_sha256": receipts.sha256(tuned.plan.dump()),
        "path": [{"changes": list(s.changes), "verdict": s.verdict, "predicted": s.predicted,
                  "ratio": None if s.ratio is None else asdict(s.ratio), "steps": s.steps,
                  "memory": s.memory, "seconds": s.seconds, "reason": s.reason}
                 for s in tuned.path],
    }  # fmt: skip
    found = beside_best(tuned.plan, best, args)
    if found.ratio is None or found.before_s is None:
        why = f"the last comparison: {found.reason}"
        return receipts.append("tuner", {}, results=args.results, refused=why, n=0, **facts)
    facts |= {"n": found.ratio.n, "steps": found.steps, "loss_difference": found.loss}
    return receipts.append("tuner", metrics(tuned, found), results=args.results, **facts)


def metrics(tuned: Tuned, found: Compared) -> dict[str, Any]:
    """Ratios with their intervals, and what tuning took."""
    ratio, after_s = found.ratio, found.after_s
    assert ratio is not None and after_s is not None, "both ran"
    told = {
        "ratio_to_best": interval(ratio),
        "tuning": receipts.spread([tuned.seconds], "s"),
        "tokens_per_s": receipts.spread([tuned.plan.batch.tokens / after_s], "tokens/s"),
    }
    if tuned.memory is not None:
        told["memory_ratio"] = receipts.spread([tuned.memory], "x")
    return told if tuned.ratio is None else {**told, "speed_ratio": interval(tuned.ratio)}


def interval(ratio: Interval) -> dict[str, Any]:
    """A 95% interval as a metric; of one pair nothing is known but its value."""
    low, high = (ratio.value, ratio.value) if ratio.n < 2 else (ratio.low, ratio.high)
    return {"value": ratio.value, "low": low, "high": high, "unit": "x"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="+", help=f"{', '.join(WORKLOADS)}, or a name")
    parser.add_argument("--plan", type=Path, help="a naive plan of your own")
    parser.add_argument("--best", type=Path, help="the best plan that is known for it")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--steps", type=int, default=ACCEPT.steps, help="of the last blocks")
    parser.add_argument("--apart", action="store_true", help="tuned and best do not fit together")
    parser.add_argument("--probe", action="store_true", help="measure the machine's rates first")
    parser.add_argument("--folder", type=Path, help="keeps trials from one call to the next")
    parser.add_argument("--here", action="store_true", help="no process of its own, to debug")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--set", nargs="*", default=[], help="overrides for every plan")
    args = parser.parse_args()
    for name in args.workloads:
        row = measure(name, args)
        told = {n: round(m["value"], 4) for n, m in row["metrics"].items()}
        print(json.dumps({"workload": name, **told, "refused": row.get("refused", ""),
                          "changes": row.get("changes", [])}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
