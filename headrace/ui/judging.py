"""Judge runs that go on beside the requests for their pages, and remember what was found.

A verdict forecasts many plans and may take seconds, which no request waits for: one thread judges
one run after another, and a page shows the newest verdict that there is. A run is judged again when
it has written more, and not before ten times as long has passed as the last verdict took: so the
server spends a tenth of one core at most on a run, which may train on the same machine.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from headrace.core.errors import HeadraceError, interpreting
from headrace.core.files import shell
from headrace.doctor.advice import Advice, NoRemedy, advise
from headrace.doctor.rules import FEWEST_STEPS
from headrace.doctor.words.answer import (
    closing_verdict,
    findings_json,
    render_so_far,
    why_no_remedy,
)
from headrace.plan.technique import installed
from headrace.report.advice import FindingRecord, remedies_of
from headrace.report.page import Safe, join, muted, section, tag
from headrace.report.run_files import BottleneckRecord
from headrace.report.single import bottleneck_section
from headrace.report.words import size
from headrace.ui.frame import command_box
from headrace.ui.runs_folder import METRICS

TITLE = "The doctor, so far"
LARGEST_BYTES = 32 << 20
"""Bytes of a metrics.jsonl beyond which a page judges no run: some 50,000 steps."""
FIRST_S = 1.0
"""Seconds that a request waits for the first verdict on a run."""
LEAST_S, TIMES = 10.0, 10.0
"""Seconds between two verdicts on a run at least, and as a multiple of what the last one took."""
MOST_KEPT = 64
"""Most runs of which a verdict is remembered."""
MAKES = "The doctor reads what the run has written so far. Its verdict is shown when it is there."


@dataclass
class KeptVerdict:
    """Hold what was found of a run.

    Args:
        version: that of the run's files that were read.
        parts: what the page shows of it; an error of ours where finding it failed, which is raised
            when the page asks.
        took_s: seconds that it took to find.
        ended_s: when that was done, by the monotonic clock.
    """

    version: Hashable
    parts: Safe | Exception
    took_s: float
    ended_s: float

    def stands(self, version: Hashable) -> bool:
        """Return whether it is not looked for again at this version of the run's files."""
        due_s = self.ended_s + max(LEAST_S, TIMES * self.took_s)
        return self.version == version or time.monotonic() < due_s


class Judge:
    """Judge runs in a thread of its own.

    Args:
        find: returns what the page shows of the run of a folder.
    """

    def __init__(self, find: Callable[[Path], Safe] | None = None) -> None:
        self._find = find or verdict_of
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="doctor")
        self._kept: OrderedDict[Path, KeptVerdict] = OrderedDict()
        self._asked: dict[Path, Future[None]] = {}
        self._lock = Lock()

    def newest(self, path: Path, version: Hashable) -> Safe:
        """Return the newest verdict on a run, and have a newer one found where that is due.

        Args:
            path: the folder of the run.
            version: what changes when its files do.
        """
        with self._lock:
            known, asked = self._kept.get(path), self._asked.get(path)
            if asked is None and not (known is not None and known.stands(version)):
                asked = self._thread.submit(self._judge, path, version)
                self._asked[path] = asked
        if known is None and asked is not None:
            wait([asked], timeout=FIRST_S)
        with self._lock:
            known = self._kept.get(path)
        if known is None:
            return section(TITLE, muted(MAKES))
        if isinstance(known.parts, Exception):
            raise known.parts
        return known.parts

    def _judge(self, path: Path, version: Hashable) -> None:
        """Find a verdict and keep it."""
        began_s = time.monotonic()
        try:
            parts = self._find(path)
        except Exception as error:
            parts = error
        ended_s = time.monotonic()
        with self._lock:
            self._kept[path] = KeptVerdict(version, parts, ended_s - began_s, ended_s)
            self._kept.move_to_end(path)
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            del self._asked[path]


def verdict_of(path: Path) -> Safe:
    """Judge a run by what it has written so far, and render what is found.

    A file that is damaged is part of the page, with what mends it.
    """
    try:
        with interpreting(f"a file in {path}", f"headrace doctor {shell(path)}"):
            if (bytes_ := (path / METRICS).stat().st_size) > LARGEST_BYTES:
                return _too_large(path, bytes_)
            return render_verdict(path, advise(path, installed()))
    except FileNotFoundError:
        return section(TITLE, muted("No step is complete yet."))
    except HeadraceError as error:
        remedy = error.remedy.text
        return section(TITLE, tag("p", error.message), *((command_box(remedy),) if remedy else ()))
    except OSError as error:
        return section(TITLE, tag("p", f"{path} cannot be read: {error}"))


def render_verdict(path: Path, advice: Advice) -> Safe:
    """Render a verdict, with its remedies as commands to copy.

    Args:
        path: the folder of the run.
        advice: what the doctor found.
    """
    steps = advice.so_far or 0
    if advice.no_remedy is NoRemedy.TOO_FEW_STEPS:
        written = f"{steps} step{'s' * (steps != 1)}"
        words = (
            f"The run has written {written}, which are too few to judge it: {FEWEST_STEPS} steady "
            "ones are needed, and the first ones and those that compile are none."
        )
        return section(TITLE, tag("p", words))
    words = render_so_far(steps)
    by = f"{words[0].upper()}{words[1:]}."
    later = "It judges again as the run goes on, and by all of it when it has ended."
    bottleneck = BottleneckRecord.model_validate(closing_verdict(advice))
    findings = [FindingRecord.model_validate(row) for row in findings_json(advice)]
    return join(
        (
            section(TITLE, muted(by, " ", later)),
            bottleneck_section(bottleneck, commands=True),
            remedies_of(path, findings, commands=True),
            *((muted(f"{why[0].upper()}{why[1:]}."),) if (why := why_no_remedy(advice)) else ()),
        )
    )


def _too_large(path: Path, bytes_: int) -> Safe:
    """Return what says that a run's metrics are judged by a command alone."""
    words = (
        f"{METRICS} has {size(bytes_)}, and a page judges up to {size(LARGEST_BYTES)}. "
        "In a terminal, all of it is judged:"
    )
    return section(TITLE, tag("p", words), command_box(f"headrace doctor {shell(path)}"))
