"""Profile a few steady steps with torch.profiler now and then, and write their traces.

A profiler window is one step that warms the profiler up, the steps that are measured, and one whose
beginning ends the last of them. Everything that costs the host time happens between steps: the
profiler is turned on, stepped and off there, and the trace is written there. Compressing it runs
beside the next steps. The caller learns which steps ran in a window or right after one, and leaves
them out of the steady steps.

A window ends without a trace where something else than steps ran in it: a compilation, or what the
caller reports. Files are `step-N.rank-R.json.gz`, Chrome's JSON, written aside and renamed. The
newest `KEPT` of a rank stay, and none is larger than `MOST_BYTES` unpacked. Shapes of operations
are recorded, which the roofline needs; stacks and memory are not. An error of the profiler or of
the disk, or a profiler of the user's own, ends profiler windows for good: the run gets one warning
and goes on. When two loops in one process want a window at once, one waits: a second profiler takes
the first one down, and the process with it.

Left out: tearing CUPTI down afterwards. torch has no call for it, only an environment variable of
the process (TEARDOWN_CUPTI), which is the user's to set. Until then CUPTI stays loaded after the
first window; `benchmarks/overhead.py` measures what that costs.
"""

import gzip
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from headrace.core.files import publish

FIRST = 10
"""Steps of this process before the first window: compiling, lazy state and caches are behind."""
WARM_UP = 1
"""Steps in which the profiler runs and records nothing: its first ones are slow."""
KEPT = 3
"""Newest traces of a rank that stay."""
MOST_BYTES = 512 * 1024**2
"""Largest trace that is kept, in bytes before it is compressed."""
LEVEL = 3
"""Compression level of gzip: traces shrink to a tenth, at 100 MB/s."""
NAME = re.compile(r"^step-(\d+)\.rank-(\d+)\.json\.gz$")


class ProfilerWindows:
    """Record the profiler windows of one rank of a run, or of a watched loop.

    Read `traced` before a step is noted down, call `advance` once it is issued, and `begin` when
    nothing but steps comes next.

    Args:
        folder: where traces go; made when the first is written.
        device: the device that is recorded beside the host.
        every_steps: steps from one window to the next; 0 for no window, None for one only.
        steps: steps that a window measures.
        rank: the rank of this process.
        warn: takes the one warning, where profiling fails.
    """

    running: ClassVar["ProfilerWindows | None"] = None
    """The windows whose profiler is on in this process."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        every_steps: int | None,
        steps: int = 3,
        rank: int = 0,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.folder, self.steps, self.rank = folder, steps, rank
        self.trouble = ""
        self.files: list[str] = []
        self._device, self._every, self._warn = device, every_steps, warn
        self._profile: Any = None
        self._left = self._advanced = self._step = 0
        self._due = every_steps is None or every_steps > 0
        self._after = False
        self._thread: threading.Thread | None = None

    @property
    def length(self) -> int:
        """Return how many steps follow each other in a window."""
        return WARM_UP + self.steps + 1

    @property
    def on(self) -> bool:
        """Return whether the profiler is on."""
        return self._profile is not None

    @property
    def traced(self) -> bool:
        """Return whether the step that is being issued runs in a window, or right after one."""
        return self.on or self._after

    def named(self, name: str) -> AbstractContextManager[Any]:
        """Mark in the trace what runs inside; do nothing where no window is open."""
        return record_function(name) if self.on else nullcontext()

    def advance(self, step: int, *, steady: bool = True) -> None:
        """Take note that a step has been issued.

        Args:
            step: the number of the step.
            steady: False where it compiled.
        """
        self._step, self._advanced = step, self._advanced + 1
        self._after = False
        if self._every and step % self._every == 0 and self._advanced > FIRST:
            self._due = self._due or not self.trouble
        if not self.on:
            return
        if not steady:
            self.drop()
            return
        self._left -= 1
        last = self._left == 0
        self._guarded(self._finish if last else self._profile.step)

    def begin(self, room: int | None = None) -> None:
        """Begin a window if one is due and enough steps follow each other from here.

        Args:
            room: steps until something else comes in between; None for many.
        """
        may = self._advanced >= FIRST and self._due and ProfilerWindows.running is None
        if may and (room is None or room >= self.length):
            self._due = False
            self._left = self.length
            self._guarded(self._start)

    def drop(self) -> None:
        """End an open window without a trace, since no step came next; try another one later."""
        if self.on:
            self._stop()
            self._due = True

    def close(self) -> None:
        """End everything; a trace that is being written is finished first."""
        self._due = False
        self._stop()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def report(self) -> dict[str, Any] | None:
        """Return the names of the traces and what went wrong; None where none was asked for.

        A trace that is being written is named once it is whole: after `close`, at the latest.
        """
        if self._every == 0:
            return None
        why = self.trouble or ("" if self.files else f"no {self.length} steady steps in a row yet")
        return {"folder": self.folder.name, "files": list(self.files), "trouble": why}

    # --- the profiler ---

    def _guarded(self, call: Callable[[], None]) -> None:
        """Call the profiler; what it raises ends profiler windows and not the run."""
        try:
            call()
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        first = (str(error).strip().splitlines() or [""])[0][:200]
        self.trouble = f"{type(error).__name__}: {first}"
        self._due = False
        self._stop()
        self._warn(f"no further traces: {self.trouble}")

    def _start(self) -> None:
        if torch.autograd.profiler._is_profiler_enabled:  # it would lose what it has recorded
            raise RuntimeError("another profiler is on")
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=WARM_UP, active=self.steps + 1, repeat=1),
            record_shapes=True,
        )
        ProfilerWindows.running = self
        self._profile.start()

    def _stop(self) -> None:
        if self.on:
            ended, self._profile, self._after = self._profile, None, True
            ProfilerWindows.running = None
            with suppress(Exception):  # it may be what failed
                ended.stop()

    def _finish(self) -> None:
        """Finish a window: wait for the device, write the trace, and compress it beside the run."""
        ended = self._profile
        self._stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{self._step}.rank-{self.rank}.json.gz"
        plain = self.folder / f".{name.removesuffix('.gz')}"
        ended.export_chrome_trace(str(plain))
        if plain.stat().st_size > MOST_BYTES:
            size = plain.stat().st_size
            plain.unlink()
            raise ValueError(f"a trace of {self.steps} steps takes {size / 1024**2:.0f} MiB")
        if self._thread is not None:
            self._thread.join()
        thread = threading.Thread(target=self._pack, args=(plain, name), daemon=True)
        thread.start()
        self._thread = thread  # one that could not start cannot be waited for

    def _pack(self, plain: Path, name: str) -> None:
        """Compress a trace and rename it; delete the oldest beyond `KEPT`."""
        aside = plain.with_suffix(".json.gz")
        try:
            with plain.open("rb") as source, gzip.open(aside, "wb", compresslevel=LEVEL) as packed:
                shutil.copyfileobj(source, packed, 1 << 20)
            publish(aside, self.folder / name)
            mine = [step for step, rank in traces(self.folder) if rank == self.rank]
            for step in sorted(mine)[:-KEPT]:
                traces(self.folder)[step, self.rank].unlink(missing_ok=True)
            self.files = [
                path.name for (_, rank), path in traces(self.folder).items() if rank == self.rank
            ]
        except OSError as error:
            aside.unlink(missing_ok=True)
            self.trouble, self._due = f"{type(error).__name__}: {error}", False
        finally:
            plain.unlink(missing_ok=True)


def traces(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the traces of a folder by step and rank, in that order; none where it is missing."""
    by_step = {}
    for path in folder.glob("step-*.json.gz"):
        if match := NAME.match(path.name):
            by_step[int(match[1]), int(match[2])] = path
    return dict(sorted(by_step.items()))
