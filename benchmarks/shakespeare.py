"""Measure what three minutes on two CPU cores learn of tinyshakespeare: nats per character.

    python benchmarks/shakespeare.py --data DIR --minutes 3

DIR holds `input.txt` (github.com/karpathy/char-rnn, data/tinyshakespeare; public domain). The last
tenth of its characters is held out, and all of it is evaluated, in windows of the trained length.
The text is ASCII, so a character is a byte, and nats per character compare across tokenizers: they
are the loss in nats per token times the tokens, by the characters.

The clock starts with the process and stops with the last update: it counts importing, learning the
tokenizer, compiling and training, and leaves out evaluating alone. The process stays on the first
`--cores` cores that it may use. A run that the clock ends before its schedule does has not decayed
to the end; its row says so by `steps` beside `horizon_steps`. `--steps` gives another horizon. What
is imported and written beside the steps may end the run after its minutes: a row that is not
`within_budget` shows nothing. A row also says how busy these cores were just before, and how much
of them the run then got.
"""

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import receipts
import torch

from headrace.cli.catalogue import catalogue
from headrace.core.cores import CAN_BIND, bound, cores
from headrace.data.ingest import prepare
from headrace.plan.plan import Plan
from headrace.train import train
from headrace.train.run_folder import RunFolder
from headrace.train.start import process_age_s

VALIDATION_SHARE = 0.1
"""Share of the characters, at the end of the text, that are held out; nanoGPT's."""
MOST_PARAMETERS = 1_000_000
"""A model of this size or more is not measured."""
LOOK_S = 0.5
"""Seconds for which the other processes' load is watched before the clock starts."""
BUILD_S = 2.0
"""Seconds of the budget that are kept for building the model and for the last step."""


def busy_share(of: Sequence[int], seconds: float) -> float | None:
    """Return the share of the cores' time that others use; None where /proc/stat is missing."""

    def ticks() -> tuple[int, int]:
        lines = Path("/proc/stat").read_text().splitlines()
        wanted = {f"cpu{core}" for core in of}
        rows = [list(map(int, line.split()[1:9])) for line in lines if line.split()[0] in wanted]
        return sum(map(sum, rows)), sum(row[3] + row[4] for row in rows)

    if not Path("/proc/stat").is_file():
        return None
    all_before, idle_before = ticks()
    time.sleep(seconds)
    all_after, idle_after = ticks()
    return 1 - (idle_after - idle_before) / max(1, all_after - all_before)


def split(text: str, work: Path) -> list[str]:
    """Write both parts of the text, and return the overrides that name them."""
    cut = int(len(text) * (1 - VALIDATION_SHARE))
    parts = {"data.sources": text[:cut], "data.validation": text[cut:]}
    for key, part in parts.items():
        (work / f"{key}.txt").write_text(part)
    return [f"{key}='{work / key}.txt'" for key in parts]


def measure(args: argparse.Namespace, on: Sequence[int], work: Path) -> dict[str, Any]:
    """Train the plan within the budget, evaluate it, and write its row."""
    busy, looked_s = busy_share(on, LOOK_S), LOOK_S
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    before_s = max(0.0, (process_age_s() or 0.0) - looked_s)
    steps = [f"schedule.steps={args.steps}"] if args.steps else []
    places = [f"directory='{work / 'runs'}'", f"data.directory='{work / 'data'}'"]
    text = (args.data / "input.txt").read_text()
    plan = Plan.read(
        receipts.plan_file(args.plan).read_text(),
        catalogue(),
        overrides=[*split(text, work), *places, *steps, f"seed={args.seed}", *args.set],
        with_=args.with_,
        without=args.without,
    )
    prepare(plan)
    left_s = args.minutes * 60 - before_s - (time.perf_counter() - begun_s) - BUILD_S
    goal = {"steps": plan.horizon_steps, "minutes": max(left_s, 1) / 60}
    plan = plan.replaced(goal=goal)
    torch.set_num_threads(len(on))
    report = RunFolder(train.run(plan).folder).read_report()
    if report["parameters"] >= MOST_PARAMETERS:
        raise SystemExit(f"{report['parameters']:,} parameters are not under {MOST_PARAMETERS:,}")
    own_s = time.perf_counter() - begun_s
    score, phases = report["val"][-1], report["phase_s"]
    assert score["step"] == report["steps"] and score["share"] == 1, "not all was evaluated"
    metrics = {
        "nats_per_character": (score["bits_per_byte"] * math.log(2), "nats/character"),
        "nats_per_token": (score["loss_nats"], "nats/token"),
        "parameters": (report["parameters"], "parameters"),
        "tokens": (report["tokens"], "tokens"),
        "seconds": (before_s + own_s - phases["eval"], "s"),
        "compile_seconds": (phases["compile"], "s"),
        "tokens_per_s": (report["steady_tokens_per_s"], "tokens/s"),
    }
    return receipts.append(
        "learning",
        {name: receipts.spread([value], unit) for name, (value, unit) in metrics.items()},
        results=args.results,
        hardware=receipts.processor(),
        kind="shakespeare",
        shape=plan.name,
        minutes=args.minutes,
        steps=report["steps"],
        within_budget=metrics["seconds"][0] <= args.minutes * 60,
        horizon_steps=plan.horizon_steps,
        cores=list(on),
        busy_before=busy,
        load_before=args.load,
        cores_had=(time.process_time() - begun_cpu_s) / own_s,
        text_sha256=receipts.sha256(text),
        n=1,
        seeds=[args.seed],
        techniques=sorted(plan.techniques),
        plan_sha256=receipts.sha256(plan_facts(plan)),
    )


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Return the plan without its places and its clock, which differ from run to run."""
    plain = {k: v for k, v in plan.dump().items() if k not in ("directory", "name", "seed", "goal")}
    kept = {k: v for k, v in plain["data"].items() if k not in ("directory", "sources")}
    return {**plain, "data": kept | {"validation": VALIDATION_SHARE}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder of input.txt")
    parser.add_argument("--minutes", type=float, default=3.0, help="the budget, all in")
    parser.add_argument("--plan", default="shakespeare", help="of plans/, or a TOML file")
    parser.add_argument("--steps", type=int, help="the horizon; the plan's own without")
    parser.add_argument("--cores", type=int, default=2, help="cores that the run may use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--with", dest="with_", nargs="*", default=[])
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the plan")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    args.load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as work:
        on = cores()[: args.cores]
        if CAN_BIND:
            with bound(on):
                row = measure(args, on, Path(work))
        else:
            row = measure(args, on, Path(work))
    facts = ("steps", "horizon_steps", "within_budget", "busy_before", "load_before", "cores_had")
    values = {name: metric["value"] for name, metric in row["metrics"].items()}
    print(json.dumps({**{name: row[name] for name in facts}, **values}, indent=1))


if __name__ == "__main__":
    main()
