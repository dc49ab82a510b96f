"""The engines by name, and how many workers each has."""

import importlib.util
import os
from enum import StrEnum
from pathlib import Path

from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.strict import Strict
from headrace.data.scale.job import PartWorkers
from headrace.data.scale.local import Processes
from headrace.data.scale.slurm import SlurmArray


class EngineName(StrEnum):
    """Where parts are made."""

    LOCAL = "local"
    RAY = "ray"
    SLURM = "slurm"


class EngineChoice(Strict):
    """An engine and its number of workers, as a user asks for them."""

    name: EngineName
    workers: int = 0
    """Parts that are made at once; 0 is one for each core of this machine."""

    def part_workers(self) -> PartWorkers:
        """Return what makes the parts.

        Raises:
            UnsupportedError: the engine is not installed.
        """
        count = self.workers or os.cpu_count() or 1
        if self.name is EngineName.SLURM:
            return SlurmArray(count)
        if self.name is EngineName.LOCAL:
            return Processes(count)
        if importlib.util.find_spec("ray") is None:
            raise UnsupportedError(
                "--engine ray needs the package `ray`, which is not installed",
                "pip install 'headrace[ray]' or --engine local",
            )
        module = "headrace.data.scale.on_ray"
        return Processes(1, module=module, words=[str(count)], slots=count, name="Ray's driver")


def parse_task(words: str) -> tuple[int, int]:
    """Return (K, N) of a task `K/N`.

    Raises:
        ConfigError: it is none.
    """
    task, _, tasks = words.partition("/")
    if not (task.isdecimal() and tasks.isdecimal() and int(task) < int(tasks)):
        raise ConfigError(
            f"--task {words!r} is no K/N with K from 0 and below N", "--task 0/1 for all parts"
        )
    return int(task), int(tasks)


def as_job(folder: Path, stage: str) -> Path:
    """Return the folder of a job that has a stage.

    Raises:
        ConfigError: there is none, or no such stage.
    """
    if not (folder / "job.json").is_file():
        raise ConfigError(
            f"{folder} is no job of an ingest: it has no job.json",
            "headrace data ingest PLAN --engine local",
        )
    stages = sorted(
        path.name for path in folder.iterdir() if path.is_dir() and "." not in path.name
    )
    if stage not in stages:
        raise ConfigError(
            f"--stage {stage!r} is none of {folder}, which has {', '.join(stages) or 'none yet'}",
            f"--stage {stages[-1]}" if stages else "headrace data ingest PLAN --engine local",
        )
    return folder
