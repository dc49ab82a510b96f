"""Keep what was measured in `trials.jsonl` of a tuning folder, and answer from it.

A row is one reading with what it was of: the plans by their hashes (without name and folder, which
change nothing), how much was measured, and the machine with its versions. The same question at the
same place is answered from the file, as often as it was measured. Another machine or another
version measures anew, beside the old rows. A reading that was cut off by the clock, or cut to fewer
steps than a look at two plans takes, is kept with the seconds that it had. It is measured anew
where it may have more of them, and else costs no time a second time.
"""

import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from headrace.core.errors import MALFORMED, RefusalKind
from headrace.plan.plan import Plan
from headrace.train.guard import First
from headrace.train.run_folder import environment
from headrace.tuner.paired_blocks import LOOK, SampleSize
from headrace.tuner.pairs import Measure
from headrace.tuner.readings import NOT_DONE, OUT_OF_MEMORY, Reading

BEGAN = {
    NOT_DONE: RefusalKind.TIME,
    OUT_OF_MEMORY: RefusalKind.MEMORY,
    "its process died": RefusalKind.PROCESS,
    "the plan before it cannot run": RefusalKind.BASELINE,
}
"""How the reasons began that versions before 0.2 wrote without their kind."""
HERE = ("headrace", "commit", "torch", "cuda", "device_name", "devices", "threads")
"""Keys of the environment that a reading depends on."""
ALIKE_S = 5.0
"""Seconds by which the limits of two calls with the same minutes may differ, for the time it takes
to look for plans. One minute more gives a reading more than that."""


def fingerprint(plan: Plan) -> str:
    """Return a plan's hash, whatever it is called and wherever its runs are kept."""
    values = {k: v for k, v in plan.dump().items() if k not in ("name", "directory")}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def here(device: torch.device) -> dict[str, Any]:
    """Return the machine and the versions that a reading is of."""
    readings = environment(device, [])
    return {name: readings[name] for name in HERE}


class Store:
    """Hold the readings of one folder.

    Args:
        file: trials.jsonl; None keeps nothing.
        place: see `here`.
        clock: seconds that go by.
    """

    def __init__(
        self, file: Path | None, place: dict[str, Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.file, self.place, self.clock = file, place, clock
        self.spent_s = 0.0
        """seconds spent by all readings that were asked for, those of earlier calls too"""
        self.fresh_s = 0.0
        """seconds of it that were spent in this call"""
        self.limit_of_last_s = 0.0
        """seconds that the last reading had, where the clock cut it off, now or in an earlier
        call"""
        self.cut: dict[str, tuple[Reading, float]] = {}
        """key of what does not stand -> it, and the most seconds that it had"""
        self.lost_s: defaultdict[str, float] = defaultdict(float)
        """key of it -> seconds that it took in earlier calls, until they are on the bill"""
        self.readings = self._read()
        self._asked: Counter[str] = Counter()

    def measure(self, inner: Measure) -> Measure:
        """Return `inner`, asked only for what does not stand here."""

        def ask(
            first: Plan, second: Plan, *, size: SampleSize, together: bool, limit_s: float
        ) -> Reading:
            one, two = fingerprint(first), fingerprint(second)
            what = {"first": one, "second": two, "size": size.to_dict(), "together": together}
            return self.once(
                what,
                lambda: inner(first, second, size=size, together=together, limit_s=limit_s),
                limit_s=limit_s,
                alike_s=ALIKE_S,
            )

        return ask

    def once(
        self,
        what: dict[str, Any],
        fresh: Callable[[], Reading],
        *,
        limit_s: float,
        alike_s: float = 0.0,
        repeat: bool = True,
    ) -> Reading:
        """Return the reading of `what`, from the file or else from `fresh`.

        Args:
            what: it is of.
            fresh: measures it.
            limit_s: that it may take; what was not done within as many is not tried again.
            alike_s: by which limits may differ that are the same.
            repeat: asked twice in one call it is measured twice; else once is enough.
        """
        key, self.limit_of_last_s = json.dumps([what, self.place], sort_keys=True), 0.0
        if not repeat and self._asked[key] and key in self.readings:
            return self.readings[key][0][0]
        self._asked[key] += 1
        if len(known := self.readings.get(key, [])) >= self._asked[key]:
            reading, seconds = known[self._asked[key] - 1]
            self.spent_s += seconds
            return reading
        self.spent_s += self.lost_s.pop(key, 0.0)
        if key in self.cut and limit_s <= self.cut[key][1] + alike_s:
            reading, self.limit_of_last_s = self.cut[key]
            refused = f"{reading.refused} when it was tried before" if reading.refused else ""
            return replace(reading, refused=refused)
        began_s = self.clock()
        try:
            reading = fresh()
        finally:
            spent_s = self.clock() - began_s
            self.spent_s += spent_s
            self.fresh_s += spent_s
        if not self._keep(self.readings, key, reading, spent_s, limit_s):
            self.limit_of_last_s = limit_s
        row = {
            "here": self.place,
            "seconds": spent_s,
            "limit_s": limit_s,
            "reading": to_dict(reading),
        }
        self._write({**what, **row})
        return reading

    def _keep(
        self,
        readings: dict[str, list[tuple[Reading, float]]],
        key: str,
        reading: Reading,
        seconds: float,
        limit_s: float,
    ) -> bool:
        """Keep a reading and return whether it stands; else it is remembered with its limit."""
        if stands(reading):
            readings.setdefault(key, []).append((reading, seconds))
            return True
        if limit_s >= self.cut.get(key, (reading, 0.0))[1]:
            self.cut[key] = reading, limit_s
        return False

    def _write(self, row: dict[str, Any]) -> None:
        """Append a row; a full disk ends no tuning.

        What is measured from then on is kept until the end of the process.
        """
        if self.file is None:
            return
        try:
            whole = not self.file.is_file() or self.file.read_bytes()[-1:] in (b"", b"\n")
            with self.file.open("a") as file:
                file.write(("" if whole else "\n") + json.dumps(row) + "\n")
        except OSError:
            self.file = None

    def _read(self) -> dict[str, list[tuple[Reading, float]]]:
        """Return the rows by what they are of; a damaged line is left out."""
        readings: dict[str, list[tuple[Reading, float]]] = {}
        text = self.file.read_text(errors="replace") if self.file and self.file.is_file() else ""
        for line in text.splitlines():
            try:
                row = json.loads(line)
                reading, seconds = row.pop("reading"), float(row.pop("seconds"))
                place = row.pop("here")
                limit_s = float(row.pop("limit_s", 0.0))
                key = json.dumps([row, place], sort_keys=True)
                if not self._keep(readings, key, read(reading), seconds, limit_s):
                    self.lost_s[key] += seconds
            except MALFORMED:
                continue
        return readings


def stands(reading: Reading) -> bool:
    """Return whether the clock left it enough time to stand."""
    if any(r.timed_out for r in (reading, reading.beside) if r):
        return False
    if reading.untrained_s:
        return False
    return bool(reading.refused) or reading.steps >= LOOK or not reading.beside


def to_dict(reading: Reading) -> dict[str, Any]:
    """Return a reading as JSON values."""
    return asdict(reading)


def read(row: dict[str, Any]) -> Reading:
    """Return a reading from what `to_dict` returned."""
    beside, kind = row.get("beside"), kept_kind(row.get("refused"), row.get("refusal"))
    firsts = [First(*first) for first in row.get("firsts", [])]
    whole = {**row, "firsts": firsts, "refusal": kind}
    return Reading(**{**whole, "beside": read(beside) if beside else None})


def kept_kind(words: object, kind: object) -> RefusalKind | None:
    """Return the kind of a refusal in a file; versions before 0.2 kept its words alone.

    Args:
        words: of the reason; nothing where nothing was refused.
        kind: as it was written beside them.
    """
    if not words:
        return None
    if isinstance(kind, str) and kind in {*RefusalKind}:
        return RefusalKind(kind)
    old = (known for begins, known in BEGAN.items() if str(words).startswith(begins))
    return next(old, RefusalKind.OTHER)
