"""Read a run's folder, what `headrace.watch` saved, or the traces of any trainer, and judge it.

Beside the signals of a run or of a watched loop lie the traces of its profiler windows, if it was
traced. Then the newest window is read too, as any trainer's traces are, and its findings stand for
what signals can only guess: see `rules`. A trace that cannot be read, or was asked for and never
made, is a finding and does not stop the doctor.
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
from headrace.core.command import rerun
from headrace.core.errors import (
    ConfigError,
    HeadraceError,
    RunError,
    UnsupportedError,
    nearest,
)
from headrace.core.files import has_folder, parse_object, shell
from headrace.costs.machine import Machine
from headrace.doctor.findings import Finding, Kind, phase_findings
from headrace.doctor.log import read_log
from headrace.doctor.observation import Observation, observe, read_rows
from headrace.doctor.recipe import slower_than_another
from headrace.doctor.rules import FEWEST_STEPS, examine
from headrace.doctor.so_far import report_so_far
from headrace.doctor.trace import computation, diagnose_trace, judge_trace
from headrace.doctor.trace.facts import newest
from headrace.doctor.trace.file import ENDINGS as TRACES
from headrace.doctor.trace.host import host_families
from headrace.doctor.trace.ranks import measure_traces
from headrace.doctor.use import UNKNOWN, Use
from headrace.inference.load import read_recorded_plan, resolve_run
from headrace.observe import REPORT_FORMAT
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Context, installed
from headrace.predict.prediction import predict
from headrace.probes.at_hand import rates
from headrace.train.run_folder import RunFolder, cpu_name

ALWAYS = ("step_s", "input_s")
"""Times that every row has."""
DEVICES = ("cpu", "cuda", "mps")
"""Kinds of devices that a run may have been on."""
ROUNDING_S = 1e-6
"""Seconds that a difference of two clocks may lie below 0 by rounding."""
WATCHED, LOOK_BYTES = re.compile(rb'"watched"\s*:\s*true'), 4096
"""What stands near the beginning of a file that `headrace.watch` saved, and how near in bytes."""
SAVE = "watched.save({!r}) again"
"""What mends such a file, of which the path goes in."""


def diagnose(paths: Sequence[Path]) -> list[Finding]:
    """Return the verdicts on a run, on what a watch saved, or on the traces of one run's ranks.

    Raises:
        ConfigError: they are neither; or see `diagnose_run` and `diagnose_trace`.
        RunError: a file is damaged.
    """
    return examined(paths)[1]


def diagnose_run(folder: Path, use: Use | None = None) -> list[Finding]:
    """Return the faults, the gravest first, what binds the steps, then the phases by time.

    Args:
        folder: the run's.
        use: what the work of its steps takes; read from its plan where it is not given.

    Raises:
        ConfigError: the run has not ended.
        RunError: a file of it is damaged.
    """
    return examined_run(folder, use)[1]


def examined(paths: Sequence[Path]) -> tuple[Observation, list[Finding]]:
    """Return what is known of a run, a watched loop, a log or traces, and the verdicts on it.

    Raises:
        ConfigError, RunError: as `diagnose`.
    """
    first = paths[0]
    if len(paths) == 1 and (not first.name.endswith(TRACES) or first.is_dir()):
        if first.is_file() and (log := read_log(first)) is not None:
            seen = log.observe()
            return seen, examine(seen)
        return examined_run(resolve_run(first))
    if not all(path.name.endswith(TRACES) and not path.is_dir() for path in paths):
        raise ConfigError(
            f"{', '.join(map(str, paths))}: one run is judged at a time, or its ranks' traces",
            f"headrace doctor {shell(first)}",
        )
    watched = [path for path in paths if is_watched(path)]
    if not watched:
        return Observation(), diagnose_trace(paths)
    if len(paths) > 1:
        raise ConfigError(
            f"{watched[0]} was saved by headrace.watch, and such files are judged one at a time",
            f"headrace doctor {shell(watched[0])}",
        )
    report, save = read_watched(first), SAVE.format(str(first))
    check_report(report, first, save)
    return _judged(report, _numbers(report.get("rows", []), first, save), first, save)


def examined_run(folder: Path, use: Use | None = None) -> tuple[Observation, list[Finding]]:
    """Return what is known of a run, and the verdicts on it; see `diagnose_run`."""
    run = RunFolder(folder)
    report, file, mend = run.read_report(), folder / "report.json", run.mend("report")
    check_report(report, file, mend)
    use = use_of(folder, report) if use is None else use
    return _judged(report, rows_of(folder), file, mend, slower_than_another, use)


def examined_so_far(folder: Path, catalogue: Catalogue) -> tuple[Observation, list[Finding]]:
    """Return what is known of a run that has not ended, and the verdicts on it; see `so_far`.

    Raises:
        RunError: a file of it is damaged.
    """
    rows, file = rows_of(folder), folder / "metrics.jsonl"
    report = report_so_far(folder, rows)
    return _judged(report, rows, file, _aside(file), use=use_of(folder, report, catalogue))


def use_of(
    folder: Path,
    report: Mapping[str, Any],
    catalogue: Catalogue | None = None,
    rates_here: Callable[[torch.device], Machine] = rates,
) -> Use:
    """Return what the work of a run's steps takes of its device, by its plan and the rates.

    Args:
        folder: the run's.
        report: its report.json.
        catalogue: the techniques that there are; those of this package without it.
        rates_here: of a device that is here; by itself nothing is measured.
    """
    utilization = report.get("model_flops_utilization")
    reached = utilization.get("value") if isinstance(utilization, dict) else None
    peak = reached if isinstance(reached, float) else None
    try:
        plan = read_recorded_plan(folder, catalogue or installed())
        where = place_of(plan, RunFolder(folder).read("environment") or {}, rates_here)
        return Use.of(predict(plan, *where), peak)
    except (HeadraceError, OSError) as error:
        why = error.message if isinstance(error, HeadraceError) else str(error)
        return Use(peak=peak, unknown=why)


def place_of(
    plan: Plan,
    environment: Mapping[str, Any],
    rates_here: Callable[[torch.device], Machine] = rates,
) -> tuple[Context, Machine]:
    """Return where a run was, by its environment.json, and what is known of the device's rates.

    Raises:
        UnsupportedError: nothing is known of it.
    """
    here, name = torch.device("cpu"), str(environment.get("device_name", ""))
    kind = str(environment.get("device") or "cpu")
    if kind not in DEVICES:
        raise UnsupportedError(
            f"environment.json says that the run was on {kind!r:.40}, which is none of "
            f"{', '.join(DEVICES)}",
            f"device={nearest(kind, DEVICES)} in place of it",
        )
    if kind != "cuda":
        context = make_context(plan, torch.device(kind))
        same = context.device == "cpu" and environment.get("cpu") in (None, cpu_name())
        return context, rates_here(here) if same else Machine.assumed(context.device_name)
    if torch.cuda.is_available() and torch.cuda.get_device_name() == name:
        here = torch.device("cuda")
        return make_context(plan, here), rates_here(here)
    return elsewhere(make_context(plan, here), name), Machine.assumed(name)


def read_watched(file: Path) -> dict[str, Any]:
    """Return what a watch saved.

    Raises:
        RunError: it is damaged.
    """
    try:
        return parse_object(file.read_bytes())
    except ValueError as error:
        raise RunError(f"{file} is damaged: it {error}", SAVE.format(str(file))) from None


def rows_of(folder: Path) -> list[dict[str, float | None]]:
    """Return the rows of a run's metrics.jsonl.

    Raises:
        RunError: it is damaged.
    """
    file = folder / "metrics.jsonl"
    return _numbers(read_rows(file), file, _aside(file))


def _aside(file: Path) -> str:
    """Return the command that renames a damaged file of a run, and judges the run without it."""
    folder = file.parent
    return f"mv {shell(file)} {shell(f'{file}.damaged')}; {rerun((folder, folder), verb='doctor')}"


def check_report(report: Mapping[str, Any], file: Path, mend: str) -> None:
    """Refuse a report that this version cannot judge.

    Args:
        report: what the file holds; `_judged` refuses it where a key is missing.
        file: report.json, or what a watch saved.
        mend: what is done about it.

    Raises:
        RunError: it has another format, or a time, a size or a share that can be none.
    """
    if (version := report.get("format", REPORT_FORMAT)) != REPORT_FORMAT:
        message = f"{file} has format {version!r:.40}; this Headrace reads format {REPORT_FORMAT}"
        raise RunError(message, mend)
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
    """Return rows of numbers, None for those that are not finite.

    Raises:
        RunError: a row holds something else; names the first one and what it holds.
    """
    numbers = []
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
        numbers.append(kept)
    return numbers


def _number(value: Any) -> float | None:
    try:
        return value if isinstance(value, int | float) and isfinite(value) else None
    except OverflowError:  # a whole number beyond any float
        return None


def is_watched(file: Path) -> bool:
    """Return whether `headrace.watch` saved a file."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return WATCHED.search(opened.read(LOOK_BYTES)) is not None


def _judged(
    report: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    file: Path,
    mend: str,
    recipe: Callable[[Path, Mapping[str, Any]], Finding | None] = lambda folder, report: None,
    use: Use = UNKNOWN,
) -> tuple[Observation, list[Finding]]:
    """Observe a report with its rows and traces, and judge it.

    Raises:
        RunError: a key or a value is none that this version writes.
    """
    try:
        seen = observe(report, rows, use, phase_findings(report))
        traced, split = _traced(report, seen, file.parent)
        slower = recipe(file.parent, report)
        seen = replace(seen, traced=tuple(traced), split=split, beside=slower)
        return seen, examine(seen)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"a value in it is of another kind ({error})"
        if isinstance(error, KeyError):
            what = f"a key {error} is not in it"
        raise RunError(f"{file} is damaged, or of another version: {what}", mend) from None


def _traced(
    report: Mapping[str, Any], seen: Observation, beside: Path
) -> tuple[list[Finding], Finding | None]:
    """Return what the newest profiler window says, and what kernels ran; nothing without one."""
    traces = (report.get("signals") or {}).get("traces")
    if traces is None:
        return [], None
    there = has_folder(beside, traces["folder"])
    if not (paths := newest(beside / traces["folder"]) if there else []):
        return [Finding(Kind.NO_TRACE, 0.0, {"why": traces["trouble"]})], None
    try:
        usual_s = median(seen.step_s) if seen.steps >= FEWEST_STEPS else None
        numbers = replace(measure_traces(paths), undisturbed_s=usual_s)
    except ConfigError as error:
        return [Finding(Kind.UNREADABLE_TRACE, 0.0, {"why": error.message})], None
    verdicts = judge_trace(numbers)
    if any(rank.steps for rank in numbers.ranks):
        return verdicts, computation(numbers)
    if seen.device != "cpu":
        return verdicts, None
    families = host_families(paths[0])
    split = Finding(Kind.HOST_SPLIT, 0.0, {"families": families})
    return [], split if families else None
