"""Let a token see the last `window` tokens only.

Attention's work grows with the square of the row; with a window it grows with row x window, if the
backend skips what the mask forbids: `flex_attention` does. torch's SDPA takes a dense mask instead,
computes every score and loses its causal kernel. Layers still pass what they know along: after L
layers a token has heard of L x (window - 1) tokens before it. With `between`, some layers have no
window and hear of all: one after so many with it, as Gemma 2 alternates. There are two masks then,
made once per forward. Sampling computes rows whole, since the cache keeps every key.
Source: arXiv 1904.10509; Mistral 7B (arXiv 2310.06825, section 2); Gemma 2 (arXiv 2408.00118).
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.costs.mask_work import windowed
from headrace.data.loader import Micro
from headrace.model.adapter import shape_of
from headrace.model.attention import SelfAttention
from headrace.model.mask import MaskSpec
from headrace.plan.technique import (
    Card,
    Context,
    Doubt,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)


class SlidingWindow(Technique[Build]):
    """Let a token see the last `window` tokens only."""

    window: int = Field(default=1024, ge=1, le=1 << 24)
    """Tokens that a token sees, itself included; tuner range 128 to 4096."""

    between: int = Field(default=0, ge=0, le=100_000)
    """Layers with the window between two without it; 0 is no layer without; tuner range 1 to 5."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.PARTS
    composes: ClassVar[tuple[str, ...]] = ("mask",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("computation:attention",)
    card: ClassVar[Card] = Card(
        buys="attention's work in proportion to row x window, with a backend that skips blocks",
        costs=(
            "what stands further back is heard through other tokens only",
            "under SDPA a dense mask of length^2 and its copy in every layer on a CPU (derived)",
        ),
        helps="rows of many windows, with flex_attention",
        hurts="short rows, and SDPA, which computes what it masks",
        source="arXiv 1904.10509; arXiv 2310.06825",
    )

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn of a window in which a token sees only itself."""
        if self.window > 1 or self.between:
            return None
        usual = f"techniques.{self.name()}.window={max(2, plan.data.sequence_length // 4)}"
        return Doubt(
            f"techniques.{self.name()}.window = 1 shows a token itself alone: no layer passes "
            "anything from one token to another",
            mend(usual),
            changes=(usual,),
        )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support rows that are longer than the window."""
        length, model = context.plan.data.sequence_length, shape_of(context.plan.model)
        if model.window:
            return Unsupported(
                f"this model has a window already: model.window = {model.window}",
                mend(f"-{self.name()}"),
            )
        if self.window >= length:
            return Unsupported(
                f"a window of {self.window} tokens limits nothing in rows of {length}",
                mend(f"techniques.sliding_window.window={max(1, length // 4)}"),
            )
        if self.between >= model.layers:
            return Unsupported(
                f"no layer of {model.layers} is without a window after {self.between} with it",
                mend(f"techniques.sliding_window.between={model.layers - 1}"),
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Add a dense mask, shared by the layers with the window, and SDPA's copy of it in each."""
        return windowed(ledger, self.window, self.between)

    def apply(self, build: Build) -> None:
        """Compose the mask."""
        build.mask = replace(build.mask, window=self.window, between=self.between)

    def active(self, build: Build) -> Evidence:
        """Change a row's first value, and read which of this rank's queries it reaches."""
        length, model = build.plan.data.sequence_length, build.model
        attends = {int(n): isinstance(b.mixer, SelfAttention) for n, b in model.blocks.items()}
        layers = [layer for layer, here in attends.items() if here]
        if all(map(model.mask.is_open, layers)):
            alone = build.world.size("pipeline") == 1
            return Evidence(False if alone else None, "no layer of attention here has the window")
        ids = torch.zeros(1, length, dtype=torch.int64)
        work = build.place(build, Micro(ids, ids))
        place_T = work.index_BT[0]
        with torch.no_grad():
            # A prefix is seen from beyond the window too.
            shared = model.share(work.rows._replace(prefix_B=None), len(place_T))
            moved_T = self._moved(build, shared.for_layer(is_open=False).mask, place_T)
            open_T = moved_T
            if model.mask.between:
                open_T = self._moved(build, shared.for_layer(is_open=True).mask, place_T)
        near, far = moved_T[place_T < self.window], moved_T[place_T >= self.window]
        inside, beyond, through = (
            x.max().item() if len(x) else 0.0 for x in (near, far, open_T[place_T >= self.window])
        )
        spec = MaskSpec(between=self.between)
        right = [layer for layer in layers if spec.is_open(layer)]
        opened = [layer for layer in layers if model.mask.is_open(layer)]
        hears = self.between > 0 and len(far) > 0 and model.mask.blocks is None
        wrong = beyond > 0 or opened != right or (hears and through == 0)
        return Evidence(
            active=False if wrong else inside > 0 if len(near) else None,
            detail=f"a change moved {len(near)} tokens by {inside:.3g}, {len(far)} after them "
            f"by {beyond:.3g}; {len(opened)} of {len(layers)} layers of attention have no window",
            numbers={"inside": inside, "beyond": beyond, "open_layers": len(opened)},
        )

    def _moved(self, build: Build, mask: object, place_T: Tensor) -> Tensor:
        """Return how far each query's result moves under `mask` with the first token's value."""
        config, blocks = build.config, build.model.blocks.values()
        attend = next(b.mixer.attend for b in blocks if isinstance(b.mixer, SelfAttention))
        groups, tensor = config.resolved_kv_heads, build.world.size("tensor")
        draw = torch.Generator().manual_seed(0)
        shape = len(place_T), config.resolved_head_dim
        q, k, v = (
            torch.randn(1, shape[0], heads, shape[1], generator=draw).to(build.device, build.dtype)
            for heads in (whole // tensor for whole in (config.heads, groups, groups))
        )
        changed = torch.where((place_T == 0)[None, :, None, None], v + 1, v)
        return (attend(q, k, v, mask) - attend(q, k, changed, mask)).abs().amax(dim=(0, 2, 3))
