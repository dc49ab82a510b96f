"""Define the plan's table of the optimizer, with factors for each role of a parameter."""

from typing import Annotated

from pydantic import Field

from headrace.core.remedy import mend
from headrace.core.strict import Strict, Wrong

Decay = Annotated[float, Field(ge=0, lt=1)]
RateFactor = Annotated[float, Field(gt=0, le=1e6)]
DecayFactor = Annotated[float, Field(ge=0, le=1e6)]


class LrFactors(Strict):
    """Multiply the learning rate by role, whichever optimizer takes the parameter.

    Decoupled weight decay is multiplied too, since a step takes away learning rate x decay.
    """

    matrices: RateFactor = 1.0
    """Factor of tensors of two or more dimensions inside of blocks."""
    embeddings: RateFactor = 1.0
    """Factor of tables that are looked up: tokens, learned positions. A tied output matrix is the
    table of tokens."""
    head: RateFactor = 1.0
    """Factor of the output matrix, where it is not the table of tokens."""
    vectors: RateFactor = 1.0
    """Factor of tensors of one dimension: norms and biases."""


class DecayFactors(Strict):
    """Multiply the weight decay by role, whichever optimizer takes the parameter."""

    matrices: DecayFactor = 1.0
    """Factor of tensors of two or more dimensions inside of blocks."""
    embeddings: DecayFactor = 1.0
    """Factor of tables that are looked up: tokens, learned positions."""
    head: DecayFactor = 1.0
    """Factor of the output matrix, where it is not the table of tokens."""
    vectors: DecayFactor = 0.0
    """Factor of tensors of one dimension. GPT-2 and its successors do not shrink them."""


class OptimizerConfig(Strict):
    """Configure the baseline's optimizer, which is AdamW (arXiv 1711.05101)."""

    lr: float = Field(default=1e-3, gt=0, le=1e30)
    """Highest learning rate; the schedule scales it."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the first and second moments, per step; at 1 a moment would never move."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0, le=1e6)
    """Rate of decay of the weights, by `decay_factors`; each step multiplies it by the learning
    rate."""
    clip_norm: float = Field(default=1.0, ge=0, le=1e9)
    """Largest global norm of the gradient; 0 only measures it."""
    lr_factors: LrFactors = LrFactors()
    decay_factors: DecayFactors = DecayFactors()

    def check_tied(self) -> None:
        """Check that the head has the embeddings' factors, or none, where both are one matrix.

        Raises:
            Wrong: the head has a factor of its own.
        """
        for name, table in (("lr_factors", self.lr_factors), ("decay_factors", self.decay_factors)):
            if table.head not in (1.0, table.embeddings):
                raise Wrong(
                    f"optimizer.{name}.head = {table.head:g} cannot be obeyed: with "
                    "model.tied_embeddings the output matrix is the table of tokens, whose factor "
                    f"is optimizer.{name}.embeddings = {table.embeddings:g}",
                    mend(f"optimizer.{name}.head={table.embeddings:g}"),
                )
