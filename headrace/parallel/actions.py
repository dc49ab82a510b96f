"""What a schedule of a pipeline is made of."""

from typing import Literal, NamedTuple

Direction = Literal["forward", "backward", "inputs", "weights"]
"""A pass of a micro-batch through a stage. A backward pass is whole, or it is done in two parts:
the gradient of what came in, and later those of the weights."""


class Action(NamedTuple):
    """An action is one pass of one micro-batch through one of the rank's stages."""

    kind: Direction
    chunk: int
    micro: int
