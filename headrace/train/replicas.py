"""Compare the ranks that hold copies of the same numbers, and name one whose copy is another.

Memory, links and arithmetic of a GPU can err without an error: Llama 3's run of 54 days had six
such cases (arXiv 2407.21783, section 3.3.4), and one rank's wrong weights spoil everyone's
gradients. Replicas take the same sums and the same updates, so their weights and optimizer states
are equal to the bit. Here each rank adds up the bits of what it holds, tensor by tensor, every
`mesh.compare_every_steps` steps, and the sums of equal pieces are compared. A bit that flips
changes the sum by a power of two.

What no other rank holds cannot be compared: slices of `fsdp` without `mesh.replicate`, stages of a
pipeline, halves of a matrix. With two copies a difference shows and not which is wrong; with three
or more the one that differs from the most is named.

Cost: weights and optimizer states are read once, and 20 bytes a tensor and rank are sent.
"""

from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.command import train_command
from headrace.core.errors import ConfigError, RunError
from headrace.core.remedy import mend
from headrace.train import state
from headrace.train.checkpoint import Checkpoints

COMPARED = ("model/", "optimizer/")
"""Beginnings of the names of what is compared."""
CHUNK_NUMBERS = 1 << 24
"""Numbers that are added up at once: the sum takes 8 bytes for each."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a number -> the whole numbers as which its bits are added up."""
MOST_NAMED = 3


class CopiesDiffer(RunError):
    """Two ranks hold other numbers where they should hold the same."""


class Comparison:
    """Compare copies while a run goes; it is one of the build's `after_update`.

    Args:
        build: the run.
        checkpoints: of the run: which of them to go on from is told.
        run: the run's folder, for the remedy.
    """

    def __init__(self, build: Build, checkpoints: Checkpoints) -> None:
        self._every, self._checkpoints = build.plan.mesh.compare_every_steps, checkpoints
        self._equal_at = self._times = 0
        if not _has_copies(build):
            raise ConfigError(
                f"mesh.compare_every_steps = {self._every} compares what several ranks hold, and "
                "here each number is on one rank alone",
                mend("mesh.compare_every_steps=0") | mend("mesh.replicate=2"),
            )

    def __call__(self, build: Build, good: Tensor) -> None:
        """Compare after an update whose step is due.

        Raises:
            CopiesDiffer: they differ; it names the rank where that is known.
        """
        step = int(build.now["step"]) + 1
        if step % self._every:
            return
        sums = build.world.gather(_sums(build))
        self._times += 1
        copies = _copies(sums)
        if wrong := {key: by for key, by in copies.items() if len(set(by.values())) > 1}:
            raise self._differ(wrong, step)
        self._equal_at = step
        counts = {"compared": self._times, "tensors": len(copies), "equal_at": step}
        build.run_notes.copies = counts

    def _differ(self, wrong: dict[Any, dict[int, int]], step: int) -> CopiesDiffer:
        odd = Counter(rank for by in wrong.values() for rank in _odd(by))
        names = [name for name, *_ in list(wrong)[:MOST_NAMED]]
        what = ", ".join(names) + (
            f" and {len(wrong) - len(names)} more" * (len(wrong) > MOST_NAMED)
        )
        if odd:
            rank = odd.most_common(1)[0][0]
            who = f"rank {rank} holds another {what} than its replicas after step {step}"
        else:
            ranks = sorted(next(iter(wrong.values())))
            who = f"ranks {' and '.join(map(str, ranks))} differ in {what} after step {step}"
        sound = [n for n in self._checkpoints.steps() if n <= self._equal_at]
        kept = f"step-{sound[-1]} is from before" if sound else "no checkpoint is from before"
        resume = f"--resume --checkpoint step-{sound[-1]}" if sound else ""
        run = self._checkpoints.folder.parent
        return CopiesDiffer(
            f"{who}, and they were equal after step {self._equal_at}: memory, a link or a GPU of "
            f"it errs; {kept}",
            f"{train_command(run, *resume.split())}, on another device for that rank",
        )


def _sums(build: Build) -> list[tuple[str, tuple[int, ...], tuple[int, ...], int]]:
    """Return (name, offset, shape, sum of bits) of each piece that this rank holds."""
    pieces = {n: p for n, p in state.tensors(build).items() if n.startswith(COMPARED)}
    sums = [sum_of_bits(piece.local) for piece in pieces.values()]
    numbers = torch.stack(sums).tolist() if sums else []  # one wait for the device
    return [
        (name, piece.box.offset, piece.box.shape, number)
        for (name, piece), number in zip(pieces.items(), numbers, strict=True)
        if piece.local.numel()
    ]


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, read as whole numbers, modulo 2^64: an int64 scalar."""
    flat = tensor.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for part in flat.split(CHUNK_NUMBERS):
        total += part.view(WORDS[part.element_size()]).sum(dtype=torch.int64)
    return total


def _copies(sums_of_ranks: list[list[Any]]) -> dict[Any, dict[int, int]]:
    """Return each piece that several ranks hold -> rank -> its sum."""
    by_piece: dict[Any, dict[int, int]] = defaultdict(dict)
    for rank, sums in enumerate(sums_of_ranks):
        for name, offset, shape, number in sums:
            by_piece[name, tuple(offset), tuple(shape)][rank] = number
    return {piece: by for piece, by in by_piece.items() if len(by) > 1}


def _odd(by_rank: dict[int, int]) -> list[int]:
    """Return the ranks whose sum is not that of the most; empty where no sum is of the most."""
    (most, count), *rest = Counter(by_rank.values()).most_common()
    if rest and rest[0][1] == count:
        return []
    return [rank for rank, number in by_rank.items() if number != most]


def _has_copies(build: Build) -> bool:
    """Return whether any parameter is held by several ranks; the same answer on each."""
    model = build.model
    copies = [
        build.layouts[name].copies(build.world, parameter)
        for name, parameter in model.named_parameters()
        if name in build.layouts
    ]
    return build.world.any(max(copies, default=1) > 1)


def compare_copies(build: Build, checkpoints: Checkpoints) -> None:
    """Let the ranks compare their copies while the run goes, where its plan asks for that.

    Raises:
        ConfigError: no number is held by several ranks.
    """
    if build.plan.mesh.compare_every_steps:
        build.after_update.append(Comparison(build, checkpoints))
