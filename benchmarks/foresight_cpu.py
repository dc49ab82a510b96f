"""Probe a CPU, predict every plan of a list, and measure what each takes.

    taskset -c 0,1 python benchmarks/foresight_cpu.py --minutes 9
    python benchmarks/foresight_cpu.py --only mini-128x32/plain --results FOLDER

For each plan of `plans/cpu.toml`: a probe, as long as the one that a run takes by itself where no
rates are known, then a row of the prediction in results/plans.jsonl, and only then an outcome, from
a fresh build in a process that takes readings. Torch takes as many threads as the process may use
cores. A row is written as soon as it is known and never again, so that a command that was cut off
can be given again and goes on. Rows
say `device: cpu`; their hardware is the processor and the threads. Times are of steps on random
tokens, fp32, without a loader or evaluation. Memory is the peak of all tensors of a step by torch's
MemTracker, which does not stand beside a compiler.

Virtual processors share their host. A fixed work, a step of a small decoder that nothing predicts,
is timed at the probe and between the steps of a plan. A step counts where that work takes as long
as at the probe both before and after it, whatever the step itself takes. A plan with fewer than
`LEAST` such steps is measured again, and left where it never has them. Older rows have one probe
before all plans, which was up to an hour old when a plan was measured.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import receipts
import torch
from foresight import predicted
from lists import Configuration, configurations
from residuals import known, quantiles
from torch.nn import functional

from headrace import probes
from headrace.assemble.context import make_context
from headrace.costs.machine import Machine
from headrace.observe.signals import TrackedMemory
from headrace.plan.plan import Plan
from headrace.predict.prediction import predict
from headrace.probes.at_hand import QUICK_S
from headrace.train import train
from headrace.tuner.readings import Reading, opened, read
from headrace.tuner.worker import Worker

CPU = torch.device("cpu")
LIST = Path(__file__).parent / "plans" / "cpu.toml"
WARM, LEAST, MOST = 2, 5, 40
"""Steps before the timed ones, and the least and the most timed steps."""
TIMED_S = 3.0
"""The approximate seconds of all steps of a plan that count."""
GROUP_S = 0.2
"""The approximate seconds of the steps between two readings of the fixed work."""
SOUGHT_S = 40.0
"""The most seconds in which a plan's steps are timed until enough of them count."""
SETTLING = 24
"""How often the fixed work is read at the probe."""
REFERENCE = "step of a small decoder that learns nothing"
"""The fixed work, as rows name it. Older rows have others: matmuls and additions of large arrays,
which do not show what slows the many small operations of a step, and a decoder that was fitted."""
ENOUGH = 10
"""The least number of plans from which the spread of their errors is printed."""
AS_FAST, WAIT_S, WAITS_S, TRIES = 0.07, 2.0, 30.0, 4
"""The share by which the reference work may last longer or shorter than at the probe; the seconds
until it is asked again, and after which another plan's turn comes; and how often a plan is measured
until it was as fast before and after."""
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


@cache
def _small_step() -> Callable[[], None]:
    """Return a training step of a fixed small decoder, without a trainer.

    It learns nothing: fitted to its one batch, it would have gradients so small that a processor
    takes ten times as long for them.
    """
    sizes = {"embed": (2048, 128), "in": (128, 512), "out": (512, 128), "head": (128, 2048)}
    weights = {name: torch.randn(size).mul(0.02).requires_grad_() for name, size in sizes.items()}
    ids, targets = (torch.randint(0, 2048, (2048,)) for _ in range(2))
    optimizer = torch.optim.AdamW(weights.values(), lr=0.0, foreach=True)

    def step() -> None:
        hidden = weights["embed"][ids]
        for _ in range(4):
            normed = functional.layer_norm(hidden, (128,))
            hidden = hidden + functional.gelu(normed @ weights["in"]) @ weights["out"]
        functional.cross_entropy(hidden @ weights["head"], targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def reference_s() -> float:
    """Return the seconds that the fixed work takes now, the better of two.

    Neighbours on the same host make a virtual processor up to twice as slow from minute to minute,
    which no prediction knows of.
    """
    times = list[float]()
    for _ in range(2):
        began_s = time.perf_counter()
        _small_step()()
        times.append(time.perf_counter() - began_s)
    return min(times)


def settled_s() -> float:
    """Return the median seconds of the fixed work over some seconds, once it is warm."""
    readings = [reference_s() for _ in range(SETTLING)]
    return median(readings[SETTLING // 4 :])


def as_fast(known_s: float) -> bool:
    """Return whether the processor is as fast as it was at the probe."""
    return abs(reference_s() / known_s - 1) <= AS_FAST


def foretell(one: Configuration, results: Path, seconds: float) -> dict[str, Any] | None:
    """Probe, write the prediction of a plan and return it, or None where the processor changed."""
    before_s, machine, after_s = settled_s(), rates(seconds), settled_s()
    if abs(after_s / before_s - 1) > AS_FAST:
        print(
            f"{one.id}: the same work took {before_s:.4f} s before the probe and {after_s:.4f} s "
            "after it: the plan waits for a steadier moment",
            flush=True,
        )
        return None
    expected = predict(one.plan, make_context(one.plan, CPU), machine)
    row = {
        **predicted(one, one.plan, expected),
        **facts(one),
        "parts_s": expected.time.parts_s,
        "reference": REFERENCE,
        "reference_s": (before_s + after_s) / 2,
        "probe_s": seconds,
    }
    receipts.append(
        "plans",
        {},
        results=results,
        kind="prediction",
        tier="after_probes",
        rates_of=machine.date,
        calibrated_by="",
        predicted_for="cpu",
        **row,
    )
    return row


def measure(
    every: list[Configuration], results: Path, seconds: float, ends_s: float, here: bool
) -> None:
    """Predict and then measure each plan that has no outcome."""
    rows = known(results)
    predictions = {
        row["id"]: row
        for row in rows
        if row["kind"] == "prediction" and row.get("reference") == REFERENCE
    }
    done = {row["id"] for row in rows if row["kind"] == "outcome"}
    waiting = {name: one for one in every if (name := name_of(one)) not in done}
    with Worker(here=here) as worker:
        for _ in range(TRIES):
            for name, one in list(waiting.items()):
                if time.monotonic() >= ends_s:
                    break
                prediction = predictions.get(name) or foretell(one, results, seconds)
                if prediction is None:
                    continue
                predictions[name] = prediction
                if reading := _reading(worker, one, prediction["reference_s"], ends_s):
                    write(one, prediction, reading, results)
                    del waiting[name]
    print(f"left: {', '.join(one.id for one in waiting.values()) or 'none'}")


def _reading(worker: Worker, one: Configuration, known_s: float, ends_s: float) -> Reading | None:
    """Return what a plan took, or None where it was cut off or the processor was not as fast."""
    waits_until_s = min(ends_s, time.monotonic() + WAITS_S)
    while time.monotonic() < waits_until_s and not as_fast(known_s):
        time.sleep(WAIT_S)
    spare_s = ends_s - time.monotonic()
    if spare_s <= 0 or not as_fast(known_s):
        return None
    reading = worker.ask(timed_steps, one.plan, known_s, limit_s=min(CHILD_S, spare_s))
    cut_off = reading.refused and spare_s < CHILD_S
    too_few = not reading.refused and len(reading.seconds) < LEAST
    return None if cut_off or too_few else reading


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


def timed_steps(plan: Plan, known_s: float) -> Reading:
    """Return the timed steps of a plan that count, and the peak of its tensors unless compiled.

    Args:
        plan: the plan.
        known_s: seconds of the fixed work at the probe.
    """

    def go(reading: Reading) -> None:
        with opened(plan) as (build, micros):
            indices = iter(range(10**9))

            def once() -> float:
                index = next(indices)
                began_s = time.perf_counter()
                train.step(build, micros(index), index)
                return time.perf_counter() - began_s

            reading.seconds = counted(once, lambda: as_fast(known_s))
            if build.is_eager:
                index = next(indices)
                tracked = TrackedMemory(build.model, list(build.optimizers.values()))
                build.model.zero_grad()
                with tracked:
                    train.step(build, micros(index), index)
                reading.peak_bytes = float(tracked.peak_bytes()["Total"])

    return read(go)


def counted(once: Callable[[], float], steady: Callable[[], bool]) -> list[float]:
    """Return the seconds of steps that count: the processor was steady before and after them.

    Args:
        once: makes a step, and returns its seconds.
        steady: whether the processor is as fast as at the probe.
    """
    warm_s = [once() for _ in range(WARM)][-1]
    wanted = int(min(MOST, max(LEAST, TIMED_S / warm_s)))
    group = max(1, min(wanted, round(GROUP_S / warm_s)))
    seconds, ends_s, was = list[float](), time.perf_counter() + SOUGHT_S, steady()
    while len(seconds) < wanted and time.perf_counter() < ends_s:
        steps_s = [once() for _ in range(group)]
        now = steady()
        if was and now:
            seconds += steps_s
        was = now
    return seconds


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
    parser.add_argument("--seconds", type=float, default=QUICK_S["cpu"], help="of each probe")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin nothing later")
    parser.add_argument("--here", action="store_true", help="no process of its own, to debug")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--commit", help=receipts.COMMIT_HELP)
    args = parser.parse_args()
    receipts.given_commit = args.commit
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU beside it is another device
    ends_s = time.monotonic() + 60 * args.minutes
    every = [c for c in configurations([args.list]) if c.id.startswith(args.only)]
    measure(every, args.results, args.seconds, ends_s, args.here)
    print(summary(args.results))


if __name__ == "__main__":
    main()
