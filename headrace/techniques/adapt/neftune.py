"""Add noise to what the first block reads while training, so that answers are learned less by rote.

Each feature of a token is moved by a number from -1 to 1 times alpha / sqrt(L x D), where L counts
the tokens of its text: of its document where documents are masked, else of its row. So the noise of
a whole text has about the same length whatever its size. Validation and sampling have none.

The noise is a hash of (seed, place of the token in the stream, feature), as the draws of Sophia
are: micro-batches, ranks, recomputation and a resume change nothing, and another epoch has other
noise. It is added behind the embedding's norm where there is one. Ranks that share rows cut what
whole rows drew.

Source: NEFTune (Jain et al. 2023, arXiv 2310.05914).

Shapes: B rows, T tokens, D features.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build, MicroBatch
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.costs.work import Stream, Work
from headrace.data.loader import Micro
from headrace.model.mask import Rows, mixed
from headrace.plan.technique import Card, Context, Doubt, Evidence, Stage, Supported, Technique

WORD = (1 << 30) - 1
"""Largest word of a token: its product with a 32-bit factor fits into 62 bits."""
EAGER = (272, 19)
"""Bytes of a feature and kernels that eager torch moves: a hash in 64-bit words, and what scales
and adds it (counted of the operations below)."""
FUSED = 8
"""Bytes of a feature where a compiler makes them one kernel."""


def lengths(rows: Rows, length: int) -> Tensor:
    """Return the tokens of each token's text, int64 [B, T], or [1, T] where rows are one text."""
    positions_BT = rows.positions_BT
    if rows.segments_BT is None:
        return torch.full_like(positions_BT, length)
    T = positions_BT.size(1)
    place_T = torch.arange(T, device=positions_BT.device)
    is_last_BT = torch.ones_like(positions_BT, dtype=torch.bool)
    is_last_BT[:, :-1] = positions_BT[:, 1:] == 0
    ends_BT = torch.where(is_last_BT, place_T, T).flip(1).cummin(dim=1).values.flip(1)
    return positions_BT.gather(1, ends_BT) + 1


def with_noise(work: MicroBatch, seed: int) -> MicroBatch:
    """Return a micro-batch whose rows say what each token's noise is made of, and how much."""
    index_BT = work.index_BT
    word_BT = mixed(index_BT & WORD, index_BT >> 30, seed & WORD) & WORD
    length_BT = lengths(work.rows, work.ids_BT.size(1))
    noise_BT = word_BT | length_BT << 30
    return work._replace(rows=work.rows._replace(noise_BT=noise_BT))


def noise_of(noise_BT: Tensor, dim: int, alpha: float) -> Tensor:
    """Return the noise of each token, fp32 [B, T, D]."""
    place_D = torch.arange(dim, device=noise_BT.device)
    word_BT, length_BT = noise_BT & WORD, (noise_BT >> 30).float()
    share_BTD = mixed(word_BT[..., None], place_D, 0).float() * 2.0**-31 - 1.0
    return share_BTD * (alpha * (length_BT * dim).rsqrt())[..., None]


class Neftune(Technique[Build]):
    """Add noise to what the first block reads while training, so that less is learned by rote."""

    alpha: float = Field(default=5.0, gt=0, le=1000)
    """Length of a text's noise, in its units of 1 / sqrt(3); tuner range 5 to 15."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "adapt"
    stage: ClassVar[Stage] = Stage.LINEAR
    composes: ClassVar[tuple[str, ...]] = ("annotate",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys="answers that follow the question more freely: AlpacaEval of a 7B model from 29.8% to "
        "64.7% after Alpaca (arXiv 2310.05914, table 1)",
        costs="a hash of every feature that the first block reads (derived)",
        helps="fine-tuning on few thousand conversations, several times over",
        hurts="pretraining, and facts that must be told word for word",
        source="arXiv 2310.05914",
    )

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn of more noise than the paper tried."""
        if self.alpha <= 15:
            return None
        usual = f"techniques.{self.name()}.alpha=5"
        return Doubt(
            f"techniques.{self.name()}.alpha = {self.alpha:g} is more noise than its paper tried, "
            "5 to 15",
            mend(usual),
            changes=(usual,),
        )

    def supports(self, context: Context) -> Supported:
        """Support every device and layout."""
        return Supported()

    def is_noisy(self) -> bool:
        """Add noise while training alone."""
        return True

    def predict(self, ledger: Ledger) -> Ledger:
        """Add the noise to what the embedding's forward pass moves."""
        features = ledger.sizes["tokens"] * ledger.sizes["dim"]

        def edit(name: str, piece: Work) -> Work:
            if name != "embedding/forward" or not isinstance(piece, Stream):
                return piece
            bytes, kernels = (FUSED, 1) if ledger.sizes.get("compiled_loss") else EAGER
            more = bytes * features / piece.count
            return replace(piece, bytes=piece.bytes + more, kernels=piece.kernels + kernels)

        return ledger.reworked(edit)

    def apply(self, build: Build) -> None:
        """Give words to whole rows, and add their noise where the model begins."""
        seed, model = build.plan.seed, build.model
        enter, alpha, dim = model.enter, self.alpha, build.config.dim
        build.annotate.append(lambda build, work: with_noise(work, seed))

        def noisy(ids_BT: Tensor, shared: Any) -> Tensor:
            x_BTD = enter(ids_BT, shared)
            if shared.noise_BT is None or not torch.is_grad_enabled():
                return x_BTD
            return x_BTD + noise_of(shared.noise_BT, dim, alpha).to(x_BTD.dtype)

        model.enter = noisy

    def active(self, build: Build) -> Evidence:
        """Compare what the first block reads with and without gradients, of this rank's tokens."""
        model, length = build.model, build.plan.data.sequence_length
        if model.embed is None:
            return Evidence(None, "this stage of a pipeline embeds nothing")
        ids_BT = torch.zeros(1, length, dtype=torch.int64)
        work = build.place(build, Micro(ids_BT, ids_BT))
        own = work.ids_BT.size(1)
        shared = model.share(work.rows, own)
        # Outside of a step, shards of the embedding are whole on no rank until they are gathered.
        sharded = [part for part in (model, model.embed) if hasattr(part, "unshard")]
        for part in sharded:
            part.unshard()  # type: ignore[operator]
        with torch.no_grad():
            plain_BTD = model.enter(work.ids_BT, shared)
        with torch.enable_grad():
            moved_BTD = (model.enter(work.ids_BT, shared) - plain_BTD).detach().float()
        for part in sharded:
            part.reshard()  # type: ignore[operator]
        norm = moved_BTD.norm().item()
        wanted = self.alpha * (own / (3 * length)) ** 0.5
        return Evidence(
            active=norm > 0,
            detail=f"noise of length {norm:.3g} on {own} tokens; {wanted:.3g} is expected",
            numbers={"length": norm, "expected": wanted},
        )
