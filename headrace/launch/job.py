"""Describe one job: how many processes run which plan, and the shell text that starts a node."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from headrace.core.command import rerun_with
from headrace.core.errors import ConfigError
from headrace.core.files import shell
from headrace.core.remedy import mend
from headrace.plan.mesh_config import MeshConfig

PLAN_FILE = "asked.toml"
"""Name of the copy of the user's plan file in the folder of a launch."""
RUN_NAME = "HEADRACE_RUN"
"""Environment variable in which a launch tells its processes the name of their run: a plan of that
name is this run, and not the newest or the next of NAME, NAME-2, NAME-3, ..."""
GRACE_S = 120
"""Seconds between the request to end and the kill, in which a run saves its checkpoint. torchrun
itself kills its processes after 30 s unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says more."""
RESERVE_S = 10
"""Seconds of the grace time that are left for torchrun to end after its processes."""


@dataclass(frozen=True)
class Job:
    """Hold what is launched.

    Args:
        name: the name of the run, which is the name of the launch too.
        directory: where runs are kept, as the plan says.
        data: where prepared data is kept, as the plan says.
        plan: the name of a recipe, or the path of the plan file as the user gave it.
        text: the plan file's content; None for a recipe.
        words: what follows the plan on the command line: `key=value`, `--with X`, `--without X`.
        nodes: how many machines it takes.
        processes: how many processes run on each machine, one a GPU.
        gpus: whether each process needs a GPU.
        cwd: the folder in which the plan's relative paths are read.
        resume: whether the run is there already, and goes on.
        at: when it is launched, as a word that no other launch has.
    """

    name: str
    directory: str
    data: str
    plan: str
    text: str | None
    words: tuple[str, ...]
    nodes: int
    processes: int
    gpus: bool
    cwd: Path
    resume: bool = False
    at: str = ""

    @property
    def run(self) -> Path:
        """Return the folder of the run, relative to `cwd` where the plan's directory is."""
        return Path(self.directory) / self.name

    @property
    def argument(self) -> str:
        """Return what `status`, `logs` and `stop` take for this job, as a shell takes it.

        They look for a plain name in `runs` first, so that a job of another directory has a path.
        """
        path = self.run.parent.as_posix() + "/" + self.name
        return shell(self.name if path == f"runs/{self.name}" else path)

    @property
    def folder(self) -> Path:
        """Return the folder of the launch, which stands beside the folder of the run."""
        return launch_folder(self.directory, self.name)

    @property
    def files(self) -> dict[str, str]:
        """Return the files that every engine needs: the plan, unless it is a recipe."""
        return {} if self.text is None else {PLAN_FILE: self.text}

    def train(self, plan_folder: str | Path | None = None) -> list[str]:
        """Return the words of `headrace` that train the plan under the name of the job.

        Args:
            plan_folder: where the copy of the plan file lies; the folder of the launch without it.
        """
        plan = self.plan
        if self.text is not None:
            plan = str(Path(plan_folder or self.folder) / PLAN_FILE)
        return ["train", plan, *self.words, f"name={self.name}"]

    def torchrun(self, *, rendezvous: str, python: str = sys.executable) -> list[str]:
        """Return the words that start this node's processes with torchrun, up to the module.

        Args:
            rendezvous: HOST:PORT of the first node, as the shell of a node expands it.
            python: the interpreter that has Headrace.
        """
        where = ["--standalone"]
        if self.nodes > 1:
            where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous]
            where += ["--rdzv-id", self.name]
        start = [python, "-m", "torch.distributed.run", "--nnodes", str(self.nodes)]
        return [*start, "--nproc-per-node", str(self.processes), *where, "-m", "headrace"]

    def script(
        self, *, rendezvous: str, python: str = sys.executable, plan_folder: str | None = None
    ) -> str:
        """Return the shell text that every node runs; one that is started again resumes the run.

        The run's folder appears only after the processes of all nodes have met, so all nodes decide
        alike. A run that is to go on is resumed even where no folder is: it must not begin anew.

        Args:
            rendezvous: HOST:PORT of the first node; shell variables in it are expanded.
            python: the interpreter that has Headrace.
            plan_folder: where the copy of the plan file lies.
        """
        endpoint = "RENDEZVOUS"
        start = shlex.join(self.torchrun(rendezvous=endpoint, python=python))
        start = start.replace(f" {endpoint} ", f' "{rendezvous}" ')
        train = shlex.join(self.train(plan_folder))
        resume = "resume=--resume\n"
        if not self.resume:
            begun = f"[ -d {shlex.quote(str(self.run))} ]"
            resume = f"resume=\nif {begun}; then resume=--resume; fi\n"
        return (
            f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={GRACE_S - RESERVE_S}\n"
            f"export {RUN_NAME}={shlex.quote(self.name)}\n"
            f"{resume}"
            f"exec {start} \\\n  {train} $resume\n"
        )


def launch_folder(directory: str | Path, name: str) -> Path:
    """Return the folder that keeps what was written to launch the run of that name."""
    return Path(directory) / f"{name}.launch"


def check_resumable(job: Job) -> None:
    """Refuse to resume a run that is not here.

    Raises:
        ConfigError: there is no such run.
    """
    if job.resume and not job.run.is_dir():
        raise ConfigError(
            f"there is no run {job.name!r} in {job.run.parent} to resume", "leave out --resume"
        )


def unused_name(directory: str, name: str) -> str:
    """Return `name`, or the first of NAME-2, NAME-3, ... of which there is no run and no launch."""
    number, free = 1, name
    while (Path(directory) / free).exists() or launch_folder(directory, free).exists():
        number += 1
        free = f"{name}-{number}"
    return free


def processes_of(mesh: MeshConfig, nodes: int, gpus: int | None, here: int | None) -> int:
    """Return how many processes each node starts.

    Args:
        mesh: of the plan.
        nodes: how many nodes there are.
        gpus: what the user gave; None derives it from the mesh.
        here: the GPUs of this machine, where the plan is to run on it; None elsewhere.

    Raises:
        ConfigError: it cannot be derived, or the mesh has another number of ranks.
    """
    if gpus is None:
        if mesh.auto and here is not None:
            return max(1, here)
        if mesh.auto:
            raise ConfigError(
                "mesh.auto lays a run out on the GPUs that there are, and --gpus does not say how "
                "many a node has",
                rerun_with("--gpus", "8", verb="launch PLAN"),
            )
        if mesh.ranks % nodes:
            raise ConfigError(
                f"the {mesh.ranks} ranks of the plan's mesh cannot be shared by {nodes} nodes",
                mend(f"mesh.data={nodes}"),
            )
        return mesh.ranks // nodes
    started, others = nodes * gpus, mesh.ranks // mesh.data
    if mesh.auto or started == mesh.ranks:
        return gpus
    fits = started % others == 0
    alike = rerun_with("--gpus", str(max(1, mesh.ranks // nodes)), verb="launch PLAN")
    remedy = mend(f"mesh.data={started // others}") if fits else alike
    raise ConfigError(
        f"--nodes {nodes} and --gpus {gpus} start {started} processes, and the plan's mesh has "
        f"{mesh.ranks} ranks",
        remedy,
    )
