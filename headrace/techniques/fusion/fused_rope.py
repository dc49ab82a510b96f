"""Rotate queries and keys, with their norm, in one kernel forward and one backward.

Rotary embedding is a few products by element, but eager torch widens queries and keys to fp32,
makes four products and two sums of them, joins and rounds: about ten passes through device memory
for what needs one read and one write. The kernel does that, and reads keys where they lie in the
fused projection, which saves their copy (kernels/rope). The backward pass rotates the gradient by
the negative angle with the same kernel. Nothing more is kept: cosine and sine are made once per
forward, in fp32, by whatever fills `parts.position`, and all layers share them.

With `model.qk_norm` each head is first divided by the root of its mean square. A mixer hands that
norm over to the rotation, and the kernel does it on the way, for no traffic more. Eager torch keeps
an fp32 product of every query and key for it; here the heads are kept as they were, most of which
the fused projection keeps anyway.

It enters at each block, which passes its mixer a rotation that calls the kernel. So it stands
beside any rule of frequencies, and no mixer knows of it. A norm of another kind than the default is
applied before the kernel.

A compiler makes a rotation of its own and joins it to the work around it, but not across this
kernel. It was expected to win by that and does not: on an H200 the compiled plans of both shapes
gained a little (results/techniques.jsonl; with `fused_rms_norm`, peers.jsonl). It is on where a
plan names it. No recipe of Headrace's own does: they run on CPUs too, which refuse it. The tuner
keeps what it measures to gain more than its margin; beside a compiler it found no difference yet
that it could tell from none (tuner.jsonl).
Source: arXiv 2104.09864; arXiv 2410.10989; arXiv 2302.05442 (QK-norm).

Shapes: B rows, T tokens, D features, H heads, K features of a head.
"""

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from headrace.assemble.sockets import Build, Forward
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.costs.work import CUSTOM
from headrace.kernels.launches import since
from headrace.kernels.rope import rope, rope_norm
from headrace.model.norm import RMSNorm
from headrace.model.position import Normalise, as_is
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

KERNELS = ("rope_rotate", "rope_back", "rope_norm_rotate", "rope_norm_back")


class FusedRotation(NamedTuple):
    """It does `model.position.Rotation` by the kernel; fp32 [B or 1, T, 1, K/2]."""

    cos: Tensor
    sin: Tensor

    def rotate(self, x_BTHK: Tensor, norm: Normalise = as_is) -> Tensor:
        """Rotate `norm(x_BTHK)` by its positions' angles in fp32; returns its own dtype."""
        if type(norm) is RMSNorm:
            return rope_norm(x_BTHK, norm.weight, norm.eps, self.cos, self.sin)
        return rope(norm(x_BTHK), self.cos, self.sin)


class FusedRope(Technique[Build]):
    """Rotate queries and keys by their positions in one kernel, and normalise them in it."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "fusion"
    stage: ClassVar[Stage] = Stage.MODEL
    composes: ClassVar[tuple[str, ...]] = ("block_forward",)
    symptoms: ClassVar[tuple[str, ...]] = (
        "memory bandwidth:elementwise",
        "kernel efficiency:elementwise",
    )
    card: ClassVar[Card] = Card(
        buys=(
            "all but one read and one write of queries and keys in their rotation and norm, "
            "and with model.qk_norm the memory of an fp32 product of both (derived)"
        ),
        costs=(
            "a kernel of Triton's that is compiled once per dtype and size",
            "a compiler cannot fuse other work into it",
        ),
        helps="runs in half precision: eager ones plainly, compiled ones by little or nothing "
        "(H200, results/techniques.jsonl, tuner.jsonl); rows of many heads; model.qk_norm",
        hurts="eager steps that wait for launches",
        source="arXiv 2104.09864; arXiv 2410.10989; arXiv 2302.05442",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support rotary embedding on an NVIDIA GPU with Triton."""
        position = context.plan.model.position
        if position != "rope":
            return Unsupported(
                f"model.position = {position!r} rotates nothing", mend("model.position=rope")
            )
        return context.lacks_triton() or Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Keep rotated queries and keys as before; of their norm, what was copied for it."""
        sizes = ledger.sizes
        heads, groups = sizes["heads"], sizes["kv_heads"]
        copied = heads if 1 < groups < heads else 0  # out of the fused product
        kept = sizes["activation_bytes"] * sizes["tokens"] * copied * sizes["head_dim"]
        for name, line in ledger.memory.items():
            if name.endswith("/qk_norm"):
                ledger = ledger.with_line(name, replace(line, bytes=kept))
        ledger = replace(ledger, sizes={**sizes, "qk_norm_products": 0.0})
        ledger = ledger.reworked(lambda n, w: None if n.startswith("qk_norm/") else w)
        # Queries' kernel and keys'.
        return ledger.made_one("rope", launch=2 * CUSTOM).made_one("queries", launch=0.0)

    def apply(self, build: Build) -> None:
        """Wrap the blocks."""
        build.notes[self.name()] = since({}, "rope")
        build.wrap_blocks(self.name(), _with_kernel)

    def active(self, build: Build) -> Evidence:
        """Read the kernels' launches in this run; with a norm in them where the model has one.

        Where a mixer learns, gradients have passed its rotation too.
        """
        if not len(build.model.blocks):
            return Evidence(None, "this rank holds no block")
        launched = since(build.notes[self.name()], "rope")
        rotated, back, normed, normed_back = (launched.get(kernel, 0) for kernel in KERNELS)
        ran, returned = (normed, normed_back) if build.config.qk_norm else (rotated, back)
        blocks: list[Any] = [*build.model.blocks.values()]
        learns = any(p.requires_grad for block in blocks for p in block.mixer.parameters())
        return Evidence(
            active=ran > 0 and (returned > 0 or not learns),
            detail=f"launched {rotated + normed} rotations forward and {back + normed_back} "
            f"backward, {normed} and {normed_back} of them with a norm",
            numbers={
                "forward": rotated + normed,
                "backward": back + normed_back,
                "norms": normed,
                "norms_backward": normed_back,
            },
        )


def _with_kernel(forward: Forward, layer: int) -> Forward:
    def with_rotation(x_BTD: Tensor, shared: Any) -> Tensor:
        """Run a block whose rotation is the kernel."""
        return forward(x_BTD, shared._replace(rotation=FusedRotation(*shared.rotation)))

    return with_rotation
