"""What is trained on and what is held out, in numbers, and what makes a validation doubtful."""

import math
from dataclasses import dataclass
from typing import Any

from headrace.core.command import rerun_plan
from headrace.core.remedy import as_remedy, mend
from headrace.core.units import format_bytes
from headrace.data.heldout import LEAST, Overlap, Record
from headrace.data.shards import Shards
from headrace.plan.technique import Doubt

COPIED = 0.25
"""Share of a validation text's passages, trained on too, from which on this is told."""
FEW_TARGETS = 500
"""Targets below which an evaluation is told as one of few."""
MOVES, FALLS = 0.4, 0.26
"""From one text of n targets to another, bits per byte has a deviation of MOVES x n^-FALLS of its
mean. Fitted to pieces of two held-out texts (plays and articles; dim 64, 2 layers, vocabulary 512):
14% at 50 targets, 9 to 10% at 200, 6 to 7% at 1,000. Neighbours are alike, so it falls slower than
the root. Pieces of Python's standard library, whose files differ more, had 36%, 31% and 26%: the
number is told as the least that is to be expected."""


@dataclass(frozen=True)
class Sides:
    """Hold both sides of prepared data: what is trained on, and what is held out.

    Args:
        train: shards that are trained on.
        validation: shards of the validation text.
        asked: `data.validation`: a share, or a path.
        record: how the sides were made; None where an earlier version made them.
    """

    train: tuple[Shards, ...]
    validation: Shards
    asked: float | str
    record: Record | None

    @property
    def share(self) -> float | None:
        """Share of the text's bytes that is held out; None where validation has its own text."""
        if isinstance(self.asked, str):
            return None
        return self.validation.text_bytes / max(1, self._trained_bytes + self.validation.text_bytes)

    @property
    def _trained_bytes(self) -> int:
        return sum(shards.text_bytes for shards in self.train)

    @property
    def source_documents(self) -> int:
        """Return how many documents of the sources stand on either side; one that is cut is one."""
        documents = sum(shards.documents for shards in self.train)
        if isinstance(self.asked, str):
            return documents
        cut = self.record.cut_documents if self.record else 0
        return documents + self.validation.documents - cut

    @property
    def overlap(self) -> Overlap | None:
        """Return how much of a validation text of its own is trained on, or None if not known."""
        return self.record.overlap if self.record else None

    @property
    def line(self) -> str:
        """Return both sides in one line."""
        documents = sum(shards.documents for shards in self.train)
        trained = f"training text: {_amount(self._trained_bytes, documents)}"
        validation = _amount(self.validation.text_bytes, self.validation.documents)
        if self.share is None:
            return f"{trained}; validation text: {validation}"
        cut = self.record.cut_documents if self.record else 0
        ends = f", {_number(cut, 'end')} of documents too large to be held out whole" if cut else ""
        return f"{trained}; held out: {validation}, {self.share:.1%} of the text{ends}"

    def to_dict(self) -> dict[str, Any]:
        """Return both sides as JSON values."""
        validation, overlap = self.validation, self.overlap
        return {
            "train_bytes": self._trained_bytes,
            "train_documents": sum(shards.documents for shards in self.train),
            "held_out_bytes": validation.text_bytes,
            "held_out_documents": validation.documents,
            "held_out_share": self.share,
            "cut_documents": self.record.cut_documents if self.record else None,
            "overlap": None
            if overlap is None
            else {
                **overlap.model_dump(),
                "share": overlap.share,
                "passages_share": overlap.passages_share,
            },
        }

    def doubts(
        self,
        row_tokens: int,
        *,
        targets: int | None = None,
        share: float = 1.0,
        limit: str = "eval.tokens",
        bits_per_byte: float | None = None,
    ) -> list[Doubt]:
        """Return what makes a validation loss on this text doubtful.

        Args:
            row_tokens: targets of a row.
            targets: that are evaluated; all of the text's without it.
            share: of the validation text's targets that are evaluated.
            limit: the key or option that limits them.
            bits_per_byte: the loss, where it is known.
        """
        if targets is None:
            targets = self.validation.tokens - 1
        doubts = [self._overlapping(), self._few(targets, share, row_tokens, limit, bits_per_byte)]
        return [doubt for doubt in doubts if doubt is not None]

    def _overlapping(self) -> Doubt | None:
        if self.share is not None:
            return None
        if self.record is None or self.overlap is None:
            return Doubt(
                f"whether text of data.validation = {self.asked} is trained on too is not known: "
                "an earlier version prepared these shards",
                as_remedy(f"{rerun_plan('train', 'name=NEW')} for a new run, which prepares again"),
                kind="overlap_unknown",
            )
        overlap = self.overlap
        copied = overlap.passages_share >= COPIED
        if not overlap.documents and not copied:
            return None
        number = _number(overlap.of_documents, "validation document")
        whole = (
            overlap.documents == overlap.of_documents or overlap.passages == overlap.of_passages > 0
        )
        many = "ALL" if whole else f"{overlap.passages_share:.1%} of the"
        passages = f"{many} passages of the validation text"
        if not overlap.documents:
            message = f"{passages} are trained on, too"
        else:
            count = (
                f"ALL {number}"
                if overlap.documents == overlap.of_documents
                else f"{overlap.documents:,} of {number}"
            )
            message = f"{count} ({overlap.share:.1%} of their bytes) are trained on, too"
            if overlap.passages_share > overlap.share + COPIED:
                message += f", and {passages}"
        measures = "the loss measures" if whole else "their loss measures"
        return Doubt(
            f"{message}: {measures} memory, not what was learned",
            mend(
                "data.validation=0.05",
                text="data.validation=PATH of text that is in no source, or a share, as "
                "data.validation=0.05",
            ),
            kind="overlap",
            numbers={
                "documents": overlap.documents,
                "share": overlap.share,
                "passages_share": overlap.passages_share,
            },
        )

    def _few(
        self, targets: int, share: float, row_tokens: int, limit: str, bits_per_byte: float | None
    ) -> Doubt | None:
        enough = max(FEW_TARGETS, row_tokens)
        if not 0 < targets < enough:
            return None
        moves = MOVES * targets**-FALLS
        why = f"fewer than {FEW_TARGETS:,}" if targets < FEW_TARGETS else "less than a row"
        numbers: dict[str, float] = {"targets": targets, "moves_by_share": moves}
        by = f"{moves:.0%}"
        if bits_per_byte is not None:
            numbers["moves_by_bits_per_byte"] = moves * bits_per_byte
            by = f"{moves * bits_per_byte:.2g} ({by})"
        return Doubt(
            f"validation has {_number(targets, 'target')}, {why}: from one such text to another, "
            f"bits per byte moves by about {by} or more",
            as_remedy(self._more(targets, share, enough, row_tokens, limit)),
            kind="few_targets",
            numbers=numbers,
        )

    def _more(self, targets: int, share: float, enough: int, row_tokens: int, limit: str) -> str:
        """Return what gives an evaluation `enough` targets."""
        whole = targets / share
        if share < 1 and whole >= enough:
            rows = math.ceil(enough / whole * self.validation.tokens / row_tokens) + 1
            return f"{limit}={rows * row_tokens}"
        raised = f"{limit}={(math.ceil(enough / row_tokens) + 1) * row_tokens} with " * (share < 1)
        if self.share is None:
            return f"{raised}more text in {self.asked}, or data.validation=PATH of more"
        wanted = enough / whole * self.share / LEAST
        if wanted > 0.5:
            return f"{raised}more text, or data.validation=PATH of more"
        return f"{raised}data.validation={math.ceil(wanted * 100) / 100:g}, or more text"


def _amount(size: int, documents: int) -> str:
    return f"{format_bytes(size)} in {_number(documents, 'document')}"


def _number(count: int, of: str) -> str:
    return f"{count:,} {of}" + "s" * (count != 1)
