"""Judge a run that has ended, now or later: a kept run costs no device time again."""

import json
import shutil
from pathlib import Path
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.doctor.findings import ABSTAINED, Finding
from headrace.doctor.run import diagnose
from headrace.doctor.words import describe
from headrace.plan.symptoms import BOTTLENECKS

KEPT = ("report.json", "metrics.jsonl", "plan.toml", "environment.json")
"""Files of a run's folder that the doctor reads, beside the traces."""


def verdict_of(folder: Path) -> dict[str, Any]:
    """Return the doctor's part of a row.

    Args:
        folder: a run's, or what a watch saved.
    """
    why = ""
    try:
        findings = diagnose([folder])
    except HeadraceError as error:
        findings, why = [], error.message
    first = next((f for f in findings if f.bottleneck in (*BOTTLENECKS, ABSTAINED)), None)
    verdict = first.bottleneck if first else None
    unread = any(f.bottleneck == ABSTAINED for f in findings)
    return {
        "verdict": verdict,
        "abstained": first is None or (verdict in ("computation", ABSTAINED) and unread),
        "evidence": why if first is None else evidence_of(first),
        "findings": [[f.bottleneck, round(f.share, 4)] for f in findings],
    }


def evidence_of(finding: Finding) -> str:
    """Return the sentence of a finding with its evidence."""
    words = describe(finding)
    return f"{words.sentence} ({words.evidence})"


def keep(run: Path, results: Path) -> str:
    """Copy what the doctor reads of a run into RESULTS/runs, and return its name there."""
    runs = results / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    name = f"{len(list(runs.iterdir())) + 1:03}"
    if run.is_file():
        shutil.copy(run, runs / f"{name}.json")
        return f"{name}.json"
    (runs / name / "traces").mkdir(parents=True)
    for file in KEPT:
        if (run / file).is_file():
            shutil.copy(run / file, runs / name / file)
    for trace in sorted((run / "traces").glob("step-*.json.gz"))[-1:]:
        shutil.copy(trace, runs / name / "traces" / trace.name)
    return name


def rejudge(kept: Path, results: Path, thresholds: str | None) -> tuple[int, int]:
    """Judge the kept runs with the doctor of this checkout; return how many are right, and all.

    Args:
        kept: doctor.jsonl and runs/, as `--keep` wrote them.
        results: where the new rows go.
        thresholds: the commit of the doctor's thresholds.
    """
    right, rows = 0, []
    for line in (kept / "doctor.jsonl").read_text().splitlines():
        row = json.loads(line)
        if not row.get("kept"):
            continue
        row |= {**verdict_of(kept / "runs" / row["kept"]), "thresholds": thresholds}
        good = row["verdict"] == row.get("expected", "computation")
        right += good
        if not good:
            what = f"{row.get('fault') or 'healthy'} {row.get('wanted', '')}".strip()
            print(f"{row['kept']} {what} in {row['workload']}: {row['verdict']}: {row['evidence']}")
        rows.append(json.dumps(row) + "\n")
    results.mkdir(parents=True, exist_ok=True)
    with (results / "doctor.jsonl").open("a") as file:
        file.writelines(rows)
    return right, len(rows)
