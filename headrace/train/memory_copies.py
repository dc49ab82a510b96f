"""Keep each rank's newest state in the memory of hosts, for restarts that read no disk.

A process that dies takes its memory with it, and torchrun then starts all of them again. Files
under /dev/shm are memory that outlives processes. Every `checkpoint.memory_every_steps` steps each
rank writes what it holds there, as a checkpoint of its part alone: the same files, the same sha256,
the same code to read them. With several hosts a thread then sends it to the rank of the same place
on the next host, which keeps it too. So a state survives the death of any process, and of any one
host, whose ranks get theirs back from the next one (Gemini: SOSP 2023, doi
10.1145/3600006.3613145).

A resume takes the newest step that all ranks have, in memory or on the disk. Memory serves the
layout that wrote it alone; another one goes on from the disk. The next copy begins when the one
before has arrived. Two steps of a rank lie beside each other while one is written, and on several
hosts a neighbour's too. A run that ends well removes its copies; those of one that never goes on
stay until the host starts again, or `rm -r /dev/shm/headrace-UID`.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.command import train_command
from headrace.core.errors import ConfigError
from headrace.core.files import publish
from headrace.core.remedy import mend
from headrace.parallel.boxes import TensorPart
from headrace.train.checkpoint import INDEX, Checkpoints, steps_in

SHARED_MEMORY = Path("/dev/shm")
"""Where Linux keeps files in memory."""
CHUNK_BYTES = 1 << 26
"""Bytes of a file that are sent at once."""
LAYOUT = ("mesh", "techniques")
"""Tables of a plan that say which part of the state a rank holds."""


class MemoryCopies(Checkpoints):
    """Keep the newest state of one rank in memory.

    Args:
        build: the run.
        run: the run's folder.
        root: where files lie in memory.
        local_ranks: ranks of a host; None asks torchrun, and else it is all of them.

    Raises:
        ConfigError: copies are asked for, and this system has no place for them.
    """

    def __init__(
        self,
        build: Build,
        run: Path,
        *,
        root: Path = SHARED_MEMORY,
        local_ranks: int | None = None,
    ) -> None:
        self.build, self.world = build, build.world
        self.every = build.plan.checkpoint.memory_every_steps
        if not self.every:
            return
        local = local_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", self.world.ranks))
        self.next_host = (self.world.rank + local) % self.world.ranks
        self.last_host = (self.world.rank - local) % self.world.ranks
        self.group: Any = None
        if local < self.world.ranks:  # a group of its own: it sends beside the step's collectives
            self.group = dist.new_group(backend="gloo")
        key = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
        self.all = _own_folder(root) / key
        folder = self._folder_of(self.world.rank)
        folder.mkdir(parents=True, exist_ok=True)
        rank, ranks = self.world.rank, self.world.ranks
        super().__init__(folder, rank=rank, ranks=ranks, keep_last=1, alone=True)
        self.go_on = train_command(run, "--resume", "checkpoint.memory_every_steps=0")

    def _folder_of(self, rank: int) -> Path:
        return self.all / f"rank-{rank:05d}"

    def is_due(self, step: int) -> bool:
        """Return whether a copy is made after so many steps."""
        return bool(self.every) and step % self.every == 0

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor | TensorPart],
        values: dict[str, Any],
        before_change: list[Callable[[], None]] | None = None,
    ) -> None:
        """Begin to copy all that this rank holds, what others hold too included.

        Raises:
            RunError: the copy before failed, or memory has no room for this one.
        """
        every = {
            name: piece._replace(writes=True) if isinstance(piece, TensorPart) else piece
            for name, piece in tensors.items()
        }
        super().save(step, every, values, before_change)

    def _write(
        self, step: int, host: dict[str, Tensor], pieces: dict[str, Any], values: dict[str, Any]
    ) -> None:
        super()._write(step, host, pieces, values)
        if self.group is not None:
            sent, last = self.folder / f"step-{step}", self.last_host
            _exchange(sent, self.next_host, self._aside(last, step), last, last, self.group)
            self._keep(last, step)

    def _aside(self, rank: int, step: int) -> Path:
        return self._folder_of(rank) / f"step-{step}.tmp"

    def _keep(self, rank: int, step: int) -> None:
        """Publish another rank's copy that has arrived, and remove older ones of it."""
        folder = self._folder_of(rank)
        done = folder / f"step-{step}"
        shutil.rmtree(done, ignore_errors=True)
        publish(self._aside(rank, step), done)
        for old in steps_in(folder):
            if old != step:
                shutil.rmtree(folder / f"step-{old}")

    def newest_of(self, disk: Checkpoints) -> Path | None:
        """Return the newest checkpoint of the disk or of memory, the latter where it is newer.

        All ranks call this together. A rank whose host lost its copy gets it from another one.

        Args:
            disk: the checkpoints of the run.
        """
        if not self.every:
            return disk.latest()
        copies = [{(r, n) for r, n in own} for own in self.world.gather(self._copies_here(disk))]
        somewhere = set[tuple[int, int]]().union(*copies)
        steps = {step for _, step in somewhere}
        whole = [n for n in steps if all((r, n) in somewhere for r in range(self.world.ranks))]
        newest = max(whole, default=-1)
        if newest <= max(disk.steps(), default=-1):
            return disk.latest()
        for rank in range(self.world.ranks):
            if (rank, newest) not in copies[rank]:
                sender = next(r for r, here in enumerate(copies) if (rank, newest) in here)
                self._move(newest, sender, rank)
        return self.folder / f"step-{newest}"

    def _copies_here(self, disk: Checkpoints) -> list[tuple[int, int]]:
        """Return rank and step of each copy on this host that this layout wrote.

        Where another layout wrote newer ones than the disk has, a line tells that they are left.
        """
        now, newest = self._layout(self.build.plan.dump()), max(disk.steps(), default=-1)
        usable, others = list[tuple[int, int]](), set[int]()
        for rank in range(self.world.ranks):
            for step in steps_in(self._folder_of(rank)):
                index = self._index(self._folder_of(rank) / f"step-{step}")
                if self._layout(index.get("plan", {})) == now:
                    usable.append((rank, step))
                elif step > newest:
                    others.add(step)
        if others and self.world.rank == 0:
            self.build.note_line(
                f"copies of step-{max(others)} in memory are of another layout, and are not read"
            )
        return usable

    def _layout(self, plan: Mapping[str, Any]) -> str:
        return json.dumps([plan.get(table) for table in LAYOUT], sort_keys=True)

    def _move(self, step: int, sender: int, rank: int) -> None:
        """Send a rank its copy; only the two of them do anything."""
        path = self._folder_of(rank) / f"step-{step}"
        if self.world.rank == sender:
            _exchange(path, rank, None, rank, rank)
        elif self.world.rank == rank:
            _exchange(None, sender, self._aside(rank, step), sender, rank)
            self._keep(rank, step)

    def begin_at(self, step: int) -> None:
        """Remove copies of later steps: the run goes on from this one."""
        if self.every:
            for rank in {self.world.rank, self.last_host}:
                for later in steps_in(self._folder_of(rank)):
                    if later > step:
                        shutil.rmtree(self._folder_of(rank) / f"step-{later}")

    def drop(self) -> None:
        """Remove the copies, once the one on its way has arrived: the disk has the run's end.

        Raises:
            RunError: the last copy failed.
        """
        if self.every:
            self.wait()
            for rank in {self.world.rank, self.last_host}:
                shutil.rmtree(self._folder_of(rank), ignore_errors=True)


def _own_folder(root: Path) -> Path:
    """Return the folder of this user's copies.

    Raises:
        ConfigError: there are no files in memory here, or another user made the folder.
    """
    folder = root / f"headrace-{os.getuid()}"
    if root.is_dir():
        folder.mkdir(mode=0o700, exist_ok=True)
    if not folder.is_dir() or folder.is_symlink() or folder.stat().st_uid != os.getuid():
        why = "is another user's" if folder.exists() else "cannot be made: this system has none"
        raise ConfigError(
            f"checkpoint.memory_every_steps keeps copies in {folder}, which {why}",
            mend("checkpoint.memory_every_steps=0"),
        )
    return folder


def _sizes(bytes: int) -> list[int]:
    """Return the bytes of each chunk of a file."""
    whole, rest = divmod(bytes, CHUNK_BYTES)
    return [CHUNK_BYTES] * whole + [rest] * bool(rest)


def _chunks(file: Path) -> Iterator[Tensor]:
    """Yield a file's bytes, chunk by chunk."""
    with file.open("rb") as opened:
        while part := opened.read(CHUNK_BYTES):
            yield torch.frombuffer(bytearray(part), dtype=torch.uint8)


def _exchange(
    copy: Path | None, to: int, aside: Path | None, came_from: int, of: int, group: Any = None
) -> None:
    """Send a copy to one rank while a copy arrives from another, file by file.

    Args:
        copy: what is sent; None sends nothing.
        to: the rank that gets it.
        aside: the folder of what arrives; None gets nothing.
        came_from: the rank that sends it.
        of: the rank whose copy arrives.
        group: the ranks among which it is; None is all of them.
    """
    if aside is not None:
        aside.mkdir(parents=True, exist_ok=True)
    leaving = [] if copy is None else [copy / INDEX, *copy.glob("*.safetensors")]
    for number, name in enumerate((INDEX, f"rank-{of:05d}.safetensors")):
        file = leaving[number] if leaving else None
        head = None if file is None else torch.tensor([file.stat().st_size])
        coming = None if aside is None else torch.zeros(1, dtype=torch.long)
        _both(head, to, coming, came_from, group)
        out = iter(()) if file is None else _chunks(file)
        sizes = [] if coming is None else _sizes(int(coming))
        rounds = max(0 if head is None else len(_sizes(int(head))), len(sizes))
        with nullcontext() if aside is None else (aside / name).open("wb") as into:
            for at in range(rounds):
                part = torch.empty(sizes[at] if at < len(sizes) else 0, dtype=torch.uint8)
                _both(next(out, None), to, part if len(part) else None, came_from, group)
                if into is not None:
                    into.write(part.numpy().tobytes())


def _both(out: Tensor | None, to: int, into: Tensor | None, came_from: int, group: Any) -> None:
    """Send and receive at once; None is nothing."""
    works = [] if out is None else [dist.isend(out, to, group=group)]
    works += [] if into is None else [dist.irecv(into, came_from, group=group)]
    for work in works:
        assert work is not None
        work.wait()
