"""The doctor's door: a run's folder, what `headrace.watch` saved, or the traces of any trainer."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError, RunError
from headrace.doctor.findings import Finding, stations
from headrace.doctor.judge import judge
from headrace.doctor.trace import diagnose_trace
from headrace.doctor.window import of_run, read_rows
from headrace.load import resolve_run
from headrace.run_folder import RunFolder

TRACES = (".json", ".json.gz")
"""How the names of traces end."""
WATCHED, LOOK_BYTES = re.compile(rb'"watched"\s*:\s*true'), 4096
"""What stands near the beginning of a file that `headrace.watch` saved."""


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
            f"headrace doctor {first}",
        )
    watched = [path for path in paths if _is_watched(path)]
    if not watched:
        return diagnose_trace(paths)
    if len(paths) > 1:
        raise ConfigError(
            f"{watched[0]} was saved by headrace.watch, and such files are judged one at a time",
            f"headrace doctor {watched[0]}",
        )
    try:
        report = json.loads(first.read_bytes())
    except ValueError as error:
        raise RunError(f"{first} is damaged: {error}", "watched.save(PATH) again") from None
    return _judged(report, report.get("rows", []), first)


def diagnose_run(folder: Path) -> list[Finding]:
    """Faults, the gravest first, then the stations by time.

    Raises:
        ConfigError: the run has not ended.
        RunError: a file of it is damaged.
    """
    report = RunFolder(folder).read_report()
    return _judged(report, read_rows(folder / "metrics.jsonl"), folder / "report.json")


def _is_watched(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return WATCHED.search(opened.read(LOOK_BYTES)) is not None


def _judged(
    report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], file: Path
) -> list[Finding]:
    """What the judge finds, then the stations; last that too little was measured, if it was."""
    try:
        found = judge(of_run(report, rows))
        faults = [f for f in found if f.bottleneck not in ("computation", "not measured")]
        unread = [f for f in found if f.bottleneck == "not measured"]
        return [*faults, *stations(report), *unread]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(
            f"{file} is damaged, or of another version: {error!r}", "headrace doctor on another run"
        ) from None


def narrowest(findings: list[Finding]) -> dict[str, Any]:
    """The first of them, for report.json."""
    if not findings:
        return {"station": None, "share": None, "sentence": "No step was measured.", "evidence": ""}
    first = findings[0]
    return {
        "station": first.bottleneck, "share": first.share, "sentence": first.sentence,
        "evidence": first.evidence,
    }  # fmt: skip
