"""Render an inspection as rows of words, which the terminal and the page both show."""

import shlex

from headrace.core.units import format_bytes, format_count
from headrace.data.inspection.record import (
    Inspection,
    NearValidation,
    PackingEstimate,
    PolicyName,
    RepeatedShare,
)
from headrace.data.quality.compiled import INSTALL

Cells = list[tuple[str, ...]]
PACKINGS: dict[PolicyName, str] = {
    "cut": "cut: one stream, cut anywhere",
    "pad": "pad: a row for each document",
    "best_fit": "best fit: whole documents together",
}
SHOWN = 8
"""Special tokens, scripts and refused files that are shown."""


def percent(share: float) -> str:
    """Format a share: 0.1234 -> '12.3%'; a share that rounds to nothing is '<0.1%'."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def repeated(share: RepeatedShare) -> str:
    """Format the share of items that repeat earlier ones, with its interval where it has one."""
    if share.exact:
        return f"{percent(share.share)}, {percent(share.bytes_share)} of the bytes (all compared)"
    return (
        f"{percent(share.share)} ({percent(share.low)} to {percent(share.high)}), "
        f"{percent(share.bytes_share)} of the bytes (a sample of {share.sampled:,} by hash)"
    )


def facts(inspection: Inspection) -> Cells:
    """Return the figures of the whole corpus as (what, value)."""
    words = [
        ("sources", ", ".join(inspection.sources)),
        ("files", f"{inspection.files:,}"),
        ("documents", f"{inspection.documents:,}"),
        (
            "text",
            f"{format_bytes(inspection.text_bytes)}, "
            f"{format_count(inspection.characters)} characters",
        ),
        (
            "length of a document",
            f"median {format_bytes(inspection.median_bytes)}, 90% up to "
            f"{format_bytes(inspection.p90_bytes)}, 99% up to {format_bytes(inspection.p99_bytes)}",
        ),
        ("longest", f"{format_bytes(inspection.longest_bytes)} ({inspection.longest})"),
        ("tokenizer", inspection.tokenizer),
        ("tokens, estimated", format_count(inspection.tokens)),
        ("repeated documents", repeated(inspection.repeated_documents)),
        ("repeated paragraphs", repeated(inspection.repeated_paragraphs)),
        ("near-duplicate documents", near(inspection)),
        (
            f"lost by cropping at {inspection.sequence_length:,}",
            f"{percent(_of(inspection, 'pad').cropped)} of the tokens",
        ),
        ("packing that wins", PACKINGS[inspection.best_packing]),
        ("memory of this pass", f"at most {format_bytes(inspection.bound_bytes)} and one document"),
    ]
    if inspection.near_validation is not None:
        words.append(("held-out documents", validation(inspection.near_validation)))
    if inspection.refused_files:
        words.append(("files that would be refused", f"{inspection.refused_files:,}"))
    return words


def near(inspection: Inspection) -> str:
    """Format the share of documents that nearly repeat others, equal ones included."""
    share = inspection.near_documents
    return f"not estimated: {INSTALL}" if share is None else repeated(share)


def validation(one: NearValidation) -> str:
    """Format how many documents that a share holds out have a near copy that is trained on."""
    count = f"{one.near:,} of {one.documents:,} with data.validation={one.asked:g}"
    sample = "" if one.exact else f" of the sample, {percent(one.share)} estimated,"
    return f"{count}{sample} have a near copy that is trained on"


def _of(inspection: Inspection, policy: PolicyName) -> PackingEstimate:
    return next(one for one in inspection.packing if one.policy == policy)


def scripts(inspection: Inspection) -> Cells:
    """Return a row for each script: its name, documents, text and three fertilities."""
    return [
        (
            one.script,
            f"{one.documents:,}",
            format_bytes(one.text_bytes),
            f"{one.tokens_per_byte:.3f}",
            f"{one.tokens_per_character:.3f}",
            "-" if one.tokens_per_word is None else f"{one.tokens_per_word:.2f}",
        )
        for one in inspection.scripts
    ]


def packings(inspection: Inspection) -> Cells:
    """Return a row for each way to make rows: its name, rows, padding, cropped and split."""
    return [
        (
            PACKINGS[one.policy],
            f"{one.rows:,}",
            percent(one.padding),
            percent(one.cropped),
            percent(one.split),
        )
        for one in inspection.packing
    ]


SCRIPT_HEAD = ("script", "documents", "text", "tokens/byte", "tokens/character", "tokens/word")
PACKING_HEAD = ("rows of documents", "rows", "padding", "tokens cropped", "documents split")


def tables(inspection: Inspection) -> list[tuple[str, tuple[str, ...], Cells]]:
    """Return what stands in tables of its own, as (title, head, rows)."""
    titled = [
        ("Scripts, and the tokenizer on a sample of each", SCRIPT_HEAD, scripts(inspection)),
        (
            f"Rows of {inspection.sequence_length:,} tokens, estimated from the lengths",
            PACKING_HEAD,
            packings(inspection),
        ),
    ]
    if rows := special_texts(inspection):
        head = ("text of a special token", "documents", "times", "first")
        titled.append(("Text that spells special tokens, and stays text", head, rows))
    return titled


def special_texts(inspection: Inspection) -> Cells:
    """Return a row for each special token that text spells."""
    return [
        (one.text, f"{one.documents:,}", f"{one.times:,}", one.first)
        for one in inspection.special_texts[:SHOWN]
    ]


def lines(inspection: Inspection) -> list[str]:
    """Return what a reader should act on, a line each."""
    advice = [one.line() for one in inspection.left_out]
    for one in inspection.refused[:SHOWN]:
        advice.append(f"would be refused: {one.message}")
        if one.remedy:
            advice.append(f"  try: {one.remedy}")
    if (more := inspection.refused_files - SHOWN) > 0:
        advice.append(f"would be refused: {more:,} more files")
    if inspection.near_validation is not None and inspection.near_validation.near:
        advice.append(
            "a loss on documents that have near copies in the training text measures memory: "
            "data.deduplication.method=minhash leaves one of each"
        )
    if inspection.special_texts:
        key = shlex.quote(f"data.separator={inspection.special_texts[0].text}")
        advice.append(f"where {inspection.special_texts[0].text} stands between documents: {key}")
    return advice
