"""Keep values and arrays in files that begin with the sha256 of what follows.

Such a file appears whole, by a rename, once it is on the disk; one that was damaged later is found
when it is read. Arrays are kept as safetensors with JSON values beside them: nothing that is read
can execute code.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors.numpy import load, save

from headrace.core.errors import ConfigError
from headrace.core.files import shell, write_whole
from headrace.core.strict import Strict
from headrace.data.quality.cleaner import PartState


def as_json(value: Any) -> str:
    """Return a value as JSON in ASCII: names of files may hold what is no UTF-8."""
    return json.dumps(value.model_dump() if isinstance(value, Strict) else value)


def write_sealed(path: Path, value: Any) -> None:
    """Write JSON values whole, below their sha256."""
    _write(path, as_json(value).encode())


def read_sealed(path: Path) -> Any:
    """Return the value of a file that `write_sealed` wrote.

    Raises:
        ConfigError: it is damaged.
    """
    return json.loads(_read(path))


def write_state(path: Path, state: PartState) -> None:
    """Write arrays and JSON values whole, below their sha256."""
    values = as_json(state.values).encode()
    size = len(values).to_bytes(8, "little")
    _write(path, size + values + save(state.arrays))


def read_state(path: Path) -> PartState:
    """Return what `write_state` wrote.

    Raises:
        ConfigError: it is damaged.
    """
    body = _read(path)
    end = 8 + int.from_bytes(body[:8], "little")
    return PartState(load(body[end:]), json.loads(body[8:end]))


def _write(path: Path, body: bytes) -> None:
    write_whole(path, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def _read(path: Path) -> bytes:
    seal, _, body = path.read_bytes().partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != seal:
        part = path.parent if path.name == "part.json" else path
        raise ConfigError(
            f"{path} is damaged: its sha256 is not the one in its first line",
            f"rm -r {shell(part)}, and the same command again",
        )
    return body
