"""Find the rank that holds up all others, and name it.

A collective waits until every rank has come. gloo gives up after 30 minutes and NCCL after 10, and
neither says who is missing. Here a thread of each rank writes a heartbeat into the world's store
once a second: the step, where the main thread stands, since when it waits for others, and since
when its process does nothing. The lowest rank whose heart beats reads them all, and names a rank

- that is silent: no heartbeat came for `patience_s`, so its process was stopped, or its machine is
  gone;
- that others wait for: they stand in a collective, and it stands in none and does nothing (no CPU
  time, no bytes read or written, no compiler) for `patience_s`;
- that waits in another collective than the others. Python's stack cannot tell that, so torch's
  flight recorder is read, which numbers the collectives of every group (gloo and NCCL; torch
  2.5 and later, `TORCH_FR_BUFFER_SIZE`).

What was found is left in the store, and every rank ends by it. A rank that computes is never named,
however long it takes. Cost: a thread, and a word in the store a rank and second.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from headrace.parallel.world import World

BEAT_S = 1.0
"""Seconds between two heartbeats."""
AWAKE_SHARE, AWAKE_BYTES_PER_S = 0.02, 2**16
"""A process does something where its CPU time grows by that share of the time that passes, or where
so many bytes a second are read and written. Waiting for a collective of gloo takes 0.001."""
INNERMOST = 4
"""Frames of a stack, innermost first, of which one is torch's or ours where a rank waits."""
PATIENCE_BEFORE = 4.0
"""How much longer a rank may be silent that has not begun."""
WAITING = ("torch/distributed/", "headrace/parallel/")
"""Files in which a rank waits for others."""
FOREIGN = tuple(
    str(Path(file).parent).replace(os.sep, "/") for file in (os.__file__, torch.__file__)
)
"""Folders of code that a user has not written: Python's own modules, and torch's."""
PRINTING_S = 10.0
"""Seconds that ranks leave to the one that tells what was found."""


@dataclass(frozen=True)
class Heartbeat:
    """Say how a rank is.

    Args:
        number: of the heartbeat.
        step: complete steps.
        where: where its main thread stands: file, line and function.
        waits_s: seconds for which it has stood in one place where ranks wait for others; 0 where
            it does not.
        idle_s: seconds for which its process has done nothing.
        begun: group of ranks -> number of the last collective that it has begun.
        open: group of ranks -> the last collective that is not complete: number and name; the group
            that has begun one last comes last.
    """

    number: int
    step: int = 0
    where: str = ""
    waits_s: float = 0.0
    idle_s: float = 0.0
    begun: Mapping[str, int] = field(default_factory=dict)
    open: Mapping[str, tuple[int, str]] = field(default_factory=dict)


class Culprit(NamedTuple):
    """A rank that holds up the others, and in words what is known of it."""

    rank: int
    words: str


# --- judging ---------------------------------------------------------------------------------


def find_culprit(
    beats: Mapping[int, Heartbeat], silent_s: Mapping[int, float], patience_s: float
) -> Culprit | None:
    """Return the rank that holds up the others, by all ranks' heartbeats; None where none does.

    Args:
        beats: the newest heartbeat of each rank.
        silent_s: seconds since it came.
        patience_s: seconds after which a rank that is silent, or does nothing, is named.
    """
    last = max(beat.step for beat in beats.values())
    for rank, quiet_s in silent_s.items():
        if quiet_s >= patience_s:
            return Culprit(
                rank,
                f"rank {rank} has not answered for {quiet_s:.0f} s "
                + (f"after step {last}" if beats[rank].number else "and has not begun")
                + ": its process was stopped, or its machine is gone",
            )
    waiting = [rank for rank, beat in beats.items() if beat.waits_s >= patience_s]
    if not waiting:
        return None
    for rank, beat in beats.items():
        if not beat.waits_s and beat.idle_s >= patience_s:
            joined = _joined(beats, waiting, rank)
            return Culprit(
                rank,
                f"rank {rank} has done nothing for {beat.idle_s:.0f} s at {beat.where}, after step "
                f"{beat.step}, and {_named(waiting, len(beats))} for it{joined}",
            )
    return _elsewhere(beats) if len(waiting) == len(beats) else None


def _joined(beats: Mapping[int, Heartbeat], waiting: list[int], rank: int) -> str:
    """Return in words the collective that others have begun and a rank has not."""
    for other in waiting:
        for group, (number, name) in beats[other].open.items():
            if beats[rank].begun.get(group, number) < number:
                return f" in {name}, number {number} of its group"
    return ""


def _elsewhere(beats: Mapping[int, Heartbeat]) -> Culprit | None:
    """Return the rank that waits in another collective than the others, where all wait."""
    missing = dict[tuple[str, int, str], list[int]]()
    for beat in beats.values():
        for group, (number, name) in beat.open.items():
            absent = [r for r, b in beats.items() if b.begun.get(group, number) < number]
            if absent:
                missing[group, number, name] = absent
    if not missing:
        return None
    (group, number, name), absent = min(missing.items(), key=lambda item: len(item[1]))
    rank = absent[0]
    own = beats[rank].where
    if beats[rank].open:
        own_number, own_name = [*beats[rank].open.values()][-1]
        own = f"{own_name}, number {own_number}"
    others = [r for r, beat in beats.items() if group in beat.open and r not in absent]
    return Culprit(
        rank,
        f"rank {rank} waits in {own} of its group, after step {beats[rank].step}, and "
        f"{_named(others, len(beats))} in {name}, number {number} of another group: they do not "
        "call the same",
    )


def _named(ranks: list[int], of: int) -> str:
    """Return the subject of a sentence: who waits."""
    if len(ranks) == of - 1 > 3:
        return f"the other {of - 1:,} wait"
    names = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"rank {names} waits" if len(ranks) == 1 else f"ranks {names} wait"


# --- what a rank knows of itself -------------------------------------------------------------


class Pulse:
    """Read how this process is, from another thread than its main one.

    Args:
        main: the identifier of the main thread.
        compiles: whether a compiler works on a thread; its workers are other processes.
        recording_s: seconds of waiting from which on torch's flight recorder is read.
    """

    def __init__(self, main: int, compiles: Callable[[int], bool], recording_s: float) -> None:
        self._main, self._compiles, self._recording_s = main, compiles, recording_s
        self._place: tuple[Any, ...] = ()
        self._since_s = self._awake_s = self._read_s = time.monotonic()
        self._spent = _spent()

    def read(self, number: int, step: int) -> Heartbeat:
        """Return the heartbeat of this moment."""
        now_s = time.monotonic()
        waits, where, place = _place_of(self._main)
        if (step, *place) != self._place:
            self._place, self._since_s = (step, *place), now_s
        spent = _spent()
        cpu_s, moved = (a - b for a, b in zip(spent, self._spent, strict=True))
        passed_s = max(1e-3, now_s - self._read_s)
        busy = cpu_s > AWAKE_SHARE * passed_s or moved > AWAKE_BYTES_PER_S * passed_s
        if busy or self._compiles(self._main):
            self._awake_s = now_s
        self._spent, self._read_s = spent, now_s
        waits_s = now_s - self._since_s if waits else 0.0
        idle_s = now_s - self._awake_s
        # Not sooner: a collective that ends meanwhile holds the recorder and wants Python's lock.
        stuck = max(waits_s, idle_s) >= self._recording_s
        begun, open_ = recorded() if stuck else ({}, {})
        return Heartbeat(number, step, where, waits_s, idle_s, begun, open_)


def _spent() -> tuple[float, float]:
    """Return this process's seconds of CPU time, and its bytes read and written (Linux)."""
    moved = 0.0
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/io").read_text().splitlines()
        moved = sum(float(line.split()[1]) for line in lines if line[1:].startswith("char"))
    return time.process_time(), moved


def _place_of(thread: int) -> tuple[bool, str, tuple[Any, ...]]:
    """Return whether a thread waits for other ranks, where it stands in words, and the place."""
    frames = list(_frames(thread))
    files = [frame.f_code.co_filename.replace(os.sep, "/") for frame in frames]
    waits = any(part in file for file in files[:INNERMOST] for part in WAITING)
    own = next((i for i, file in enumerate(files) if not file.startswith(FOREIGN)), 0)
    if not frames:
        return False, "", ()
    frame = frames[own]
    name = "/".join(files[own].split("/")[-3:])
    where = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
    return waits, where, tuple((f.f_code, f.f_lasti) for f in frames[:INNERMOST])


def _frames(thread: int) -> Iterator[Any]:
    """Yield the frames of a thread, innermost first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def recorded() -> tuple[dict[str, int], dict[str, tuple[int, str]]]:
    """Return what torch's flight recorder knows: see `Heartbeat.begun` and `Heartbeat.open`."""
    from torch._C import _distributed_c10d as c10d

    begun: dict[str, int] = {}
    open_: dict[str, tuple[int, str]] = {}
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:  # an older torch: stacks alone tell
        return begun, open_
    for entry in json.loads(dump() or "{}").get("entries", ()):
        group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
        begun[group] = max(begun.get(group, 0), number)
        if entry["state"] != "completed":  # of gloo's no state is updated, so the last one counts
            open_.pop(group, None)
            open_[group] = number, str(entry["profiling_name"]).partition(":")[2]
    return begun, open_


# --- the thread ------------------------------------------------------------------------------


class Heartbeats:
    """Write this rank's heartbeats, and end every rank once one is found to hold up the others.

    Args:
        world: this process's place among several.
        patience_s: see `find_culprit`.
        step: returns the number of complete steps.
        compiles: see `Pulse`.
        end: ends this process; called in the thread with what was found, and whether this rank is
            the one that tells it.
    """

    def __init__(
        self,
        world: World,
        patience_s: float,
        *,
        step: Callable[[], int],
        compiles: Callable[[int], bool],
        end: Callable[[Culprit, bool], None],
    ) -> None:
        self._world, self._patience_s, self._step, self._end = world, patience_s, step, end
        self._pulse = Pulse(threading.get_ident(), compiles, patience_s / 2)
        self._seen: dict[int, tuple[int, float]] = {}
        self._left, self._number = threading.Event(), 0
        self._thread = threading.Thread(target=self._watch, name="heartbeats", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._left.set()

    def _watch(self) -> None:
        store: Store | None = None
        heard_s = time.monotonic()
        wait_s = 0.0
        while not self._left.wait(wait_s):
            wait_s = BEAT_S
            try:
                store = store or own_store(self._world.name)
                verdict = self._exchange(store)
                heard_s = time.monotonic()
            except RuntimeError as error:  # the store does not answer, or no more
                verdict, quiet_s = None, time.monotonic() - heard_s
                if quiet_s >= self._patience_s:
                    reason = str(error).splitlines()[0][:120]
                    words = f"the store of all ranks has not answered for {quiet_s:.0f} s: {reason}"
                    self._end(Culprit(-1, words), True)
                    return
            if verdict is not None and store is not None and not self._left.is_set():
                self._conclude(store, *verdict)
                return

    def _exchange(self, store: Store) -> tuple[Culprit, bool] | None:
        """Write a heartbeat; return what was found, and whether this rank found it."""
        self._number += 1
        beat = self._pulse.read(self._number, self._step())
        store.set(f"beat/{self._world.rank}", json.dumps(asdict(beat)))
        if store.check(["found"]):
            return Culprit(*json.loads(store.get("found"))), False
        if any(self._silent_s(store, rank) < self._patience_s for rank in range(self._world.rank)):
            return None  # a lower rank judges
        ranks = range(self._world.ranks)
        keys = [f"beat/{rank}" for rank in ranks]
        if store.check(keys):
            texts = [json.loads(text) for text in store.multi_get(keys)]
            beats = {rank: _read(text) for rank, text in zip(ranks, texts, strict=True)}
        else:  # some have not begun, as one that reads its weights from a slow disk
            begun = [rank for rank in ranks if store.check([keys[rank]])]
            beats = dict.fromkeys(ranks, Heartbeat(0))
            beats |= {rank: _read(json.loads(store.get(keys[rank]))) for rank in begun}
        silent_s = {rank: self._since_s(rank, beat.number) for rank, beat in beats.items()}
        culprit = find_culprit(beats, silent_s, self._patience_s)
        return None if culprit is None else (culprit, True)

    def _silent_s(self, store: Store, rank: int) -> float:
        """Return for how long a lower rank has been silent."""
        key = f"beat/{rank}"
        number = json.loads(store.get(key))["number"] if store.check([key]) else 0
        return self._since_s(rank, number)

    def _since_s(self, rank: int, number: int) -> float:
        """Return the seconds since a rank's heartbeat of that number was first seen here."""
        now_s = time.monotonic()
        if self._seen.get(rank, (None, 0.0))[0] != number:
            self._seen[rank] = number, now_s
        passed_s = now_s - self._seen[rank][1]
        return passed_s if number else passed_s / PATIENCE_BEFORE

    def _conclude(self, store: Store, culprit: Culprit, mine: bool) -> None:
        """Tell the others what was found, or wait until it is told; then end."""
        if mine:
            store.set("found", json.dumps(culprit))
        else:
            give_up_s = time.monotonic() + PRINTING_S
            with suppress(RuntimeError):
                while not store.check(["told"]) and time.monotonic() < give_up_s:
                    time.sleep(BEAT_S / 4)
        self._end(culprit, mine)

    def release(self) -> None:
        """Let the other ranks end: what was found is told."""
        with suppress(RuntimeError):
            own_store(self._world.name).set("told", "1")


def _read(values: dict[str, Any]) -> Heartbeat:
    open_ = {group: (int(n), str(name)) for group, (n, name) in values.pop("open").items()}
    return Heartbeat(**values, open=open_)


def own_store(name: str) -> Store:
    """Return a connection of its own to the store of all ranks: another thread may wait in theirs.

    Raises:
        RuntimeError: the process that keeps the store is gone.
    """
    wait_s = timedelta(seconds=10)
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=wait_s,
    )
    return PrefixStore(f"{name}/heartbeats", store)
