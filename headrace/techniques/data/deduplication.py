"""Train on one of several equal texts.

A run pays for every token that it reads, and copies of a text teach little after the first one: web
corpora hold whole documents hundreds of times, models repeat those word for word, and validation
text that has copies in the training text measures memory. Deduplicated text reaches the same loss
in fewer steps (arXiv 2107.06499).

This rewrites the table `data.deduplication`, and preparing the data acts on it: one more pass
before the text is surveyed learns every document in the fixed order, so the shards, their name and
the tokenizer are those of what remains. What fell is told when a run begins, in its report and in
`cleaning.json` beside the shards, and a resumed run refuses text that was cleaned otherwise.

Cost: reading and comparing the text once more when it is prepared; nothing while training. Left
out: texts that mean the same in other words, which need a model to be found.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.costs.ledger import Ledger
from headrace.data.quality.compiled import INSTALL, METHODS, MISSING, is_installed
from headrace.plan.cleaning import DeduplicationConfig
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)


class Deduplication(DeduplicationConfig, Technique[Build]):
    """Train on one of several equal texts."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "data"
    stage: ClassVar[Stage] = Stage.DATA
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    table: ClassVar[str] = "techniques.deduplication"
    settled: ClassVar[tuple[str, ...]] = tuple(DeduplicationConfig.model_fields)
    card: ClassVar[Card] = Card(
        buys="fewer tokens to the same loss, and ten times less text that is repeated word for "
        "word (arXiv 2107.06499)",
        costs="one more pass over the text while it is prepared (derived)",
        helps="text from the web, and sources that were joined from several places",
        hurts="small texts of which several epochs are wanted: up to 4 of them are worth nearly "
        "as much as new text (arXiv 2305.16264)",
        source="arXiv 2107.06499",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `data.deduplication`, whole."""
        fields = set(DeduplicationConfig.model_fields)
        table = self.model_dump(mode="json", include=fields, exclude_none=True)
        return {"data.deduplication": table}

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require Numba for the methods whose loops it compiles; the device does not matter."""
        if self.method in METHODS and not is_installed():
            return Unsupported(MISSING, INSTALL, RefusalKind.PACKAGE)
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Return the ledger as it is: a step does not change."""
        return ledger

    def apply(self, build: Build) -> None:
        """Check that the plan's table is in force."""
        assert build.plan.data.deduplication is not None

    def active(self, build: Build) -> Evidence:
        """Read what fell from the record beside the shards, and count the documents in those."""
        record = build.prepared.cleaning
        report = record.step("deduplication") if record else None
        if record is None or report is None:
            return Evidence(False, f"{build.prepared.directory} was prepared without it")
        data = build.plan.data
        stand = build.prepared.sides(data.validation).source_documents
        if stand != record.documents_left:
            return Evidence(
                False,
                f"{stand:,} documents stand in the shards, and cleaning left "
                f"{record.documents_left:,}",
            )
        return Evidence(
            active=record.deduplication == data.deduplication,
            detail=f"{report.dropped_documents:,} of {report.documents:,} documents fell, "
            f"{report.dropped_bytes:,} of {report.bytes:,} bytes",
            numbers={
                "documents": report.documents,
                "dropped_documents": report.dropped_documents,
                "dropped_bytes": report.dropped_bytes,
            },
        )
