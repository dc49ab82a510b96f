"""Launch on Slurm: one sbatch file, which is queued again before its time ends.

`--signal=B:TERM@120` asks Slurm to tell the batch shell 120 s before the time limit
(https://slurm.schedmd.com/sbatch.html). The shell passes the signal on to the processes, waits for
their checkpoint, and puts the job into the queue again, where it resumes. What a cluster wants
beside it (partition, account, time) is given by `--set`, or by sbatch's own variables, as
SBATCH_PARTITION. The folder of the runs must be on a disk that all nodes share.
"""

import shlex
from pathlib import Path

from pydantic import Field

from headrace.core.strict import Strict
from headrace.launch.engine import Launcher
from headrace.launch.job import GRACE_S, Job

FILE = "job.sbatch"
SCRIPT = """#!/bin/bash
{options}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RENDEZVOUS="$head:$((20000 + SLURM_JOB_ID % 20000))"

# Slurm tells this shell {grace_s} s before the time limit; the steps save a checkpoint and end.
asked=
trap 'asked=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM

# Since Slurm 22.05, srun takes the cores of a task from a variable of its own alone.
if [ -n "$SLURM_CPUS_PER_TASK" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi

srun --kill-on-bad-exit=1 bash -c {script} &
step=$!
wait "$step"
code=$?
if [ -n "$asked" ]; then
  wait "$step"
  code=$?
  state=$(squeue --noheader --format=%T --jobs "$SLURM_JOB_ID")
  if [ "$code" != 0 ] && [ "$state" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit "$code"
"""


class SlurmSettings(Strict):
    """Hold what a cluster wants to know of a job, by sbatch's own names."""

    partition: str | None = None
    """The partition of nodes."""
    account: str | None = None
    """Who pays."""
    qos: str | None = None
    """The quality of service."""
    time: str | None = Field(default=None, pattern=r"^[0-9:-]+$")
    """The time limit, as 12:00:00; the job is queued again when it is reached."""
    constraint: str | None = None
    """Features that the nodes need."""
    reservation: str | None = None
    """A reservation to run in."""
    cpus_per_task: int | None = Field(default=None, ge=1, le=4096)
    """CPU cores of each node that the job takes."""
    mem: str | None = None
    """Memory of each node that the job takes, as 200G; 0 takes all of it."""
    exclusive: bool = False
    """Share the nodes with no other job."""


class Slurm(Launcher):
    """Launch with sbatch."""

    name = "slurm"
    tool = "sbatch"
    settings_table = SlurmSettings
    active = (
        "^(PENDING|CONFIGURING|RUNNING|COMPLETING|SUSPENDED|STOPPED|SIGNALING|RESIZING|STAGE_OUT"
        r"|REQUEUED|REQUEUE_FED|REQUEUE_HOLD|RESV_DEL_HOLD|SPECIAL_EXIT)\b"
    )

    def files(self, job: Job) -> dict[str, str]:
        """Return the sbatch file."""
        script = job.script(rendezvous="$RENDEZVOUS")
        options = "\n".join(f"#SBATCH {option}" for option in self._options(job))
        text = SCRIPT.format(options=options, script=shlex.quote(script), grace_s=GRACE_S)
        return {FILE: text, **job.files}

    def _options(self, job: Job) -> list[str]:
        """Return the options of sbatch, each as the file has it."""
        given = self.settings.model_dump(exclude_none=True)
        exclusive = given.pop("exclusive")
        log = job.cwd / job.folder / "slurm-%j.log"
        return [
            f"--job-name={job.name}",
            f"--nodes={job.nodes}",
            "--ntasks-per-node=1",
            *([f"--gpus-per-node={job.processes}"] if job.gpus else []),
            *(f"--{key.replace('_', '-')}={shlex.quote(str(v))}" for key, v in given.items()),
            *(["--exclusive"] if exclusive else []),
            f"--chdir={shlex.quote(str(job.cwd))}",
            f"--output={shlex.quote(str(log))}",
            "--open-mode=append",
            "--requeue",
            f"--signal=B:TERM@{GRACE_S}",
        ]

    def submit(self, job: Job) -> list[str]:
        """Return the sbatch command, which prints the job's number."""
        return ["sbatch", "--parsable", str(job.folder / FILE)]

    def job_id(self, job: Job, output: str = "") -> str:
        """Return the number that sbatch printed, without the name of the cluster behind it."""
        return output.strip().partition(";")[0]

    def status(self, identity: str) -> list[str]:
        """Return the command that prints the state and its reason."""
        return ["squeue", "--noheader", "--states=all", "--format=%T %r", "--jobs", identity]

    def logs(self, identity: str, folder: Path) -> list[str]:
        """Return the command that prints the log, which all nodes write."""
        return ["cat", str(folder / f"slurm-{identity}.log")]

    def stop(self, identity: str) -> list[str]:
        """Return scancel, which tells the steps first and kills them after the site's KillWait."""
        return ["scancel", identity]
