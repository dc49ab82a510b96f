"""Clean the text of a plan before it is surveyed: duplicates first, then evaluation sets.

Each cleaner makes one pass over what the ones before it left, in the fixed order of the sources;
the passes after them read what remains. All of them go over the parts of the sources (see
parts.py), one after the other; where a cleaner is a `PartCleaner`, its parts may be learned
elsewhere and are merged here, in their order. Duplicates fall first, so that a near copy of a
document that an evaluation set contaminates does not outlive it.

A plan that asks for nothing is read as it was before there was cleaning, with the same shards under
the same name. A validation text of its own is always compared; a run that was recorded before there
was cleaning goes on with its text as it was.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import Field, ValidationError

from headrace.core.errors import ConfigError, RunError
from headrace.core.files import write_whole
from headrace.core.progress import OnProgress
from headrace.core.strict import Strict
from headrace.core.units import format_bytes
from headrace.data.asked_text import VALIDATION, asked_sources, evaluation_sets
from headrace.data.fields import TextReading
from headrace.data.heldout import Overlap
from headrace.data.left_out import LeftOutTally, without_text
from headrace.data.listing import Asked
from headrace.data.number_column import NumberColumn
from headrace.data.parts import SourcePart, read_part
from headrace.data.quality.cleaner import (
    Cleaner,
    CleanReport,
    Deduplicator,
    PartCleaner,
    PartState,
    Remains,
)
from headrace.data.quality.decontaminate import Decontaminator
from headrace.data.quality.methods import decided_duplicates, make_deduplicator
from headrace.data.sources import Document, read_documents, source_signature
from headrace.plan.cleaning import DecontaminationConfig, DeduplicationConfig
from headrace.plan.data_config import DataConfig
from headrace.plan.plan import Plan

RULE = 2
"""Version of what the cleaners do; other prepared data belongs to another version."""
METHOD_RULES = {"bloom": 4, "minhash": 3}
"""Versions of the methods of deduplication whose results changed after `RULE` was the last."""
FILE = "cleaning.json"
"""What prepared data keeps of its cleaning lies in this file."""
StepName = Literal["deduplication", "decontamination"]
DOING: dict[StepName, str] = {
    "deduplication": "deduplicating",
    "decontamination": "decontaminating",
}
"""What progress calls a step."""


def rule_of(deduplication: DeduplicationConfig | None) -> int:
    """Return the version of what the cleaners of a table do."""
    return METHOD_RULES.get(deduplication.method, RULE) if deduplication else RULE


class CleaningStep(Strict):
    """Hold one cleaner's name and report."""

    name: StepName
    report: CleanReport

    def line(self) -> str:
        """Return it as one line for a person."""
        r = self.report
        share = f"{r.dropped_bytes / max(1, r.bytes):.1%}"
        cut = f", and parts of {_number(r.cut_documents)}" if r.cut_documents else ""
        across = f"; {r.across_sources:,} for text of another source" if r.across_sources else ""
        return (
            f"{self.name}: {r.dropped_documents:,} of {_number(r.documents)}{cut} fall, "
            f"{format_bytes(r.dropped_bytes)} of {format_bytes(r.bytes)} ({share}){across}"
        )


class CleaningRecord(Strict):
    """What prepared data keeps of its cleaning: what was asked for, and what fell."""

    rule: int = RULE
    deduplication: DeduplicationConfig | None = None
    decontamination: DecontaminationConfig | None = None
    steps: tuple[CleaningStep, ...] = Field(min_length=1)

    @property
    def fingerprint(self) -> str:
        """Return a digest of what was asked for and what fell, which a resumed run compares."""
        derived = {"steps": {"__all__": {"report": {"across_sources"}}}}
        facts = self.model_dump(mode="json", exclude_defaults=True, exclude=derived)
        return hashlib.sha256(json.dumps([self.rule, facts], sort_keys=True).encode()).hexdigest()

    def step(self, name: StepName) -> CleanReport | None:
        """Return the report of a cleaner; None where it was not asked for."""
        return next((step.report for step in self.steps if step.name == name), None)

    @property
    def documents_left(self) -> int:
        """Return how many documents remain of the sources."""
        last = self.steps[-1].report
        return last.documents - last.dropped_documents

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values, by cleaner."""
        return {
            step.name: {
                **(getattr(self, step.name).model_dump(mode="json")),
                **step.report.model_dump(mode="json"),
                "line": step.line(),
            }
            for step in self.steps
        }

    def save(self, folder: Path) -> None:
        """Write it beside the shards."""
        write_whole(folder / FILE, self.model_dump_json(indent=1))

    @staticmethod
    def load(folder: Path) -> "CleaningRecord | None":
        """Read it; None where the text was not cleaned.

        Raises:
            ConfigError: it is no record.
        """
        try:
            return CleaningRecord.model_validate_json((folder / FILE).read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            problem = error.errors()[0]["msg"].lower()
            raise ConfigError(f"{folder / FILE} is damaged: {problem}") from None


class _Learned(NamedTuple):
    """A cleaner that has learned its text, or what it decided of one part."""

    cleaner: Remains
    begins_P: list[int]
    """How many documents of its source the cleaner was given before each part."""
    counts_P: list[int]
    """How many documents of each part it was given."""


class Learner(Protocol):
    """Lets a cleaner learn the parts."""

    def begin(self, step: StepName, cleaner: Cleaner, progress: OnProgress) -> None:
        """Do what can be done for all parts before the first is learned."""
        ...

    def learn(self, number: int, cleaner: Cleaner, begin: int, progress: OnProgress) -> int:
        """Let a cleaner learn a part, and return the number of documents that it was given.

        Args:
            number: of the part.
            cleaner: learns it.
            begin: documents of the part's source that it was given before.
            progress: as `Cleaning.learn` takes it.
        """
        ...


class LearnHere:
    """Lets cleaners learn in this process.

    Args:
        cleaning: whose parts are read.
        left_out: counts what gives no document.
    """

    def __init__(self, cleaning: "Cleaning", left_out: LeftOutTally | None = None) -> None:
        self._cleaning, self._left_out, self._done_bytes, self._doing = cleaning, left_out, 0, ""

    def begin(self, step: StepName, cleaner: Cleaner, progress: OnProgress) -> None:
        """Begin a step: its progress is told from zero on."""
        self._done_bytes, self._doing = 0, DOING[step]

    def learn(self, number: int, cleaner: Cleaner, begin: int, progress: OnProgress) -> int:
        """Let a cleaner learn a part; see `Learner.learn`."""

        def count(size: int) -> None:
            self._done_bytes += size
            progress(self._doing, self._done_bytes, None)

        return self._cleaning.learn_part(number, cleaner, begin, count, self._left_out)


class Cleaning:
    """Cleans the text of a plan: made, then `learn`, then any number of passes of `documents`.

    Args:
        data: the plan's table.
        parts: of all sources, in the order of the text.
        column: notes a number of each row, which its document keeps whatever remains of it.
    """

    def __init__(
        self,
        data: DataConfig,
        parts: Sequence[SourcePart] = (),
        column: NumberColumn | None = None,
    ) -> None:
        self._data, self._sources, self._parts = data, asked_sources(data), parts
        self._column = column
        self._deduplication = data.deduplication
        self._evaluation = evaluation_sets(data)
        self._decontamination = data.decontamination if self._evaluation else None
        if data.chat and (table := self._decontamination) and table.remove == "passage":
            # A conversation without one of its passages is none.
            self._decontamination = table.model_copy(update={"remove": "document"})
        self._counts: dict[int, int] = {}
        self._signatures: list[tuple[Asked, str]] = []
        self._done: dict[StepName, _Learned] = {}
        self.overlap: Overlap | None = None
        """How much of a validation text of its own is trained on all the same."""
        self.record: CleaningRecord | None = None
        """What was asked for and what fell; None where nothing was."""

    def facts(self) -> list[Any]:
        """Return what the shards depend on by this; nothing where nothing is asked for."""
        asked = (self._deduplication, self._decontamination)
        if asked == (None, None):
            return []
        tables = [table and table.model_dump(mode="json") for table in asked]
        against = [source_signature(one) for one, _ in self._evaluation if one.key != VALIDATION]
        return ["cleaning", rule_of(self._deduplication), *tables, against]

    def learn(
        self,
        progress: OnProgress,
        left_out: LeftOutTally | None = None,
        learner: Learner | None = None,
    ) -> None:
        """Make one pass for each cleaner, over what the ones before it left.

        Args:
            progress: called with (description, done, None), in characters.
            left_out: counts what of the sources gives no document, once.
            learner: lets each cleaner learn the parts; this object without it.

        Raises:
            ConfigError: a source or an evaluation set cannot be read.
            RunError: a source changed meanwhile.
        """
        self._signatures = self._signed()
        learner = learner or LearnHere(self, left_out)
        steps: list[CleaningStep] = []
        if self._deduplication:
            cleaner = make_deduplicator(self._deduplication, lambda: self._texts(progress))
            report = self._pass("deduplication", cleaner, learner, progress)
            steps.append(CleaningStep(name="deduplication", report=report))
        if self._evaluation:
            cleaner = self._decontaminator()
            report = self._pass("decontamination", cleaner, learner, progress)
            if isinstance(self._data.validation, str):
                self.overlap = cleaner.overlap()
            if self._decontamination:
                steps.append(CleaningStep(name="decontamination", report=report))
        if steps:
            self.record = CleaningRecord(
                rule=rule_of(self._deduplication),
                deduplication=self._deduplication,
                decontamination=self._decontamination,
                steps=tuple(steps),
            )

    def _signed(self) -> list[tuple[Asked, str]]:
        """Return everything that is read, with the sizes and times of its files in a digest."""
        every = [*self._sources, *(asked for asked, _ in self._evaluation)]
        return [(asked, source_signature(asked)) for asked in every]

    def check_unchanged(self) -> None:
        """Refuse text whose files have changed since `learn` began; after the last pass.

        Raises:
            RunError: they have.
        """
        for (asked, now), (_, before) in zip(self._signed(), self._signatures, strict=True):
            if now != before:
                raise RunError(
                    f"{asked} changed while it was read: the size or the time of one of its files "
                    "is another than before",
                    "the same command again",
                )

    def _decontaminator(self) -> Decontaminator:
        """Return one that knows the evaluation sets."""
        cleaner = Decontaminator(self._decontamination or DecontaminationConfig(remove="nothing"))
        for asked, reading in self._evaluation:
            own = asked.key == VALIDATION
            empty, met = True, LeftOutTally()
            for document in read_documents(asked, reading=reading, left_out=met):
                cleaner.evaluate(document.text, is_validation=own)
                empty = False
            if empty and not own:
                raise without_text(f"{asked} gives", met, asked.without())
        return cleaner

    def _texts(self, progress: OnProgress) -> Iterator[str]:
        """Yield every document, for a method that must know how much there is."""
        done_bytes = 0
        for part in range(len(self._parts)):
            for document in self.documents(part):
                done_bytes += len(document.text)
                progress("counting", done_bytes, None)
                yield document.text

    def _pass(
        self, step: StepName, cleaner: Cleaner, learner: Learner, progress: OnProgress
    ) -> CleanReport:
        """Let a cleaner learn what is left now, and add it to those that clean."""
        begins_P, counts_P = list[int](), list[int]()
        counts_S = [0] * len(self._sources)
        learner.begin(step, cleaner, progress)
        for number, part in enumerate(self._parts):
            begins_P.append(begin := counts_S[part.source])
            counts_P.append(learner.learn(number, cleaner, begin, progress))
            counts_S[part.source] += counts_P[-1]
        self._done[step] = _Learned(cleaner, begins_P, counts_P)
        return cleaner.finish()

    def part_cleaner(self, step: StepName) -> PartCleaner:
        """Return a cleaner that learns a part for the one of a step."""
        if step == "decontamination":
            return self._decontaminator()
        assert self._deduplication
        cleaner = make_deduplicator(self._deduplication, lambda: (), threads=1)
        assert isinstance(cleaner, PartCleaner)
        return cleaner

    def learn_part(
        self,
        number: int,
        cleaner: Cleaner,
        begin: int,
        read: Callable[[int], None],
        left_out: LeftOutTally | None = None,
    ) -> int:
        """Let a cleaner learn what is left of a part; see `Learner.learn`.

        Args:
            number: of the part.
            cleaner: learns it.
            begin: number of its first document in its source.
            read: called with the characters of each document.
            left_out: counts what gives no document.
        """
        index, source = begin, self._parts[number].source
        for document in self.documents(number, None if self._done else left_out):
            cleaner.learn(source, index, document.text)
            index += 1
            read(len(document.text))
        return index - begin

    def read_count(self, number: int) -> int:
        """Return the documents of a part as it is, which was read."""
        return self._counts[number]

    def note_count(self, number: int, documents: int) -> None:
        """Know how many documents a part has that was read elsewhere."""
        self._counts[number] = documents

    @property
    def steps_done(self) -> tuple[StepName, ...]:
        """Return the steps whose cleaners clean, in their order."""
        return tuple(self._done)

    def decided(self, step: StepName, number: int) -> PartState:
        """Return what a cleaner that is done has decided of a part."""
        learned = self._done[step]
        begin, count = learned.begins_P[number], learned.counts_P[number]
        state = learned.cleaner.decided(self._parts[number].source, begin, count)
        return PartState(state.arrays, {**state.values, "read": self._counts[number]})

    def take_decided(self, step: StepName, number: int, state: PartState) -> None:
        """Clean part `number` alone by what was decided of it; see `decided`."""
        source, zeros_P = self._parts[number].source, [0] * len(self._parts)
        self.note_count(number, state.values["read"])
        if step == "decontamination":
            remains = Decontaminator.of_decided(state, source)
        else:
            assert self._deduplication
            remains = decided_duplicates(self._deduplication, state, source)
        self._done[step] = _Learned(remains, zeros_P, zeros_P)

    def documents(self, part: int, left_out: LeftOutTally | None = None) -> Iterator[Document]:
        """Yield what remains of each document of part number `part`, in the fixed order.

        Raises:
            RunError: it has other documents than when it was learned.
        """
        rest = self._read(part, left_out)
        for learned in self._done.values():
            rest = _applied(learned, self._parts[part].source, part, rest)
        return rest

    def with_duplicates(self, source: int) -> Iterator[tuple[str, int | None]]:
        """Yield the text of each document that deduplication leaves, and how many fell for it.

        The number is None where the method counts none.
        """
        ((cleaner, begins_P, _),) = self._done.values()
        counts = cleaner if isinstance(cleaner, Deduplicator) else None
        for part in self.parts_of(source):
            for index, document in enumerate(self._read(part), begins_P[part]):
                if rest := cleaner.apply(source, index, document.text):
                    yield rest, counts.duplicates(source, index) if counts else None

    def parts_of(self, source: int) -> list[int]:
        """Return the numbers of the parts of source number `source`."""
        return [number for number, part in enumerate(self._parts) if part.source == source]

    def _read(self, number: int, left_out: LeftOutTally | None = None) -> Iterator[Document]:
        """Yield the documents of a part as they are, and refuse other ones than were learned."""
        part = self._parts[number]
        asked, reading = self._sources[part.source], TextReading.of(self._data)
        learned, count = self._counts.get(number), 0
        for document in read_part(part, asked, reading, left_out, self._column):
            count += 1
            if learned is not None and count > learned:
                break
            yield document
        if self._counts.setdefault(number, count) != count:
            raise RunError(
                f"{asked} changed while it was read: {_number(self._counts[number])} before, and "
                f"{'more' if count > self._counts[number] else f'{count:,}'} now",
                "the same command again",
            )

    def emptied(self, source: int) -> ConfigError | None:
        """Return the error of a source of which cleaning leaves nothing; None where it had none."""
        count = sum(self._counts.get(part, 0) for part in self.parts_of(source))
        if not self._done or not count:
            return None
        asked = self._sources[source]
        lines = "; ".join(step.line() for step in self.record.steps) if self.record else ""
        words = []
        if self._decontamination and self._decontamination.remove != "nothing":
            words.append("data.decontamination.remove=nothing")
        if self._deduplication and self._deduplication.scope == "all":
            words.append("data.deduplication.scope=source")
        return ConfigError(
            f"cleaning leaves nothing of the {_number(count)} of {asked}: {lines}",
            " or ".join([*words, asked.without()]),
        )


def _applied(
    learned: _Learned, source: int, part: int, documents: Iterator[Document]
) -> Iterator[Document]:
    """Yield what a cleaner leaves of each document; those that it drops are left out."""
    for index, document in enumerate(documents, learned.begins_P[part]):
        if rest := learned.cleaner.apply(source, index, document.text):
            yield document._replace(text=rest)


def uncleaned(plan: Plan) -> Plan:
    """Return the plan of a run that was recorded before there was cleaning."""
    keys = {"deduplication": None, "decontamination": None}
    return plan.model_copy(update={"data": plan.data.model_copy(update=keys)})


def _number(count: int) -> str:
    return f"{count:,} document" + "s" * (count != 1)
