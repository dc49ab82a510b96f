"""Pack whole documents into rows by best fit, so that only those longer than a row are cut.

The baseline cuts one stream, and a cut takes the beginning of a document away from its end: the
model then learns to continue a text whose facts it cannot see. Here a document stays in one row
where it fits one. Longer ones fill whole rows, and what is left of them is packed with other
documents by best-fit decreasing (data/packing). Documents do not see each other, and positions
restart in each, as `document_packing` has it.

What remains empty of a row is padding that no loss counts. On lengths as those of web pages it is
below a thousandth, since short documents fill what long ones leave; `headrace data pack PLAN` says
before the run what it is on a plan's own text. Rows are a pure function of their number, so that
order, mixture, ranks, workers and a resume are as with the baseline's rows. The validation text
is cut as ever, so that losses stay comparable.

Source: arXiv 2404.10830 (ICML 2024).
"""

from typing import ClassVar

from headrace.assemble.documents import leak_between_documents, with_document_mask
from headrace.assemble.sockets import Build
from headrace.costs.ledger import Ledger
from headrace.data.packing.best_fit import BestFit
from headrace.plan.technique import Card, Context, Evidence, Stage, Supported, Technique


class BestFitPacking(Technique[Build]):
    """Pack whole documents into rows by best fit, so that only those longer than a row are cut."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "data"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("pack",)
    composes: ClassVar[tuple[str, ...]] = ("mask",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("wasted tokens",)
    card: ClassVar[Card] = Card(
        buys=(
            "no document that fits a row is cut",
            "its paper reports 4.7% more in reading, 16.8% in following a context, and up to 58.3% "
            "fewer invented names in code and summaries, at the same cost of training",
        ),
        costs=(
            "a little padding, which `headrace data pack` counts before the run",
            "the causal kernel, under SDPA: a dense mask of rows x length^2 (derived)",
        ),
        helps="documents about as long as a row or shorter: web pages, code, conversations",
        hurts="a few long documents, which leave little to pack beside them",
        source="arXiv 2404.10830",
    )

    def supports(self, context: Context) -> Supported:
        """Run everywhere: any backend takes the mask, and rows are rows."""
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Add the mask that keeps documents apart; a row has as many tokens as before."""
        return with_document_mask(ledger)

    def apply(self, build: Build) -> None:
        """Take the place of the baseline's packer, and compose the mask."""
        build.mask = build.mask.with_document()
        build.pack = lambda build, shards: BestFit(shards, build.plan.data.sequence_length)

    def active(self, build: Build) -> Evidence:
        """Look at what a changed document moves, and whether rows come from the best fit."""
        leak, packer = leak_between_documents(build), build.loader.packer
        if not isinstance(packer, BestFit):
            return Evidence(False, "another packer makes the rows")
        detail = f"{sum(packer.units)} rows an epoch, {packer.padding:.2%} of them padding"
        numbers = {"rows": float(sum(packer.units)), "padding_fraction": packer.padding}
        return Evidence(leak.separate, f"{detail}; {leak.detail}", leak.numbers | numbers)
