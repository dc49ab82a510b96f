"""Let the first tokens of a text see each other both ways, and learn to continue them.

A question is there as a whole before its answer begins, yet under a causal mask a token of the
question sees only half of it. In a prefix language model the first tokens see each other fully,
those behind them look back as ever, and one decoder does the work of an encoder and a decoder. What
a prefix shows cannot be asked for: targets inside of it are ignored, the first that counts is the
token that follows it. The rest is plain training, and validation counts the same targets.

Each row draws the length of its prefix evenly from 0 to `tokens`, by the seed and the row's place
in the stream: whoever reads it draws the same, and the model knows short prompts as well as long
ones. Where documents are masked, each of the row's documents has a prefix of that length and none
reaches into another; a document that is shorter teaches nothing. Sampling takes the prompt as
the prefix, and keeps its cache.

The prefix is one part of the mask description. torch's SDPA takes it as a dense tensor of rows x
length^2 and leaves its causal kernel; `flex_attention` computes it. Other backends refuse. Where
`ulysses` shares rows over ranks, they cut what whole rows drew, and attend over whole rows again.
Sources: T5 (arXiv 1910.10683, section 3.2.1); UL2 (arXiv 2205.05131).

Shapes: B rows, T tokens.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build, MicroBatch
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.count import instants_of
from headrace.costs.decoder_work import masked
from headrace.costs.ledger import Ledger, Line
from headrace.data.loader import Micro
from headrace.model.attention import equal_scores, weights
from headrace.model.head import IGNORED
from headrace.model.mask import mixed
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

LOOKED_UP = 10.0
"""Features of a head that take as long as a mask of each row's own does in flex_attention, in every
score: 9.8 at 160m and 11.0 at 1b (results/techniques.jsonl)."""
ROWS = 64
"""How many rows evidence draws; it looks at the longest prefix among them."""


def prefixes(row_B: Tensor, most: int, seed: int) -> Tensor:
    """Draw tokens of each row's prefix by its place in the stream, int64 [B], 0 to `most`."""
    return mixed(row_B, torch.zeros_like(row_B), seed) % (most + 1)


def with_prefix(work: MicroBatch, tokens: int, seed: int) -> MicroBatch:
    """Return a micro-batch whose rows have prefixes, without targets that a prefix shows.

    The target of a prefix's last token is the first that the prefix does not hold.
    """
    T = work.ids_BT.size(1)
    prefix_B = prefixes(work.index_BT[:, 0] // T, min(tokens, T - 1), seed)
    shown_BT = work.rows.positions_BT < prefix_B[:, None] - 1
    return work._replace(
        targets_BT=work.targets_BT.masked_fill(shown_BT, IGNORED),
        rows=work.rows._replace(prefix_B=prefix_B),
    )


class PrefixLm(Technique[Build]):
    """Let the first tokens of a text see each other both ways, and learn to continue them."""

    tokens: int = Field(default=128, gt=1, le=1 << 24)
    """Longest prefix; each row draws its own, from 0 on; tuner range an eighth to half of a row."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.PARTS
    composes: ClassVar[tuple[str, ...]] = ("mask", "annotate")
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys=(
            "prompts that are read as an encoder reads them",
            "better on all of T5's tasks than a causal decoder of the same size trained "
            "alike (arXiv 1910.10683, table 2)",
        ),
        costs=(
            "the targets inside of the prefix, tokens / 2 of a row on average",
            "under SDPA a dense mask of rows x length^2 and the causal kernel (derived)",
        ),
        helps="models that answer: fine-tuning on questions, summaries, translation",
        hurts="plain text, where every token could have been a target; samplers that do not know "
        "the prefix",
        source="arXiv 1910.10683, section 3.2.1; arXiv 2205.05131",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support prefixes shorter than a row, where no ring of ranks computes attention."""
        plan = context.plan
        length = plan.data.sequence_length
        if self.tokens >= length:
            return Unsupported(
                f"a prefix of up to {self.tokens} tokens leaves nothing to predict in rows of "
                f"{length}",
                mend(f"techniques.prefix_lm.tokens={max(2, length // 2)}"),
            )
        if plan.mesh.context > 1 and context.has_ring:
            return Unsupported(
                f"the ring of mesh.context = {plan.mesh.context} ranks has no prefix that sees "
                "both ways",
                context.whole("context"),
                RefusalKind.COMBINATION,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Add a dense mask, shared by all layers, and the copy that SDPA makes of it in each."""
        sizes = ledger.sizes
        ledger = ledger.with_line("mask", Line(sizes["mask"], ("loss", "turn", "backward")))
        for layer in range(int(sizes["layers"])):
            line = Line(sizes["mask_copy"], instants_of(layer), layer)
            ledger = ledger.with_line(f"{layer}/mask_copy", line)
        # A prefix adds half of its square to half of the row's; the mean square is a third.
        return masked(ledger, 1.0, 1 + (self.tokens / sizes["length"]) ** 2 / 3, extra=LOOKED_UP)

    def apply(self, build: Build) -> None:
        """Compose the mask, and give prefixes to whole rows."""
        build.mask = replace(build.mask, prefix=True)
        seed = build.plan.seed
        build.annotate.append(lambda build, work: with_prefix(work, self.tokens, seed))

    def active(self, build: Build) -> Evidence:
        """Read weights around the longest of some prefixes, and which targets count."""
        length, spec, world = build.plan.data.sequence_length, build.model.mask, build.world
        ids_BT = torch.zeros(ROWS, length, dtype=torch.int64)
        work = build.place(build, Micro(ids_BT, ids_BT))
        prefix_B, attend = work.rows.prefix_B, build.model.attend
        if prefix_B is None or not spec.prefix:
            return Evidence(False, "rows have no prefix, or the mask knows none")
        row = int(prefix_B.argmax())
        prefix = int(prefix_B[row])
        parts = world.size("tensor") * world.size("context")  # ranks that share heads
        q, k = (
            x[:, :, : x.size(2) // parts]
            for x in equal_scores(build.config, build.device, build.dtype, length=length)
        )
        group = torch.zeros(length, dtype=torch.int64, device=build.device)
        group[prefix - 1], group[prefix] = 1, 2
        with torch.no_grad():
            one = work.rows._replace(prefix_B=prefix_B[row : row + 1])
            mask = build.model.prepare_mask(spec.of_layer(0), one, work.ids_BT.size(1))
            weight_TN = weights(attend, mask, q, k, group)[0].amax(dim=1)
        inside, beyond = weight_TN[0, 1].item(), weight_TN[:prefix, 2].max().item()
        ignored_T = work.targets_BT[row] == IGNORED
        right = ignored_T.equal(work.index_BT[row] % length < prefix - 1)
        ignored = int(ignored_T.sum())
        return Evidence(
            active=prefix > 1 and inside > 0 == beyond and right,
            detail=f"of a prefix of {prefix} tokens the first gives the last a weight of "
            f"{inside:.3g}, and all of them {beyond:.3g} to the next; {ignored} targets ignored",
            numbers={"prefix_tokens": prefix, "ignored_targets": ignored},
        )
