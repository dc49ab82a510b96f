"""Define the pipeline from sources to shards as one typed object.

Documents are read, cleaned (see cleaning.py), surveyed, tokenized and written to shards.

Its stages run over parts (see parts.py). First each cleaner that is asked for learns them. Then
`survey` reads a part and learns what must be known of the whole text before a token can be written:
what is held out, and what the tokenizer is trained on. `encode` reads it again and gives tokens to
both sides. After each stage one process merges what parts gave, in their order, and decides. An
`PartEngine` says where a stage runs: here, part after part, into the very shards; or by workers
elsewhere, whose results it merges. The shards are the same.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from headrace.core.native import call_native
from headrace.core.progress import OnProgress
from headrace.data.chat.encode import ChatEncoder
from headrace.data.cleaning import Cleaning, Learner, LearnHere, asked_sources
from headrace.data.fields import TextReading
from headrace.data.heldout import Split, Weights
from headrace.data.left_out import LeftOutTally
from headrace.data.listing import Asked
from headrace.data.number_column import NumberColumn
from headrace.data.parts import SourcePart, list_parts
from headrace.data.shards import ShardWriter, TokenSink
from headrace.data.sources import Document, read_documents
from headrace.data.survey import Survey, place_of
from headrace.data.tokenizer import Tokenizer
from headrace.plan.data_config import DataConfig

ENCODE_BYTES = 8 << 20


class Piece(NamedTuple):
    """A piece is a document, or the part of it that lies on one side."""

    text: str
    is_validation: bool = False
    is_end: bool = False
    """Whether it is the held-out end of a document that is trained on."""
    score: float = 0.0
    """What the row's own field says of how hard it is, where a curriculum goes by one."""


@dataclass
class Encoder:
    """Turns documents into the tokens of both sides, and counts what is met on the way.

    Args:
        tokenizer: that of the run.
        is_lossy: whether the plan accepts a tokenizer that loses text.
        split: which text is held out; None where validation has a text of its own.
        chat: makes tokens of documents that are conversations; None where they are texts.
    """

    tokenizer: Tokenizer
    is_lossy: bool
    split: Split | None
    chat: ChatEncoder | None = None
    cut_documents: int = 0
    """Documents whose end was held out."""
    loses: str = ""
    """The first loss of the tokenizer that was met in the validation text."""
    text_bytes: int = 0
    """UTF-8 bytes of what was encoded for training or held out of it."""
    scores: "array[float]" = field(default_factory=lambda: array("d"))
    """What the rows' own field says of each document that is trained on, of one source or part."""

    def encode_own(self, documents: Iterator[Document], validation: TokenSink) -> None:
        """Encode a validation text of its own."""
        for batch in self._encoded(_pieces(documents, None)):
            for piece, ids in batch:
                self._add(validation, piece.text, ids, is_validation=True)

    def encode(
        self,
        documents: Iterator[Document],
        train: TokenSink,
        validation: TokenSink,
        progress: Callable[[int], None],
    ) -> None:
        """Encode documents of a source.

        Args:
            documents: in their order.
            train: takes what is trained on.
            validation: takes what is held out.
            progress: called now and then with the bytes that were encoded so far.
        """
        for batch in self._encoded(_pieces(documents, self.split)):
            for piece, ids in batch:
                if not piece.is_validation and ids is not None:
                    self.scores.append(piece.score)
                self.cut_documents += piece.is_end
                side, held_out = (validation if piece.is_validation else train), piece.is_validation
                self.text_bytes += self._add(side, piece.text, ids, is_validation=held_out)
            progress(self.text_bytes)

    def take_scores(self) -> "array[float]":
        """Return the scores since the last call."""
        taken, self.scores = self.scores, array("d")
        return taken

    def _encoded(self, pieces: Iterator[Piece]) -> Iterator[Iterator[tuple[Piece, Any]]]:
        encode = self.chat.encode if self.chat else self.tokenizer.encode_batch
        for batch in _batches(pieces):
            texts = [piece.text for piece in batch]
            ids = call_native(lambda texts=texts: encode(texts))
            yield zip(batch, ids, strict=True)

    def _add(self, side: TokenSink, text: str, ids: Any, *, is_validation: bool) -> int:
        """Add a document, and return the bytes of its text."""
        if self.chat is not None:
            return self.chat.add(side, text, ids)
        if not self.is_lossy:
            self.tokenizer.check_document(text, ids, is_validation=is_validation)
        elif is_validation and not self.loses:
            self.loses = self.tokenizer.lost_of(text, ids, is_validation=True)
        size = len(text.encode())
        side.add(ids, text_bytes=size, counted_bytes=self.tokenizer.bytes_of(ids))
        return size


@dataclass(frozen=True)
class Pipeline:
    """What is done to the text of a plan, stage by stage, over its parts.

    Attributes:
        data: the plan's table.
        parts: of all sources, in the order of the text.
        column: notes a number of each row, which scores it; None where no field of theirs does.
    """

    data: DataConfig
    parts: tuple[SourcePart, ...]
    column: NumberColumn | None = None

    @staticmethod
    def of(
        data: DataConfig, left_out: LeftOutTally, column: NumberColumn | None = None
    ) -> "Pipeline":
        """Return the pipeline of a plan's data as its sources are listed now."""
        return Pipeline(data, list_parts(asked_sources(data), left_out), column)

    @cached_property
    def cleaning(self) -> Cleaning:
        """Return what cleans the text; it learns before any stage is run."""
        return Cleaning(self.data, self.parts, self.column)

    def training_texts(self, split: Split | None) -> Iterator[str]:
        """Yield the text of the training side in its order."""
        for number in range(len(self.parts)):
            for piece in _pieces(self.documents(number), split):
                if not piece.is_validation:
                    yield piece.text

    def documents(self, number: int, left_out: LeftOutTally | None = None) -> Iterator[Document]:
        """Yield what cleaning leaves of a part; `left_out` counts what gives no document."""
        return self.cleaning.documents(number, left_out)

    def new_survey(self, share: float | None = None) -> Survey:
        """Return a survey of nothing; `share` is held out in place of the plan's."""
        asked = self.data.validation
        share = share or (0.0 if isinstance(asked, str) else asked)
        return Survey(Weights(share, cuts=self.data.chat is None))

    def survey(
        self,
        number: int,
        survey: Survey,
        progress: Callable[[int], None],
        *,
        keep_sample: bool | None = None,
    ) -> LeftOutTally:
        """Learn of a part, and return what of it is no text.

        Args:
            number: of the part.
            survey: takes what is learned.
            progress: called now and then with the bytes that were surveyed so far.
            keep_sample: whether to keep text for a tokenizer; without it, if one learns from a
                sample.
        """
        tally = LeftOutTally()
        is_sampled = (self.data.tokenizer, self.data.tokenizer_text) == ("bpe", "sample")
        keep = is_sampled if keep_sample is None else keep_sample
        for document in self.documents(number, tally):
            survey.add(document.text, keep_sample=keep, source=self.parts[number].source)
            progress(survey.text_bytes)
        return tally


class PartEngine(Protocol):
    """Where the stages run, and how what they give comes together."""

    def learner(self, pipeline: Pipeline) -> Learner:
        """Return what lets cleaners learn the parts, before any other stage."""
        ...

    def begin_survey(self, pipeline: Pipeline, progress: OnProgress) -> None:
        """Do what can be done for all parts before the first is merged."""
        ...

    def survey(
        self, pipeline: Pipeline, number: int, survey: Survey, progress: OnProgress
    ) -> LeftOutTally:
        """Merge what is learned of a part into `survey`, and return what of it is no text."""
        ...

    def begin_encode(self, pipeline: Pipeline, encoder: Encoder, progress: OnProgress) -> None:
        """Do what can be done for all parts before the first is merged."""
        ...

    def encode(
        self,
        pipeline: Pipeline,
        number: int,
        encoder: Encoder,
        train: ShardWriter,
        validation: ShardWriter,
        progress: Callable[[int], None],
    ) -> None:
        """Add the documents of a part to both sides, and its counts to those of `encoder`."""
        ...


class InThisProcess:
    """Runs every stage here, part after part, and writes no file but the shards themselves."""

    def learner(self, pipeline: Pipeline) -> Learner:
        """Return what lets cleaners learn here."""
        return LearnHere(pipeline.cleaning)

    def begin_survey(self, pipeline: Pipeline, progress: OnProgress) -> None:
        """Do nothing before the first part."""

    def survey(
        self, pipeline: Pipeline, number: int, survey: Survey, progress: OnProgress
    ) -> LeftOutTally:
        """Learn of a part."""
        return pipeline.survey(number, survey, lambda done: progress("reading", done, None))

    def begin_encode(self, pipeline: Pipeline, encoder: Encoder, progress: OnProgress) -> None:
        """Do nothing before the first part."""

    def encode(
        self,
        pipeline: Pipeline,
        number: int,
        encoder: Encoder,
        train: ShardWriter,
        validation: ShardWriter,
        progress: Callable[[int], None],
    ) -> None:
        """Encode a part into the shards."""
        encoder.encode(pipeline.documents(number), train, validation, progress)


def own_validation(data: DataConfig, left_out: LeftOutTally) -> Iterator[Document]:
    """Yield the documents of a validation text of its own; none where a share is held out."""
    if isinstance(data.validation, str):
        asked = Asked(data.validation, "data.validation")
        yield from read_documents(asked, reading=TextReading.of(data), left_out=left_out)


def _pieces(documents: Iterator[Document], split: Split | None) -> Iterator[Piece]:
    """Yield documents, those that are cut as two."""
    for document in documents:
        if split is None:
            yield Piece(document.text, score=document.number)
            continue
        place = place_of(hashlib.sha256(document.text.encode()).digest())
        trained, validation = split.parts(document.text, place)
        if trained:
            yield Piece(trained, score=document.number)
        if validation:
            yield Piece(validation, is_validation=True, is_end=bool(trained))


def _batches(pieces: Iterator[Piece]) -> Iterator[Sequence[Piece]]:
    """Yield pieces in lists of about 8 MiB of text."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= ENCODE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
