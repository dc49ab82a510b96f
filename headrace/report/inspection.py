"""Write the page of `headrace data inspect`: what a corpus holds, with pictures."""

from collections.abc import Callable, Iterable

import numpy as np

from headrace.core.units import format_bytes, format_count
from headrace.data.inspection import words
from headrace.data.inspection.near import THRESHOLD
from headrace.data.inspection.record import Inspection, RepeatedShare
from headrace.report.chart import ChartAxis, ChartLine, line_chart
from headrace.report.page import (
    Safe,
    bar,
    cards,
    figure,
    join,
    legend,
    muted,
    page,
    section,
    stack,
    swatch,
    table,
    tag,
)
from headrace.report.style import DATA_COLOURS

NEAR = (
    f"Near duplicates share {THRESHOLD:.0%} of their runs of five words or more (Jaccard index); "
    "equal documents are counted among them."
)


def inspection_page(inspection: Inspection) -> str:
    """Return the whole page; everything that text or names could hold is escaped."""
    return page(
        "What the text holds",
        tag(
            "header",
            tag("p", "headrace data inspect", class_="eyebrow"),
            tag("h1", "What the text holds"),
            tag("p", ", ".join(inspection.sources), class_="verdict"),
            _figures(inspection),
        ),
        _lengths(inspection),
        _rows(inspection),
        _scripts(inspection),
        _repeats(inspection),
        _special(inspection),
        _left_out(inspection),
        source="the text",
    )


def _figures(inspection: Inspection) -> Safe:
    documents = inspection.repeated_documents
    sample = "all compared" if documents.exact else f"a sample of {documents.sampled:,}"
    near = inspection.near_documents
    compared = "equal ones included" if near is None or near.exact else "estimated on a sample"
    return cards(
        [
            ("Documents", format_count(inspection.documents), f"in {inspection.files:,} files"),
            (
                "Text",
                format_bytes(inspection.text_bytes),
                f"{format_count(inspection.characters)} chars",
            ),
            ("Tokens", format_count(inspection.tokens), f"estimated; {inspection.tokenizer}"),
            (
                "Median document",
                format_bytes(inspection.median_bytes),
                f"99% are up to {format_bytes(inspection.p99_bytes)}",
            ),
            ("Repeated documents", words.percent(documents.share), sample),
            *([] if near is None else [("Near duplicates", words.percent(near.share), compared)]),
            (
                "Packing that wins",
                words.PACKINGS[inspection.best_packing].partition(":")[0],
                f"rows of {inspection.sequence_length:,} tokens",
            ),
        ]
    )


def _steps(points: Iterable[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return a histogram of octaves as the outline of its columns."""
    by_octave = dict(points)
    first, last = int(min(by_octave)), int(max(by_octave))
    x, y = [float(first)], [0.0]
    for octave in range(first, last + 1):
        x += [octave, octave + 1]
        y += [by_octave.get(octave, 0.0)] * 2
    return np.array([*x, last + 1.0]), np.array([*y, 0.0])


def _octave(form: Callable[[float], str], first: float) -> Callable[[float], str]:
    """Return what writes a tick of an axis of octaves from `first` on: nothing between two."""
    return lambda octave: form(2 ** (first + octave)) if octave == int(octave) else ""


def _lengths(inspection: Inspection) -> Safe:
    """Render the histogram of lengths by documents and by text."""
    documents, sizes = dict[int, float](), dict[int, float]()
    for group in inspection.lengths:
        octave = int(np.log2(group.text_bytes / group.documents))
        share = group.documents / inspection.documents
        documents[octave] = documents.get(octave, 0.0) + share
        sizes[octave] = sizes.get(octave, 0.0) + group.text_bytes / inspection.text_bytes
    lines, first = [], float(min(documents))
    for points, colour in ((documents, "c0"), (sizes, "c1")):
        x, y = _steps(points.items())
        lines.append(ChartLine(x - first, 100 * y, colour, band=(np.zeros_like(y), 100 * y)))
    key = legend([(swatch("c0"), "share of the documents"), (swatch("c1"), "share of the text")])
    chart = line_chart(
        "lengths",
        lines,
        label="Documents and text by length, in octaves of bytes",
        axis=ChartAxis(
            "bytes of a document", _octave(lambda v: format_bytes(v).replace(".0 ", " "), first)
        ),
        y_label="%",
    )
    return section(
        "Lengths",
        tag(
            "div",
            join((figure("Documents by length", join((key, chart))), _cropping(inspection))),
            class_="charts",
        ),
        muted(f"The longest has {format_bytes(inspection.longest_bytes)}: {inspection.longest}"),
    )


def _cropping(inspection: Inspection) -> Safe:
    """Render what cropping loses by sequence length."""
    x = np.log2([length for length, _ in inspection.cropped_at])
    y = np.array([100 * share for _, share in inspection.cropped_at])
    here = legend([(swatch("goal", "dash"), f"the plan's {inspection.sequence_length:,}")])
    plan = float(np.log2(inspection.sequence_length))
    first = min(float(x[0]), plan)
    chart = line_chart(
        "cropping",
        [ChartLine(x - first, y, "c6", marks=True)],
        label="Share of the tokens that cropping loses, by sequence length",
        axis=ChartAxis("tokens of a row", _octave(lambda v: f"{v:,.0f}", first)),
        y_label="% of the tokens",
        limit=plan - first,
    )
    return figure("Lost where each document is cropped to a row", join((here, chart)))


def _rows(inspection: Inspection) -> Safe:
    """Render what each way to make rows of documents wastes."""
    rows = []
    for one, cells in zip(inspection.packing, words.packings(inspection), strict=True):
        name = cells[0]
        if one.policy == inspection.best_packing:
            name = join((name, " ", tag("span", "wins", class_="badge good")))
        picture = stack(
            f"{one.policy}: padding {words.percent(one.padding)}, cropped "
            f"{words.percent(one.cropped)}",
            [
                ("c2", (1 - one.padding) * (1 - one.cropped)),
                ("c7", one.padding * (1 - one.cropped)),
                ("c1", one.cropped),
            ],
        )
        rows.append((join((name, picture)), *cells[1:]))
    marks = [("c2", "read"), ("c7", "padding"), ("c1", "cropped")]
    return section(
        f"Rows of {inspection.sequence_length:,} tokens",
        legend([(swatch(colour), name) for colour, name in marks]),
        table("Ways to make rows", words.PACKING_HEAD, rows),
        muted(
            "Estimated from the lengths. The way that splits the fewest documents wins among those "
            "that pad and crop no more than 1%."
        ),
    )


def _scripts(inspection: Inspection) -> Safe:
    """Render the scripts and how many tokens the tokenizer makes of each."""
    shares = [(one, one.text_bytes / inspection.text_bytes) for one in inspection.scripts]
    shown = list(zip(shares, DATA_COLOURS, strict=False))
    widest = max(one.tokens_per_character for one in inspection.scripts)
    rows = []
    for number, (one, cells) in enumerate(
        zip(inspection.scripts, words.scripts(inspection), strict=True)
    ):
        colour = DATA_COLOURS[number] if number < len(DATA_COLOURS) else "rule"
        long = bar(one.tokens_per_character / widest, colour)
        name = tag("span", swatch(colour), cells[0], class_="mark")
        rows.append((join((name, long)), *cells[1:]))
    head = [name.replace("/", " per ") for name in words.SCRIPT_HEAD]
    label = ", ".join(f"{one.script} {words.percent(share)}" for one, share in shares)
    return section(
        "Scripts and the tokenizer",
        stack(f"Text by script: {label}", [(c, share) for (_, share), c in shown]),
        table("Scripts", head, rows),
        muted(
            f"{inspection.tokenizer}. The bars are tokens per character: a longer one means longer "
            "sequences, and less text in a context, for the same words."
        ),
    )


def _placed(text: str, where: str) -> Safe:
    """Render a text above the places where it stands, so that a phone shows both."""
    return join((tag("span", text), muted(where)))


def _repeats(inspection: Inspection) -> Safe:
    """Render what stands in the corpus more than once."""

    def part(name: str, share: RepeatedShare) -> Safe:
        rows = [
            (_placed(one.text, ", ".join(one.origins)), f"{one.times:,}") for one in share.examples
        ]
        shown = table(f"Repeated {name}", ("Begins, and where it stands", "Times"), rows)
        head = tag("h3", f"{name.capitalize()}: {words.repeated(share)}")
        return join((head, shown) if rows else (head,))

    near = [muted(f"Near duplicates: {words.near(inspection)}")]
    if (share := inspection.near_documents) is not None:
        near = [part("near-duplicate documents", share), muted(NEAR)]
    if inspection.near_validation is not None:
        near.append(tag("p", "Held-out documents: ", words.validation(inspection.near_validation)))
    return section(
        "Repeats",
        part("documents", inspection.repeated_documents),
        part("paragraphs", inspection.repeated_paragraphs),
        *near,
    )


def _special(inspection: Inspection) -> Safe:
    """Render text that spells special tokens."""
    special = words.special_texts(inspection)
    if not special:
        return section("Special tokens in text", muted("None was found."))
    rows = [(_placed(text, where), *counts) for text, *counts, where in special]
    return section(
        "Special tokens in text",
        table("Special tokens", ("Text, and where it is first", "Documents", "Times"), rows),
        muted(
            "It stays text: it becomes ordinary tokens, and never a special one. Where it stands "
            "between documents, data.separator cuts there."
        ),
    )


def _left_out(inspection: Inspection) -> Safe:
    """Render what is no text, and which files would be refused."""
    parts = [tag("p", one.line()) for one in inspection.left_out]
    for one in inspection.refused[: words.SHOWN]:
        parts.append(tag("p", tag("span", "refused", class_="badge bad"), " ", one.message))
        parts.append(tag("pre", one.remedy, class_="command"))
    if (more := inspection.refused_files - words.SHOWN) > 0:
        parts.append(muted(f"{more:,} more files would be refused."))
    return section("Left out and refused", *(parts or [muted("Nothing was.")]))
