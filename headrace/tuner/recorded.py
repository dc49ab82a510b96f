"""Read the path of a tuning from its folder, as it was written there."""

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from headrace.core.errors import MALFORMED, ConfigError
from headrace.core.files import parse_object, shell
from headrace.tuner.path import PATH, PLAN, TRIALS
from headrace.tuner.trial_row import TrialRow

ROWS = TypeAdapter(tuple[TrialRow, ...])


@dataclass(frozen=True)
class RecordedTuning:
    """Hold a tuning as its folder tells it.

    Args:
        name: of the plan that came of it.
        aim: what was to become less.
        result: the sentence that says what it came to.
        path: every plan that was tried, in order.
        bought: number of a change that was kept -> what it buys, in words.
        counted: whether peaks were measured; else they are predicted.
        seconds: that it took; None is not known.
        left: changes that were not begun, or that no gain is predicted of.
        interrupted: by a signal.
    """

    name: str
    aim: str
    result: str
    path: tuple[TrialRow, ...]
    bought: dict[int, str]
    counted: bool
    seconds: float | None
    left: tuple[str, ...]
    interrupted: bool


def read_tuning(folder: Path) -> RecordedTuning:
    """Return what a tuning came to.

    Raises:
        ConfigError: its path.json is missing or damaged.
    """
    file = folder / PATH
    aside = f"mv {shell(file)} {shell(f'{file}.damaged')}"
    try:
        values = parse_object(file.read_bytes())
        rows = [_with_ends(row) for row in values["path"]]
        path = ROWS.validate_python(rows)
        seconds = float(values.get("tuning_s") or 0.0)
        return RecordedTuning(
            name=str(values["name"]),
            aim=str(values["aim"]),
            result=_result(folder),
            path=path,
            bought={row["number"]: str(row.get("bought") or "") for row in rows},
            counted=bool(values.get("memory_measured")),
            seconds=seconds if isfinite(seconds) and seconds > 0 else None,
            left=tuple(map(str, [*values.get("left", ()), *values.get("no_gain_foreseen", ())])),
            interrupted=bool(values.get("interrupted")),
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{file} is damaged: path.{where}: {first['msg']}", aside) from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}", f"ls -l {shell(file)}") from None
    except MALFORMED as error:
        words = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{file} is damaged: {words}", aside) from None


def readings_in(folder: Path) -> int:
    """Return how many readings a tuning has kept so far."""
    try:
        return (folder / TRIALS).read_bytes().count(b"\n")
    except OSError:
        return 0


def _with_ends(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of path.json with NaN for the ends that JSON could not hold."""
    ratio = row.get("ratio")
    if isinstance(ratio, dict):
        row = {**row, "ratio": {k: float("nan") if v is None else v for k, v in ratio.items()}}
    return row


def _result(folder: Path) -> str:
    """Return what the tuned plan says of itself in its first line; "" where it says nothing."""
    try:
        with (folder / PLAN).open(encoding="utf-8", errors="replace") as file:
            first = file.readline(2000)
    except OSError:
        return ""
    if not first.startswith("#"):
        return ""
    words = first.removeprefix("#").strip()
    return words.partition(": ")[2] or words
