"""Let tokens of a row see their own document only, with positions that restart in each.

The baseline cuts one stream of documents into rows, so a row holds the end of one text and the
beginning of others, and plain causal attention lets them look at each other. This composes the mask
with `document` and restarts positions: what a document computes no longer depends on its
neighbours. No token is padded or dropped. Source: arXiv 2107.02027; Llama 3 (arXiv 2407.21783,
3.2).

Cost: SDPA takes the mask as a dense tensor and loses its causal kernel; a backend that skips blocks
of foreign documents turns the mask into a saving.
"""

from typing import ClassVar

from headrace.assemble.documents import leak_between_documents, with_document_mask
from headrace.assemble.sockets import Build
from headrace.costs.ledger import Ledger
from headrace.plan.technique import Card, Context, Evidence, Stage, Supported, Technique


class DocumentPacking(Technique[Build]):
    """Let tokens of a row see their own document only, with positions that restart in each."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "data"
    stage: ClassVar[Stage] = Stage.PARTS
    composes: ClassVar[tuple[str, ...]] = ("mask",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("wasted tokens",)
    card: ClassVar[Card] = Card(
        buys="rows without padding whose documents do not see each other",
        costs="the causal kernel, under SDPA: a dense mask of rows x length^2 (derived)",
        helps="short documents, fine-tuning, long rows",
        hurts="long documents, where there is nothing to separate (nanochat measured no gain at "
        "2,048 tokens)",
        source="arXiv 2107.02027; arXiv 2407.21783, section 3.2",
    )

    def supports(self, context: Context) -> Supported:
        """Run everywhere: any backend takes the mask."""
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Add a dense mask, shared by all layers, and the copy that SDPA makes of it in each."""
        return with_document_mask(ledger)

    def apply(self, build: Build) -> None:
        """Compose the mask; the loader then makes documents and positions."""
        build.mask = build.mask.with_document()

    def active(self, build: Build) -> Evidence:
        """Change one document, and look at its own loss and at the next one's."""
        leak = leak_between_documents(build)
        return Evidence(leak.separate, leak.detail, leak.numbers)
