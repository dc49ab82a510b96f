"""Let a token see the last `window` tokens only.

Attention's work grows with the square of the row; with a window it grows with row x window, if the
backend skips what the mask forbids: `flex_attention` does. torch's SDPA takes a dense mask instead,
computes every score and loses its causal kernel. Layers still pass what they know along: after L
layers a token has heard of L x (window - 1) tokens before it. Sampling computes rows whole, since
the cache keeps every key. Source: arXiv 1904.10509; Mistral 7B (arXiv 2310.06825, section 2).
"""

from dataclasses import replace
from typing import ClassVar

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
from headrace.data.loader import Micro
from headrace.model.count import held_in
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
        """Change a row's first value, and look which of this rank's queries hear of it."""
        length, width = build.plan.data.sequence_length, build.config.resolved_head_dim
        ids = torch.zeros(1, length, dtype=torch.int64)
        work = build.place(build, Micro(ids, ids))
        place_T = work.index_BT[0]
        draw = torch.Generator().manual_seed(0)
        dtype = torch.bfloat16 if build.context.precision == "bf16" else torch.float32
        q, k, v = (
            torch.randn(1, len(place_T), 1, width, generator=draw).to(build.device, dtype)
            for _ in range(3)
        )
        changed = torch.where((place_T == 0)[None, :, None, None], v + 1, v)
        attend = build.model.attend
        with torch.no_grad():
            mask = attend.prepare(build.model.mask, work.rows, len(place_T))
            moved_T = (
                (attend(q, k, v, mask) - attend(q, k, changed, mask)).abs().amax(dim=(0, 2, 3))
            )
        near = moved_T[place_T < self.window]
        inside = near.max().item() if len(near) else 0.0
        far = moved_T[place_T >= self.window]
        beyond = far.max().item() if len(far) else 0.0
        return Evidence(
            active=beyond == 0.0 < inside if len(near) else None if beyond == 0.0 else False,
            detail=f"a change moved {len(near)} tokens by {inside:.3g}, {len(far)} after them "
            f"by {beyond:.3g}",
            numbers={"inside": inside, "beyond": beyond},
        )
