"""Read files of object stores, which an address such as `s3://bucket/folder/*.jsonl` names.

fsspec (the extra `cloud`) speaks with the store. A file is copied into a temporary folder when its
turn comes, read there as any other, and removed: the disk holds one file a process, and a copy that
came in short is found by its size. What tells one state of a file from another is its size and its
ETag, or the time of its change where the store gives no such tag. Credentials are those that the
store's own tools find.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from headrace.core.errors import (
    ConfigError,
    HeadraceError,
    RunError,
    UnsupportedError,
    is_full_disk,
    is_out_of_memory,
)
from headrace.core.files import in_one_line, printable
from headrace.core.units import format_bytes
from headrace.data.left_out import LeftOutTally, Reason
from headrace.data.listing import READABLE, Asked, kind_of

SCHEMES = frozenset({"s3", "gs", "gcs", "az", "abfs", "hf", "file", "memory"})
"""Schemes of addresses that are read; `hf://datasets/NAME/FILE` is a file, `hf:NAME` a dataset."""
VERSIONS = ("ETag", "etag", "blob_id", "mtime", "LastModified", "last_modified", "created")
"""Where stores say what tells one state of a file from another, the surest first."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of an object store as it was listed.

    Args:
        url: its address.
        size: bytes.
        version: its ETag, or the time of its last change.
    """

    url: str
    size: int
    version: str


def is_remote(source: str) -> bool:
    """Return whether a source is an address in an object store."""
    scheme, _, rest = source.partition("://")
    return bool(rest) and scheme in SCHEMES


def list_remote(asked: Asked, tally: LeftOutTally) -> list[tuple[str, RemoteFile]]:
    """Return the readable files of an address (a file, a folder or a glob), sorted.

    Args:
        asked: the source as the plan names it.
        tally: counts the files that are not read.

    Raises:
        ConfigError: nothing is there that can be read, or the store refuses.
        UnsupportedError: what speaks with the store is not installed.
    """
    with _asking(asked):
        system, path = _system(asked)
        system.invalidate_cache()
        if any(sign in path for sign in "*?["):
            infos = system.glob(path, detail=True)
        elif (info := system.info(path))["type"] == "directory":
            infos = system.find(path, detail=True)
        else:
            infos = {path: info}
    files: list[tuple[str, RemoteFile]] = []
    for name, info in sorted(infos.items()):
        url = system.unstrip_protocol(name)
        if info["type"] != "file":
            continue
        if any(part.startswith(".") for part in name.removeprefix(path).split("/")):
            tally.add(Reason.HIDDEN, url)
        elif kind_of(Path(name))[0] not in READABLE:
            tally.add(Reason.ENDING, url)
        elif not info["size"]:
            tally.add(Reason.EMPTY_FILE, url)
        else:
            files.append((url, RemoteFile(url, info["size"], _version(info))))
    if not files:
        others = "; ".join(record.format() for record in tally.records)
        raise ConfigError(
            f"{asked} names no file that can be read" + (others and f", only {others}"),
            asked.to("PATH"),
        )
    return files


def look_up(file: RemoteFile, asked: Asked) -> RemoteFile | None:
    """Return a file as it is now, or None where it is gone."""
    with _asking(asked):
        system, path = _system(Asked(file.url, asked.key))
        system.invalidate_cache()
        try:
            info = system.info(path)
        except FileNotFoundError:
            return None
    return RemoteFile(file.url, info["size"], _version(info))


@contextmanager
def fetched(file: RemoteFile, asked: Asked) -> Iterator[Path]:
    """Give a copy of a file on this machine, which is there until the context ends.

    Raises:
        RunError: the copy came in short, or the disk of the temporary folder is full.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        copy = Path(folder) / PurePosixPath(file.url).name
        try:
            with _asking(asked):
                system, path = _system(Asked(file.url, asked.key))
                system.get_file(path, str(copy))
        except OSError as error:
            if not is_full_disk(error):
                raise
            room, whole = shutil.disk_usage(folder).free, format_bytes(file.size)
            raise RunError(
                f"the disk is full: {format_bytes(room)} left in {tempfile.gettempdir()}, where "
                f"{printable(file.url)} of {whole} is copied to be read",
                "free some space, or TMPDIR=FOLDER on another disk before the same command",
            ) from None
        if (size := copy.stat().st_size) != file.size:
            raise RunError(
                f"{printable(file.url)} broke off: {size:,} of {file.size:,} bytes came in",
                "the same command again",
            )
        yield copy


def _system(asked: Asked) -> tuple[Any, str]:
    """Return what speaks with the store of an address, and the path there.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        import fsspec

        return fsspec.core.url_to_fs(asked.source)
    except ImportError as error:
        raise UnsupportedError(
            f"{asked} needs a package that is not installed: {error}",
            "pip install 'headrace[cloud]'",
        ) from None


def _version(info: Mapping[str, Any]) -> str:
    value = next((info[key] for key in VERSIONS if info.get(key)), "")
    if isinstance(value, datetime):  # one question is answered by a date, another by its seconds
        value = value.timestamp()
    return str(value).strip('"')


@contextmanager
def _asking(asked: Asked) -> Iterator[None]:
    """Raise what a store answers as one error: its library has dozens of kinds."""
    try:
        yield
    except HeadraceError:
        raise
    except FileNotFoundError:
        raise ConfigError(f"{asked} does not exist", asked.to("PATH")) from None
    except Exception as error:
        if is_out_of_memory(error) or is_full_disk(error):
            raise
        why = in_one_line(str(error)) or type(error).__name__
        raise ConfigError(f"{asked} cannot be read: {why}", asked.to("PATH")) from None
