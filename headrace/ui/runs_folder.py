"""Find the runs and tunings of a folder, and refuse what does not lie in it.

A name is one part of a path, and what it names lies in the folder wherever links lead. The same
holds for every file in a run's folder, for the pages read these files and repeat what is wrong with
them. A pipe or a device in the place of a file is refused too: reading it might never end.
"""

import stat
from pathlib import Path

from headrace.core.errors import ConfigError, nearest
from headrace.core.files import RECORDED, is_within, printable, shell
from headrace.tuner.path import PATH, TRIALS

LARGEST_BYTES = 64 << 20
"""Bytes of a file of JSON or TOML beyond which it is not read; those of runs have up to 1 MiB."""
LARGEST_METRICS_BYTES = 512 << 20
"""Bytes of a metrics.jsonl beyond which it is not read; a row has some 600."""
METRICS = "metrics.jsonl"
READ = (
    RECORDED,
    "plan.toml",
    "report.json",
    "environment.json",
    "findings.json",
    METRICS,
    "tuned.toml",
    PATH,
    TRIALS,
)
"""Files that pages are made of."""


class OutsideFolder(ConfigError):
    """A name or a link leads out of the folder of runs, or names nothing in it."""


class RunsFolder:
    """Hold the folder of runs that the pages show."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self) -> list[str]:
        """Return the names of all runs and tunings, the newest first."""
        dated: list[tuple[float, str]] = []
        for path in self.root.iterdir():
            if path.name.startswith(".") or not is_within(self.root, path):
                continue
            try:
                if is_run(path) or is_tuning(path):
                    dated.append((changed_s(path), path.name))
            except OSError:  # removed meanwhile, or not ours to read
                continue
        return [name for _, name in sorted(dated, reverse=True)]

    def find(self, name: str) -> Path:
        """Return the folder of a run or a tuning.

        Args:
            name: its name in this folder.

        Raises:
            OutsideFolder: it is no name, leads out of the folder, or names neither.
            ConfigError: a file in it leads out of the folder, is no file, or is too large.
        """
        path = self.root / name
        plain = name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)
        if not plain or not is_within(self.root, path):
            message = f"{printable(name)!r} does not lie in {self.root}"
            raise OutsideFolder(message, f"headrace ui {shell(self.root)}, which lists what does")
        if not (is_run(path) or is_tuning(path)):
            names = self.names()
            near = f"; the nearest is {nearest(name, names)}" if names else ""
            message = f"there is no run {printable(name)!r} in {self.root}{near}"
            raise OutsideFolder(message, f"headrace ui {shell(self.root)}, which lists what is")
        self._check(path)
        return path

    def _check(self, folder: Path) -> None:
        """Refuse a folder one of whose files cannot be read safely; see the module."""
        for name in READ:
            file = folder / name
            try:
                about = file.stat()
            except FileNotFoundError:
                if not file.is_symlink():
                    continue
                about = None
            except (OSError, RuntimeError) as error:
                raise ConfigError(f"{file} cannot be read: {error}", _aside(file)) from None
            if about is None or not is_within(self.root, file):
                raise OutsideFolder(f"{file} is a link out of {self.root}", _aside(file))
            if not stat.S_ISREG(about.st_mode):
                raise ConfigError(f"{file} is no regular file", _aside(file))
            most = LARGEST_METRICS_BYTES if name == METRICS else LARGEST_BYTES
            if name != TRIALS and about.st_size > most:
                message = f"{file} has {about.st_size:,} bytes; a page reads up to {most:,}"
                raise ConfigError(message, f"headrace report {shell(folder)}")


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run."""
    return (folder / RECORDED).is_file() or (folder / "plan.toml").is_file()


def is_tuning(folder: Path) -> bool:
    """Return whether a folder is that of a tuning."""
    return (folder / TRIALS).is_file() or (folder / PATH).is_file()


def changed_s(folder: Path) -> float:
    """Return when the files of a run or a tuning changed last, in seconds since 1970."""
    times = [0.0]
    for name in READ:
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)


def is_locked(folder: Path) -> bool | None:
    """Return whether a process holds the lock of a run's folder; None where that cannot be told.

    Linux lists locks in /proc/locks. Nothing is locked to find out, for a run that starts at this
    instant would meet the lock.
    """
    try:
        number = str((folder / ".lock").stat().st_ino)
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    return any(f":{number} " in line and "FLOCK" in line for line in lines)


def _aside(file: Path) -> str:
    return f"mv {shell(file)} {shell(f'{file}.refused')}"
