"""Give every rank of `mesh.context` a part of each row, however attention looks across parts.

Norms, MLPs, head and loss see tokens one by one and need no change, for the loss is a sum and
positions come with the tokens. Attention alone looks across, in the way of each technique. What an
embedding reads of the tokens before needs no exchange: a rank has the ids of the two before each
piece of a row, and embeds them itself (model/token_before).
"""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from headrace.assemble.sockets import Build, MicroBatch
from headrace.core.errors import ConfigError, RefusalKind
from headrace.core.remedy import Remedy, mend
from headrace.model.adapter import shape_of
from headrace.model.token_before import leads
from headrace.plan.technique import Context, Supported, Technique, Unsupported

AXIS = "context"


class RowPartTechnique(Technique[Build]):
    """A technique of this kind gives every rank a part of each row."""

    room: ClassVar[str] = "parallel"
    axes: ClassVar[tuple[str, ...]] = (AXIS,)
    symptoms: ClassVar[tuple[str, ...]] = ("memory capacity:activations", "memory capacity:logits")
    timed: ClassVar[bool] = True
    chunks: ClassVar[int]
    """pieces of a row that a rank has"""

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require several ranks, rows that divide, and attention in every layer."""
        plan = context.plan
        ranks, length = plan.mesh.context, plan.data.sequence_length
        if ranks == 1:
            return Unsupported(
                "mesh.context = 1: there is nothing to split over", mend("mesh.context=2")
            )
        if length % (self.chunks * ranks):
            return Unsupported(*indivisible(length, ranks, self.chunks))
        for name, other in plan.techniques.items():
            if "parts.mixer" in other.claims:
                return Unsupported(
                    f"{name} fills the mixer, and tokens that it mixes are on other ranks",
                    mend(f"-{name}"),
                    RefusalKind.COMBINATION,
                )
        model = shape_of(plan.model)
        if model.rope_scaling.kind == "dynamic":
            return Unsupported(
                "model.rope_scaling.kind = 'dynamic' turns by the length of a whole document, and "
                f"a rank of mesh.context = {ranks} has a part of it",
                context.whole(AXIS),
                RefusalKind.COMBINATION,
            )
        return Supported()


def part_of(
    work: MicroBatch, ranks: int, chunks: int, cut: Callable[[Tensor], Tensor]
) -> MicroBatch:
    """Return a rank's tokens of a micro-batch.

    Args:
        work: whole rows.
        ranks: the ranks that share every row.
        chunks: pieces of a row that each has.
        cut: whole rows [B, T, ...] -> the rank's tokens of them [B, T / ranks, ...].

    Raises:
        ConfigError: rows do not divide into the pieces.
    """
    length, rows = work.ids_BT.size(1), work.rows
    if length % (chunks * ranks):
        raise ConfigError(*indivisible(length, ranks, chunks))
    extras = {
        name: cut(x_N.unflatten(0, work.ids_BT.shape)).flatten(0, 1)
        for name, x_N in (work.extras or {}).items()
    }
    return work._replace(
        ids_BT=cut(work.ids_BT),
        targets_BT=cut(work.targets_BT),
        index_BT=cut(work.index_BT),
        rows=rows._replace(
            positions_BT=cut(rows.positions_BT),
            segments_BT=None if rows.segments_BT is None else cut(rows.segments_BT),
            noise_BT=None if rows.noise_BT is None else cut(rows.noise_BT),
            before_BC2=cut(leads(work.ids_BT)).unflatten(1, (chunks, -1))[:, :, 0],
        ),
        extras=extras or None,
    )


def indivisible(length: int, ranks: int, chunks: int) -> tuple[str, Remedy]:
    """Return what is wrong with rows that do not divide, and the nearest that do."""
    unit = chunks * ranks
    near = max(1, round(length / unit)) * unit
    return (
        f"rows of {length} tokens do not divide into {unit} pieces, {chunks} for each of "
        f"mesh.context = {ranks} ranks",
        mend(f"data.sequence_length={near}"),
    )
