"""Launch on Ray: a Ray job whose driver runs torchrun once on each of as many nodes.

A Ray Train TorchTrainer would start one process a GPU and set up torch.distributed by itself, but
needs a function in Python in place of a command. So Ray places the nodes, and torchrun starts the
processes. The folder in which the job is launched must be on a disk that all nodes share.
"""

import shlex
from pathlib import Path

from pydantic import Field

from headrace.core.strict import Strict
from headrace.launch.engine import Launcher
from headrace.launch.job import Job

FILE = "node.sh"


class RaySettings(Strict):
    """Hold where the cluster is, and what each node gives to the job."""

    address: str | None = Field(default=None, min_length=1)
    """The address of the dashboard, as http://127.0.0.1:8265; else RAY_ADDRESS says it."""
    cpus: int = Field(default=1, ge=1, le=4096)
    """CPU cores of each node that the job takes."""


class RayJob(Launcher):
    """Launch with `ray job`."""

    name = "ray"
    tool = "ray"
    settings_table = RaySettings
    active = r": \S*(PENDING|RUNNING)\b"

    def files(self, job: Job) -> dict[str, str]:
        """Return what each node runs."""
        start = f"#!/bin/bash\ncd {shlex.quote(str(job.cwd))}\n"
        return {FILE: start + job.script(rendezvous="$RENDEZVOUS"), **job.files}

    def _ray(self, verb: str, *words: str) -> list[str]:
        """Return a `ray job` command for the cluster of the launch."""
        address = ["--address", self.settings.address] if self.settings.address else []
        return ["ray", "job", verb, *address, *words]

    def submit(self, job: Job) -> list[str]:
        """Return the command that submits the driver, and returns when it is queued."""
        gpus = job.processes if job.gpus else 0
        driver = ["python", "-m", "headrace.launch.ray_nodes", str(job.nodes), str(gpus)]
        driver += [str(self.settings.cpus), str(job.cwd / job.folder / FILE)]
        name = ("--submission-id", self.job_id(job))
        return self._ray("submit", "--no-wait", *name, "--", *driver)

    def job_id(self, job: Job, output: str = "") -> str:
        """Return a name that no other submission has: Ray takes none again."""
        return f"{job.name}-{job.at}"

    def status(self, identity: str) -> list[str]:
        """Return the command that prints the state."""
        return self._ray("status", identity)

    def logs(self, identity: str, folder: Path) -> list[str]:
        """Return the command that prints the log so far."""
        return self._ray("logs", identity)

    def stop(self, identity: str) -> list[str]:
        """Return the command that ends the driver, and so its tasks."""
        return self._ray("stop", "--no-wait", identity)
