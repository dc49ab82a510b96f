"""This module does the work of `headrace data ingest --engine` and of `headrace data part`."""

import json
from pathlib import Path
from typing import Any, Literal

from headrace.core.errors import ConfigError
from headrace.core.progress import OnProgress
from headrace.data.ingest import folder_of, prepare
from headrace.data.prepared import Prepared
from headrace.data.scale.engines import EngineChoice, EngineName, as_job, parse_task
from headrace.data.scale.job import ingest_on, job_folder, missing_parts
from headrace.data.scale.slurm import SlurmArray, run_task
from headrace.plan.plan import Plan

EngineWord = Literal["local", "ray", "slurm"] | None


def prepared_on(plan: Plan, engine: EngineWord, workers: int, progress: OnProgress) -> Prepared:
    """Return a plan's data, prepared by an engine, or by this process alone where none is named.

    Raises:
        HeadraceError: see `prepare`; or the engine is not installed.
    """
    if engine is None:
        _refuse_workers(workers)
        return prepare(plan, progress=progress)
    chosen = EngineChoice(name=EngineName(engine), workers=workers)
    return ingest_on(plan, chosen.part_workers(), progress=progress)


def submission(plan: Plan, engine: EngineWord, workers: int) -> dict[str, str]:
    """Return the script that Slurm would be given, and the command that would give it.

    Raises:
        ConfigError: another engine is asked for, which is given no script.
    """
    if engine != EngineName.SLURM:
        raise ConfigError(
            f"--dry-run prints what Slurm is given, and --engine is {engine or 'not set'}",
            "--engine slurm",
        )
    folder = job_folder(folder_of(plan))
    array = EngineChoice(name=EngineName.SLURM, workers=workers).part_workers()
    assert isinstance(array, SlurmArray)
    return {"script": array.script(folder), "command": f"# {array.command(folder, 'STAGE')}"}


def make_parts(job: Path, stage: str, words: str) -> dict[str, Any]:
    """Make a task's share of a stage, and return how many parts there are.

    Raises:
        HeadraceError: there is no such job or task, or a part cannot be made.
    """
    task, tasks = parse_task(words)
    folder = as_job(job, stage)
    parts = len(json.loads((folder / "job.json").read_bytes())["parts"])
    run_task(folder, stage, task, tasks, parts)
    return {"parts": parts, "missing": len(missing_parts(folder, stage, parts))}


def _refuse_workers(workers: int) -> None:
    if workers:
        raise ConfigError(
            f"--workers {workers} is of an engine, and none is named", "--engine local"
        )
