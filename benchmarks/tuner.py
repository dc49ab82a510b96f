"""Measure how near the tuner comes to the best known plan, from a plan that nobody tuned.

    python benchmarks/tuner.py small demo --folder runs/tuner
    python benchmarks/tuner.py 160m 1b lora long --minutes 8
    python benchmarks/tuner.py mine --plan naive.toml --best best.toml

A workload is a recipe or a shape's plan with changes: the naive one, as a first script has it
(eager kernels; at the shapes also small micro-batches, and every block's activations computed
again), and candidates for the best one: what `results/` has the fastest rows of at that shape; for
the LoRA fine-tune, which has none, the shape's recipe. The tuner knows nothing of them. When it has
ended, its plan is timed in alternation with each candidate that can run here, on 50 steps or more.
The row has its speed over that of the candidate that is fastest beside it. torchtitan's rows at
these shapes are slower than the best ones here (`results/peers.jsonl`).

Where the tuner ended, and each candidate that was timed, is kept in `--folder`: the same command
goes on where it was cut off, and tunes no second time.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import receipts
from scoring.numbers import BUDGETS
from variants import FLASH4, KERNELS

from headrace import probes
from headrace.assemble.context import check_supported, choose_device, make_context
from headrace.cli.catalogue import catalogue
from headrace.cli.plans import rates_here
from headrace.core.errors import HeadraceError, UnsupportedError
from headrace.core.limits import TUNE_MINUTES
from headrace.core.statistics import Interval
from headrace.costs.machine import Machine
from headrace.plan.changes import parse
from headrace.plan.plan import Plan
from headrace.tuner.command import tune_command
from headrace.tuner.judge import Rules, compare
from headrace.tuner.pairs import ACCEPT, SampleSize, measure_with
from headrace.tuner.path import Tuned
from headrace.tuner.store import fingerprint
from headrace.tuner.worker import Worker

PLANS = Path(__file__).parent / "plans"
RECIPES = receipts.ROOT / "headrace" / "recipes"
RECIPE = "-torch_compile -cudnn_attention -fused_swiglu -fused_cross_entropy -bf16_parameters"
LONG = "data.sequence_length=32768 batch.tokens=65536"
FASTEST = KERNELS + FLASH4
"""At both shapes, beside the recipe's own techniques; for a machine that has FlashAttention 4."""
GRAPHS = "+torch_compile +cuda_graphs"
SMALL = (
    GRAPHS,
    f"{GRAPHS} +fused_cross_entropy",
    f"{GRAPHS} +cudnn_attention",
    f"{GRAPHS} techniques.torch_compile.scope=block",
    "+torch_compile",
)
"""Plans of the small recipes, whose steps wait for launches; the last is for a CPU, too."""
WORKLOADS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "small": ("small", "", SMALL),
    "demo": ("demo", "", SMALL),
    "160m": ("160m", f"{RECIPE} batch.micro_sequences=8", (FASTEST, KERNELS, "")),
    "1b": (
        "1b",
        f"{RECIPE} +full_checkpoint batch.micro_sequences=1",
        (f"+float8_linear {FASTEST}", f"+float8_linear {KERNELS}", "+float8_linear"),
    ),
    "lora": ("1b", f"{RECIPE} +lora +full_checkpoint batch.micro_sequences=1", ("+lora",)),
    "long": (
        "1b",
        f"{LONG} {RECIPE} +full_checkpoint batch.micro_sequences=1",
        (f"{LONG} +float8_linear {FLASH4}", f"{LONG} +float8_linear"),
    ),
}
"""name -> (recipe or shape, changes that make it naive, those that make each candidate)"""
LIMIT_S = 240.0
"""Seconds of the comparison with one candidate."""
ROUNDS, BLOCK_S = 6, 0.5
"""Rounds of the comparison, and the least seconds of a block: it has more of short steps, whose
ratio three rounds of 0.2 s left anywhere within 10%."""
KEPT = "beside.json"
"""The file in a tuning folder that holds the tuned plan, and each candidate timed beside it."""


def plans_of(name: str, args: argparse.Namespace) -> tuple[Plan, dict[str, Plan]]:
    """Return the naive plan, and the candidates that can run here by their changes."""
    if args.plan:
        if not args.best:
            raise SystemExit("--plan goes with --best")
        texts, naive, best = (args.plan.read_text(), args.best.read_text()), "", ("",)
    elif name in WORKLOADS:
        shape, naive, best = WORKLOADS[name]
        texts = (file_of(shape).read_text(),) * 2
    else:
        raise SystemExit(f"no workload {name!r}; there are {', '.join(WORKLOADS)}, or --plan FILE")
    known = catalogue()
    plans = {words: parse(words.split()).plan(texts[1], known, args.set) for words in best}
    plans = {words: plan for words, plan in plans.items() if runs_here(plan)}
    if not plans:
        raise SystemExit(f"{name}: no candidate for the best plan can run here")
    return parse(naive.split()).plan(texts[0], known, args.set), plans


def file_of(shape: str) -> Path:
    """Return the plan of a recipe or a shape."""
    recipe = RECIPES / f"{shape}.toml"
    return recipe if recipe.is_file() else PLANS / f"{shape}.toml"


def runs_here(plan: Plan) -> bool:
    """Return whether nothing that the plan asks for is refused here."""
    try:
        check_supported(list(plan.techniques.values()), make_context(plan, choose_device(plan)))
    except UnsupportedError:
        return False
    return True


class Kept:
    """Keep for the next call where the tuner ended, and the candidates that were timed.

    Args:
        file: the file that keeps it.
        about: plan, machine and commit; a file about others is not used.
    """

    def __init__(self, file: Path, about: dict[str, Any]) -> None:
        self.file = file
        kept = json.loads(file.read_text()) if file.is_file() else {}
        kept = kept if kept.get("about") == about else {}
        self.about = about
        self.tuned: dict[str, Any] = kept.get("tuned", {})
        self.beside: dict[str, dict[str, Any]] = kept.get("beside", {})

    def write(self) -> None:
        """Write what is kept to the file."""
        state = {"about": self.about, "tuned": self.tuned, "beside": self.beside}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(state, indent=1))


def measure(name: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """Tune a workload's naive plan and write its row; None where candidates are left."""
    naive, candidates = plans_of(name, args)
    minutes = args.minutes or BUDGETS.get(name, TUNE_MINUTES)
    folder = args.folder / f"{name}-tune" if args.folder else Path(tempfile.mkdtemp())
    kept = Kept(
        folder / KEPT,
        {
            "plan": fingerprint(naive),
            "minutes": minutes,
            "hardware": receipts.hardware(),
            "commit": receipts.commit(),
        },
    )
    facts: dict[str, Any] = {
        "workload": name,
        "shape": naive.name,
        "seeds": [naive.seed],
        "minutes": minutes,
        "plan_sha256": receipts.sha256(naive.dump()),
    }
    if not kept.tuned:
        try:
            kept.tuned = tuned_facts(*tune(naive, minutes, folder, args))
        except HeadraceError as error:
            return receipts.append(
                "tuner", {}, results=args.results, refused=str(error), n=0, **facts
            )
        kept.write()
    tuned = Plan.read(kept.tuned["toml"], catalogue())
    if left := beside_candidates(tuned, candidates, kept, args):
        goes_on = "the same command" if args.folder else "a command with --folder FOLDER"
        print(f"left: {name} beside {' and '.join(map(repr, left))}: {goes_on} goes on", flush=True)
        return None
    row = append(tuned, candidates, kept, facts, args)
    kept.file.unlink()  # the next call tunes again
    return row


def tune(
    naive: Plan, minutes: float, folder: Path, args: argparse.Namespace
) -> tuple[Tuned, Machine]:
    """Tune for step time, as `headrace tune` does; return the result, and the machine it used."""
    device = choose_device(naive)
    context = make_context(naive, device)
    machine = probes.measure(device) if args.probe else rates_here(device)
    return tune_command(
        naive,
        aim="time",
        minutes=minutes,
        catalogue=catalogue(),
        context=context,
        machine=machine,
        folder=folder,
        note=lambda line: print(line, flush=True),
        in_process=args.here,
    ), machine


def tuned_facts(tuned: Tuned, machine: Machine) -> dict[str, Any]:
    """Return where the tuner ended and how, as JSON values."""
    return {
        "toml": tuned.plan.to_toml(),
        "rates": machine.source,
        "changes": list(tuned.changes),
        "seconds": tuned.seconds,
        "memory": tuned.memory,
        "ratio": asdict(tuned.ratio) if tuned.ratio else None,
        "path": [
            {
                "changes": list(s.changes),
                "verdict": s.verdict,
                "predicted": s.predicted,
                "ratio": None if s.ratio is None else asdict(s.ratio),
                "steps": s.steps,
                "memory": s.memory,
                "seconds": s.seconds,
                "reason": s.reason,
            }
            for s in tuned.path
        ],
    }


def beside_candidates(
    tuned: Plan, candidates: Mapping[str, Plan], kept: Kept, args: argparse.Namespace
) -> list[str]:
    """Time the tuned plan beside each candidate that was not timed yet; return those left.

    A ratio above 1 means that the tuned plan is faster.
    """
    ends_s, left = time.monotonic() + 60 * args.best_minutes, []
    with Worker(here=args.here) as worker:
        for words, plan in candidates.items():
            limit_s = min(LIMIT_S, ends_s - time.monotonic())
            if words in kept.beside:
                continue
            device = choose_device(plan)
            rules = Rules(device=device.type, precision=make_context(plan, device).precision)
            size = SampleSize(steps=args.steps, rounds=ROUNDS, block_s=BLOCK_S)
            compared = compare(
                plan,
                tuned,
                measure_with(worker),
                rules,
                size=size,
                together=not args.apart,
                limit_s=limit_s,
            )
            if compared.verdict == "cut" and limit_s < LIMIT_S:
                left.append(words)
                continue
            kept.beside[words] = {
                "ratio": asdict(compared.ratio) if compared.ratio and compared.after_s else None,
                "reason": compared.reason,
                "after_s": compared.after_s,
                "steps": compared.steps,
                "loss_difference": compared.loss,
            }
            kept.write()
            ratio_text = f"{compared.ratio.value:.4f}" if compared.ratio else compared.reason
            print(f"{tuned.name} tuned over {words or 'the recipe'}: {ratio_text}", flush=True)
    return left


def append(
    tuned: Plan,
    candidates: Mapping[str, Plan],
    kept: Kept,
    facts: dict[str, Any],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Write the row: the tuned plan over the candidate that is fastest beside it."""
    beside = {words: kept.beside[words] for words in candidates}
    outcome = kept.tuned
    facts |= {
        "rates": outcome["rates"],
        "techniques": sorted(tuned.techniques),
        "changes": outcome["changes"],
        "tuned_sha256": receipts.sha256(tuned.dump()),
        "path": outcome["path"],
        "candidates": beside,
    }
    timed = {words: compared for words, compared in beside.items() if compared["ratio"]}
    if not timed:
        why = "; ".join(f"beside {words!r}: {f['reason']}" for words, f in beside.items())
        return receipts.append("tuner", {}, results=args.results, refused=why, n=0, **facts)
    words = min(timed, key=lambda words: timed[words]["ratio"]["value"])
    best, compared = candidates[words], timed[words]
    facts |= {
        "baseline_sha256": receipts.sha256(best.dump()),
        "best": sorted(best.techniques),
        "best_changes": words,
        "n": compared["ratio"]["n"],
        "steps": compared["steps"],
        "loss_difference": compared["loss_difference"],
    }
    return receipts.append(
        "tuner", metrics(tuned, outcome, compared), results=args.results, **facts
    )


def metrics(tuned: Plan, facts: Mapping[str, Any], compared: Mapping[str, Any]) -> dict[str, Any]:
    """Return ratios with their intervals, and what tuning took."""
    rates = {
        "ratio_to_best": interval(Interval(**compared["ratio"])),
        "tuning": receipts.spread([facts["seconds"]], "s"),
        "tokens_per_s": receipts.spread([tuned.batch.tokens / compared["after_s"]], "tokens/s"),
    }
    if facts["memory"] is not None:
        rates["memory_ratio"] = receipts.spread([facts["memory"]], "x")
    ratio = facts["ratio"]
    return {**rates, "speed_ratio": interval(Interval(**ratio))} if ratio else rates


def interval(ratio: Interval) -> dict[str, Any]:
    """Return a 95% interval as a metric; one pair alone has no interval."""
    low, high = (ratio.value, ratio.value) if ratio.n < 2 else (ratio.low, ratio.high)
    return {"value": ratio.value, "low": low, "high": high, "unit": "x"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="+", help=f"{', '.join(WORKLOADS)}, or a name")
    parser.add_argument("--plan", type=Path, help="a naive plan of your own")
    parser.add_argument("--best", type=Path, help="the best plan that is known for it")
    parser.add_argument(
        "--minutes", type=float, help="of tuning; what each workload is held to, or 8"
    )
    parser.add_argument("--best-minutes", type=float, default=8.0, help="of all candidates")
    parser.add_argument("--steps", type=int, default=ACCEPT.steps, help="of the last blocks")
    parser.add_argument("--apart", action="store_true", help="tuned and best do not fit together")
    parser.add_argument("--probe", action="store_true", help="measure the machine's rates first")
    parser.add_argument("--folder", type=Path, help="keeps trials from one call to the next")
    parser.add_argument("--here", action="store_true", help="no process of its own, to debug")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--set", nargs="*", default=[], help="overrides for every plan")
    parser.add_argument("--commit", help=receipts.COMMIT_HELP)
    args = parser.parse_args()
    receipts.given_commit = args.commit
    for name in args.workloads:
        row = measure(name, args)
        if row is None:
            continue
        shown = {n: round(m["value"], 4) for n, m in row["metrics"].items()}
        print(
            json.dumps(
                {
                    "workload": name,
                    **shown,
                    "refused": row.get("refused", ""),
                    "changes": row.get("changes", []),
                    "best": row.get("best_changes", ""),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
