"""What was measured stands: `trials.jsonl` of a tuning folder, and who asks it before measuring.

A row is one reading with what it was of: the plans by their hashes (without name and folder, which
change nothing), how much was measured, and the machine with its versions. The same question at the
same place is answered from the file, as often as it was measured; another machine or another
version measures again, beside the old rows. What was cut off by the clock, or cut short to fewer
steps than a look at two plans takes, is kept with the seconds that it had: it is measured again
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

from headrace.core.errors import RefusalKind
from headrace.plan.plan import Plan
from headrace.train.guard import First
from headrace.train.run_folder import environment
from headrace.tuner.pairs import Measure
from headrace.tuner.readings import NOT_DONE, OUT_OF_MEMORY, Reading
from headrace.tuner.turns import LOOK, Size

BEGAN = {
    NOT_DONE: RefusalKind.TIME,
    OUT_OF_MEMORY: RefusalKind.MEMORY,
    "its process died": RefusalKind.PROCESS,
    "the plan before it cannot run": RefusalKind.BASELINE,
}
"""How the reasons began that versions before 0.2 wrote without their kind."""
HERE = ("headrace", "commit", "torch", "cuda", "device_name", "devices", "threads")
"""What of the environment a reading depends on."""
ALIKE_S = 5.0
"""By which the limits of two calls with the same minutes may differ, for the time it takes to look
for plans. One minute more gives a reading more than that."""


def fingerprint(plan: Plan) -> str:
    """A plan's hash, whatever it is called and wherever its runs are kept."""
    values = {k: v for k, v in plan.dump().items() if k not in ("name", "directory")}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def here(device: torch.device) -> dict[str, Any]:
    """The machine and the versions that a reading is of."""
    found = environment(device, [])
    return {name: found[name] for name in HERE}


class Store:
    """Readings of one folder.

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
        """by all readings that were asked for, those of earlier calls too"""
        self.fresh_s = 0.0
        """of it, now"""
        self.late_s = 0.0
        """that the last reading had, where the clock cut it off, now or in an earlier call"""
        self.cut: dict[str, tuple[Reading, float]] = {}
        """what does not stand -> it, and the most seconds that it had"""
        self.lost_s: defaultdict[str, float] = defaultdict(float)
        """likewise what it took in earlier calls, until it is on the bill"""
        self.found = self._read()
        self._asked: Counter[str] = Counter()

    def measure(self, inner: Measure) -> Measure:
        """The same as `inner`, which is asked only for what does not stand here."""

        def ask(
            first: Plan, second: Plan, *, size: Size, together: bool, limit_s: float
        ) -> Reading:
            one, two = fingerprint(first), fingerprint(second)
            what = {"first": one, "second": two, "size": size.plain(), "together": together}
            return self.once(what, lambda: inner(
                first, second, size=size, together=together, limit_s=limit_s),
                limit_s=limit_s, alike_s=ALIKE_S)  # fmt: skip

        return ask

    def once(
        self, what: dict[str, Any], fresh: Callable[[], Reading], *, limit_s: float,
        alike_s: float = 0.0, again: bool = True,
    ) -> Reading:  # fmt: skip
        """The reading of `what`, from the file or else from `fresh`.

        Args:
            what: it is of.
            fresh: measures it.
            limit_s: that it may take; what was not done within as many is not tried again.
            alike_s: by which limits may differ that are the same.
            again: asked twice in one call it is measured twice; else once is enough.
        """
        key, self.late_s = json.dumps([what, self.place], sort_keys=True), 0.0
        if not again and self._asked[key] and key in self.found:
            return self.found[key][0][0]
        self._asked[key] += 1
        if len(known := self.found.get(key, [])) >= self._asked[key]:
            reading, seconds = known[self._asked[key] - 1]
            self.spent_s += seconds
            return reading
        self.spent_s += self.lost_s.pop(key, 0.0)
        if key in self.cut and limit_s <= self.cut[key][1] + alike_s:
            reading, self.late_s = self.cut[key]
            told = f"{reading.refused} when it was tried before" if reading.refused else ""
            return replace(reading, refused=told)
        began_s = self.clock()
        try:
            reading = fresh()
        finally:
            spent_s = self.clock() - began_s
            self.spent_s += spent_s
            self.fresh_s += spent_s
        if not self._keep(self.found, key, reading, spent_s, limit_s):
            self.late_s = limit_s
        row = {
            "here": self.place,
            "seconds": spent_s,
            "limit_s": limit_s,
            "reading": plain(reading),
        }
        self._write({**what, **row})
        return reading

    def _keep(
        self, found: dict[str, list[tuple[Reading, float]]], key: str, reading: Reading,
        seconds: float, limit_s: float,
    ) -> bool:  # fmt: skip
        """Whether it stands; else it is remembered with its limit."""
        if stands(reading):
            found.setdefault(key, []).append((reading, seconds))
            return True
        if limit_s >= self.cut.get(key, (reading, 0.0))[1]:
            self.cut[key] = reading, limit_s
        return False

    def _write(self, row: dict[str, Any]) -> None:
        """A full disk ends no tuning: what is measured from then on is kept until its end."""
        if self.file is None:
            return
        try:
            whole = not self.file.is_file() or self.file.read_bytes()[-1:] in (b"", b"\n")
            with self.file.open("a") as file:
                file.write(("" if whole else "\n") + json.dumps(row) + "\n")
        except OSError:
            self.file = None

    def _read(self) -> dict[str, list[tuple[Reading, float]]]:
        """Rows by what they are of; a line that is damaged is none."""
        found: dict[str, list[tuple[Reading, float]]] = {}
        text = self.file.read_text(errors="replace") if self.file and self.file.is_file() else ""
        for line in text.splitlines():
            try:
                row = json.loads(line)
                reading, seconds = row.pop("reading"), float(row.pop("seconds"))
                place = row.pop("here")
                limit_s = float(row.pop("limit_s", 0.0))
                key = json.dumps([row, place], sort_keys=True)
                if not self._keep(found, key, read(reading), seconds, limit_s):
                    self.lost_s[key] += seconds
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
        return found


def stands(reading: Reading) -> bool:
    """Whether the clock let it say something."""
    if any(r.is_late for r in (reading, reading.beside) if r):
        return False
    if reading.untrained_s:
        return False
    return bool(reading.refused) or reading.steps >= LOOK or not reading.beside


def plain(reading: Reading) -> dict[str, Any]:
    """A reading as JSON values."""
    return asdict(reading)


def read(row: dict[str, Any]) -> Reading:
    """A reading as `plain` wrote it."""
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
