"""Files that survive a power cut, and plans as text."""

import os
import tomllib
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError

DEEPEST = 16
"""Tables and lists inside each other; no plan has more than five."""


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
        ConfigError: it is not UTF-8, or no TOML.
    """
    try:
        text = file.read_text(encoding="utf-8")
        toml_values(text, str(file))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is no plan: it is not UTF-8, by its byte {error.start} ({error.reason})",
            f"a TOML file; iconv -f LATIN1 -t UTF-8 {file} > NEW.toml, if it is in Latin-1",
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{file} is no plan: it is not valid TOML: {error}",
            ""
            if file.suffix == ".toml"
            else f"headrace train demo data.sources={file}, if it is text to train on",
        ) from None
    return text


def toml_values(text: str, what: str) -> dict[str, Any]:
    """The tables of a TOML text.

    Args:
        text: to be parsed.
        what: it is, for a message.

    Raises:
        tomllib.TOMLDecodeError: it is no TOML.
        ConfigError: it is TOML beyond what Python parses.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise _too_deep(what) from None
    except ValueError:  # Python's own limit of digits
        raise _too_long(what) from None


def toml_value(raw: str, key: str) -> Any:
    """What `raw` is in TOML, or itself: bare words are strings.

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
        ConfigError: a number is longer, or a value lies too deep.
    """
    if depth > DEEPEST:
        raise _too_deep(what)
    if isinstance(value, dict):
        for key, item in value.items():
            check_values(item, f"{what}.{key}" if what else key, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_values(item, what, depth + 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise _too_long(what)


def _too_deep(what: str) -> ConfigError:
    return ConfigError(f"{what} has tables or lists too deep inside each other to be read")


def _too_long(what: str) -> ConfigError:
    return ConfigError(f"{what} has a number of more than 64 bits", f"at most {2**63 - 1}")
