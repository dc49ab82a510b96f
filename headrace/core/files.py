"""Write files that survive a power cut, and read plans and JSON from text."""

import errno
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import sys
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.core.errors import ConfigError
from headrace.core.remedy import leave_out, mend

if TYPE_CHECKING:
    from filelock import BaseFileLock

RECORDED = ".plan.toml"
"""The name, in a run's folder, of the plan that it was started with; plan.toml is for people."""
DEEPEST = 16
"""How many tables and lists may lie inside each other; no plan has more than five."""


def encodable(text: str | Path) -> str:
    r"""Return a text with what is not UTF-8 in it escaped: `caf\xe9.txt`."""
    try:
        raw = os.fsencode(text)
    except UnicodeEncodeError:  # no name of a file that is here
        raw = str(text).encode(errors="backslashreplace")
    return raw.decode(errors="backslashreplace")


def in_one_line(text: str) -> str:
    """Return what another library says with its line breaks as blanks."""
    return " ".join(text.split())


def printable(name: str | Path) -> str:
    """Return a file's name on one line that every file and terminal takes."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in encodable(name)
    )


def shell(path: str | Path) -> str:
    """Return a path as a shell takes it, one that is not UTF-8 too."""
    name = printable(path)
    if name == str(path):
        return shlex.quote(name)
    literal = "".join(
        chr(b) if 32 <= b < 127 and b not in b"'\\" else f"\\x{b:02x}" for b in os.fsencode(path)
    )
    return f"$'{literal}'"


def python(script: str, *words: str) -> str:
    """Return the command that runs a script by the Python that Headrace runs in.

    Args:
        script: what `-c` takes.
        words: what follows it, as a shell takes them.
    """
    executable = shutil.which("python")
    activated = executable is not None and Path(executable).parent == Path(sys.executable).parent
    called = "python" if activated else shell(sys.executable)
    return " ".join((called, "-c", shlex.quote(script), *words))


def has_file(folder: Path, name: str) -> bool:
    """Return whether a folder has a file of this name, which may be one that no file can have."""
    try:
        return (folder / name).is_file()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False


def has_folder(folder: Path, name: str) -> bool:
    """Return whether a folder has a folder of this name, as `has_file` does of a file."""
    try:
        return (folder / name).is_dir()
    except (OSError, ValueError):
        return False


def sync_path(path: Path) -> None:
    """Push a file's content, or a folder's list of names, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(aside: Path, path: Path) -> None:
    """Make the file or folder `aside` current under the name `path`.

    Its content reaches the disk before its name does, and its name before this returns. So a kill
    or a power cut leaves what was there before, or all of the new.
    """
    inside = sorted(aside.rglob("*"), reverse=True) if aside.is_dir() else []
    for one in (*inside, aside):
        sync_path(one)
    os.replace(aside, path)
    sync_path(path.parent)


def sha256_of(file: Path) -> str:
    """Return the sha256 of what a file holds, read a part at a time."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file aside and publish it: a reader finds the old content or the new."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)
        publish(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def hold_lock(file: Path, *, wait: bool, key: str) -> "BaseFileLock":
    """Lock a file until `release`; the system takes the lock back when the process ends.

    Args:
        file: what to lock; it is made and stays.
        wait: whether to wait for another process.
        key: the plan's key that puts the file elsewhere, for the message.

    Raises:
        ConfigError: the file system has no locks.
        Timeout: another process holds it, and `wait` is false.
    """
    from filelock import FileLock, Timeout  # it loads asyncio, which most verbs need not wait for

    lock = FileLock(file, timeout=-1 if wait else 0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise
    except (OSError, NotImplementedError) as error:
        without = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
        if isinstance(error, OSError) and error.errno not in without:
            raise
        raise ConfigError(
            f"{file.parent} is on a file system without file locks (flock: {error}); supported are "
            "local disks of Linux and macOS, NFS 4, and Lustre mounted with -o flock",
            f"{key}=FOLDER on one of these",
        ) from None
    return lock


def is_within(folder: Path, path: Path) -> bool:
    """Return whether a path lies in a folder, wherever links in both of them lead.

    Args:
        folder: the folder.
        path: what may lie in it; it need not be there.
    """
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (
        OSError,
        RuntimeError,
        ValueError,
    ):  # links in a circle, or no name of a file
        return False


def recorded_plan(run: Path) -> Path:
    """Return the plan that a run was started with, whatever was written into plan.toml since.

    A run of before kept plan.toml alone.
    """
    kept = run / RECORDED
    return kept if kept.is_file() else run / "plan.toml"


def mend_plan(run: Path) -> str:
    """Return the command that makes a run's plan.toml what it was; "" where it was not kept."""
    kept = run / RECORDED
    return shlex.join(["cp", str(kept), str(run / "plan.toml")]) if kept.is_file() else ""


def read_plan_text(file: Path) -> str:
    """Return the text of a plan's file.

    Raises:
        ConfigError: it is not UTF-8, or no TOML.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")  # tools of Windows put a mark before it
        toml_values(text, str(file))
    except UnicodeDecodeError as error:
        kept = mend_plan(file.parent) if file.name == "plan.toml" else ""
        raise ConfigError(
            f"{file} is no plan: it is not UTF-8, by its byte {error.start} ({error.reason})",
            kept or f"iconv -f LATIN1 -t UTF-8 {shell(file)} > NEW.toml; NEW.toml in its place",
        ) from None
    except tomllib.TOMLDecodeError as error:
        kept = mend_plan(file.parent) if file.name == "plan.toml" else ""
        raise ConfigError(
            f"{file} is no plan: it is not valid TOML: {error}",
            kept
            if file.suffix == ".toml"
            else f"headrace train demo data.sources={shell(file)}, if it is text to train on",
        ) from None
    return text


def parse_json(text: bytes | str) -> Any:
    """Return the value that a JSON text holds; a number that is not finite becomes None.

    Args:
        text: to be parsed; bytes are UTF-8.

    Raises:
        ValueError: it is no JSON; says why, behind "it".
    """
    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8, by its byte {error.start} ({error.reason})") from None
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(no_json(text, error)) from None


def parse_object(text: bytes | str) -> dict[str, Any]:
    """Return the object that a JSON text holds, parsed as by `parse_json`.

    Raises:
        ValueError: it holds none; says why, behind "it".
    """
    parsed = parse_json(text)
    if not isinstance(parsed, dict):
        raise ValueError(f"holds a {type(parsed).__name__}, not a JSON object")
    return parsed


def no_json(text: str, error: Exception) -> str:
    """Return what is wrong with a text that json cannot read, as words to put behind its name."""
    if not text.strip():
        return "is empty"
    if isinstance(error, RecursionError):
        return "holds lists in lists too deep to be read"
    if not isinstance(error, json.JSONDecodeError):
        return "holds a number of more digits than are read"
    begins = text.lstrip()[:16]
    if begins[0] not in "{[":
        return f"is no JSON: it begins with {begins!a}"
    return f"is not whole JSON: {error}"


def _finite(digits: str) -> float | None:
    return number if math.isfinite(number := float(digits)) else None


def _whole(digits: str) -> int | float | None:
    """Return the whole number that digits spell; one of 20 digits or more as a float."""
    return int(digits) if len(digits) < 20 else _finite(digits)


_DECODER = json.JSONDecoder(parse_float=_finite, parse_int=_whole, parse_constant=lambda word: None)
"""One for all lines: json.loads makes one a call where it is told how to read a number."""


def toml_values(text: str, what: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Args:
        text: to be parsed.
        what: it is, for a message.

    Raises:
        tomllib.TOMLDecodeError: it is no TOML.
        ConfigError: it is TOML beyond what Python parses.
    """
    try:
        return _read_anew(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise _too_deep(what) from None
    except ValueError:  # Python's own limit of digits
        raise _too_long(what) from None


def _read_anew(text: str) -> dict[str, Any]:
    """Return tables of a TOML text that nobody else holds."""
    try:
        return _copied(_parsed(text))
    except RecursionError:  # a key with many dots lies deeper than a copy goes
        return tomllib.loads(text)


def _copied(value: Any) -> Any:
    """Return a copy of tables and lists; what else TOML has nobody can change."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


@lru_cache(maxsize=256)
def _parsed(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text; a search reads one plan a thousand times."""
    return tomllib.loads(text)


def toml_value(raw: str, key: str) -> Any:
    """Return the value that `raw` spells in TOML, or `raw` itself: bare words are strings.

    Raises:
        ConfigError: see `toml_values`; it names the key.
    """
    try:
        return toml_values(f"x = {raw}", key)["x"]
    except tomllib.TOMLDecodeError:
        return raw


def check_values(value: Any, what: str = "", depth: int = 0) -> None:
    """Refuse what no table takes and no message can show: TOML's whole numbers have 64 bits.

    Raises:
        ConfigError: a number is longer, a value lies too deep, or a text is not UTF-8.
    """
    if depth > DEEPEST:
        raise _too_deep(what)
    if isinstance(value, dict):
        for key, item in value.items():
            check_values(item, f"{what}.{key}" if what else key, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_values(item, what, depth + 1)
    elif isinstance(value, str) and not is_utf_8(value):
        raise _not_utf_8(what, value)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise _too_long(what)


def is_utf_8(text: str) -> bool:
    """Return whether a text can be written in UTF-8; a name of a file may hold other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _not_utf_8(key: str, value: str) -> ConfigError:
    """Say that a plan cannot keep a name; a link to the file has one that it can."""
    name = re.sub("[^A-Za-z0-9._-]+", "_", Path(value).name).strip("_") or "text"
    link = f"ln -s {shell(value)} {name}, and "
    return ConfigError(
        f"{key} = '{printable(value)}' is not UTF-8, and plans are",
        mend(f"{key}={name}", text=f"{link if os.path.lexists(value) else ''}{key}={name}"),
    )


def _too_deep(what: str) -> ConfigError:
    return ConfigError(
        f"{what} has tables or lists too deep inside each other to be read", leave_out(what)
    )


def _too_long(what: str) -> ConfigError:
    return ConfigError(
        f"{what} has a number of more than 64 bits: at most {2**63 - 1} can be kept",
        leave_out(what),
    )
