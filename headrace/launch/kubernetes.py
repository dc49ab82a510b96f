"""Launch on Kubernetes: a JobSet, which needs one controller and nothing of the cluster's own.

A Kubeflow TrainJob refers to a runtime that somebody has installed in the cluster, and becomes a
JobSet itself (https://www.kubeflow.org/docs/components/trainer/). So a JobSet
(https://jobset.sigs.k8s.io) is what runs on every cluster of either kind. It gives the pods names
that they find each other by, and starts all of them again when one fails.
"""

import os
import posixpath
import re
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field

from headrace.core.errors import ConfigError
from headrace.core.remedy import mend
from headrace.core.strict import Strict
from headrace.launch.engine import Launcher
from headrace.launch.job import GRACE_S, PLAN_FILE, Job
from headrace.launch.yaml import to_yaml

FILE = "job.yaml"
PORT = 29500
WORK = "/work"
"""Folder of the volume in a pod, in which the run and the prepared data are kept."""
PLAN = "/headrace"
"""Folder of the plan file in a pod."""
USUAL = {"directory": "runs", "data.directory": "data"}
"""Maps a key of the plan to its default, a folder below `WORK`."""
LONGEST = 40
"""Most characters of a JobSet's name: its pods' names add to it and have at most 63."""
DIGITS = 6
"""Hexadecimal digits that tell runs apart whose names Kubernetes cannot."""


class KubernetesSettings(Strict):
    """Hold what a cluster wants to know of a job."""

    image: str = Field(min_length=1)
    """The image of the containers, which has Headrace and torch."""
    claim: str = Field(min_length=1)
    """The claim of the volume that all nodes share; runs and data are kept on it."""
    namespace: str | None = None
    """The namespace; else that of kubectl's context."""
    queue: str | None = None
    """The local queue of Kueue."""
    restarts: int = Field(default=3, ge=0, le=1000)
    """How often the job is started again after a failure; it resumes."""
    gpu: str = "nvidia.com/gpu"
    """The name of the GPUs among the cluster's resources."""
    cpu: str | None = None
    """CPU cores of each pod, as 16."""
    memory: str | None = None
    """Memory of each pod, as 200Gi."""


class Kubernetes(Launcher):
    """Launch with kubectl."""

    name = "kubernetes"
    tool = "kubectl"
    settings_table = KubernetesSettings
    sees_runs = False
    active = r"^JobSet(?!.* (Completed|Failed)\b)"

    def files(self, job: Job) -> dict[str, str]:
        """Return the manifest: the JobSet, and a ConfigMap with the plan where it is a file.

        Raises:
            ConfigError: the run or its data would not be kept on the claim's volume.
        """
        check_on_volume(job)
        documents = [self.job_set(job)]
        if job.text is not None:
            metadata = self._metadata(job)
            plan = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
            documents.insert(0, {**plan, "data": {PLAN_FILE: job.text}})
        return {FILE: "---\n".join(map(to_yaml, documents))}

    def job_set(self, job: Job) -> dict[str, Any]:
        """Return the JobSet of a job as plain values."""
        metadata = self._metadata(job)
        if self.settings.queue:
            metadata["labels"] = {"kueue.x-k8s.io/queue-name": self.settings.queue}
        pods = {
            "parallelism": job.nodes,
            "completions": job.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"spec": self._pod(job)},
        }
        nodes = {"name": "node", "replicas": 1, "template": {"spec": pods}}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata,
            "spec": {
                "failurePolicy": {"maxRestarts": self.settings.restarts},
                "replicatedJobs": [nodes],
            },
        }

    def _metadata(self, job: Job) -> dict[str, Any]:
        """Return the name of a job's objects, and the namespace where one is given."""
        space = {"namespace": self.settings.namespace} if self.settings.namespace else {}
        return {"name": self.job_id(job), **space}

    def _pod(self, job: Job) -> dict[str, Any]:
        """Return what each node runs."""
        name = self.job_id(job)
        given = {"cpu": self.settings.cpu, "memory": self.settings.memory}
        limits = {key: value for key, value in given.items() if value}
        if job.gpus:
            limits[self.settings.gpu] = str(job.processes)
        volumes: list[dict[str, Any]] = [
            {"name": "work", "persistentVolumeClaim": {"claimName": self.settings.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL and loaders share through it
        ]
        mounts = [
            {"name": "work", "mountPath": WORK},
            {"name": "shm", "mountPath": "/dev/shm"},
        ]
        if job.text is not None:
            volumes.append({"name": "plan", "configMap": {"name": name}})
            mounts.append({"name": "plan", "mountPath": PLAN})
        script = job.script(
            rendezvous=f"{name}-node-0-0.{name}:{PORT}", python="python", plan_folder=PLAN
        )
        container = {
            "name": "train",
            "image": self.settings.image,
            "workingDir": WORK,
            "command": ["bash", "-c"],
            "args": [script],
            "ports": [{"containerPort": PORT}],
            "resources": {"limits": limits},
            "volumeMounts": mounts,
        }
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE_S,
            "containers": [container],
            "volumes": volumes,
        }

    def submit(self, job: Job) -> list[str]:
        """Return the kubectl command that applies the manifest.

        A JobSet that has ended starts no pod again, so that of a run that goes on is replaced by a
        new one, once its pods are gone.
        """
        verb = ["replace", "--force", "--cascade=foreground"] if job.resume else ["apply"]
        return ["kubectl", *verb, "--filename", str(job.folder / FILE)]

    def job_id(self, job: Job, output: str = "") -> str:
        """Return the name of the JobSet."""
        return object_name(posixpath.relpath(in_pod(job.directory), WORK), job.name)

    def _kubectl(self, *words: str) -> list[str]:
        """Return a kubectl command in the namespace of the launch."""
        space = ["--namespace", self.settings.namespace] if self.settings.namespace else []
        return ["kubectl", *words, *space]

    def status(self, identity: str) -> list[str]:
        """Return the command that prints the state of the pods."""
        state = "custom-columns=POD:.metadata.name,STATE:.status.phase"
        label = f"jobset.sigs.k8s.io/jobset-name={identity}"
        return self._kubectl("get", "pods", "--selector", label, "--output", state)

    def probe(self, identity: str) -> list[str]:
        """Return the command that prints "JobSet" and its conditions; nothing where there is none.

        One that is being deleted is there until its pods have saved their checkpoint.
        """
        true = '{range .status.conditions[?(@.status=="True")]} {.type}{end}'
        output = ("--ignore-not-found", "--output", f"jsonpath=JobSet{true}")
        return self._kubectl("get", "jobset", identity, *output)

    def replaced(self, job: Job) -> str:
        """Return the name of the JobSet."""
        return self.job_id(job)

    def logs(self, identity: str, folder: Path) -> list[str]:
        """Return the command that prints what the pods printed."""
        label = f"jobset.sigs.k8s.io/jobset-name={identity}"
        every = ("--prefix", "--tail=-1", "--max-log-requests=1000")  # else 5 pods at most
        return self._kubectl("logs", "--selector", label, *every)

    def stop(self, identity: str) -> list[str]:
        """Return the command that deletes the JobSet, whose pods get SIGTERM and the grace time."""
        there = ("--cascade=foreground", "--wait=false")  # it stays until its pods are gone
        return self._kubectl("delete", "jobset", identity, *there)


def in_pod(folder: str) -> PurePosixPath:
    """Return the path in a pod of a folder that the plan names, without `..`."""
    return PurePosixPath(posixpath.normpath(posixpath.join(WORK, folder)))


def check_on_volume(job: Job) -> None:
    """Refuse a run that would be kept, with its data, on a disk that ends with the pod.

    Raises:
        ConfigError: a folder of the plan is not on the volume of the claim.
    """
    asked = {"directory": job.directory, "data.directory": job.data}
    outside = [key for key in asked if not in_pod(asked[key]).is_relative_to(WORK)]
    if outside:
        folders = " and ".join(f"{key} = {asked[key]!r}" for key in outside)
        raise ConfigError(
            f"{folders} would be on the pod's own disk, which ends with the pod: the volume of "
            f"the claim is at {WORK}",
            mend(*(f"{key}={USUAL[key]}" for key in outside)),
        )


def object_name(directory: str, name: str) -> str:
    """Return the name of a run as Kubernetes names objects: small letters, digits and dashes.

    Where that is not the run's whole name, and where the run is not kept in `runs`, the first
    digits of a hash of both follow, so that no two runs have one name.

    Args:
        directory: where the run is kept, relative to where it runs.
        name: the name of the run.
    """
    plain = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = re.sub("^([0-9])", r"run-\1", plain)
    path = posixpath.normpath(posixpath.join(directory, name))
    if path == f"runs/{plain}" and len(plain) <= LONGEST:
        return plain
    digits = sha256(os.fsencode(path)).hexdigest()[:DIGITS]
    return f"{plain[: LONGEST - DIGITS - 1].strip('-')}-{digits}"
