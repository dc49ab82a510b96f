"""Define what an engine does with a job, and run the commands of its own tools."""

import shlex
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from headrace.core.command import rerun_with
from headrace.core.errors import ConfigError, RunError, UnsupportedError, alike
from headrace.core.overrides import write_override
from headrace.core.remedy import mend
from headrace.core.strict import Strict, read_table
from headrace.launch.job import Job

LauncherName = Literal["local", "slurm", "kubernetes", "ray", "skypilot"]
ENGINES: tuple[str, ...] = get_args(LauncherName)


class NoSettings(Strict):
    """Hold the settings of an engine that has none."""


class Launcher(ABC):
    """Render a job for one engine, and name the commands that submit, show and stop it."""

    name: ClassVar[str]
    tool: ClassVar[str]
    """the command that submits"""
    settings_table: ClassVar[type[Strict]] = NoSettings
    """what `--set key=value` may say"""
    sees_runs: ClassVar[bool] = True
    """whether runs are kept where they are launched from"""
    active: ClassVar[str]
    """pattern of what `probe` prints of a job that has not ended"""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @abstractmethod
    def files(self, job: Job) -> dict[str, str]:
        """Return the content of each file that the engine is given, by its name."""

    @abstractmethod
    def submit(self, job: Job) -> list[str]:
        """Return the command that submits the files, which lie in the folder of the launch."""

    def job_id(self, job: Job, output: str = "") -> str:
        """Return the engine's name of the job.

        Args:
            job: what was submitted.
            output: what the command that submitted it printed.
        """
        return job.name

    @abstractmethod
    def status(self, identity: str) -> list[str]:
        """Return the command that prints the state of a job in the engine's own words."""

    def probe(self, identity: str) -> list[str]:
        """Return the command that prints whether a job has ended: `active` says how."""
        return self.status(identity)

    def replaced(self, job: Job) -> str:
        """Return the engine's name of a job that this one would replace; "" where it is a new one.

        Of that job, `probe` prints nothing where it does not exist.
        """
        return ""

    @abstractmethod
    def logs(self, identity: str, folder: Path) -> list[str]:
        """Return the command that prints what the job printed.

        Args:
            identity: the engine's name of the job.
            folder: the folder of the launch.
        """

    @abstractmethod
    def stop(self, identity: str) -> list[str]:
        """Return the command that ends a job, which saves a checkpoint within its grace time."""


def read_settings(table: type[Strict], words: Iterable[str], engine: str) -> Any:
    """Return the settings that `--set key=value` words say.

    Args:
        table: what the engine can be told.
        words: each a `key=value`.
        engine: its name, for messages.

    Raises:
        ConfigError: a key is unknown or missing, or its value does not fit.
    """
    values: dict[str, Any] = {}
    known = ", ".join(table.model_fields) or "none"
    try:
        for word in words:
            write_override(values, word, table)
        for key in values:
            if key not in table.model_fields:
                near = alike(key, table.model_fields)
                raise ConfigError(
                    f"{engine} has no setting {key!r}; its settings are {known}",
                    mend(f"{near}={values[key]}") if near else "leave it out",
                )
        needed = [key for key, field in table.model_fields.items() if field.is_required()]
        if lacking := [key for key in needed if key not in values]:
            raise ConfigError(
                f"{engine} needs the settings {', '.join(needed)}",
                mend(*(f"{key}={key.upper()}" for key in lacking)),
            )
        return read_table(table, values)
    except ConfigError as error:
        words = [word for change in error.remedy.changes[:1] for word in change if "=" in word]
        options = " ".join(f"--set {shlex.quote(word)}" for word in words)
        rest = f"--set key=value, of {known}" if table.model_fields else "leave --set out"
        remedy = options or rest
        raise ConfigError(f"--set: {error.message}", remedy) from None


def call(command: Sequence[str], engine: str, *, dry: bool = False) -> str:
    """Run a command of an engine, and return what it printed on standard output.

    Args:
        command: its words.
        engine: the engine, for messages.
        dry: whether the user may ask for `--dry-run` instead.

    Raises:
        UnsupportedError: the command is not installed here.
        RunError: the command failed.
    """
    if shutil.which(command[0]) is None:
        otherwise = "this command on a machine that has it"
        raise UnsupportedError(
            f"{engine} is asked through the command `{command[0]}`, which is not on this machine",
            f"{rerun_with('--dry-run', '', verb='launch PLAN')}, which prints what would be "
            f"submitted, or {otherwise}"
            if dry
            else otherwise,
        )
    done = subprocess.run([*command], capture_output=True, text=True, check=False)
    if done.returncode:
        answer = (done.stderr.strip() or done.stdout.strip() or "it printed nothing")[-2000:]
        raise RunError(
            f"{engine} refused: `{shlex.join(command)}` ended with {done.returncode}: {answer}",
            "the same command once that is mended",
        )
    return done.stdout
