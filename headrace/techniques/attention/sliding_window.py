"""Let a token see the last `window` tokens only.

Attention's work grows with the square of the row; with a window it grows with row x window, if the
backend skips what the mask forbids: `flex_attention` does. torch's SDPA takes a dense mask instead,
computes every score and loses its causal kernel. Layers still pass what they know along: after L
layers a token has heard of L x (window - 1) tokens before it. Sampling computes rows whole, since
the cache keeps every key. Source: arXiv 1904.10509; Mistral 7B (arXiv 2310.06825, section 2).
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field

from headrace.core.ledger import Ledger, Line
from headrace.core.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)
from headrace.model.count import held_in
from headrace.model.mask import Rows
from headrace.sockets import Build


class SlidingWindow(Technique[Build]):
    """Let a token see the last `window` tokens only."""

    window: int = Field(default=1024, ge=1)
    """Tokens that a token sees, itself included; tuner range 128 to 4096."""

    room: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.PARTS
    composes: ClassVar[tuple[str, ...]] = ("mask",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("compute:attention",)
    card: ClassVar[Card] = Card(
        buys="attention's work in proportion to row x window, with a backend that skips blocks",
        costs="what stands further back is heard through other tokens only; under SDPA a dense "
        "mask of length^2 and its copy in every layer on a CPU (derived)",
        helps="rows of many windows, with flex_attention",
        hurts="short rows, and SDPA, which computes what it masks",
        source="arXiv 1904.10509; arXiv 2310.06825",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Where rows are longer than the window."""
        length = context.plan.data.sequence_length
        if self.window >= length:
            return Unsupported(
                f"a window of {self.window} tokens limits nothing in rows of {length}",
                f"techniques.sliding_window.window={max(1, length // 4)}",
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """A dense mask, shared by all layers, and the copy that SDPA makes of it in each.

        With documents masked the mask is theirs, and the window lies in it.
        """
        if "mask" in ledger.memory:
            return ledger
        sizes = ledger.sizes
        line = Line(sizes["mask"] / sizes["rows"], ("loss", "backward"))
        ledger = ledger.with_line("mask", line)
        for layer in range(int(sizes["layers"])):
            copied = Line(sizes["mask_copy"] / sizes["rows"], held_in(layer), layer)
            ledger = ledger.with_line(f"{layer}/mask_copy", copied)
        return ledger

    def apply(self, build: Build) -> None:
        """Compose the mask."""
        build.mask = replace(build.mask, window=self.window)

    def active(self, build: Build) -> Evidence:
        """Change a row's first token, and look how far one block carries it."""
        blocks, length = build.model.blocks.values(), build.plan.data.sequence_length
        if not len(blocks):
            return Evidence(None, "this rank holds no block")
        block: Any = next(iter(blocks))
        draw = torch.Generator().manual_seed(0)
        before = torch.randn(1, length, build.config.dim, generator=draw)
        after = before.clone()
        after[:, 0] += 1.0
        with torch.no_grad(), build.autocast():
            rows = Rows(torch.arange(length, device=build.device)[None])
            shared = build.model.share(rows, length)
            like = {"device": build.device, "dtype": build.model.residual_dtype}
            found = [block(x.to(**like), shared) for x in (before, after)]
        moved_T = (found[0] - found[1]).float().abs().amax(dim=(0, 2))
        inside = moved_T[: self.window].max().item()
        beyond = moved_T[self.window :].max().item()
        return Evidence(
            active=beyond == 0.0 < inside,
            detail=f"a change moved {self.window} tokens by {inside:.3g}, the "
            f"{length - self.window} after them by {beyond:.3g}",
            numbers={"inside": inside, "beyond": beyond},
        )
