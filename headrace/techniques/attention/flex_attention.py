"""Compute attention through FlexAttention: one compiled kernel skips what the mask forbids.

SDPA takes any mask but the causal flag as a dense tensor, loses its flash kernel, and computes
every score. FlexAttention takes the mask as a function of two places, generates a flash kernel
around it, and is told which blocks of 128 x 128 scores hold anything: blocks of foreign documents
blocks beyond a window and blocks that a sparse pattern leaves out are never touched. What is done
to a score, a soft cap or a slope of distance, is a second function that the same kernel computes.
Both are made from the one mask description, the blocks once per forward, and all layers share them.
All is compiled, so it needs Triton; a new shape compiles again. torch's backward pass has no CPU
kernel, so a CPU is refused.

While sampling, one query over a longer cache sees all of it, and SDPA serves that: a kernel per
cache length would have to be compiled. Source: arXiv 2412.05496, torch.nn.attention.flex_attention.

Shapes: B rows, T tokens, H query heads, G key-value heads, K features of a head.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from headrace.assemble.sockets import Build
from headrace.costs.ledger import Ledger
from headrace.model.attention import Sdpa, equal_scores, kernels_of
from headrace.model.backend_needs import lacks
from headrace.model.mask import MaskSpec, Rows, own_slopes
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

SMALLEST_HEAD = 16
"""Features that Triton's matmul takes at least."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_mod(spec: MaskSpec, rows: Rows, length: int) -> MaskMod:
    """Return `model.mask.allowed` for one query and key: (row, head, query, key) -> bool."""
    segments_BT = rows.segments_BT if spec.document else None
    prefix_B = rows.prefix_B if spec.prefix else None
    places_BT = (
        rows.positions_BT if prefix_B is None else rows.positions_BT.expand(len(prefix_B), -1)
    )
    block, seen_ZZ = 1, None
    if spec.blocks is not None:
        block = spec.blocks.block
        seen_ZZ = spec.blocks.seen(-(-length // block), rows.positions_BT.device)

    def may_see(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        ok = k <= q if spec.causal else k >= 0
        if spec.window is not None:
            ok = ok & (q - k < spec.window) & (k - q < spec.window)
        if seen_ZZ is not None:
            ok = ok & seen_ZZ[q // block, k // block]
        if prefix_B is not None:
            ok = ok | (places_BT[b, k] < prefix_B[b])
        if segments_BT is not None:
            ok = ok & (segments_BT[b, q] == segments_BT[b, k])
        return ok

    return may_see


def score_mod(spec: MaskSpec, device: torch.device) -> ScoreMod | None:
    """Return the soft cap and `model.mask.bias` of a score; None where scores stay as they are."""
    cap, slope_H = spec.soft_cap, own_slopes(spec, device) if spec.alibi else None
    if not cap and slope_H is None:
        return None

    def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cap:
            score = cap * torch.tanh(score / cap)
        if slope_H is not None:
            score = score - slope_H[h] * (q - k).abs()
        return score

    return changed


class Scored(NamedTuple):
    """A block mask stands beside what is done to the scores inside of it."""

    blocks: BlockMask
    change: ScoreMod


def masked_rows(spec: MaskSpec, rows: Rows) -> int | None:
    """Return how many rows have a mask of their own; None where one serves all."""
    if spec.document and rows.segments_BT is not None:
        return rows.segments_BT.size(0)
    return rows.prefix_B.size(0) if spec.prefix and rows.prefix_B is not None else None


class FlexBackend(Sdpa):
    """A backend that makes FlexAttention's block mask and scores from the mask description."""

    knows = frozenset({"prefix", "blocks", "alibi", "soft_cap"})

    def __init__(self) -> None:
        self._blocks = torch.compile(create_block_mask, dynamic=False)
        self._attend = torch.compile(flex_attention, dynamic=False)
        self._changes: dict[tuple[int, tuple[int, int], float], ScoreMod | None] = {}
        self.blocks: BlockMask | None = None
        """The block mask of the last forward pass."""

    def prepare(self, spec: MaskSpec, rows: Rows, length: int) -> Any:
        """Make the blocks that are not empty, the mask inside of them, and their scores' change."""
        device = rows.positions_BT.device
        self.blocks = self._blocks(
            mask_mod(spec, rows, length),
            masked_rows(spec, rows),
            None,
            length,
            length,
            device=device,
        )
        scores = (spec.alibi, spec.alibi_share, spec.soft_cap)
        if scores not in self._changes:  # one function object, so that nothing compiles twice
            self._changes[scores] = score_mod(spec, device)
        change = self._changes[scores]
        return self.blocks if change is None else Scored(self.blocks, change)

    def __call__(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: object) -> Tensor:
        """Compute attention; one query over a longer key sequence sees all of it."""
        if q_BTHK.size(1) != k_BTGK.size(1):
            return super().__call__(q_BTHK, k_BTGK, v_BTGK, None)
        q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
        change = mask.change if isinstance(mask, Scored) else None
        blocks = mask.blocks if isinstance(mask, Scored) else mask
        assert isinstance(blocks, BlockMask), "prepare makes a mask for every forward pass"
        K = q.size(-1)
        if K < SMALLEST_HEAD:  # zeros add nothing to a score
            q, k, v = (F.pad(x, (0, SMALLEST_HEAD - K)) for x in (q, k, v))
        out = self._attend(
            q, k, v, change, blocks, scale=K**-0.5, enable_gqa=q.size(1) != k.size(1)
        )
        return out[..., :K].transpose(1, 2)


class FlexAttention(Technique[Build]):
    """Compute attention through one compiled kernel that skips what the mask forbids."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("parts.attend",)
    symptoms: ClassVar[tuple[str, ...]] = ("computation:attention", "memory bandwidth:attention")
    card: ClassVar[Card] = Card(
        buys=(
            "the scores of masked blocks, and the dense mask of rows x length^2, times the "
            "heads where their scores have slopes (derived)"
        ),
        costs=(
            "compiling a kernel for each shape",
            "a block mask per forward pass",
        ),
        helps="packed documents, sliding windows, sparse patterns, slopes and soft caps, on rows "
        "of many blocks of 128 tokens",
        hurts="plain causal rows, where the flash and cuDNN kernels are faster",
        source="arXiv 2412.05496; torch.nn.attention.flex_attention",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support NVIDIA GPUs of compute capability 8.0 or later, with Triton."""
        return lacks(context, self.name()) or Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Remove the dense mask, whoever composes it; attention keeps what a flash kernel keeps."""
        dense = [n for n in ledger.memory if n == "mask" or n.endswith(("/mask_copy", "/scores"))]
        facts = {"mask": 0.0, "mask_copy": 0.0, "scores": 0.0}
        ledger = replace(ledger.without(dense), sizes={**ledger.sizes, **facts})
        return ledger.attended("flex")

    def apply(self, build: Build) -> None:
        """Fill the backend."""
        build.parts.attend = FlexBackend()

    def active(self, build: Build) -> Evidence:
        """Read the share of blocks that the last mask left out, and the kernel that is launched."""
        backend: Any = build.model.attend
        blocks = getattr(backend, "blocks", None)
        if blocks is None:
            return Evidence(False, "no forward pass made a block mask")
        rows, length = blocks.shape[0], blocks.shape[-1]
        q, k = equal_scores(build.config, build.device, torch.bfloat16, rows=rows, length=length)
        names = kernels_of(backend, q, k, k, blocks)
        used = [n for n in names if "flex_attention" in n and n.startswith("triton")]
        skipped = float(blocks.sparsity())
        return Evidence(
            active=bool(used),
            detail=f"launched {', '.join(used[:2]) or 'none of its kernels'}; the mask leaves out "
            f"{skipped:.0f}% of its blocks",
            numbers={"blocks_left_out_percent": skipped},
        )
