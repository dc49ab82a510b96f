"""Append receipts to results/TOPIC.jsonl, one JSON row a measurement, never edited."""

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
MADE_OF = "made_of.json"
"""The file in a folder of work that says what its models are made of."""
PLANS = Path(__file__).resolve().parent / "plans"
CODE = ("headrace", "benchmarks")
"""The folders of the code that a measurement runs."""
given_commit: str | None = None
"""The commit that `--commit` gives a program; None without it.

It is for a copy of the code whose checkout may be older.
"""
SCRATCH = ("--work", "--results", "--folder", "--keep")
"""Options that say where a program works and writes, which changes nothing that it measures."""
COMMIT_HELP = "commit of this code, where the checkout is older; rows tell it"
"""The help of `--commit`."""


def plan_file(shape: str) -> Path:
    """Return the path of a plan file, or of a shape by its name in plans/."""
    return Path(shape) if shape.endswith(".toml") else PLANS / f"{shape}.toml"


def spread(values: Sequence[float], unit: str) -> dict[str, Any]:
    """Return readings as a metric: the median, the lowest and the highest."""
    return {"value": median(values), "low": min(values), "high": max(values), "unit": unit}


def hardware() -> str:
    """Return the device that was measured on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else processor()


def processor() -> str:
    """Return the machine's processor, with its cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(names)} cores"


def host_gpus() -> int:
    """Return the number of NVIDIA GPUs of the machine, visible to this process or not."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def installed(package: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the commit of the code that runs; None where it is unavailable.

    It is the one that `--commit` gave, else this checkout's. `-dirty` follows where the checkout
    knows that commit and its code differs.
    """
    return _commit(given_commit)


@cache
def _commit(given: str | None) -> str | None:
    resolved = _git("rev-parse", "--short", "--verify", "--quiet", f"{given or 'HEAD'}^{{commit}}")
    if not resolved.stdout.strip():
        return given
    same = _git("diff", "--quiet", given or "HEAD", "--", *CODE).returncode == 0
    return resolved.stdout.strip() + ("" if same else "-dirty")


def _git(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
    )


def sha256(value: Any) -> str:
    """Return a plan's fingerprint."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def claim(folder: Path, **facts: Any) -> None:
    """Keep in a folder what its models are made of, so that another command does not take them.

    Args:
        folder: it is made where it is missing.
        facts: JSON values that decide what is made in it.

    Raises:
        SystemExit: it holds what other facts, or nobody knows which, have made.
    """
    file, wanted = folder / MADE_OF, json.loads(json.dumps(facts))
    folder.mkdir(parents=True, exist_ok=True)
    if not file.is_file() and not any(folder.iterdir()):
        file.write_text(json.dumps(wanted, indent=1))
        return
    had = json.loads(file.read_text()) if file.is_file() else {}
    if had != wanted:
        differ = [key for key in {**had, **wanted} if had.get(key) != wanted.get(key)]
        raise SystemExit(
            f"{folder} was made with other {', '.join(differ)} than this command asks for; try: "
            f"another folder, or rm -r {folder}"
        )


def command(words: Sequence[str]) -> str:
    """Return a command as another reader may give it: without folders of this machine.

    Args:
        words: the program and its words; a folder is one word behind the option that takes it.
    """
    kept = ["python", *words[:1]]
    for before, word in pairwise(words):
        if word not in SCRATCH and before not in SCRATCH:
            kept.append("DIR" if before == "--data" or Path(word).is_absolute() else word)
    return " ".join(kept)


def append(topic: str, metrics: dict[str, Any], *, results: Path, **facts: Any) -> dict[str, Any]:
    """Write one row and return it.

    Args:
        topic: the file's name.
        metrics: name -> {value, low, high, unit}.
        results: the folder.
        facts: plan_sha256, baseline_sha256, technique, techniques, shape, seeds, n, refused ...
    """
    row = {
        "date": date.today().isoformat(),
        "commit": commit(),
        "command": command(sys.argv),
        "hardware": hardware(),
        "host_gpus": host_gpus(),
        "torch": torch.__version__,
        "triton": installed("triton"),
        **facts,
        "metrics": metrics,
    }
    results.mkdir(parents=True, exist_ok=True)
    with (results / f"{topic}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row
