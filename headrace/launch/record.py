"""Keep what was launched in a small JSON file, from which it is followed later."""

import json
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError, RunError, alike
from headrace.core.files import parse_json, parse_object, shell, write_whole
from headrace.core.strict import Strict
from headrace.launch.engine import LauncherName
from headrace.launch.job import launch_folder

RECORD = "launch.json"


class Launch(Strict):
    """Say what was launched, where, and under which name the engine knows it."""

    name: str
    """The name of the run."""
    engine: LauncherName
    identity: str
    """The engine's name of the job."""
    nodes: int
    processes: int
    """Processes a node."""
    command: list[str]
    """The command that submitted it, or that it is."""
    settings: dict[str, Any]
    """What `--set` said."""
    cwd: str
    """The folder in which it was launched."""

    def write(self, folder: Path) -> None:
        """Write the record into the folder of the launch."""
        write_whole(folder / RECORD, json.dumps(self.model_dump(), indent=1) + "\n")


def read_launch(name: str) -> tuple[Launch, Path]:
    """Return the record of a launch, and its folder.

    Args:
        name: the name of the run under `runs`, or the path of its folder; a word without a slash
            is a name first.

    Raises:
        ConfigError: nothing of that name was launched; the nearest name is given.
        RunError: the record is damaged.
    """
    path = Path(name)
    folders = [launch_folder(path.parent, path.name), launch_folder("runs", name)]
    if "/" not in name:
        folders.reverse()
    folder = next((one for one in folders if (one / RECORD).is_file()), None)
    if folder is None:
        names = [p.parent.name.removesuffix(".launch") for p in Path("runs").glob(f"*/{RECORD}")]
        near = alike(name, names) or (names[0] if names else None)
        raise ConfigError(
            f"nothing named {name!r} was launched from here"
            + (f"; the nearest is {near}" if near else ""),
            f"headrace status {shell(near)}" if near else "headrace launch demo --dry-run",
        )
    return read_record(folder), folder


def read_record(folder: Path) -> Launch:
    """Return the record in the folder of a launch.

    Raises:
        RunError: the record is damaged.
    """
    try:
        return Launch.model_validate(parse_object((folder / RECORD).read_bytes()))
    except (ValueError, ConfigError) as error:
        raise RunError(
            f"{folder / RECORD} is damaged: {error}",
            f"mv {shell(folder / RECORD)} {shell(folder / 'damaged.json')}",
        ) from None


def progress_of(folder: Path) -> dict[str, Any]:
    """Return how far the run of a launch has come, as far as its folder can be read here.

    Args:
        folder: the folder of the launch.

    Returns:
        `step` and `loss` of the last row of metrics.jsonl; empty before the first step.
    """
    run = folder.with_name(folder.name.removesuffix(".launch"))
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text(errors="replace").splitlines() if metrics.is_file() else []
    for line in reversed(lines):
        try:
            row = parse_json(line)
            return {"step": row["step"], "loss": row["loss"]}
        except (ValueError, KeyError, TypeError):
            continue  # a row that is being written
    return {}
