"""Make parts in an array of Slurm jobs, by plain `sbatch`.

One array a stage: task K of N makes the parts whose number leaves K when it is divided by N, and
that are not there. `sbatch --wait` returns when the array has ended, and what counts is which parts
are there then. Partition, account and limits are taken from `SBATCH_PARTITION`, `SBATCH_ACCOUNT`
and the like, which sbatch itself reads. A task that its node took down is queued again by Slurm.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.core.errors import RunError, UnsupportedError
from headrace.core.files import shell, write_whole
from headrace.data.scale.job import missing_parts
from headrace.data.scale.serve import PartFailure, attempt

SCRIPT = """#!/bin/bash
#SBATCH --job-name=headrace-data
#SBATCH --array=0-{last}
#SBATCH --output={folder}/slurm-%A_%a.log
{python} -m headrace data part {folder} --stage "$1" --task "$SLURM_ARRAY_TASK_ID/{tasks}"
"""


ARRAY = "array.sh"


class SlurmArray:
    """Makes parts in an array of jobs.

    Args:
        tasks: of the array.
    """

    def __init__(self, tasks: int) -> None:
        self._tasks = tasks

    def script(self, folder: Path) -> str:
        """Return the script that sbatch is given, with the stage as its argument."""
        return SCRIPT.format(
            last=self._tasks - 1,
            tasks=self._tasks,
            folder=shlex.quote(str(folder)),
            python=shlex.quote(sys.executable),
        )

    def command(self, folder: Path, stage: str) -> str:
        """Return the command that submits a stage and waits for it."""
        return shlex.join(["sbatch", "--parsable", "--wait", str(folder / ARRAY), stage])

    def run(
        self, folder: Path, stage: str, numbers: Sequence[int], done: Callable[[int], None]
    ) -> None:
        """Make parts; see `PartWorkers.run`."""
        if shutil.which("sbatch") is None:
            raise UnsupportedError(
                "--engine slurm needs the command `sbatch`, which is not on this machine",
                "--engine local or the same command on a machine that submits jobs to Slurm",
            )
        for old in folder.glob("failure-*.json"):
            old.unlink()
        write_whole(folder / ARRAY, self.script(folder))
        command = self.command(folder, stage)
        with subprocess.Popen(
            shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as submitted:
            job = ""
            try:
                assert submitted.stdout and submitted.stderr
                job = submitted.stdout.readline().strip().partition(";")[0]
                output = submitted.stderr.read().strip()
                submitted.wait()
            except BaseException:  # the jobs would go on without anybody
                submitted.terminate()
                if job:
                    subprocess.run(["scancel", job], check=False)
                raise
        for failure in sorted(folder.glob("failure-*.json")):
            raise PartFailure.model_validate_json(failure.read_bytes()).error()
        missing = missing_parts(folder, stage, max(numbers) + 1)
        if missing:
            logs = f"its logs are {shell(folder)}/slurm-{job}_*.log"
            raise RunError(
                f"the Slurm job {job or 'was not accepted and'} left {len(missing):,} of "
                f"{len(numbers):,} parts unmade; {output or logs}",
                "the same command again, which goes on with the parts that are finished",
            )
        for number in numbers:
            done(number)


def run_task(folder: Path, stage: str, task: int, tasks: int, parts: int) -> None:
    """Make this task's share of the parts that are not there.

    Args:
        folder: of the job.
        stage: its name.
        task: which of the tasks this is, from 0.
        tasks: how many there are.
        parts: how many the job has.

    Raises:
        HeadraceError: a part cannot be made; the process that submitted the job tells it too.
    """
    for number in missing_parts(folder, stage, parts):
        if number % tasks == task and (failure := attempt(str(folder), stage, number)):
            write_whole(folder / f"failure-{number:05d}.json", failure)
            raise PartFailure.model_validate_json(failure).error()
