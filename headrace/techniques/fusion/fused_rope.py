"""The rotation of queries and keys as one kernel, forward and backward.

Rotary embedding is a few products by element, but eager torch widens queries and keys to fp32,
makes four products and two sums of them, joins and rounds: about ten passes through device memory
for what needs one read and one write. The kernel does that, and reads keys where they lie in the
fused product, which saves their copy (kernels/rope). The backward pass turns the gradient by the
negative angle with the same kernel. Nothing more is kept: cosine and sine are made once per
forward, in fp32, by whatever fills `parts.position`, and all layers share them.

It enters at each block, which passes its mixer a rotation that turns by the kernel. So it stands
beside any rule of frequencies, and no mixer knows of it. Left out: the norm of queries and keys
(`model.qk_norm`) in the same kernel, for which the mixer would have to hand over its norms.
Source: arXiv 2104.09864; arXiv 2410.10989.

Shapes: B rows, T tokens, D features, H heads, K features of a head.
"""

from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from headrace.core.ledger import Ledger
from headrace.core.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)
from headrace.kernels.launches import since
from headrace.kernels.rope import rope
from headrace.sockets import Build, Forward


class FusedRotation(NamedTuple):
    """`model.position.Rotation` by the kernel: fp32 [B or 1, T, 1, K/2]."""

    cos: Tensor
    sin: Tensor

    def turn(self, x_BTHK: Tensor) -> Tensor:
        """`x_BTHK` turned by its positions' angles, computed in fp32, returned in its own dtype."""
        return rope(x_BTHK, self.cos, self.sin)


class FusedRope(Technique[Build]):
    """Turn queries and keys by their positions in one kernel."""

    room: ClassVar[str] = "fusion"
    stage: ClassVar[Stage] = Stage.MODEL
    composes: ClassVar[tuple[str, ...]] = ("block_forward",)
    symptoms: ClassVar[tuple[str, ...]] = ("memory bandwidth", "kernel efficiency:elementwise")
    card: ClassVar[Card] = Card(
        buys="all but one read and one write of queries and keys in their rotation (derived)",
        costs="a kernel of Triton's that is compiled once per dtype and size; a compiler cannot "
        "fuse other work into it",
        helps="eager runs in half precision; rows of many heads",
        hurts="compiled runs may lose: there the rotation is joined to the work around it",
        source="arXiv 2104.09864; arXiv 2410.10989",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Rotary embedding on an NVIDIA GPU with Triton."""
        found = context.plan.model.position
        if found != "rope":
            return Unsupported(
                f"model.position = {found!r} rotates nothing", 'model.position="rope"'
            )
        if context.device != "cuda":
            return Unsupported(
                f"its kernel needs an NVIDIA GPU, not {context.device}", "device=cuda"
            )
        if not context.has_triton:
            return Unsupported("its kernel is compiled by Triton", "pip install triton")
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """The same is kept: rotated queries and keys, which attention needs."""
        return ledger

    def apply(self, build: Build) -> None:
        """Wrap the blocks."""
        build.notes[self.name()] = since({}, "rope")
        build.wrap_blocks(self.name(), _with_kernel)

    def active(self, build: Build) -> Evidence:
        """The kernel's launches in this run."""
        if not len(build.model.blocks):
            return Evidence(None, "this rank holds no block")
        launched = since(build.notes[self.name()], "rope")
        turned, back = (launched.get(kernel, 0) for kernel in ("rope_turn", "rope_back"))
        return Evidence(
            active=turned > 0,
            detail=f"launched {turned} rotations forward and {back} backward",
            numbers={"forward": turned, "backward": back},
        )


def _with_kernel(forward: Forward, layer: int) -> Forward:
    def turned(x_BTD: Tensor, shared: Any) -> Tensor:
        """A block whose rotation is the kernel."""
        return forward(x_BTD, shared._replace(rotation=FusedRotation(*shared.rotation)))

    return turned
