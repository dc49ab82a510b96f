"""Files that survive a power cut, and plans as text."""

import os
from pathlib import Path

from headrace.core.errors import ConfigError


def sync_path(path: Path) -> None:
    """Push a file's content, or a folder's list of names, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_plan_text(file: Path) -> str:
    """The text of a plan.

    Raises:
        ConfigError: it is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is no plan: it is not UTF-8, by its byte {error.start} ({error.reason})",
            f"a TOML file; iconv -f LATIN1 -t UTF-8 {file} > NEW.toml, if it is in Latin-1",
        ) from None
