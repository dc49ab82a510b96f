"""Start a Slurm of one node without systemd, and stop it: munged, slurmctld and slurmd."""

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from daemons import free_ports, stop

INSTALL = "apt-get install slurmctld slurmd slurm-client munge"
DAEMONS = ("munged", "slurmctld", "slurmd")
START_S = 60.0
CONFIGURATION = """
ClusterName=test
SlurmctldHost={node}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller}
SlurmdPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1
MpiDefault=none
ReturnToService=2
NodeName={node} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Return the commands that a Slurm needs and that are not here."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    commands = (*DAEMONS, "sbatch", "scancel", "sinfo")
    return [name for name in commands if shutil.which(name, path=path) is None]


@contextmanager
def slurm_here(cpus: int = 2) -> Iterator[dict[str, str]]:
    """Give the environment in which the commands of Slurm speak with one that runs meanwhile."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        for name in ("state", "spool"):
            (folder / name).mkdir()
        (key := folder / "munge.key").write_bytes(os.urandom(1024))
        key.chmod(0o400)
        node = socket.gethostname().partition(".")[0]
        controller, port = free_ports(2)
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                node=node,
                user=getpass.getuser(),
                folder=folder,
                controller=controller,
                port=port,
                cpus=cpus,
            )
        )
        path = f"{os.environ['PATH']}:/usr/sbin"
        env = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
        given = {f"--{name}={folder}/munge.{name}" for name in ("socket", "seed-file", "log-file")}
        given |= {f"--pid-file={folder}/munge.pid", f"--key-file={key}"}
        commands = (
            ["munged", "--foreground", "--force", *sorted(given)],
            ["slurmctld", "-D", "-c"],
            ["slurmd", "-D", "-c"],
        )
        for command in commands:
            log = stack.enter_context((folder / f"{command[0]}.out").open("w"))
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **env}
            )
            stack.callback(stop, process)
            if command[0] == "munged":
                _wait(lambda: (folder / "munge.socket").exists(), folder)
        _wait(lambda: "idle" in _states(env), folder)
        yield env


def _states(env: dict[str, str]) -> str:
    asked = ["sinfo", "--noheader", "--format=%T"]
    done = subprocess.run(
        asked, check=False, capture_output=True, text=True, env={**os.environ, **env}
    )
    return done.stdout


def _wait(is_there: Callable[[], bool], folder: Path) -> None:
    until = time.monotonic() + START_S
    while not is_there():
        if time.monotonic() > until:
            logs = "\n".join(f"{p.name}: {p.read_text()[-2000:]}" for p in folder.glob("*.out"))
            raise AssertionError(f"Slurm did not start:\n{logs}")
        time.sleep(0.2)
