"""Tune the demo on two cores as a new user does, and measure apart what the tuning kept.

    python benchmarks/tune_demo.py --pairs 0,1 2,3 4,5 6,7 8,9 --minutes 3
    python benchmarks/tune_demo.py --pairs 0,1 2,3 4,5 6,7 8,9 --minutes 9 --until 590
    python benchmarks/tune_demo.py --pairs 0,1 2,3 4,5 6,7 8,9 --measure

Each pair of cores tunes the recipe once, at the same time as the others, in a folder and with a
cache of the compiler's of its own, as the first command of a new user. What it kept is then
measured apart on the same cores: paired steps of the recipe and of the kept plan and, where the aim
was the target, the seconds to it of both, over seeds that no tuning used. All of it is on the CPU.

Rows of `results/tune_demo.jsonl` have a `part`: "tuned" is what `path.json` says of a tuning,
"steps" and "target" (one seed) are what was measured of it; `tuning` says of which. Each is written
once it is known. A tuning that the call is too short for is interrupted, which keeps its best so
far; its row says so. With `--measure` nothing is tuned: what the file lacks is measured, of the
changes in its rows.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from math import exp, isfinite, log
from pathlib import Path
from queue import Queue
from statistics import fmean
from typing import Any

import receipts
from tuner import file_of, interval

from headrace.assemble.context import choose_device, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.statistics import Interval
from headrace.data.ingest import prepare
from headrace.plan.changes import changed, parse
from headrace.plan.plan import Plan
from headrace.tuner.command import folder_of
from headrace.tuner.judge import Rules, compare
from headrace.tuner.pairs import measure_with
from headrace.tuner.path import PATH
from headrace.tuner.running import WANTED
from headrace.tuner.target import train_with
from headrace.tuner.worker import Worker

TOPIC = "tune_demo"
SEEDS = (100, 101)
"""Seeds of the runs to the target that are measured apart: no tuning uses them."""
ENDS_S = 25.0
"""Seconds before the end of the call at which a tuning is interrupted, to write its files."""
STEPS_S, RUN_S = 150.0, 200.0
"""The most seconds of a comparison of steps, and of a run to the target."""
WANTS = {"steps": 1.15, "target": 1.6}
"""The speedup that a tuning of the demo should reach: of a step, and of the time to the target."""


def plan_of(job: dict[str, Any], changes: list[str] | None = None) -> Plan:
    """Return the plan that a job tunes, with changes."""
    given = [*job["set"], *places(job)]
    plan = parse(()).plan(file_of(job["recipe"]).read_text(), catalogue(), given)
    return changed(plan, changes, catalogue()) if changes else plan


def places(job: dict[str, Any]) -> list[str]:
    """Return the overrides that say where its runs and its data are."""
    return [f"directory={job['folder']}/runs", f"data.directory={job['folder']}/data"]


def write(job: dict[str, Any], part: str, metrics: dict[str, Any], **facts: Any) -> None:
    """Write one row of a tuning."""
    named = {name: job[name] for name in ("tuning", "workload", "minutes", "cores", "command")}
    row = receipts.append(
        TOPIC,
        metrics,
        results=Path(job["results"]),
        part=part,
        processor=receipts.processor(),
        **named,
        **facts,
    )
    shown = {name: round(m["value"], 3) for name, m in metrics.items()}
    brief = {name: row[name] for name in ("aim", "changes", "seed", "refused") if row.get(name)}
    print(json.dumps({"tuning": job["tuning"], "part": part, **brief, **shown}), flush=True)


# --- one job, in a process of its own on its cores -------------------------------------------


def tune(job: dict[str, Any]) -> None:
    """Run the command as a user does, and write a row of what it kept."""
    plan, began_s = plan_of(job), time.monotonic()
    words = ["tune", job["recipe"], *job["set"], *places(job), "--minutes", f"{job['minutes']:g}"]
    with Path(job["folder"], "tune.log").open("w") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *words], stdout=log_file, stderr=log_file
        )
        try:
            process.wait(max(1.0, job["ends_s"] - ENDS_S - time.time()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
    took = {"wall": receipts.spread([time.monotonic() - began_s], "s")}
    file = folder_of(plan) / PATH
    if not file.is_file():
        last = Path(job["folder"], "tune.log").read_text().strip().splitlines()[-3:]
        write(job, "tuned", took, refused=f"exit code {process.returncode}: {' '.join(last)}")
        return
    outcome = json.loads(file.read_text())
    metrics = took | {"tuning": receipts.spread([outcome["tuning_s"]], "s")}
    if outcome["ratio"]:
        metrics["speed_ratio"] = interval(Interval(**finite(outcome["ratio"])))
    if outcome["target"]:
        metrics["target_ratio"] = interval(Interval(**finite(outcome["target"]["ratio"])))
    names = (
        "changes",
        "verdict",
        "reason",
        "stage",
        "ratio",
        "predicted_speed",
        "compile_s",
        "break_even_steps",
        "worth",
        "bought",
        "steps",
        "seconds",
    )
    write(
        job,
        "tuned",
        metrics,
        aim=outcome["aim"],
        aim_why=outcome["aim_why"],
        changes=outcome["changes"],
        interrupted=outcome["interrupted"],
        set=job["set"],
        recipe=job["recipe"],
        path=[{name: step[name] for name in names} for step in outcome["path"]],
    )


def finite(ratio: dict[str, Any]) -> dict[str, Any]:
    """Return an interval whose ends may be null, which is no end."""
    ends = {"low": 0.0, "high": float("inf")}
    return {key: ends.get(key) if value is None else value for key, value in ratio.items()}


def measure(job: dict[str, Any], tuned: dict[str, Any], done: list[dict[str, Any]]) -> None:
    """Hold the kept plan against the recipe: steps, then runs to the target, while time is left."""
    first, second = plan_of(job), plan_of(job, tuned["changes"])
    device = choose_device(first)
    prepare(first)
    parts = {(row["part"], row.get("seed")) for row in done}
    facts = {"aim": tuned["aim"], "changes": tuned["changes"]}
    with Worker(log=Path(job["folder"], "measure.log")) as worker:
        if ("steps", None) not in parts and job["ends_s"] - time.time() > STEPS_S / 2:
            rules = Rules(device=device.type, precision=make_context(first, device).precision)
            limit_s = min(STEPS_S, job["ends_s"] - time.time())
            compared = compare(
                first,
                second,
                measure_with(worker),
                rules,
                size=WANTED,
                together=True,
                limit_s=limit_s,
            )
            if compared.ratio is None:
                write(job, "steps", {}, refused=compared.reason, **facts)
            else:
                metrics = {"speed_ratio": interval(compared.ratio)}
                write(
                    job,
                    "steps",
                    metrics,
                    steps=compared.steps,
                    before_s=compared.before_s,
                    after_s=compared.after_s,
                    **facts,
                )
        if tuned["aim"] != "quality":
            return
        train = train_with(worker, Path(job["folder"], "target"))
        for seed in SEEDS:
            if ("target", seed) not in parts and job["ends_s"] - time.time() > RUN_S:
                sides = {}
                for name, plan in (("before_s", first), ("after_s", second)):
                    run = train(plan.replaced(seed=seed), min(RUN_S, job["ends_s"] - time.time()))
                    sides[name] = run.seconds[0] if run.seconds else None
                one, two = sides.values()
                soon = {"target_ratio": receipts.spread([one / two], "x")} if one and two else {}
                write(job, "target", soon, seed=seed, **sides, **facts)


def work(job: dict[str, Any]) -> None:
    """Tune if that is asked, and measure what is not measured yet."""
    os.sched_setaffinity(0, {int(core) for core in job["cores"].split(",")})
    Path(job["folder"]).mkdir(parents=True, exist_ok=True)
    if job["tunes"]:
        tune(job)
    rows = [row for row in rows_of(Path(job["results"])) if row["tuning"] == job["tuning"]]
    for tuned in rows:
        if tuned["part"] == "tuned" and tuned.get("changes") and not job["only"]:
            measure(job, tuned, rows)


# --- all jobs, and what they came to ---------------------------------------------------------


def rows_of(results: Path) -> list[dict[str, Any]]:
    """Return the rows that are known."""
    file = results / f"{TOPIC}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def jobs_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return tunings that are asked for; or of those in the file, the ones that were made here."""
    ends_s, stamp = time.time() + args.until, time.strftime("%m%d-%H%M%S")
    given = {
        "results": str(args.results),
        "ends_s": ends_s,
        "only": args.only,
        "command": receipts.command(sys.argv),
        "commit": args.commit,
    }
    if args.measure:
        here = {"processor": receipts.processor(), "torch": receipts.torch.__version__}
        rows = [r for r in rows_of(args.results) if r["part"] == "tuned" and r.get("changes")]
        return [
            {
                **given,
                "tuning": r["tuning"],
                "workload": r["workload"],
                "recipe": r["recipe"],
                "set": r["set"],
                "minutes": r["minutes"],
                "tunes": False,
                "folder": str(args.folder / r["tuning"]),
            }
            for r in rows
            if here.items() <= r.items()
        ]
    return [
        {
            **given,
            "tuning": f"{args.recipe}-{minutes:g}-{stamp}-{i}",
            "workload": args.recipe,
            "recipe": args.recipe,
            "set": args.set,
            "minutes": minutes,
            "tunes": True,
            "folder": str(args.folder / f"{args.recipe}-{minutes:g}-{stamp}-{i}"),
        }
        for minutes in args.minutes
        for i in range(args.times or len(args.pairs))
    ]


def run(job: dict[str, Any], free: "Queue[str]") -> None:
    """Run one job on the next free pair of cores, in a process that has only those."""
    cores = free.get()
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(len(cores.split(","))),
        "TORCHINDUCTOR_CACHE_DIR": f"{job['folder']}/inductor",
        "PYTHONPATH": f"{receipts.ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    try:
        words = [sys.executable, __file__, "--job", json.dumps({**job, "cores": cores})]
        subprocess.run(words, env=env, check=False)
    finally:
        free.put(cores)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return every ratio that was measured apart by aim and minutes, and how many there are."""
    by_aim: dict[str, Any] = {}
    for tuned in (row for row in rows if row["part"] == "tuned"):
        if "aim" not in tuned:
            continue
        part = "target" if tuned["aim"] == "quality" else "steps"
        name = "target_ratio" if part == "target" else "speed_ratio"
        own = [row for row in rows if row["tuning"] == tuned["tuning"] and row["part"] == part]
        ratios = [row["metrics"][name]["value"] for row in own if name in row["metrics"]]
        entry = by_aim.setdefault(
            f"{tuned['minutes']:g} min, {part}", {"ratios": [], "kept": [], "interrupted": 0}
        )
        entry["interrupted"] += bool(tuned.get("interrupted"))
        entry["kept"].append(" ".join(tuned["changes"]))
        if not tuned["changes"]:
            entry["ratios"].append(1.0)
        elif ratios and len(ratios) == len(own) and all(map(isfinite, ratios)):
            entry["ratios"].append(round(exp(fmean(map(log, ratios))), 3))
        entry["enough"] = sum(r >= WANTS[part] for r in entry["ratios"])
    return by_aim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs="+", default=["0,1"], help="cores of each tuning, as 0,1")
    parser.add_argument("--minutes", nargs="+", type=float, default=[3.0])
    parser.add_argument("--times", type=int, default=0, help="tunings; a pair's one, without")
    parser.add_argument("--until", type=float, default=580.0, help="seconds that this call has")
    parser.add_argument("--only", action="store_true", help="tune, and measure nothing apart")
    parser.add_argument("--measure", action="store_true", help="measure what the file lacks")
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the recipe")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), TOPIC))
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--commit", help=receipts.COMMIT_HELP)
    parser.add_argument("--job", type=json.loads, help="of this program's own processes")
    args = parser.parse_args()
    receipts.given_commit = args.commit or (args.job or {}).get("commit")
    if args.job:
        work(args.job)
        return
    free: Queue[str] = Queue()
    for cores in args.pairs:
        free.put(cores)
    jobs = jobs_of(args)
    with ThreadPoolExecutor(len(args.pairs)) as pool:
        for done in [pool.submit(run, job, free) for job in jobs]:
            done.result()
    named = {job["tuning"] for job in jobs}
    print(json.dumps(summary([r for r in rows_of(args.results) if r["tuning"] in named])))


if __name__ == "__main__":
    main()
