"""Launch with SkyPilot: one task file, on a cluster that SkyPilot makes on any cloud.

The task is run by `sky launch` on a cluster of the run's name. The disk of the cluster keeps the
run until `sky down NAME`, so that `launch --resume` goes on with it. Fields as in
https://docs.skypilot.co/en/latest/reference/yaml-spec.html.
"""

from pathlib import Path
from typing import Any

from pydantic import Field

from headrace.core.strict import Strict
from headrace.launch.engine import Launcher
from headrace.launch.job import PLAN_FILE, Job
from headrace.launch.kubernetes import object_name
from headrace.launch.yaml import to_yaml

FILE = "task.yaml"
PORT = 29500
PLAN = "~/headrace-plan"
"""Folder of the plan file on each node."""
HEAD = 'export RENDEZVOUS="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{port}"\n'


class SkySettings(Strict):
    """Hold which machines are taken, by SkyPilot's own names."""

    accelerator: str | None = Field(default=None, min_length=1)
    """The name of the GPU, as H100; how many of it is the number of processes."""
    infra: str | None = None
    """Where, as aws/us-east-1 or k8s; else where it is cheapest."""
    use_spot: bool = False
    """Take machines that may be taken back."""
    cpus: str | None = None
    """CPU cores of each node, as 16+."""
    memory: str | None = None
    """GiB of each node, as 64+."""
    disk_size: int | None = Field(default=None, ge=1)
    """GiB of each node's disk."""
    image_id: str | None = None
    """An image, as docker:NAME."""
    setup: str = "pip install headrace"
    """What each node does first."""


class SkyPilot(Launcher):
    """Launch with sky."""

    name = "skypilot"
    tool = "sky"
    settings_table = SkySettings
    sees_runs = False
    active = r"\b(INIT|PENDING|SETTING_UP|RUNNING)\b"

    def files(self, job: Job) -> dict[str, str]:
        """Return the task file."""
        return {FILE: to_yaml(self.task(job)), **job.files}

    def task(self, job: Job) -> dict[str, Any]:
        """Return the task of a job as plain values.

        Raises:
            ConfigError: the plan needs GPUs, and none is named.
        """
        given = self.settings.model_dump(exclude_none=True)
        setup, accelerator = given.pop("setup"), given.pop("accelerator", None)
        resources = {key: value for key, value in given.items() if value is not False}
        if job.gpus:
            self._check_named(accelerator)
            resources["accelerators"] = f"{accelerator}:{job.processes}"
        script = job.script(rendezvous="$RENDEZVOUS", python="python", plan_folder="PLAN_FOLDER")
        task: dict[str, Any] = {
            "name": self.job_id(job),
            "num_nodes": job.nodes,
            "resources": resources,
            "setup": setup,
            "run": HEAD.format(port=PORT) + script.replace("PLAN_FOLDER", PLAN),
        }
        if job.text is not None:
            task["file_mounts"] = {f"{PLAN}/{PLAN_FILE}": str(job.folder / PLAN_FILE)}
        return task

    def _check_named(self, accelerator: str | None) -> None:
        """Refuse a launch on GPUs without their name, with which SkyPilot finds machines.

        Raises:
            ConfigError: there is no name.
        """
        from headrace.core.command import rerun_with
        from headrace.core.errors import ConfigError

        if accelerator is None:
            raise ConfigError(
                "skypilot finds machines by the name of their GPU, and none is given",
                f"{rerun_with('--set', 'accelerator=H100', verb='launch PLAN')}; or device=cpu",
            )

    def submit(self, job: Job) -> list[str]:
        """Return the sky command, which returns when the job is queued."""
        cluster = ["--cluster", self.job_id(job), "--yes", "--detach-run"]
        return ["sky", "launch", *cluster, str(job.folder / FILE)]

    def job_id(self, job: Job, output: str = "") -> str:
        """Return the name of the cluster."""
        return object_name(job.directory, job.name)

    def status(self, identity: str) -> list[str]:
        """Return the command that prints the queue of the cluster."""
        return ["sky", "queue", identity]

    def probe(self, identity: str) -> list[str]:
        """Return the command that prints the jobs of the cluster that have not ended."""
        return ["sky", "queue", "--skip-finished", identity]

    def logs(self, identity: str, folder: Path) -> list[str]:
        """Return the command that prints the log so far."""
        return ["sky", "logs", "--no-follow", identity]

    def stop(self, identity: str) -> list[str]:
        """Return the command that cancels the job; the cluster stays, with the run on its disk."""
        return ["sky", "cancel", "--all", "--yes", identity]
