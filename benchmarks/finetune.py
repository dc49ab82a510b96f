"""Measure fine-tuning of a Llama-3-8B shape on one GPU: beside peers, at long rows, and whole.

    python benchmarks/finetune.py speed --method qlora --work FOLDER
    python benchmarks/finetune.py speed --method lora --work FOLDER --rounds 4
    python benchmarks/finetune.py longest --child-s 540
    python benchmarks/finetune.py full
    python benchmarks/finetune.py predict

`speed`: tokens per second and peak memory of Headrace's sides beside PEFT with Liger's kernels and
Unsloth, of one folder of random weights and one packed batch, in alternating readings; a peer that
is not installed has a row that says so. `longest`: one full QLoRA step with one row of a length,
by the first plan of `LADDER` that is predicted to fit. Lengths are bisected: what fitted or did not
on this device is read from the rows, so that a call goes on where the last one ended. `full`: all
weights learn. Every row holds what was predicted before. `predict` trains nothing and prints that,
here or on `--device-name`. `--tiny` runs all of it on a CPU in a minute.

Said before any was measured, for one H100 of 80 GB: QLoRA of 4 rows of 2,048 tokens 31 GiB with
`selective_checkpoint` and 10 GiB with `full_checkpoint`, LoRA 41 and 20 GiB; a row of 262,144
tokens 40 GiB and 180 s, of 524,288 74 GiB and 653 s (LOG.md has all of it).
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import receipts
from finetune_sides import MAKERS, OURS, PACKAGES, WHOLE, missing, plan_of, write_model
from limits import GIB, PLANS, context_of, lengthened, speed_metrics
from peers import Peer, spreads
from variants import Variant

from headrace.assemble.build import make_ledger
from headrace.assemble.context import check_supported
from headrace.core.errors import HeadraceError, RefusalKind
from headrace.costs.machine import Machine
from headrace.plan.plan import Plan
from headrace.predict.prediction import predict
from headrace.tuner.readings import Reading, time_long_row, time_steps
from headrace.tuner.worker import Worker

TOPIC = "finetune"
TINY = (
    *("device=cpu", "model.dim=64", "model.layers=2", "model.heads=4", "model.kv_heads=2"),
    *("model.ffn=128", "model.vocab=320", "data.sequence_length=64", "batch.tokens=128"),
    *("data.workers=0", "optimizer.weight_decay=0"),
)
LENGTHS = (65536, 98304, 131072, 196608, 262144, 393216, 524288)
"""Powers of two and the midpoints between them, in tokens."""
TINY_LENGTHS = (128, 192, 256)
LOSS = "+chunked_cross_entropy techniques.chunked_cross_entropy.chunk_tokens=2048"
LONG = f"+qlora +full_checkpoint {LOSS}"
MLP = "+chunked_mlp techniques.chunked_mlp.chunk_tokens=16384"
LADDER = {
    "checkpoint": LONG,
    "chunked_mlp": f"{LONG} {MLP}",
    "offload_most": f"{LONG} {MLP} +activation_offload techniques.activation_offload.keep_last=4",
    "offload": f"{LONG} {MLP} +activation_offload",
}
"""Plans of one long row, the fastest first: each holds less of it on the device."""
ON_GPU = "+bf16_parameters +cudnn_attention"
TINY_CHUNKS = (
    "techniques.chunked_cross_entropy.chunk_tokens=32",
    "techniques.chunked_mlp.chunk_tokens=64",
)
ON_GPU_FULL = "+cudnn_attention"
FULL_BATCH = ("batch.tokens=16384",)
FULL = {
    "offloaded_states": "+full_checkpoint +chunked_cross_entropy +optimizer_offload",
    "states_8bit": "+full_checkpoint +chunked_cross_entropy +adamw_8bit",
    "states_8bit_in_backward": "+full_checkpoint +chunked_cross_entropy +adamw_8bit "
    "+optimizer_in_backward optimizer.clip_norm=0",
}
"""Ways to train all weights."""
BRIEF_TOKENS, TINY_BRIEF_TOKENS = 4096, 32
"""Tokens of the row before a long one, which compiles kernels and makes states."""
Facts = dict[str, Any]


def shape(args: argparse.Namespace) -> list[str]:
    """Return the keys of every plan of this call."""
    return [*(TINY if args.tiny else ()), *args.set]


def predicted(plan: Plan, device_name: str = "") -> Facts:
    """Return the bytes and seconds of a step that are predicted, and whether it fits.

    Raises:
        ConfigError, UnsupportedError: the plan cannot run there.
    """
    context = context_of(plan, device_name)
    check_supported(list(plan.techniques.values()), context)
    if context.device != "cuda":
        instant, peak_bytes = make_ledger(plan, context).peak()
        return {"predicted_bytes": peak_bytes, "predicted_at": instant, "predicted_fits": "unknown"}
    expected = predict(plan, context, Machine.assumed(context.device_name))
    return {
        "predicted_bytes": expected.memory.peak_bytes,
        "predicted_at": expected.memory.peak_at,
        "predicted_fits": expected.memory.fits,
        "predicted_s": expected.time.step_s,
    }


def write(
    args: argparse.Namespace, kind: str, side: str, plan: Plan | None, metrics: Facts, **facts: Any
) -> None:
    """Append a row and print it."""
    if plan is not None:
        facts |= {
            "techniques": sorted(plan.techniques),
            "seeds": [plan.seed],
            "plan_sha256": receipts.sha256(plan.dump()),
            "batch": plan.batch.model_dump(),
            "length": plan.data.sequence_length,
        }
    size = "tiny" if args.tiny else args.plan.stem
    facts |= {"kind": kind, "side": side, "shape": size, "overrides": args.set}
    receipts.append(TOPIC, metrics, results=args.results, **facts)
    shown = {
        name: round(m["value"] / (GIB if m["unit"] == "bytes" else 1), 4)
        for name, m in metrics.items()
    }
    printed = {
        "kind": kind,
        "side": side,
        **shown,
        "n": facts.get("n"),
        "length": facts.get("length"),
    }
    printed |= {"predicted_GiB": round(facts.get("predicted_bytes", 0) / GIB, 2)}
    printed |= {"predicted_s": facts.get("predicted_s"), "refused": facts.get("refused", "")}
    print(json.dumps({key: value for key, value in printed.items() if value}), flush=True)


# --- beside peers ----------------------------------------------------------------------------


def measure_speed(args: argparse.Namespace) -> None:
    """Read all sides alternately, there and back, and write a row for each."""
    facts, plans = dict[str, Facts](), dict[str, Plan]()
    for side in args.sides:
        facts[side] = {"method": args.method}
        try:
            plans[side] = plan = plan_of(side, args.method, args.plan, shape(args), tiny=args.tiny)
            if side in OURS:
                facts[side] |= predicted(plan)
        except HeadraceError as error:
            facts[side]["refused"] = str(error)
        if absent := missing(side, args.method):
            facts[side]["refused"] = f"absent: {', '.join(absent)} is not installed here"
    begin_s, readings = time.monotonic(), {side: list[Facts]() for side in args.sides}
    able = [side for side in args.sides if "refused" not in facts[side]]
    folder = write_model(args.work.resolve() / "model", plans[able[0]]) if able else args.work
    print(f"the model is there after {time.monotonic() - begin_s:.0f} s", flush=True)
    read = {
        side: Peer(side, args.plan.stem, command_of(args, side, folder), args.child_s)
        for side in able
    }
    try:
        for index in range(args.rounds):
            if index and time.monotonic() - begin_s > args.limit_s:
                break
            for side in able[:: -1 if index % 2 else 1]:
                if "refused" in facts[side] or "failed_later" in facts[side]:
                    continue
                try:
                    reading = read[side].read()
                    if why := reading.get("failed"):
                        raise RuntimeError(why)
                except RuntimeError as error:
                    key = "failed_later" if readings[side] else "refused"
                    facts[side][key] = str(error)[-1500:]
                    read[side].close()
                    continue
                readings[side].append(reading)
                if args.alone:
                    read[side].close()
                peak_gib = (reading["peak_bytes"] or 0) / GIB
                print(
                    f"round {index} {side}: {reading['tokens_per_s']:,.0f} tokens/s "
                    f"{peak_gib:.2f} GiB, {time.monotonic() - begin_s:.0f} s",
                    flush=True,
                )
    finally:
        for peer in read.values():
            peer.close()
        for side in args.sides:
            _write_side(args, side, plans.get(side), readings, facts[side])


def command_of(args: argparse.Namespace, side: str, folder: Path) -> list[str]:
    """Return the command of a side's process."""
    asked = {
        "side": side,
        "method": args.method,
        "plan": str(args.plan.resolve()),
        "folder": str(folder),
        "more": shape(args),
        "tiny": args.tiny,
    }
    program = Path(__file__).with_name("finetune_sides.py")
    return [sys.executable, str(program), json.dumps(asked)]


def _write_side(
    args: argparse.Namespace,
    side: str,
    plan: Plan | None,
    readings: dict[str, list[Facts]],
    facts: Facts,
) -> None:
    """Write a side's row; Headrace's has its ratio to each peer, by pairs of one round."""
    values = readings[side]
    wanted = {"tokens_per_s": ("tokens_per_s", "tokens/s"), "peak_memory": ("peak_bytes", "bytes")}
    metrics = spreads(values, wanted) if values else {}
    for peer in (other for other in readings if side in OURS and other not in OURS):
        pairs = list(zip(values, readings[peer], strict=False))
        for key, name in (("tokens_per_s", "ratio"), ("peak_bytes", "memory_ratio")):
            if ratios := [a[key] / b[key] for a, b in pairs if a[key] and b[key]]:
                metrics[f"{name}_to_{peer}"] = receipts.spread(ratios, "x")
    if values:
        facts |= {key: values[0][key] for key in ("first_loss", "trained", "mask")}
    versions = {package: receipts.installed(package) for package in PACKAGES}
    write(
        args,
        "speed",
        side,
        plan,
        metrics,
        n=len(values),
        alone=args.alone,
        versions=versions,
        **facts,
    )


# --- the longest row -------------------------------------------------------------------------


def rungs(args: argparse.Namespace, length: int) -> Iterator[tuple[str, Plan, Facts]]:
    """Yield the plans of one row of `length` tokens that can run, from the first that may fit."""
    for name, changes in LADDER.items():
        words = changes if args.tiny else f"{changes} {ON_GPU}"
        chunks = [word for word in TINY_CHUNKS if args.tiny and word.split(".")[1] in changes]
        more = [*shape(args), *chunks, *lengthened(length)]
        try:
            plan = Variant.parse(f"{name}: {words}", {}).of(args.plan, more)
            expected = predicted(plan, args.device_name)
        except HeadraceError as error:
            print(f"{name} at {length}: {error}", flush=True)
            continue
        expected["host_bytes"] = host_bytes(plan)
        if expected["host_bytes"] > args.host_gib * GIB:
            has, needs = args.host_gib, expected["host_bytes"] / GIB
            print(f"{name} at {length}: {needs:.0f} GiB of a host's {has:.0f}", flush=True)
            continue
        if expected["predicted_fits"] != "no" or name == list(LADDER)[-1]:
            yield name, plan, expected


def host_bytes(plan: Plan) -> int:
    """Return the page-locked bytes of the host that hold blocks' inputs in bf16.

    torch rounds each up to a power of two, so that 393,216 tokens take as much as 524,288.
    """
    offload: Any = plan.techniques.get("activation_offload")
    if offload is None:
        return 0
    each = 2 * plan.model.dim * plan.micro_rows * plan.data.sequence_length
    return (plan.model.layers - offload.keep_last) * (1 << (each - 1).bit_length())


def known(args: argparse.Namespace, lengths: tuple[int, ...]) -> tuple[int, int]:
    """Return the place of the longest row that fitted here so far, and of the shortest too long.

    They are -1 and the number of lengths where no row of this device says it.
    """
    low, high = -1, len(lengths)
    file = args.results / f"{TOPIC}.jsonl"
    size = "tiny" if args.tiny else args.plan.stem
    mine = ("longest", receipts.hardware(), size, args.set)
    for line in file.read_text().splitlines() if file.exists() else ():
        row = json.loads(line)
        if tuple(row.get(key) for key in ("kind", "hardware", "shape", "overrides")) != mine:
            continue
        if row["length"] in lengths:
            place = lengths.index(row["length"])
            low = max(low, place if row["n"] else -1)
            high = min(high, place if row.get("too_long") else len(lengths))
    return low, high


def measure_longest(args: argparse.Namespace) -> None:
    """Find the longest row that one full step has memory for, by bisection."""
    lengths = args.lengths or (TINY_LENGTHS if args.tiny else LENGTHS)
    low, high = known(args, lengths)
    fitting = [
        place
        for place, length in enumerate(lengths)
        if any(expected["predicted_fits"] != "no" for _, _, expected in rungs(args, length))
    ]
    place = fitting[-1] if fitting else 0
    while high - low > 1 and time.monotonic() < args.ends_s:
        if not low < place < high:
            place = (low + high) // 2
        did = try_length(args, lengths[place])
        if did is None:
            break
        low, high = (place, high) if did else (low, min(high, place))
    longest = f"{lengths[low]:,} tokens" if low >= 0 else "none"
    end = "the last of the list" if high == len(lengths) else f"{lengths[high]:,} is too long"
    print(f"the longest row so far: {longest}; {end}", flush=True)


def try_length(args: argparse.Namespace, length: int) -> bool | None:
    """Return whether one full step with a row of `length` tokens has memory; None if not known.

    It has none where no plan has room on the host either, and a process that died is taken for one
    that the host had no memory for.
    """
    each = list(rungs(args, length))
    for number, (name, plan, expected) in enumerate(each):
        left_s = min(args.child_s, args.ends_s - time.monotonic())
        if left_s <= 0:
            return None
        with Worker(here=args.here) as worker:
            reading = worker.ask(
                time_long_row,
                plan,
                limit_s=left_s,
                brief_tokens=TINY_BRIEF_TOKENS if args.tiny else BRIEF_TOKENS,
                steps=1,
            )
        full = reading.refusal in (RefusalKind.MEMORY, RefusalKind.PROCESS)
        last = number + 1 == len(each)
        metrics = _metrics(reading, plan, expected)
        write(args, "longest", name, plan, metrics, too_long=full and last, **expected)
        if not reading.refused:
            return True
        if not full:
            return None
    return False


def _metrics(reading: Reading, plan: Plan, facts: Facts) -> Facts:
    """Return the metrics of steps that were timed, and note in `facts` what else was read."""
    facts |= {"n": len(reading.seconds), "evidence": reading.evidence, "losses": reading.losses}
    if reading.refused:
        facts |= {"refused": reading.refused, "n": 0}
        return {}
    return speed_metrics(reading, [plan.batch.tokens / s for s in reading.seconds])


# --- all weights -----------------------------------------------------------------------------


def measure_full(args: argparse.Namespace) -> None:
    """Time steps in which all weights learn."""
    for name, plan, expected in full_plans(args):
        if plan is None:
            write(args, "full", name, None, {}, n=0, **expected)
            continue
        left_s = min(args.child_s, args.ends_s - time.monotonic())
        if left_s <= 0:
            print(f"left: full {name}", flush=True)
            continue
        with Worker(here=args.here) as worker:
            reading = worker.ask(
                time_steps, plan, limit_s=left_s, text=False, warm=2, timed=1, blocks=args.timed
            )
        metrics = _metrics(reading, plan, expected)
        write(args, "full", name, plan, metrics, **expected)


def full_plans(args: argparse.Namespace) -> Iterator[tuple[str, Plan | None, Facts]]:
    """Yield the plans that train all weights with what is predicted of them, or why not."""
    batch = TINY_CHUNKS[:1] if args.tiny else FULL_BATCH
    for name, changes in FULL.items():
        words = changes if args.tiny else f"{changes} {ON_GPU_FULL}"
        try:
            plan = Variant.parse(f"{name}: {words}", {}).of(args.plan, [*batch, *shape(args)])
            yield name, plan, predicted(plan, args.device_name)
        except HeadraceError as error:
            yield name, None, {"refused": str(error)}


# --- what is predicted -----------------------------------------------------------------------


def print_predictions(args: argparse.Namespace) -> None:
    """Print what is predicted of every plan; nothing is trained and no row is written."""

    def show(what: str, expected: Facts) -> None:
        seconds = f", {expected['predicted_s']:.1f} s" if expected.get("predicted_s") else ""
        peak = (
            f"{expected.get('predicted_bytes', 0) / GIB:.1f} GiB at {expected.get('predicted_at')}"
        )
        print(
            what, expected.get("refused") or f"{peak}{seconds}, fits: {expected['predicted_fits']}"
        )

    for method in ("qlora", "lora"):
        for side in (side for side in OURS if method == "qlora" or side not in WHOLE):
            plan = plan_of(side, method, args.plan, shape(args), tiny=args.tiny)
            show(f"speed {method} {side}", predicted(plan, args.device_name))
    for length in args.lengths or (TINY_LENGTHS if args.tiny else LENGTHS):
        for name, _, expected in rungs(args, length):
            show(f"longest {length} {name}", expected)
    for name, _, expected in full_plans(args):
        show(f"full {name}", expected)


MEASURES = {
    "speed": measure_speed,
    "longest": measure_longest,
    "full": measure_full,
    "predict": print_predictions,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measurement", choices=MEASURES)
    parser.add_argument("--method", choices=("qlora", "lora"), default="qlora")
    parser.add_argument("--sides", nargs="+", choices=MAKERS, default=list(MAKERS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--alone", action="store_true", help="speed: no side holds memory meanwhile"
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[], help="ascending, in tokens")
    parser.add_argument("--plan", "--shape", type=receipts.plan_file, default=PLANS / "8b.toml")
    parser.add_argument("--work", type=Path, default=Path("work"), help="where the model goes")
    parser.add_argument("--timed", type=int, default=4, help="steps of full that are timed")
    parser.add_argument("--child-s", type=float, default=560, help="limit of each process")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--host-gib", type=float, default=115, help="memory for rows on the host")
    parser.add_argument("--device-name", default="", help="predict: as on this GPU")
    parser.add_argument("--tiny", action="store_true", help="a minute on a CPU")
    parser.add_argument("--here", action="store_true", help="no process of its own, to debug")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--set", nargs="*", default=[], help="overrides for every plan")
    args = parser.parse_args()
    args.ends_s = time.monotonic() + args.limit_s
    MEASURES[args.measurement](args)


if __name__ == "__main__":
    main()
