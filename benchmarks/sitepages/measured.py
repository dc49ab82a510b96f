"""Read what was measured of each technique, as times the plan without it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learning_page import Gain, gains
from readme_table import changes, read_rows, shown

from headrace.core.statistics import Interval

BASES = {"trunk": "the baseline", "recipe": "the compiled recipe"}
"""Name of the plan that a technique was added to, as rows have it -> as a page says it."""


@dataclass(frozen=True)
class MeasuredEffect:
    """Hold what one plan became by one technique, as a ratio to the plan without it.

    Args:
        technique: its name.
        how: the change, in words: what it was added to or left out of, and with which keys.
        where: the model's shape and the hardware.
        speed: tokens per second with it over without it; None where nothing was timed.
        memory: peak memory with it over without it; None where it was not measured.
        commit: the commit of the row.
    """

    technique: str
    how: str
    where: str
    speed: Interval | None
    memory: Interval | None
    commit: str


def effects(results: Path) -> dict[str, list[MeasuredEffect]]:
    """Return what was measured of each technique's speed and memory, by its name.

    Args:
        results: the folder of rows.
    """
    by_name: dict[str, list[MeasuredEffect]] = {}
    for _, row in shown(read_rows(results / "techniques.jsonl")):
        effect = _effect(row)
        if effect.speed or effect.memory:
            by_name.setdefault(row["technique"], []).append(effect)
    return by_name


def learned(results: Path) -> dict[str, Gain]:
    """Return what was measured of each technique's time to a target of quality, by its name."""
    rows = read_rows(results / "learning.jsonl")
    return {gain.line: gain for gain in gains(rows)}


def refusals(results: Path) -> dict[str, list[str]]:
    """Return where each technique was asked for and could not run, by its name."""
    by_name: dict[str, list[str]] = {}
    for what, row in shown(read_rows(results / "techniques.jsonl")):
        if "refused" in row:
            why = " ".join(row["refused"].split())
            by_name.setdefault(row["technique"], []).append(f"{what} ({row['shape']}): {why}")
    return by_name


def _effect(row: dict[str, Any]) -> MeasuredEffect:
    metrics, left_out = row.get("metrics", {}), bool(row.get("left_out"))
    base = BASES.get(row["base"], row["base"])
    how = f"{'left out of' if left_out else 'added to'} {base}"
    keys = ", ".join([*filter(None, [row.get("knobs", "")]), *changes(row)])
    return MeasuredEffect(
        technique=row["technique"],
        how=f"{how} ({keys})" if keys else how,
        where=f"{row['shape']}, {row['hardware'].removeprefix('NVIDIA ')}",
        speed=_ratio(metrics, ("speed_ratio",), left_out) or _run(metrics),
        memory=_ratio(metrics, ("memory_ratio", "reserved_ratio"), left_out),
        commit=row["commit"] or "",
    )


def _ratio(metrics: dict[str, Any], names: Iterable[str], inverse: bool) -> Interval | None:
    """Return the first of the named ratios as with the technique over without it."""
    for name in names:
        if metric := metrics.get(name):
            ends = metric["low"], metric["value"], metric["high"]
            if inverse:
                ends = tuple(1 / end for end in reversed(ends))
            return Interval(*ends, n=1)
    return None


def _run(metrics: dict[str, Any]) -> Interval | None:
    """Return how many times as fast a whole run was, where no steady step was timed."""
    return _ratio(metrics, ("run_ratio",), inverse=False)
