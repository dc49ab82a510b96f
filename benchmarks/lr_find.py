"""Compare the rate that `headrace lr-find` suggests with the best one of a sweep.

    python benchmarks/lr_find.py --shape d64               # a shape below
    python benchmarks/lr_find.py --shape 60m --steps 400   # a plan of plans/, or a TOML file

Each plan is trained to its horizon at every rate of a ladder of powers of two, and at the rate that
the range test suggests, which costs no more than its own steps. All runs read the same tokens. The
row holds the validation loss of each, the test's curve, and what Step Law says. All of a plan's
optimizers follow the factor, so `muon` is swept along with AdamW.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import receipts

from headrace.cli.catalogue import catalogue
from headrace.core.errors import Diverged
from headrace.plan.plan import Plan
from headrace.train import train
from headrace.train.run_folder import RunFolder
from headrace.tuner.lr_find import RangeTest, find_rate

TINY = """
[model]
family = "headrace-small"
[data]
vocab = 1024
sequence_length = 64
[goal]
steps = 120
[batch]
tokens = 1024
[schedule]
warmup_steps = 10
[eval]
every_steps = 100000
tokens = 16384
"""
SHAPES: dict[str, tuple[list[str], list[str]]] = {
    "d64": (["model.dim=64", "model.layers=2", "model.heads=2", "model.ffn=192"], []),
    "d64-muon": (["model.dim=64", "model.layers=2", "model.heads=2", "model.ffn=192"], ["muon"]),
    "d32": (["model.dim=32", "model.layers=4", "model.heads=2", "model.ffn=96"], []),
}
"""Name of a tiny shape -> the overrides and techniques of its plan."""
LADDER = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
"""Rates of AdamW that are swept."""


def plan_of(args: argparse.Namespace, work: Path) -> Plan:
    """Return the plan of a shape, whose runs and data lie in a scratch folder."""
    own, with_ = SHAPES.get(args.shape, ([], []))
    text = TINY if args.shape in SHAPES else receipts.plan_file(args.shape).read_text()
    places = [f"directory='{work / 'runs'}'", f"data.directory='{args.data}'"]
    steps = [f"goal.steps={args.steps}", f"schedule.steps={args.steps}"] if args.steps else []
    return Plan.read(
        text,
        catalogue(),
        overrides=[*places, "guard=false", "checkpoint.every_steps=0", *own, *steps, *args.set],
        with_=[*with_, *args.with_],
    )


def trained(plan: Plan, test: RangeTest, lr: float) -> float | None:
    """Return the validation loss of the plan at a rate of AdamW; None where it diverges."""
    words = test.at(lr)
    named = Plan.read(plan.to_toml(), catalogue(), overrides=[*words, f"name=lr-{lr:.3g}"])
    try:
        folder = train.run(named).folder
    except Diverged:
        return None
    return float(RunFolder(folder).read_report()["val"][-1]["loss_nats"])


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Return the row that is written of a shape: its sweep, its test and the loss at the pick."""
    plan = plan_of(args, work)
    test = find_rate(plan, steps=args.test_steps)
    picked = None if test.pick is None else trained(plan, test, test.pick)
    swept = {lr: trained(plan, test, lr) for lr in args.lr or LADDER}
    losses = {lr: loss for lr, loss in swept.items() if loss is not None}
    best_lr = min(losses, key=lambda lr: losses[lr])
    best = losses[best_lr]
    metrics = {
        "loss_at_pick": receipts.spread([picked or float("inf")], "nats/token"),
        "loss_of_best": receipts.spread([best], "nats/token"),
        "excess": receipts.spread([(picked or float("inf")) / best - 1], "share"),
    }
    curve = test.to_dict()
    kept = ("lr", "step_law_lr", "diverged_at", "rates", "losses")
    plain = {k: v for k, v in plan.dump().items() if k not in ("directory", "name", "seed")}
    plain["data"].pop("directory", None)
    return receipts.append(
        "learning",
        metrics,
        results=args.results,
        kind="lr_find",
        shape=args.shape,
        steps=plan.goal_steps,
        test_steps=args.test_steps,
        pick=curve["lr"],
        best_lr=best_lr,
        swept=[[lr, loss] for lr, loss in swept.items()],
        n=1,
        seeds=[plan.seed],
        techniques=sorted(plan.techniques),
        plan_sha256=receipts.sha256(plain),
        test={key: curve[key] for key in kept},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", required=True, help=f"{', '.join(SHAPES)}, or a plan")
    parser.add_argument("--steps", type=int, help="horizon of every run; the plan's own without")
    parser.add_argument("--test-steps", type=int, default=150, help="steps of the range test")
    parser.add_argument("--lr", type=float, nargs="*", help="rates of AdamW that are swept")
    parser.add_argument("--with", dest="with_", nargs="*", default=[])
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the plan")
    parser.add_argument("--data", type=Path, default=Path("data"), help="where shards are kept")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        row = measure(args, Path(work))
    print(json.dumps({k: row[k] for k in ("shape", "pick", "best_lr", "swept", "metrics")}))


if __name__ == "__main__":
    main()
