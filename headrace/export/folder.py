"""Write a new folder or file whole or not at all.

It is written under another name and renamed when it is complete: a reader sees all of it or
nothing.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from headrace.core.errors import ConfigError, RunError, is_full_disk
from headrace.core.files import publish, shell


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder to write into, which becomes `out` at the end.

    Raises:
        ConfigError: `out` has files already or cannot be written.
        RunError: the disk is full; nothing is left behind.
    """
    with _new(out, "hf", is_taken=out.exists() and (not out.is_dir() or any(out.iterdir()))) as at:
        yield at
        at.chmod(0o755)
        publish(at, out)


@contextmanager
def new_file(out: Path) -> Iterator[Path]:
    """Yield a path to write a file to, which becomes `out` at the end.

    Raises:
        ConfigError: `out` exists already or cannot be written.
        RunError: the disk is full; nothing is left behind.
    """
    with _new(out, "model.gguf", is_taken=out.exists()) as folder:
        yield folder / out.name
        publish(folder / out.name, out)


@contextmanager
def _new(out: Path, name: str, *, is_taken: bool) -> Iterator[Path]:
    """Yield a folder beside `out`, which is removed at the end; see `new_folder`.

    Args:
        out: what will be written.
        name: what it is called where `out` has no name, as "..".
        is_taken: whether something stands there.
    """
    if is_taken:
        raise ConfigError(f"{out} exists already", f"--output {shell(_unused(out, name))}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            yield aside
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        cause = error.strerror if isinstance(error, OSError) else ""
        problem = f"{out} could not be written: {cause or error}"
        if is_full_disk(error) or isinstance(error, SafetensorError):
            raise RunError(problem, "--output FOLDER on a disk with room for the weights") from None
        raise ConfigError(problem, "--output FOLDER that can be written") from None


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file that people read too."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _unused(out: Path, name: str) -> Path:
    """Return the first unused name beside `out`, as NAME-2; `name` is used where it has none."""
    number, named = 2, Path(out.name or name)
    while (candidate := out.with_name(f"{named.stem}-{number}{named.suffix}")).exists():
        number += 1
    return candidate
