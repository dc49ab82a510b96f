"""Read a corpus once and say what it holds.

A file that would be refused is told with its remedy, and the next one is read: so all of them are
known after one pass. What is kept is a histogram for each script, a sample of 1,048,576 characters
for each script, 32,768 documents and as many paragraphs by their hashes, 32 MiB of documents that
are compared with each other, and the texts of 64 special tokens; and one document. A file that is
refused in its middle counts up to there.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.progress import OnProgress
from headrace.data.fertility import TextGroup
from headrace.data.fields import TextReading
from headrace.data.inspection.near import NEAR_BYTES, NearRepeats
from headrace.data.inspection.packing import best_packing, estimate_packing
from headrace.data.inspection.record import (
    Inspection,
    LengthGroup,
    RefusedFile,
    ScriptSummary,
)
from headrace.data.inspection.scripts import script_of
from headrace.data.inspection.sketches import (
    GROUPS,
    ITEM_BYTES,
    KEPT,
    OCTAVE,
    SAMPLE_CHARACTERS,
    Repeats,
    Sample,
    ScriptLengths,
    SpecialTexts,
    paragraphs,
    whole,
)
from headrace.data.left_out import LeftOutTally
from headrace.data.listing import Asked
from headrace.data.repeated import Seen
from headrace.data.sources import Document, read_by_file, source_signature
from headrace.data.tokenizer import Tokenizer, open_tokenizer
from headrace.data.training import train_for
from headrace.plan.data_config import DataConfig

REFUSED_SHOWN = 100
"""Files that would be refused of which the message is kept."""
SHORTEST, LONGEST = 64, 1 << 17
"""Sequence lengths between which the share that cropping loses is told."""
MOST_SCRIPTS = 33
BOUND_BYTES = (
    NEAR_BYTES + 2 * KEPT * ITEM_BYTES + MOST_SCRIPTS * (4 * SAMPLE_CHARACTERS + 16 * GROUPS)
)
"""Most memory of all that is kept, where every script fills its sample with wide characters."""


class _Pass:
    """Everything that one pass keeps."""

    def __init__(self, own: Sequence[str], validation: float | str = "") -> None:
        self.lengths = defaultdict[str, ScriptLengths](ScriptLengths)
        self.samples = defaultdict[str, Sample](Sample)
        self.sketches = (Repeats(whole), Repeats(paragraphs), SpecialTexts(own))
        """What sees each document."""
        try:
            self.near = NearRepeats(validation)
        except UnsupportedError:  # without Numba; the tables say what installs it
            self.near = None
        self.documents = self.text_bytes = self.characters = 0
        self.longest = (0, "")
        self.files, self.refused = 0, list[RefusedFile]()
        self.tally, self.listed = LeftOutTally(), LeftOutTally()
        self._seen = Seen(self.listed)

    def read(self, asked: Asked, reading: TextReading, progress: OnProgress) -> None:
        """Read a source; a file that would be refused is kept with its remedy."""
        source_signature(asked, LeftOutTally(), self._seen)
        for documents in read_by_file(asked, reading, self.tally):
            self.files += 1
            try:
                for document in documents:
                    self.add(document)
                    progress("reading", self.text_bytes, None)
            except ConfigError as error:
                self.refused.append(RefusedFile(message=error.message, remedy=error.remedy.text))

    def add(self, document: Document) -> None:
        """Count a document."""
        raw, script = document.text.encode(), script_of(document.text)
        size, digest = len(raw), hashlib.blake2b(raw, digest_size=16).digest()
        del raw  # a document may be large, and its sketches copy it, too
        self.lengths[script].add(size)
        self.samples[script].add(document.text, digest)
        for sketch in self.sketches:
            sketch.add(document)
        if self.near is not None:
            self.near.add(document)
        self.documents += 1
        self.text_bytes += size
        self.characters += len(document.text)
        self.longest = max(self.longest, (size, document.origin), key=lambda pair: pair[0])


def inspect_data(
    sources: Sequence[str], data: DataConfig, *, progress: OnProgress | None = None
) -> Inspection:
    """Say what sources hold, and what a plan's way to read and to cut them makes of it.

    Args:
        sources: files, folders, globs, `stdlib` or `hf:NAME`.
        data: how they are read; its tokenizer, or the size of the one that is trained on a sample
            here; and its sequence length.
        progress: called now and then with (description, bytes of text, None).

    Raises:
        ConfigError: a source is not there, or nothing of it is text; or the tokenizer is none.
    """
    progress = progress or (lambda description, done, total: None)
    tokenizer = None if data.tokenizer == "bpe" else open_tokenizer(data.tokenizer)
    own = tokenizer.special_texts if tokenizer else data.special_tokens
    survey = _read_through(sources, data, own, progress)
    near, held_out = survey.near.result() if survey.near is not None else (None, None)
    name = data.tokenizer
    if tokenizer is None:
        texts = sorted(text for sample in survey.samples.values() for text in sample.texts)
        tokenizer, _ = train_for(data, texts, survey.text_bytes, progress)
        name = "BPE trained on a sample"
    progress("measuring the tokenizer", survey.text_bytes, survey.text_bytes)
    scripts = _scripts(survey, tokenizer)
    groups = _groups(survey, {one.script: one.tokens_per_byte for one in scripts})
    counts = np.array([group.documents for group in groups])
    tokens = np.array([group.tokens / group.documents for group in groups])
    packing = estimate_packing(tokens, counts, data.sequence_length)
    documents, in_paragraphs, special = survey.sketches
    return Inspection(
        sources=tuple(sources),
        files=survey.files,
        documents=survey.documents,
        text_bytes=survey.text_bytes,
        characters=survey.characters,
        median_bytes=_quantile(groups, 0.5),
        p90_bytes=_quantile(groups, 0.9),
        p99_bytes=_quantile(groups, 0.99),
        longest_bytes=survey.longest[0],
        longest=survey.longest[1],
        tokenizer=f"{name}, {tokenizer.vocab:,} entries",
        tokens=float((tokens * counts).sum()),
        sequence_length=data.sequence_length,
        scripts=scripts,
        lengths=groups,
        cropped_at=_cropped(tokens, counts),
        packing=packing,
        best_packing=best_packing(packing),
        repeated_documents=documents.result(),
        repeated_paragraphs=in_paragraphs.result(),
        near_documents=near,
        near_validation=held_out,
        special_texts=special.result(),
        left_out=(*survey.tally.records, *survey.listed.records),
        refused=tuple(survey.refused[:REFUSED_SHOWN]),
        refused_files=len(survey.refused),
        bound_bytes=BOUND_BYTES,
    )


def _nothing(sources: Sequence[str], survey: _Pass) -> ConfigError:
    """Return the error of sources without a document."""
    refused = survey.refused
    why = [one.message for one in refused[:1]] or [one.format() for one in survey.tally.records]
    return ConfigError(
        f"data.sources = {[*sources]} give no text: {'; '.join(why) or 'there is none'}",
        refused[0].remedy if refused else "data.sources=PATH",
    )


def _read_through(
    sources: Sequence[str], data: DataConfig, special: Sequence[str], progress: OnProgress
) -> _Pass:
    """Make the one pass over all sources.

    Raises:
        ConfigError: a source is not there, or nothing of it is text.
    """
    survey = _Pass(special, data.validation)
    for asked in (Asked(source, beside=tuple(sources)) for source in sources):
        survey.read(asked, TextReading.of(data), progress)
    if not survey.documents:
        raise _nothing(sources, survey)
    return survey


def _scripts(survey: _Pass, tokenizer: Tokenizer) -> tuple[ScriptSummary, ...]:
    """Measure the tokenizer on the sample of each script; the script of most bytes first."""
    rows = []
    for script, lengths in survey.lengths.items():
        sample = TextGroup(script)
        for text in (texts := survey.samples[script].texts):
            sample.add(text)
        sample.tokens[script] = sum(map(len, tokenizer.encode_batch(texts)))
        rows.append(
            ScriptSummary(
                script=script,
                documents=int(lengths.documents.sum()),
                text_bytes=int(lengths.text_bytes.sum()),
                sample_bytes=sample.text_bytes,
                **sample.rates(script),
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.text_bytes, row.script)))


def _groups(survey: _Pass, per_byte: dict[str, float]) -> tuple[LengthGroup, ...]:
    """Return the groups of lengths that have documents, over all scripts."""
    documents = np.sum([one.documents for one in survey.lengths.values()], axis=0)
    sizes = np.sum([one.text_bytes for one in survey.lengths.values()], axis=0)
    in_text = [one.text_bytes * per_byte[script] for script, one in survey.lengths.items()]
    tokens = documents + np.sum(in_text, axis=0)
    return tuple(
        LengthGroup(
            from_bytes=round(2 ** (group / OCTAVE)),
            documents=int(documents[group]),
            text_bytes=int(sizes[group]),
            tokens=float(tokens[group]),
        )
        for group in np.flatnonzero(documents)
    )


def _quantile(groups: tuple[LengthGroup, ...], share: float) -> int:
    """Return the mean length of the group in which a share of the documents ends."""
    wanted, before = share * sum(group.documents for group in groups), 0
    for group in groups:
        before += group.documents
        if before >= wanted:
            return round(group.text_bytes / group.documents)
    raise AssertionError("the last group ends all documents")


def _cropped(tokens: np.ndarray, counts: np.ndarray) -> tuple[tuple[int, float], ...]:
    """Return the share of the tokens that cropping loses, by sequence length, to the first 0."""
    rows, length, total = list[tuple[int, float]](), SHORTEST, float((tokens * counts).sum())
    while length <= LONGEST and (not rows or rows[-1][1] > 0):
        lost = float((np.maximum(0, tokens - length) * counts).sum()) / total
        rows.append((length, lost))
        length *= 2
    return tuple(rows)
