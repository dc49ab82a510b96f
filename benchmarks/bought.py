"""Train what a budget buys beside Chinchilla's shape with AdamW's defaults, on the same minutes.

    python benchmarks/bought.py --data DIR --minutes 60
    python benchmarks/bought.py --data DIR --minutes 8 --recipe 124m --sides bought

DIR holds `train` and `val` of the 100 English novels, as in time_to_quality.py. `bought` is what
`headrace plan RECIPE --budget` writes when it is told how many tokens the text has. `chinchilla` is
the shape and the tokens that the scaling law gives to as many FLOPs as the minutes suffice for with
plain AdamW, every token taken to be fresh, and torch's defaults of AdamW (rate 1e-3, betas 0.9 and
0.999, decay 0.01) over a cosine. Both have the same text, tokenizer and step (compiled, cuDNN's
attention).

A side's speed is measured on a short run first, and its horizon is the steps that the minutes
suffice for at that speed, so that a wrong prediction gives no side more time. A plan that would
learn a short text by heart is bought fewer steps, and takes no more of them. What is compiled and
evaluated is off the clock (learning_runs.py). The result of a side is its lowest validation loss,
which `checkpoint.keep_best` keeps: text that repeats may raise the loss of the last step.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import receipts
from learning_runs import Reading, Runs

from headrace.assemble.context import choose_device, make_context
from headrace.cli.catalogue import catalogue
from headrace.cli.plans import rates_here
from headrace.plan.plan import Plan
from headrace.plan.warmups import shortened
from headrace.predict.amounts import Budget
from headrace.predict.budget import Bought, buy

TOPIC, KIND = "learning", "budget"
SPEED_STEPS = 60
"""Steps of the run that a side's speed is measured on."""
DEFAULTS = {
    "optimizer.lr": "1e-3",
    "optimizer.betas": "[0.9,0.999]",
    "optimizer.eps": "1e-8",
    "optimizer.weight_decay": "0.01",
    "optimizer.clip_norm": "1.0",
}
"""torch.optim.AdamW's, with the clipping that every recipe of a language model has."""
PLAIN = """
name = "chinchilla"
[data]
vocab = {vocab}
sequence_length = {length}
[goal]
steps = 1
[schedule]
kind = "cosine"
final_fraction = 0.1
[checkpoint]
every_steps = 0
[techniques.torch_compile]
"""


def bought(args: argparse.Namespace, side: str, overrides: list[str], tokens: int) -> Bought:
    """Return what the minutes buy of a side.

    Args:
        args: the minutes, the recipe, and techniques that every side gets.
        side: `bought` or `chinchilla`.
        overrides: where the text is, and more.
        tokens: of the text, by the recipe's tokenizer.
    """
    recipe = receipts.ROOT / "headrace" / "recipes" / f"{args.recipe}.toml"
    given = Path(args.recipe) if Path(args.recipe).is_file() else recipe
    changes = {"overrides": overrides, "with_": args.with_, "without": args.without}
    base = Plan.read(given.read_text(), catalogue(), **changes)
    budget = Budget.read(f"{args.minutes}gpu-minutes")
    if side == "chinchilla":
        text = PLAIN.format(vocab=base.data.vocab, length=base.data.sequence_length)
        base = Plan.read(text, catalogue(), overrides=overrides, with_=args.with_)
    device = choose_device(base)
    context, machine = make_context(base, device), rates_here(device)
    if side == "bought":
        return buy(budget, base, context, machine, fresh_tokens=tokens)
    flops = buy(budget, base, context, machine).flops
    return buy(Budget.read(f"{flops:.4g}flops"), base, context, machine)


def horizon(plan: Plan, steps: int, seed: int, side: str) -> Plan:
    """Return a plan that ends, with its schedule, after so many steps."""
    defaults = [f"{k}={v}" for k, v in DEFAULTS.items()] if side == "chinchilla" else []
    more = [f"{key}={value}" for key, value in shortened(plan, steps).items()]
    ends = [f"goal.steps={steps}", f"schedule.steps={steps}", f"seed={seed}"]
    return Plan.read(plan.to_toml(), catalogue(), overrides=[*ends, *more, *defaults])


def measure(args: argparse.Namespace, runs: Runs, side: str) -> None:
    """Train a side on its minutes, and write its row."""
    one = bought(args, side, [*runs.overrides, *args.set], runs.text_tokens)
    brief = runs.run(horizon(one.plan, SPEED_STEPS, args.seed, side))
    steps = max(2, round(60 * args.minutes * SPEED_STEPS / brief.seconds))
    if one.spent < 1:  # the text is too short for all of the minutes
        steps = min(steps, one.steps)
    print(f"{side}: {one.parameters:,} parameters, {steps:,} steps", flush=True)
    reading = runs.run(horizon(one.plan, steps, args.seed, side), first_look=1)
    write(args, side, one, reading, runs.text_tokens)


def write(
    args: argparse.Namespace, side: str, one: Bought, reading: Reading, text_tokens: int
) -> None:
    """Write a side's row and print it."""
    best = min(loss for _, loss in reading.curve)
    values = {
        "best_bits_per_byte": (best, "bits/byte"),
        "last_bits_per_byte": (reading.bits_per_byte, "bits/byte"),
        "seconds": (reading.seconds, "s"),
        "tokens": (reading.tokens, "tokens"),
        "tokens_per_s": (reading.tokens / reading.seconds, "tokens/s"),
        "tokens_per_parameter": (reading.tokens / one.parameters, "tokens"),
        "epochs": (reading.tokens / text_tokens, "passes over the text"),
    }
    metrics: dict[str, Any] = {k: receipts.spread([v], unit) for k, (v, unit) in values.items()}
    model = reading.plan["model"]
    receipts.append(
        TOPIC,
        metrics,
        results=args.results,
        kind=KIND,
        side=side,
        recipe=args.recipe if side == "bought" else "",
        minutes=args.minutes,
        shape=f"d{model['dim']} L{model['layers']} h{model['heads']}",
        parameters=one.parameters,
        expected_nats=one.loss.nats,
        n=1,
        seeds=[args.seed],
        techniques=reading.techniques,
        plan_sha256=reading.fingerprint,
        curve=reading.curve,
    )
    print(side, {k: round(v["value"], 4) for k, v in metrics.items()}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with train and val")
    parser.add_argument("--minutes", type=float, default=60.0, help="of one GPU, for each side")
    parser.add_argument("--recipe", default="124m", help="what the bought plan keeps")
    parser.add_argument("--sides", nargs="+", default=["bought", "chinchilla"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--with", dest="with_", nargs="*", default=["cudnn_attention"])
    parser.add_argument("--without", nargs="*", default=[], help="of the recipe, as `plan` advises")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of every plan")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--work", type=Path, help="keep shards here")
    parser.add_argument("--commit", help=receipts.COMMIT_HELP)
    args = parser.parse_args()
    receipts.given_commit = args.commit
    with tempfile.TemporaryDirectory() as scratch:
        runs = Runs(args.data, args.work or Path(scratch), args.set)
        for side in args.sides:
            measure(args, runs, side)


if __name__ == "__main__":
    main()
