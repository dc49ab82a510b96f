"""The doctor's door: a run's folder, what `headrace.watch` saved, or the traces of any trainer.

Beside the signals of a run or of a watch lie the traces of its bursts, if it was traced. Then the
newest burst is read too, in the way of any trainer's traces, and its findings stand for what
signals can only guess: see `judge`. A trace that cannot be read, or was asked for and never made,
is told and does not stop the doctor.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import torch

from headrace.assemble.context import elsewhere, make_context
from headrace.core.command import again
from headrace.core.errors import ConfigError, HeadraceError, RunError
from headrace.core.files import parse_object, shell
from headrace.core.units import format_seconds
from headrace.costs.machine import Machine
from headrace.doctor.findings import ABSTAINED, PASSES, Finding, stations
from headrace.doctor.judge import FEWEST_STEPS, busy_in, faults
from headrace.doctor.loop_words import PADDED
from headrace.doctor.physics import UNKNOWN, Use, binding
from headrace.doctor.recipe import slower_than_another
from headrace.doctor.trace import computation, diagnose_trace
from headrace.doctor.trace import judge as judge_trace
from headrace.doctor.trace.facts import newest
from headrace.doctor.trace.file import ENDINGS as TRACES
from headrace.doctor.trace.host import host_families
from headrace.doctor.trace.ranks import measure_traces
from headrace.doctor.window import Window, of_run, read_rows
from headrace.inference.load import read_recorded_plan, resolve_run
from headrace.observe import REPORT_FORMAT
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Context, installed
from headrace.predict.foresight import foresee
from headrace.probes.at_hand import rates
from headrace.train.run_folder import RunFolder, cpu_name

ALWAYS = ("step_s", "input_s")
"""Times that every row has."""
ROUNDING_S = 1e-6
"""How far below 0 a difference of two clocks may come by rounding."""
WATCHED, LOOK_BYTES = re.compile(rb'"watched"\s*:\s*true'), 4096
"""What stands near the beginning of a file that `headrace.watch` saved."""
SAVE = "watched.save({!r}) again"
"""What mends such a file, of which the path goes in."""
HELD = ("thermal slowdown", "hardware slowdown", "power brake", "clocks that were set")
"""Why a clock is slow that need not be. A limit of power is how GPUs are built and not among it."""
WRONG = ("silent no-op", "instability", "recipe")
"""What stands first whatever its share."""
WASTED = "wasted tokens"
HELD_SHARE, SLOWER = 0.2, 0.05
"""Of the samples in which one of them held, and of the clock that it took, before it is named."""


def diagnose(paths: Sequence[Path]) -> list[Finding]:
    """Verdicts on a run, on what a watch saved, or on the traces of one run's ranks.

    Raises:
        ConfigError: they are neither; or see `diagnose_run` and `diagnose_trace`.
        RunError: a file is damaged.
    """
    first = paths[0]
    if len(paths) == 1 and (not first.name.endswith(TRACES) or first.is_dir()):
        return diagnose_run(resolve_run(first))
    if not all(path.name.endswith(TRACES) and not path.is_dir() for path in paths):
        raise ConfigError(
            f"{', '.join(map(str, paths))}: one run is judged at a time, or its ranks' traces",
            f"headrace doctor {shell(first)}",
        )
    watched = [path for path in paths if _is_watched(path)]
    if not watched:
        return diagnose_trace(paths)
    if len(paths) > 1:
        raise ConfigError(
            f"{watched[0]} was saved by headrace.watch, and such files are judged one at a time",
            f"headrace doctor {shell(watched[0])}",
        )
    report, save = read_watched(first), SAVE.format(str(first))
    check_report(report, first, save)
    return _judged(report, _numbers(report.get("rows", []), first, save), first, save)


def diagnose_run(folder: Path, use: Use | None = None) -> list[Finding]:
    """Faults, the gravest first, what binds the steps, then the phases by time.

    Args:
        folder: the run's.
        use: what the work of its steps takes; read from its plan where it is not given.

    Raises:
        ConfigError: the run has not ended.
        RunError: a file of it is damaged.
    """
    run = RunFolder(folder)
    report, file, mend = run.read_report(), folder / "report.json", run.mend("report")
    check_report(report, file, mend)
    use = use_of(folder, report) if use is None else use
    return _judged(report, rows_of(folder), file, mend, slower_than_another, use)


def use_of(
    folder: Path, report: Mapping[str, Any], catalogue: Catalogue | None = None,
    rates_here: Callable[[torch.device], Machine] = rates,
) -> Use:  # fmt: skip
    """What the work of a run's steps takes of its device, by its plan and the device's rates.

    Args:
        folder: the run's.
        report: its report.json.
        catalogue: the techniques that there are; those of this package without it.
        rates_here: of a device that is here; by itself nothing is measured.
    """
    told = report.get("model_flops_utilization")
    reached = told.get("value") if isinstance(told, dict) else None
    peak = reached if isinstance(reached, float) else None
    try:
        plan = read_recorded_plan(folder, catalogue or installed())
        where = place_of(plan, RunFolder(folder).read("environment") or {}, rates_here)
        return Use.of(foresee(plan, *where), peak)
    except (HeadraceError, OSError) as error:
        said = error.message if isinstance(error, HeadraceError) else str(error)
        return Use(peak=peak, unknown=said)


def place_of(
    plan: Plan, environment: Mapping[str, Any],
    rates_here: Callable[[torch.device], Machine] = rates,
) -> tuple[Context, Machine]:  # fmt: skip
    """Where a run was, by its environment.json, and what is known of the device's rates.

    Raises:
        UnsupportedError: nothing is known of it.
    """
    here, name = torch.device("cpu"), str(environment.get("device_name", ""))
    if environment.get("device") != "cuda":
        context = make_context(plan, torch.device(str(environment.get("device") or "cpu")))
        same = context.device == "cpu" and environment.get("cpu") in (None, cpu_name())
        return context, rates_here(here) if same else Machine.assumed(context.device_name)
    if torch.cuda.is_available() and torch.cuda.get_device_name() == name:
        here = torch.device("cuda")
        return make_context(plan, here), rates_here(here)
    return elsewhere(make_context(plan, here), name), Machine.assumed(name)


def read_watched(file: Path) -> dict[str, Any]:
    """What a watch saved.

    Raises:
        RunError: it is damaged.
    """
    try:
        return parse_object(file.read_bytes())
    except ValueError as error:
        raise RunError(f"{file} is damaged: it {error}", SAVE.format(str(file))) from None


def rows_of(folder: Path) -> list[dict[str, float | None]]:
    """The rows of a run's metrics.jsonl.

    Raises:
        RunError: it is damaged.
    """
    file = folder / "metrics.jsonl"
    aside = f"mv {shell(file)} {shell(f'{file}.damaged')}; {again((folder, folder), verb='doctor')}"
    return _numbers(read_rows(file), file, aside)


def check_report(report: Mapping[str, Any], file: Path, mend: str) -> None:
    """Refuse a report that this version cannot judge.

    Args:
        report: what the file holds; of keys that it lacks `_judged` tells.
        file: report.json, or what a watch saved.
        mend: what is done about it.

    Raises:
        RunError: it has another format, or a time, a size or a share that can be none.
    """
    if (found := report.get("format", REPORT_FORMAT)) != REPORT_FORMAT:
        told = f"{file} has format {found!r:.40}; this Headrace reads format {REPORT_FORMAT}"
        raise RunError(told, mend)
    tables = {name: report.get(name) for name in ("phase_s", "peak_memory_bytes", "input_wait")}
    shares = {name: report.get(name) for name in ("wasted_token_fraction", "padding_fraction")}
    known = {name: report.get(name) for name in ("wall_s", "tokens", "steps", "parameters")} | {
        f"{name}.{key}": value
        for name, table in tables.items()
        if isinstance(table, Mapping)
        for key, value in table.items()
    }
    for name, value in {**known, **shares}.items():
        if value is None and name.startswith("phase_s."):
            raise RunError(f"{file} is damaged: {name} is no number", mend)
        if not isinstance(value, int | float):
            continue
        if value < -ROUNDING_S or (name in shares and value > 1):
            most = "between 0 and 1" if name in shares else "0 or more"
            raise RunError(f"{file} is damaged: {name} is {value!r:.40}, and not {most}", mend)


def _numbers(rows: Any, file: Path, mend: str) -> list[dict[str, float | None]]:
    """Rows of numbers, None for those that are not finite.

    Raises:
        RunError: they are none; names the first row and what it holds.
    """
    found = []
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
        if not isinstance(row, dict):
            raise RunError(f"{file} is damaged: row {number} is {row!r:.40}, and no object", mend)
        kept = {key: _number(value) for key, value in row.items()}
        for key, value in row.items():
            wrong = value is not None and not isinstance(value, int | float)
            if wrong or (kept[key] is None and key in ALWAYS):
                what = f"{key} of row {number} is {value!r:.40}, and no number"
                raise RunError(f"{file} is damaged: {what}", mend)
            if key.endswith("_s") and (kept[key] or 0.0) < -ROUNDING_S:
                what = f"{key} of row {number} is {value!r:.40}, and no time is below 0"
                raise RunError(f"{file} is damaged: {what}", mend)
        found.append(kept)
    return found


def _number(value: Any) -> float | None:
    try:
        return value if isinstance(value, int | float) and isfinite(value) else None
    except OverflowError:  # a whole number beyond any float
        return None


def _is_watched(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return WATCHED.search(opened.read(LOOK_BYTES)) is not None


def _judged(
    report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], file: Path, mend: str,
    recipe: Callable[[Path, Mapping[str, Any]], Finding | None] = lambda folder, report: None,
    use: Use = UNKNOWN,
) -> list[Finding]:  # fmt: skip
    """What the judge finds, and of the recipe; what binds; the phases; last what is not known."""
    try:
        slower = recipe(file.parent, report)
        window = of_run(report, rows)
        traced, split = _traced(report, window, file.parent)
        signals = report.get("signals") or {}
        found = faults(window, traced, use)
        wrong = [_with_breaks(f, signals.get("graph_breaks")) for f in found]
        wrong = [f for f in wrong if f.bottleneck != ABSTAINED]
        prompts = _prompts(report)
        wrong = [f for f in wrong if not (prompts and f.bottleneck == WASTED)]
        wrong = _placed(wrong, _clock(signals.get("gpu")))
        wrong = _with_outcome(wrong, report)
        unread = [f for f in (*found, *traced) if f.bottleneck == ABSTAINED]
        if wrong and _unstable(wrong[0]):  # which few steps are enough to tell
            unread = [f for f in unread if f.not_measured != "everything"]
        binds: list[Finding] = []
        if window.steps >= FEWEST_STEPS:
            busy = busy_in([split] if split is not None and split.share else [])
            binds = [binding(window, use, busy)]
            named = {f.bottleneck for f in wrong} | ({ABSTAINED} if wrong else set())
            binds = [f for f in binds if f.bottleneck not in named]
        told = [_told_apart(f, split, signals) for f in stations(report)]
        told = [replace(f, evidence=f"{f.evidence}{prompts}") if f.bottleneck == WASTED else f
                for f in told]  # fmt: skip
        return [*wrong, *([slower] if slower else []), *binds, *told, *unread]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"a value in it is of another kind ({error})"
        if isinstance(error, KeyError):
            what = f"a key {error} is not in it"
        raise RunError(f"{file} is damaged, or of another version: {what}", mend) from None


def _with_outcome(faults: list[Finding], report: Mapping[str, Any]) -> list[Finding]:
    """The faults with the divergence of the whole run first: nothing else matters before it."""
    outcome = report.get("outcome") or {}
    told = outcome.get("kind") == "not finite" and faults and _unstable(faults[0])
    if not outcome.get("diverged") or told:
        return faults
    jumps = [f.evidence for f in faults if _unstable(f)]
    sentence = outcome["sentence"]
    return [
        Finding("instability", 1.0, f"The run {sentence}.", "; ".join([_losses(outcome), *jumps]),
                "measured"),
        *(f for f in faults if not _unstable(f)),
    ]  # fmt: skip


def _unstable(finding: Finding) -> bool:
    return finding.bottleneck == "instability"


def _losses(outcome: Mapping[str, Any]) -> str:
    """The numbers of a divergence."""
    names = {"last": "at the end", "first": "at the start", "guess": "of a uniform guess"}
    known = {name: outcome[f"{name}_nats"] for name in names}
    told = [f"{nats:.4g} nats {names[name]}" for name, nats in known.items() if nats is not None]
    return "loss " + ", ".join(told)


def _prompts(report: Mapping[str, Any]) -> str:
    """What is said of tokens without a target that may all be masked prompts; "" where not.

    They are then a station and no fault. A run of ours masks none.
    """
    padded, wasted = report.get("padding_fraction"), report["wasted_token_fraction"]
    if not report.get("watched") or not wasted or (padded or 0.0) >= PADDED:
        return ""
    if padded is None:
        return "; masked prompts are no waste, and no attention_mask tells them from padding"
    return f"; masked prompts are no waste, and {padded:.1%} are padding"


# --- its traces -------------------------------------------------------------------------------


def _traced(
    report: Mapping[str, Any], window: Window, beside: Path
) -> tuple[list[Finding], Finding | None]:
    """What the newest burst says, and what kernels ran; nothing where none was asked for."""
    told = (report.get("signals") or {}).get("traces")
    if told is None:
        return [], None
    paths = newest(beside / told["folder"])
    if not paths:
        said = "Traces were asked for and none was recorded."
        return [Finding(ABSTAINED, 0.0, said, told["trouble"], "measured", "kernels")], None
    try:
        usual_s = median(window.step_s) if window.steps >= FEWEST_STEPS else None
        numbers = replace(measure_traces(paths), undisturbed_s=usual_s)
    except ConfigError as error:
        said = "The newest trace of the run cannot be read."
        return [Finding(ABSTAINED, 0.0, said, error.message, "measured", "kernels")], None
    found = judge_trace(numbers)
    if any(rank.steps for rank in numbers.ranks):
        return found, computation(numbers)
    if window.device != "cpu":
        return found, None
    shares = ", ".join(f"{name} {s:.0%}" for name, s in host_families(paths[0]).items())
    split = Finding(
        "computation", 0.0, "", f"of operations' own time {shares}", "measured",
        "efficiency of operations: of a CPU there are names and times",
    )  # fmt: skip
    return [], split if shares else None


def _with_breaks(finding: Finding, breaks: int | None) -> Finding:
    """Late launches with the graph breaks beside them, which a trace does not tell."""
    if finding.bottleneck != "launch" or not breaks or "graph break" in finding.evidence:
        return finding
    return replace(finding, evidence=f"{finding.evidence}; {breaks} graph breaks")


def _told_apart(station: Finding, split: Finding | None, signals: Mapping[str, Any]) -> Finding:
    """Both passes as a trace tells them apart: products, attention, memory-bound work."""
    if station.bottleneck != PASSES:
        return station
    evidence, missing = station.evidence, station.not_measured
    if split is not None:
        evidence, missing = f"{evidence}; in a trace {split.evidence}", split.not_measured
    gpu = signals.get("gpu")
    if signals.get("device") == "cuda" and gpu and not gpu["samples"]:
        missing = f"{missing}; the GPU's clock: {gpu['why_not']}".removeprefix("; ")
    return replace(station, evidence=evidence, not_measured=missing)


# --- its clock --------------------------------------------------------------------------------


def _clock(gpu: Mapping[str, Any] | None) -> Finding | None:
    """A clock that something held below what the device could do."""
    if not gpu or not gpu.get("samples"):
        return None
    held = {why: share for why, share in gpu["slowed"].items() if why in HELD}
    why = max(held, key=lambda name: held[name], default="")
    share = 1.0 - gpu["sm_clock_hz"]["median"] / gpu["sm_clock_hz"]["most"]
    if not why or held[why] < HELD_SHARE or share < SLOWER:
        return None
    ran, could = (gpu["sm_clock_hz"][name] / 1e6 for name in ("median", "most"))
    return Finding(
        "kernel efficiency", share, f"The GPU's clock was held down by {why}.",
        f"{ran:.0f} of {could:.0f} MHz, in {held[why]:.0%} of {gpu['samples']} samples over "
        f"{format_seconds(gpu['watched_s'])}; at most {gpu['temperature_c']} C", "inferred",
        "what the step would gain: memory's clock is another",
    )  # fmt: skip


def _placed(faults: Sequence[Finding], one: Finding | None) -> list[Finding]:
    """The faults with one more, behind what is wrong and what takes more."""
    if one is None:
        return [*faults]
    ahead = (n for n, f in enumerate(faults) if f.bottleneck not in WRONG and f.share < one.share)
    place = next(ahead, len(faults))
    return [*faults[:place], one, *faults[place:]]
