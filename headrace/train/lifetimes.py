"""Account for the time of a run's processes: what of it trained, and what failures took.

A run may be started several times: after a failure, or because somebody stopped it and goes on.
Each start adds a lifetime to lifetimes.json in the run's folder. Goodput is the share of all the
time that made steps which the run still has. The rest is start-up, steps that no checkpoint kept,
and the time from a failure to the next start. The time from a deliberate stop to the next start is
not counted.
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from headrace.core.files import parse_json, write_whole

FILE = "lifetimes.json"
SIGNS = ("metrics.jsonl", "report.json", "environment.json", FILE)
"""Files that a run's processes write; the newest is their last sign of life."""
STOPPED = ("done", "interrupted")
"""Status of a run whose processes ended as they were asked to."""
After = Literal["", "failure", "stop"]


@dataclass(frozen=True)
class Stint:
    """Hold when the processes of one start lived, in seconds since the epoch.

    Args:
        began: when they began.
        ready: when their first step ended; None where none did yet.
        ended: their last sign of life; None while they live.
        after: how those before them ended; "" where these are the first.
        machines_kept: whether the machines were kept since then, as by torchrun's own restarts.
        lost_steps: steps of those before them that no checkpoint kept.
        lost_s: seconds of these steps.
    """

    began: float
    ready: float | None = None
    ended: float | None = None
    after: After = ""
    machines_kept: bool = False
    lost_steps: int = 0
    lost_s: float = 0.0


class Lifetimes:
    """Keep the lifetimes of a run's processes, the newest one last, in the folder of the run.

    Args:
        folder: the run's.
        known: them.
    """

    def __init__(self, folder: Path, known: Sequence[Stint]) -> None:
        self._folder, self._known = folder, list(known)

    @classmethod
    def begin(cls, folder: Path, status: str | None, age_s: float) -> "Lifetimes":
        """Add the lifetime of this process, before any file of the folder is written.

        Args:
            folder: the run's.
            status: that of the report that the last ones left; None where they left none.
            age_s: the seconds since this process began.
        """
        known = _read(folder)
        after: After = ""
        if known or status is not None:
            after = "stop" if status in STOPPED else "failure"
        if known:
            known[-1] = replace(known[-1], ended=_last_sign(folder))
        kept = after == "failure" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        known.append(Stint(time.time() - age_s, after=after, machines_kept=kept))
        lifetimes = cls(folder, known)
        lifetimes._write()
        return lifetimes

    def lost(self, steps: int, seconds: float) -> None:
        """Record the steps of the last lifetime that no checkpoint kept, and their seconds."""
        self._amend(lost_steps=steps, lost_s=seconds)

    def ready(self) -> None:
        """Record that the first step of this lifetime has ended."""
        self._amend(ready=time.time())

    def paid_s(self) -> float:
        """Return the seconds of this start that a failure costs beside the steps that it lost.

        They are those since this process began, and those before it in which the machines were
        kept.
        """
        now, last = time.time(), self._known[-1]
        if last.after != "failure":
            return 0.0
        return max(0.0, now - last.began) + (
            self._down_s(len(self._known) - 1) * last.machines_kept
        )

    def account(self) -> dict[str, Any]:
        """Return a report's numbers: restarts after failures and after stops, and the time."""
        now = time.time()
        afters = [one.after for one in self._known]
        lived_s = [(one.ended or now) - one.began for one in self._known]
        start_s = sum(
            max(0.0, min((one.ready or one.ended or now) - one.began, lived))
            for one, lived in zip(self._known, lived_s, strict=True)
        )
        down_s = sum(self._down_s(n) for n, after in enumerate(afters) if after == "failure")
        lost_s = sum(one.lost_s for one in self._known)
        total_s = sum(max(0.0, lived) for lived in lived_s) + down_s
        useful_s = max(0.0, total_s - start_s - down_s - lost_s)
        return {
            "restarts": afters.count("failure"),
            "resumes": afters.count("stop"),
            "uptime": {
                "total_s": total_s,
                "start_s": start_s,
                "lost_s": lost_s,
                "lost_steps": sum(one.lost_steps for one in self._known),
                "down_s": down_s,
                "goodput": useful_s / total_s if total_s else None,
            },
        }

    def _down_s(self, index: int) -> float:
        """Return the seconds from the end of the lifetime before one to its begin."""
        before = self._known[index - 1].ended if index else None
        return 0.0 if before is None else max(0.0, self._known[index].began - before)

    def _amend(self, **values: Any) -> None:
        """Change the newest lifetime, where this process keeps any: the first rank does."""
        if self._known:
            self._known[-1] = replace(self._known[-1], **values)
            self._write()

    def _write(self) -> None:
        with suppress(OSError):  # a full disk ends the run where it loses something
            write_whole(self._folder / FILE, json.dumps([asdict(one) for one in self._known]))


def _read(folder: Path) -> list[Stint]:
    """Return the lifetimes that a folder has; those of a damaged file are none."""
    try:
        known = [Stint(**row) for row in parse_json((folder / FILE).read_bytes())]
    except (OSError, ValueError, TypeError):
        return []
    return known if all(map(_is_sound, known)) else []


def _is_sound(one: Stint) -> bool:
    """Return whether what a file says of a start are numbers."""
    numbers = (one.began, one.ready or 0.0, one.ended or 0.0, one.lost_steps, one.lost_s)
    return all(isinstance(number, int | float) for number in numbers)


def _last_sign(folder: Path) -> float | None:
    """Return when the newest file was written that a run's processes write."""
    times = []
    for name in SIGNS:
        with suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return max(times, default=None)
