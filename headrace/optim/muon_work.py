"""Predict the memory and the work of Muon's update: what a chunk holds, its matmuls and its passes.

Constants are counted in the code that they are of: optim/muon and kernels/orthogonalize.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from headrace.costs.work import COMPILED, EAGER, Matmul, Stream, Work, collective
from headrace.kernels.orthogonalize import SEGMENTS, SQUARED, STEPS, is_wide
from headrace.kernels.symmetric_matmul import is_served
from headrace.optim.muon import CHUNK_MATRICES, CHUNK_NUMBERS, MatrixCut
from headrace.optim.submatrix import shape_taken

FP32, BF16 = 4, 2
ITERATED, ITERATED_WIDE = (2, 2), ((1, 5), (2, 4))
"""Batches, and batches of squares [shorter, shorter], that an iteration holds at once; on X X^T
either of two."""
MOMENTUM, SCALED, WRITTEN, SCALARS = (40, 7), (12, 7), (20, 1), 8
"""Bytes of a number and kernels of a chunk where no compiler sees it: stacked, masked, momentum and
direction; norms and quotient; and the weight, beside one kernel a matrix. The last is the kernels
that make a step's scalars. Counted in optim/muon."""
HALF = 1.21
"""Time of half of a product beside all of it, in an update of 1b on an H200 (LOG.md). A prototype
alone took 0.69 and 0.83 of 2,048 and 768 rows."""
FUSED_MOMENTUM, FUSED_SCALED, FUSED_WRITTEN = (22, 3), (6, 4), (10, 1)
"""What these are where a compiler fuses them: the direction is bf16 then."""
PART_MOMENTUM, FUSED_PART_MOMENTUM, PART_SCALARS = (28, 6), (20, 3), 2
"""Bytes of a number and kernels of a chunk's momentum where a step updates a part of a matrix and
the momentum is the direction, without a compiler and with one; and kernels that a step's scalars
take more. Counted in optim/muon."""
SELECTED, FUSED_SELECTED = 13, 8
"""Kernels of a kind of piece: lengths, the largest, three of their places, what is taken out, four
that put it back beside IDLE, and three that count rows, of which a compiler fuses some. Counted in
optim/submatrix."""
FED_BACK, FUSED_FED_BACK = (19, 3, 4), (8, 0, 0)
"""Bytes of a number of the momentum that decays where rows were updated, how often a number of the
update is read or written beside, and kernels of a chunk. Counted in optim/muon."""


@dataclass(frozen=True)
class MuonWork:
    """Predict what the update of all matrices of one shape holds and does.

    Args:
        shape: of each.
        cut: how each is taken apart.
        count: how many there are.
        compiled: whether a compiler makes the update.
        on_gpu: whether it iterates in bf16.
        rows: whether rows are normalised.
        symmetric: whether half of symmetric matmuls is computed alone.
        ahead: whether a direction is more than the momentum.
        fraction: share of the shorter side of each piece that a step updates.
        slices: ranks of which each holds a slice.
        axis: the axis of the mesh whose `ranks`, with those of tensors, share the matrices.
        sizes: the ledger's.
    """

    shape: tuple[int, ...]
    cut: MatrixCut
    count: int
    compiled: bool
    on_gpu: bool
    rows: bool
    symmetric: bool
    ahead: bool
    fraction: float
    slices: float
    axis: str
    ranks: int
    sizes: Mapping[str, float]

    @property
    def chunk(self) -> int:
        """Return how many matrices are updated at once (optim/muon)."""
        most = max(self.ranks, CHUNK_NUMBERS // prod(self.shape))
        return min(self.count, CHUNK_MATRICES, most)

    @property
    def own(self) -> int:
        """Return how many matrices of all this rank orthogonalises: the most that any does."""
        whole, rest = divmod(self.count, self.chunk)
        return whole * ceil(self.chunk / self.ranks) + ceil(rest / self.ranks)

    def runs(self) -> list[tuple[int, int, int]]:
        """Return (pieces, rows, columns) of each kind of piece of one matrix."""
        return self.cut.shapes(self.shape[0], self.shape[1])

    def taken(self) -> list[tuple[int, int, int]]:
        """Return (pieces, rows, columns) of what is orthogonalised of each kind of piece."""
        return [(n, *shape_taken(self.fraction, *sides)) for n, *sides in self.runs()]

    def peak_bytes(self) -> float:
        """Return the most bytes that an update makes: of one chunk, and of what travels beside.

        Over ranks the chunk after it is sent meanwhile, and what became of the one before.
        """
        if not self._travels:
            return self._chunk_bytes()
        low = BF16 if self.on_gpu else FP32
        travelling = self.chunk / self.slices + ceil(self.chunk / self.ranks)
        neighbours = min(2, max(0, ceil(self.count / self.chunk) - 1))
        return self._chunk_bytes() + neighbours * low * travelling * prod(self.shape)

    def _chunk_bytes(self) -> float:
        """Return the most bytes that the update of one chunk makes."""
        mine = ceil(self.chunk / self.ranks)
        low = BF16 if self.on_gpu else FP32
        directions = self.ahead * FP32 * self.chunk * prod(self.shape) / self.slices
        whole = low * mine * prod(self.shape)
        sent = 0.0 if self.ranks == 1 else low * self.chunk * prod(self.shape) / self.slices
        part, most = self.fraction < 1, 0.0
        for pieces, rows, columns in self.taken():
            numbers, squares = pieces * rows * columns, pieces * min(rows, columns) ** 2
            shapes = ITERATED_WIDE if is_wide(rows, columns) else (ITERATED,)
            iterated = max(b * numbers + s * squares for b, s in shapes)
            most = max(most, low * mine * (iterated + part * numbers))
        chosen = low * mine * self._numbers_taken
        if self.compiled:  # fused: directions are made in bf16, and pieces where they are used
            return max(directions + whole + part * chosen, whole * (not part) + most) + sent
        copied = len(self.runs()) > 1 or self.cut.groups > 1
        apart = whole * copied
        before = directions + (whole if self.ranks > 1 else 0.0)
        normalized = 3 * chosen * self.rows
        last = sent + (2 * FP32 + part) * self.chunk * prod(self.shape) / self.slices
        done = self._done_bytes(low * mine)
        after = (1 + copied) * whole + normalized
        if part:
            placed = (1 + copied) * whole + copied * (1 + self.rows) * chosen
            after = max(placed, chosen + max(2 * whole, normalized))
        return max(before + apart + done + most, before + after, last)

    def _done_bytes(self, each: float) -> float:
        """Return the bytes of the pieces that are done while the last kind iterates."""
        return each * sum(n * rows * columns for n, rows, columns in self.taken()[:-1])

    @property
    def _numbers_taken(self) -> int:
        """Return how many numbers of one matrix are orthogonalised."""
        return sum(n * rows * columns for n, rows, columns in self.taken())

    def work(self) -> dict[str, Work]:
        """Return the pieces of work of one update, by name."""
        chunks, numbers = ceil(self.count / self.chunk), self.count * prod(self.shape)
        share = self.own / self.count
        streams = (MOMENTUM, SCALED, WRITTEN)
        if self.compiled:
            streams = (FUSED_MOMENTUM, FUSED_SCALED, FUSED_WRITTEN)
        momentum, scaled, written = streams
        name, low = "x".join(map(str, self.shape)), BF16 if self.on_gpu else FP32
        taken = self._numbers_taken * self.own
        if self.fraction < 1:
            if not self.ahead:
                momentum = FUSED_PART_MOMENTUM if self.compiled else PART_MOMENTUM
            bytes, often, kernels = FUSED_FED_BACK if self.compiled else FED_BACK
            written = written[0] + bytes + often * low, written[1] + kernels
        run_count = len(self.runs())
        pieces_of_work: dict[str, Work] = {
            "momentum": self._stream(momentum[0] * numbers / self.slices, momentum[1] * chunks),
            "scaled": self._stream(scaled[0] * taken, scaled[1] * chunks * run_count),
            "written": self._stream(
                written[0] * numbers / self.slices,
                chunks * written[1] if self.compiled else chunks * written[1] + self.count,
            ),
        }
        if self.cut.runs and (run_count > 1 or self.cut.groups > 1):
            pieces_of_work["apart"] = self._stream(
                4 * low * share * numbers, chunks * (run_count + 1)
            )
        if self.rows:
            pieces_of_work["rows"] = self._stream(4 * low * taken, 12 * chunks * run_count)
        if self.fraction < 1:
            pieces_of_work["selected"] = self._selected(share * numbers, taken, chunks * run_count)
        for index, (pieces, rows, columns) in enumerate(self.taken()):
            kind = f"{rows}x{columns}"
            if f"{kind}/gram" in pieces_of_work:  # pairs of queries have the shape of pairs of keys
                kind = f"{kind}_{index}"
            pieces_of_work |= self._matmuls(kind, self.own * pieces, rows, columns)
        pieces_of_work |= self._sent(low)
        return {
            f"update/muon_{name}{_suffix(self.cut)}/{what}": w for what, w in pieces_of_work.items()
        }

    def _selected(self, numbers: float, taken: float, batches: int) -> Stream:
        """Return the search of the longest rows, and what it takes to take them out and put back.

        Args:
            numbers: of all matrices of this rank.
            taken: those that are orthogonalised.
            batches: of pieces of one kind.
        """
        low = BF16 if self.on_gpu else FP32
        cast = self.on_gpu and not self.compiled
        read = FP32 + 2 * low * cast
        moved = FP32 + (2 * low if self.compiled else FP32 + low)
        put_back = 0 if self.compiled else 3 * low  # a compiler fuses it with what is written
        kernels = FUSED_SELECTED if self.compiled else SELECTED + cast
        return self._stream((read + put_back) * numbers + moved * taken, kernels * batches)

    def _stream(self, bytes: float, kernels: float) -> Stream:
        """Return a stream of the update."""
        launch = COMPILED if self.compiled else EAGER
        return Stream("optimizer", 1, bytes, max(1.0, kernels), launch=launch)

    def _matmuls(self, name: str, many: int, rows: int, columns: int) -> dict[str, Work]:
        """Return the matmuls of all iterations of so many pieces, and the sums that they add to.

        A batch of matrices has the tiles of one matmul as long as all of them.
        """
        narrow, long, wide = min(rows, columns), max(rows, columns), is_wide(rows, columns)
        often = {"gram": STEPS, "squared": STEPS, "product": STEPS}
        if wide:
            often = {"gram": len(SEGMENTS), "squared": SQUARED, "product": len(SEGMENTS)}
        low = BF16 if self.on_gpu else FP32
        halved = self.symmetric and self.on_gpu and is_served(narrow, long)
        across = round(HALF * narrow) if halved else narrow
        shapes = {"gram": (across, long), "squared": (across, narrow), "product": (long, narrow)}
        pieces_of_work: dict[str, Work] = {
            f"{name}/{what}": Matmul(
                "optimizer",
                often[what],
                (many * narrow, *shape),
                "bf16" if self.on_gpu else "fp32",
                launch=COMPILED if self.compiled else EAGER,
            )
            for what, shape in shapes.items()
        }
        if halved:  # which adds in passing
            return pieces_of_work
        added = STEPS if wide else 2 * STEPS  # to diagonals, in place
        copied = STEPS if wide else 0  # by the matmuls that add a matrix to their own
        numbers = copied * narrow**2 + added * narrow
        kernels = ceil(self.count / self.chunk) * (added + copied * self.on_gpu)
        pieces_of_work[f"{name}/sums"] = self._stream(2 * low * many * numbers, kernels)
        return pieces_of_work

    def _sent(self, low: int) -> dict[str, Work]:
        """Return what ranks send each other: matrices to their ranks, and results to all."""
        if self.ranks == 1:
            return {}
        whole, chunks = float(low * self.count * prod(self.shape)), ceil(self.count / self.chunk)
        if self.slices == 1:
            return {"gather": self._collective("all_gather", whole, chunks)}
        operation = "all_to_all" if self.on_gpu or self._travels else "all_gather"
        each = whole / self.slices if operation == "all_to_all" else whole
        return {"gather": self._collective(operation, 2 * each, 2 * chunks)}

    @property
    def _travels(self) -> bool:
        """Return whether chunks are sent while others are worked on (parallel/team)."""
        return self.slices > 1 and self.shape[0] % self.slices == 0

    def _collective(self, operation: Any, bytes: float, kernels: float) -> Work:
        return collective(self.sizes, self.axis, "optimizer", operation, bytes, kernels=kernels)


def _suffix(cut: MatrixCut) -> str:
    """Return what tells matrices of one shape apart that are taken apart differently."""
    return "/".join(f"_{n}x{rows}" for n, rows, _ in cut.runs)
