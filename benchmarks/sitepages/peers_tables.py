"""Make the tables of the page on other trainers, from rows that measured them beside Headrace."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from readme_table import read_rows, shown
from scoring.tables import markdown

MARKER = re.compile(r"^<!-- table: ([a-z]+) -->$", re.MULTILINE)
SIDES: Mapping[str, str] = {
    "headrace": "Headrace",
    "headrace_exact": "Headrace, exact techniques alone",
    "headrace_float8": "Headrace, float8",
    "headrace_float8_flash4": "Headrace, float8 and FlashAttention 4",
    "headrace_flash4": "Headrace, FlashAttention 4",
    "headrace_fused": "Headrace, more fused kernels",
    "headrace_half": "Headrace, half of the blocks recomputed",
    "headrace_kept": "Headrace, nothing recomputed",
    "headrace_micro": "Headrace, the smallest micro-batch",
    "headrace_small": "Headrace, for memory",
    "headrace_smallest": "Headrace, for the least memory",
    "headrace_whole": "Headrace, some blocks held whole",
    "headrace_autotuned": "Headrace, attention chosen by time",
    "torchtitan": "torchtitan",
    "torchtitan_float8": "torchtitan, float8",
    "litgpt": "litgpt",
    "unsloth": "Unsloth",
    "peft": "PEFT",
    "peft_liger": "PEFT and Liger",
    "peft_liger_kept": "PEFT and Liger, nothing recomputed",
    "one": "Headrace, one GPU",
    "fsdp": "Headrace, fsdp",
    "replicas": "Headrace, replicas",
    "titan_fsdp": "torchtitan, FSDP2",
}
"""Name of a side in rows -> as a table says it."""
OF_MESHES = ("one", "fsdp", "replicas", "titan_fsdp")
"""Sides of scaling.jsonl that a peer ran too, or that it is compared with."""
GIB = 2**30


def with_tables(page: str, results: Path) -> str:
    """Return a page with a table of rows in the place of each `<!-- table: NAME -->`.

    Args:
        page: Markdown.
        results: the folder of rows.
    """
    return MARKER.sub(lambda marker: TABLES[marker[1]](results), page)


def _pretraining(results: Path) -> str:
    rows = [row for _, row in shown(read_rows(results / "peers.jsonl")) if row.get("peer")]
    kept = [row for row in rows if row["n"] > 1]
    return _table(sorted(kept, key=lambda r: (r["shape"], -_speed(r))), "peer")


def _finetuning(results: Path) -> str:
    rows = [r for r in read_rows(results / "finetune.jsonl") if r.get("kind") == "speed"]
    methods = dict.fromkeys(row["method"] for row in rows)
    each = (shown([row for row in rows if row["method"] == method]) for method in methods)
    kept = [row for newest in each for _, row in newest if row.get("metrics")]
    return _table(
        sorted(kept, key=lambda r: (r["method"], r["hardware"], -_speed(r))), "side", ("method",)
    )


def _several(results: Path) -> str:
    rows = [row for _, row in shown(read_rows(results / "scaling.jsonl"))]
    kept = [r for r in rows if r.get("side") in OF_MESHES and r["kind"] == "side"]
    return _table(sorted(kept, key=lambda r: (r["ranks"], -_speed(r))), "side", ("ranks",))


def _speed(row: dict[str, Any]) -> float:
    metrics = row["metrics"]
    return next(
        metrics[k]["value"] for k in ("tokens_per_s", "tokens_per_s_per_gpu") if k in metrics
    )


def _table(rows: list[dict[str, Any]], name: str, more: tuple[str, ...] = ()) -> str:
    """Return rows as a table: speed, memory, readings and the commit, the fastest first."""
    head = ("trainer", "shape", *more, "hardware", "tokens/s of a GPU", "peak, GiB", "n", "commit")
    cells = [
        (
            SIDES.get(row[name], row[name]),
            row["shape"],
            *(str(row[key]) for key in more),
            row["hardware"].removeprefix("NVIDIA "),
            f"{_speed(row):,.0f}",
            f"{row['metrics']['peak_memory']['value'] / GIB:.1f}",
            str(row["n"]),
            row["commit"] or "",
        )
        for row in rows
    ]
    return markdown(head, cells)


TABLES: Mapping[str, Callable[[Path], str]] = {
    "pretraining": _pretraining,
    "finetuning": _finetuning,
    "several": _several,
}
"""Name of a table in a page's marker -> what makes it."""
