"""Launch on this machine: this process becomes torchrun, in the foreground."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from headrace.core.errors import UnsupportedError
from headrace.core.files import shell
from headrace.launch.engine import Launcher
from headrace.launch.job import GRACE_S, RESERVE_S, RUN_NAME, Job


class Local(Launcher):
    """Launch by torchrun here. The name of a job is its process and when that was started."""

    name = "local"
    tool = sys.executable
    active = "RUNNING"

    def files(self, job: Job) -> dict[str, str]:
        """Return the copy of the plan alone."""
        return job.files

    def submit(self, job: Job) -> list[str]:
        """Return the command that trains: without torchrun where one process is enough."""
        start = ["/usr/bin/env", f"{RUN_NAME}={job.name}"]
        if job.processes > 1:
            start += [f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={GRACE_S - RESERVE_S}"]
            start += job.torchrun(rendezvous="")
        else:
            start += [sys.executable, "-m", "headrace"]
        return [*start, *job.train(), *(["--resume"] if job.resume else [])]

    def job_id(self, job: Job, output: str = "") -> str:
        """Return the number of this process and its start, in the kernel's ticks."""
        return f"{os.getpid()}@{_started(os.getpid())}"

    def status(self, identity: str) -> list[str]:
        """Return no command: `state_of` asks the kernel."""
        return []

    def logs(self, identity: str, folder: Path) -> list[str]:
        """Refuse: what ran in the foreground printed to its terminal.

        Raises:
            UnsupportedError: always.
        """
        name = folder.name.removesuffix(".launch")
        raise UnsupportedError(
            f"{name} was launched in the foreground, and printed to its terminal",
            f"headrace report {shell(folder.with_name(name))}, which shows what the run kept",
        )

    def stop(self, identity: str) -> list[str]:
        """Return no command: `end` sends the signal."""
        return []


def become(command: list[str]) -> NoReturn:
    """Replace this process by a command, whose exit code and signals are then this one's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def state_of(identity: str) -> str:
    """Return "RUNNING" while the process of that name lives, else "ENDED"."""
    pid, _, started = identity.partition("@")
    return "RUNNING" if started and _started(int(pid)) == started else "ENDED"


def end(identity: str) -> bool:
    """Ask a process to save its checkpoint and end; return whether it was there."""
    if state_of(identity) != "RUNNING":
        return False
    with suppress(ProcessLookupError):
        os.kill(int(identity.partition("@")[0]), signal.SIGTERM)
    return True


def _started(pid: int) -> str:
    """Return when a process was started, in ticks since boot; "" for one that is gone.

    A number of a process is given again, so the number alone does not name it. Where there is no
    /proc, as on macOS, the answer for a living process is "unknown".
    """
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except OSError:
            return ""
        return "unknown"
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
