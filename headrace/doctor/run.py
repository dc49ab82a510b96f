"""The doctor's door: a run's folder, what `headrace.watch` saved, or the traces of any trainer."""

import json
import tomllib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError, RunError
from headrace.doctor.findings import Finding, stations
from headrace.doctor.judge import judge
from headrace.doctor.trace import diagnose_trace
from headrace.doctor.window import of_run, read_rows
from headrace.load import resolve_run
from headrace.run_folder import RunFolder

NO_FAULT = ("computation", "not measured")
TRACES = (".json", ".json.gz")
"""How the names of traces end."""
WATCHED, LOOK_BYTES = b'"watched": true', 4096
"""What stands near the beginning of a file that `headrace.watch` saved."""


def diagnose(paths: Sequence[Path]) -> list[Finding]:
    """Verdicts on a run, or on the traces of one run's ranks.

    Raises:
        ConfigError: they are neither; or see `diagnose_run` and `diagnose_trace`.
    """
    traces = [path for path in paths if path.name.endswith(TRACES) and not path.is_dir()]
    if traces and len(traces) == len(paths):
        return _watched(traces[0]) or diagnose_trace(traces)
    if len(paths) > 1:
        raise ConfigError(
            f"{', '.join(map(str, paths))}: one run is judged at a time, or its ranks' traces",
            f"headrace doctor {paths[0]}",
        )
    return diagnose_run(resolve_run(paths[0]))


def _watched(file: Path) -> list[Finding]:
    """Verdicts on what `headrace.watch` saved; none where the file is something else."""
    with file.open("rb") if file.is_file() else nullcontext() as opened:
        if opened is None or WATCHED not in opened.read(LOOK_BYTES):
            return []
    try:
        report = json.loads(file.read_bytes())
        window = of_run(report, report["rows"], {})
        return [*(f for f in judge(window) if f.bottleneck not in NO_FAULT), *stations(report)]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} is damaged: {error!r}", "watched.save(PATH) again") from None


def diagnose_run(folder: Path) -> list[Finding]:
    """Faults by what they cost, the largest first, then the stations by time.

    Raises:
        ConfigError: the run has not ended.
        RunError: a file of it is damaged.
    """
    report, path = RunFolder(folder).read_report(), folder / "plan.toml"
    try:
        plan = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} cannot be read: {error}", "headrace doctor on another run"
        ) from None
    window = of_run(report, read_rows(folder / "metrics.jsonl"), plan)
    faults = [found for found in judge(window) if found.bottleneck not in NO_FAULT]
    return [*faults, *stations(report)]


def narrowest(findings: list[Finding]) -> dict[str, Any]:
    """The first of them, for report.json."""
    if not findings:
        return {"station": None, "share": None, "sentence": "No step was measured.", "evidence": ""}
    first = findings[0]
    return {
        "station": first.bottleneck, "share": first.share, "sentence": first.sentence,
        "evidence": first.evidence,
    }  # fmt: skip
