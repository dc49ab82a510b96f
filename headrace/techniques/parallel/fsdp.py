"""Hold a share of every parameter, gradient and optimizer state on each rank (FSDP2).

Replicas that all hold the same weights waste memory. Here each of the ranks along `shard` (data x
context) keeps a slice of every parameter; a block's weights are gathered right before it runs and
freed after it, and its gradients arrive as slices, already summed (ZeRO stage 3: arXiv 1910.02054;
PyTorch FSDP: arXiv 2304.11277; torch.distributed.fsdp.fully_shard).

Cost: two gathers of the weights and one scatter of the gradients a micro-batch; with several
micro-batches gradients are kept whole until the last one and sent once. `reshard=False` keeps the
gathered weights until the backward pass: one gather less, the weights' memory more. Left open, they
are kept where that adds at most a twentieth to the predicted peak.
`mesh.replicate` slices within groups of ranks, and adds slices of the gradients up over the groups
(HSDP): gathers stay inside a node, and a rank holds more.
"""

from typing import ClassVar

from headrace.assemble.sliced import SlicingTechnique
from headrace.plan.technique import Card


class Fsdp(SlicingTechnique):
    """Hold a share of every parameter, gradient and optimizer state on each rank (FSDP2)."""

    reshard: bool | None = None
    """Free a block's gathered weights after its forward pass. Left open: where they are more than a
    twentieth of the predicted peak."""

    symptoms: ClassVar[tuple[str, ...]] = (
        "memory capacity:parameters",
        "memory capacity:optimizer",
    )
    card: ClassVar[Card] = Card(
        buys="weights, gradients and optimizer state divided by the ranks (derived)",
        costs=(
            "gathering every block's weights twice a micro-batch, or once and keeping them",
            "time where the network is slow",
        ),
        helps="models whose 16 bytes a parameter do not fit, and then larger micro-batches",
        hurts="small models, where replicas fit and one sum of gradients is cheaper",
        source="arXiv 2304.11277; arXiv 1910.02054; torch.distributed.fsdp.fully_shard",
    )

    def frees_weights(self) -> bool | None:
        """Gather a block's weights once more for its backward pass, where they are much."""
        return self.reshard
