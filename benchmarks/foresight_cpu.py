"""Probe a CPU, predict every plan of a list, and measure what each takes.

    taskset -c 0,1 python benchmarks/foresight_cpu.py --minutes 9
    python benchmarks/foresight_cpu.py --only mini-128x32/plain --results FOLDER

First `headrace probe --device cpu --seconds 55`, then a row in results/plans.jsonl for every plan
of `plans/cpu.toml`, and only then an outcome for each, from a fresh build in a process that takes
readings. Torch takes as many threads as the process may use cores. A row is written as soon as it
is known and never again, so that a command that was cut off can be given again and goes on. Rows
say `device: cpu`; their hardware is the processor and the threads. Times are of steps on random
tokens, fp32, without a loader or evaluation. Memory is the peak of all tensors of a step by torch's
MemTracker, which does not stand beside a compiler.

Virtual processors share their host. A plan counts where a fixed work takes as long as at the probe,
both before and after its steps; else it is measured again, and left where it never does.
"""

import argparse
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import receipts
import torch
from foresight import predicted
from lists import Configuration, configurations
from residuals import known, quantiles

from headrace import probes
from headrace.assemble.context import make_context
from headrace.costs.machine import Machine
from headrace.observe.signals import TrackedMemory
from headrace.plan.plan import Plan
from headrace.predict.prediction import predict
from headrace.train import train
from headrace.tuner.readings import Reading, opened, read
from headrace.tuner.worker import Worker

CPU = torch.device("cpu")
LIST = Path(__file__).parent / "plans" / "cpu.toml"
WARM, LEAST, MOST = 2, 5, 40
"""Steps before the timed ones, and the least and the most timed steps."""
TIMED_S = 3.0
"""The approximate seconds of all timed steps of a plan."""
ENOUGH = 10
"""The least number of plans from which the spread of their errors is printed."""
AS_FAST, WAIT_S, TRIES = 0.07, 2.0, 4
"""The share by which the reference work may last longer or shorter than at the probe; the seconds
until it is asked again; and how often a plan is measured until it was as fast before and after."""
CHILD_S = 180.0
"""Seconds after which a plan is given up."""


def hardware() -> str:
    """Return the processor and the threads that torch uses of it."""
    return probes.driver_of(CPU)


def name_of(one: Configuration) -> str:
    """Return the name of a plan in the rows, which names the processor too."""
    return f"cpu {hardware()}: {one.id}"


def facts(one: Configuration) -> dict[str, Any]:
    """Return the facts that each row of a plan holds."""
    return {
        "id": name_of(one),
        "device": "cpu",
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "command": "python benchmarks/foresight_cpu.py --list benchmarks/plans/cpu.toml",
    }


def rates(seconds: float) -> Machine:
    """Return the rates of this processor, probed now: kept ones are of another moment."""
    return probes.measure(CPU, budget_s=seconds)


def reference_s() -> float:
    """Return the seconds that a fixed work takes now: matmuls and additions, the best of three.

    Neighbours on the same host make a virtual processor up to twice as slow from minute to minute,
    which no prediction knows of.
    """
    matrix, stream = torch.rand(768, 768), torch.rand(2**22)
    times = list[float]()
    for _ in range(3):
        began_s = time.perf_counter()
        for _ in range(12):
            torch.mm(matrix, matrix)
            torch.add(stream, stream)
        times.append(time.perf_counter() - began_s)
    return min(times)


def as_fast(known_s: float) -> bool:
    """Return whether the processor is as fast as it was at the probe."""
    return abs(reference_s() / known_s - 1) <= AS_FAST


def write_predictions(every: list[Configuration], results: Path, seconds: float) -> None:
    """Write a prediction for each plan that has none."""
    done = {row["id"] for row in known(results) if row["kind"] == "prediction"}
    left = [one for one in every if name_of(one) not in done]
    if not left:
        return
    machine = rates(seconds)
    reference = reference_s()
    print(f"{machine.driver}: {machine.says}; left out: {'; '.join(machine.skipped) or 'nothing'}")
    for one in left:
        plan = one.plan
        expected = predict(plan, make_context(plan, CPU), machine)
        row = predicted(one, plan, expected) | facts(one)
        receipts.append(
            "plans",
            {},
            results=results,
            kind="prediction",
            tier="after_probes",
            **row,
            parts_s=expected.time.parts_s,
            reference_s=reference,
            rates_of=machine.date,
            calibrated_by="",
            predicted_for="cpu",
        )


def measure(every: list[Configuration], results: Path, ends_s: float, here: bool) -> None:
    """Measure each plan that has a prediction and no outcome."""
    rows = known(results)
    predictions = {row["id"]: row for row in rows if row["kind"] == "prediction"}
    done = {row["id"] for row in rows if row["kind"] == "outcome"}
    names = [name_of(one) for one in every]
    waiting = {
        n: o for n, o in zip(names, every, strict=True) if n in predictions and n not in done
    }
    with Worker(here=here) as worker:
        for _ in range(TRIES):
            for name, one in list(waiting.items()):
                known_s = predictions[name]["reference_s"]
                while time.monotonic() < ends_s and not as_fast(known_s):
                    time.sleep(WAIT_S)
                spare_s = ends_s - time.monotonic()
                if spare_s <= 0:
                    break
                reading = worker.ask(timed_steps, one.plan, limit_s=min(CHILD_S, spare_s))
                if (reading.refused and spare_s < CHILD_S) or not as_fast(known_s):
                    continue  # it was cut off, or the processor became slower meanwhile
                write(one, predictions[name], reading, results)
                del waiting[name]
    print(f"left: {', '.join(one.id for one in waiting.values()) or 'none'}")


def write(one: Configuration, prediction: dict[str, Any], reading: Reading, results: Path) -> None:
    """Write the row of one outcome, and print how far its prediction was off."""
    if receipts.sha256(one.plan.dump()) != prediction["plan_sha256"]:
        raise SystemExit(f"{one.id} is not the plan that was predicted: give it another name")
    if reading.refused:
        receipts.append(
            "plans",
            {},
            results=results,
            kind="outcome",
            risky=False,
            refused=reading.refused,
            **facts(one),
        )
        print(one.id, "refused:", reading.refused[:200], flush=True)
        return
    step_s = median(reading.seconds)
    receipts.append(
        "plans",
        {"step": receipts.spread(reading.seconds, "s")},
        results=results,
        kind="outcome",
        risky=False,
        step_s=step_s,
        allocated_bytes=reading.peak_bytes,
        reserved_bytes=None,
        fits=True,
        out_of_memory="",
        choice=one.choice,
        shape=one.shape,
        warm=WARM,
        timed=len(reading.seconds),
        n=len(reading.seconds),
        seeds=[one.plan.seed],
        techniques=sorted(one.plan.techniques),
        plan_sha256=prediction["plan_sha256"],
        evidence=reading.evidence,
        **facts(one),
    )
    off = [f"step {step_s:.4f} s"]
    pairs = (
        ("", prediction["step_s"], step_s),
        (" memory", prediction["allocated_bytes"], reading.peak_bytes),
    )
    off += [f"{what}{p / m - 1:+.1%}" for what, p, m in pairs if p and m]
    print(one.id, *off, flush=True)


def timed_steps(plan: Plan) -> Reading:
    """Return every timed step of a plan, and the peak of its tensors where nothing is compiled."""

    def go(reading: Reading) -> None:
        with opened(plan) as (build, micros):
            for index in range(WARM):
                began_s = time.perf_counter()
                train.step(build, micros(index), index)
                once_s = time.perf_counter() - began_s
            count = int(min(MOST, max(LEAST, TIMED_S / once_s)))
            for index in range(WARM, WARM + count):
                began_s = time.perf_counter()
                train.step(build, micros(index), index)
                reading.seconds.append(time.perf_counter() - began_s)
            if build.is_eager:
                tracked = TrackedMemory(build.model, list(build.optimizers.values()))
                build.model.zero_grad()
                with tracked:
                    train.step(build, micros(index + 1), index + 1)
                reading.peak_bytes = float(tracked.peak_bytes()["Total"])

    return read(go)


def errors(results: Path) -> Iterator[tuple[str, float, float | None]]:
    """Yield name, time error and memory error of each plan here that has an outcome."""
    rows = known(results)
    predictions = {row["id"]: row for row in rows if row["kind"] == "prediction"}
    for row in rows:
        one = predictions.get(row["id"], {})
        if row["kind"] == "outcome" and row["hardware"] == hardware() and one.get("step_s"):
            memory, seen = one["allocated_bytes"], row["allocated_bytes"]
            yield row["id"], one["step_s"] / row["step_s"] - 1, memory / seen - 1 if seen else None


def summary(results: Path) -> str:
    """Return the mean errors so far."""
    measured_errors = list(errors(results))
    if not measured_errors:
        return "nothing was measured"
    steps = [abs(step) for _, step, _ in measured_errors]
    memory_errors = [abs(memory) for *_, memory in measured_errors if memory is not None]
    text = f"{len(steps)} plans: steps {fmean(steps):.1%} off on average, {max(steps):.1%} at most"
    if memory_errors:
        mean, most = fmean(memory_errors), max(memory_errors)
        text += f"; memory of {len(memory_errors)} {mean:.2%}, {most:.1%} at most"
    if len(measured_errors) >= ENOUGH:  # as headrace/predict/intervals.py has it
        low, high = quantiles([-math.log1p(step) for _, step, _ in measured_errors])
        text += f"\n80% of them took {math.exp(low):.3f} to {math.exp(high):.3f} times as long"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", type=Path, default=LIST)
    parser.add_argument("--only", default="", help="how names of plans begin")
    parser.add_argument("--seconds", type=float, default=55.0, help="of the probe")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin nothing later")
    parser.add_argument("--predict", action="store_true", help="predict and measure nothing")
    parser.add_argument("--here", action="store_true", help="no process of its own, to debug")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--commit", help=receipts.COMMIT_HELP)
    args = parser.parse_args()
    receipts.given_commit = args.commit
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU beside it is another device
    ends_s = time.monotonic() + 60 * args.minutes
    every = [c for c in configurations([args.list]) if c.id.startswith(args.only)]
    write_predictions(every, args.results, args.seconds)
    if not args.predict:
        measure(every, args.results, ends_s, args.here)
    print(summary(args.results))


if __name__ == "__main__":
    main()
