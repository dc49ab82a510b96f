"""Read what was measured of each technique, as times the plan without it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learning_page import Gain, gains
from readme_table import changes, read_rows, shown

from headrace.core.statistics import Interval

BASES = {"trunk": "the baseline", "recipe": "the compiled recipe"}
"""Name of the plan that a technique was added to, as rows have it -> as a page says it."""

OF_SIDES = {
    "fsdp": ("fsdp", "ratio_to_one"),
    "replicas": ("data_parallel", "ratio_to_one"),
    "zero1": ("zero", "ratio_to_one"),
    "tensor": ("tensor_parallel", "ratio_to_one"),
    "pipeline": ("pipeline_parallel", "ratio_to_one"),
    "context_8k": ("context_parallel", "ratio_to_fsdp_8k"),
}
"""Side of a row on several GPUs -> the technique that divides the work, and the ratio to show."""
OTHERS = {"ratio_to_one": "one GPU alone", "ratio_to_fsdp_8k": "fsdp alone"}
"""Ratio of such a row -> what it is a ratio to."""


@dataclass(frozen=True)
class MeasuredEffect:
    """Hold what one plan became by one technique, as a ratio to the plan without it.

    Args:
        technique: its name.
        how: the change, in words: what it was added to or left out of, and with which keys.
        where: the model's shape and the hardware.
        speed: tokens per second with it over without it; None where nothing was timed.
        memory: peak memory with it over without it; None where it was not measured.
    """

    technique: str
    how: str
    where: str
    speed: Interval | None
    memory: Interval | None


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


def effects_elsewhere(results: Path) -> dict[str, list[MeasuredEffect]]:
    """Return what rows of other topics measured, by the technique's name.

    These are several GPUs over one, adapters over another trainer's, text with copies, and changes
    of natural runs.

    Args:
        results: the folder of rows.
    """
    by_name: dict[str, list[MeasuredEffect]] = {}
    each = (_of_meshes, _of_adapters, _of_duplicates, _of_natural_runs)
    for effect in (effect for rows_of in each for effect in rows_of(results)):
        by_name.setdefault(effect.technique, []).append(effect)
    return by_name


def _of_meshes(results: Path) -> Iterator[MeasuredEffect]:
    for _, row in shown(_rows(results, "scaling")):
        name, ratio = OF_SIDES.get(row.get("side", ""), ("", ""))
        if metric := row.get("metrics", {}).get(ratio):
            how = f"{row['ranks']} GPUs, tokens/s of each over {OTHERS[ratio]}"
            yield _elsewhere(row, name, how, metric, None)


def _of_adapters(results: Path) -> Iterator[MeasuredEffect]:
    rows = [row for row in _rows(results, "finetune") if row.get("kind") == "speed"]
    for method in dict.fromkeys(row["method"] for row in rows):
        for _, row in shown([row for row in rows if row["method"] == method]):
            if metric := row.get("metrics", {}).get("ratio_to_peft_liger_kept"):
                side = row["side"].removeprefix("headrace").strip("_") or "as it is"
                how = f"over PEFT with Liger's kernels ({side})"
                memory = row["metrics"].get("memory_ratio_to_peft_liger_kept")
                yield _elsewhere(row, method, how, metric, memory)


def _of_duplicates(results: Path) -> Iterator[MeasuredEffect]:
    for row in _rows(results, "data"):
        if row.get("kind") == "duplicates":
            metric = row["metrics"]["seconds_ratio"]
            sooner = {"low": 1 / metric["high"], "high": 1 / metric["low"]}
            sooner["value"] = 1 / metric["value"]
            how = f"sooner at a target on text of which {row['copies']:,} documents are copies"
            yield _elsewhere(row, "deduplication", how, sooner, None)


def _of_natural_runs(results: Path) -> Iterator[MeasuredEffect]:
    for row in _rows(results, "natural"):
        for one in row.get("measured", ()):
            sign, name = one["change"][0][0], one["change"][0][1:]
            if sign == "+" and len(one["change"]) == 1 and (gain := one.get("gain")):
                metric = {end: 1 + gain[end] for end in ("low", "value", "high")}
                how = f"added to a run whose verdict is {row['verdict']}"
                yield _elsewhere(row | {"shape": row["workload"]}, name, how, metric, None)


def _elsewhere(
    row: dict[str, Any],
    name: str,
    how: str,
    speed: dict[str, float],
    memory: dict[str, float] | None,
) -> MeasuredEffect:
    return MeasuredEffect(
        technique=name,
        how=how,
        where=f"{row['shape']}, {row['hardware'].removeprefix('NVIDIA ')}",
        speed=Interval(speed["low"], speed["value"], speed["high"], 1),
        memory=Interval(memory["low"], memory["value"], memory["high"], 1) if memory else None,
    )


def _rows(results: Path, topic: str) -> list[dict[str, Any]]:
    file = results / f"{topic}.jsonl"
    return read_rows(file) if file.is_file() else []


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
