"""Divide the optimizer's states over the ranks, and the gradients too, while weights stay whole.

Replicas all keep the same two moments of AdamW, twice the weights' bytes. Here each rank of `shard`
(data x context) updates its slice of every parameter alone, so it keeps the states of that slice,
and the updated slices are gathered once a step (ZeRO, stages 1 and 2: arXiv 1910.02054). Stage 1
adds up the gradients of all micro-batches whole and scatters their sum once; stage 2 scatters those
of each micro-batch as the backward pass makes them, and never keeps more than a block's whole.
Stage 3, which gathers a block's weights for every pass, is `fsdp`.

The mechanism is that of `fsdp`: between steps a rank holds slices, and within a step the weights
that it gathered. So checkpoints and optimizers treat both alike, and the peak of memory is that of
the paper's stages with the fp32 slice beside the weights. A step sends one gather of the weights
and one scatter of the gradients, as many bytes as the sum of gradients that replicas need.
"""

from typing import ClassVar, Literal

from headrace.assemble.sliced import SlicingTechnique
from headrace.plan.technique import Card


class Zero(SlicingTechnique):
    """Divide the optimizer's states over the ranks, and the gradients too (ZeRO, 1 and 2)."""

    zero_stage: Literal[1, 2] = 1
    """1 keeps whole gradients over a step's micro-batches, 2 a block's; with one micro-batch both
    are the same."""

    gathers_once: ClassVar[bool] = True
    symptoms: ClassVar[tuple[str, ...]] = ("memory capacity:optimizer", "interconnect:gathers")
    card: ClassVar[Card] = Card(
        buys="optimizer state divided by the ranks, and in stage 2 gradients over several "
        "micro-batches (derived); a step sends no more than replicas do (arXiv 1910.02054, "
        "section 7)",
        costs=(
            "a slice in fp32 beside the whole weights (derived)",
            "stage 2: a scatter of the gradients every micro-batch",
        ),
        helps="models whose weights fit and whose moments do not; many micro-batches, for each of "
        "which fsdp gathers the weights twice",
        hurts="models whose whole weights are most of the memory: fsdp frees them",
        source="arXiv 1910.02054; torch.distributed.fsdp.fully_shard",
    )

    def sends_each(self) -> bool:
        """Scatter each micro-batch's gradients in stage 2."""
        return self.zero_stage == 2
