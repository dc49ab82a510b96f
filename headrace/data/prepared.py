"""Data that is ready to train on, and whether it is what a run was trained on."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.command import rerun_train
from headrace.core.errors import ConfigError
from headrace.core.files import printable
from headrace.data import left_out, mixture
from headrace.data.bpe import TrainedOn
from headrace.data.chat.record import ChatRecord
from headrace.data.cleaning import CleaningRecord
from headrace.data.heldout import Record
from headrace.data.left_out import LeftOut
from headrace.data.quality.scores import Scores
from headrace.data.shards import Shards
from headrace.data.sides import Sides
from headrace.data.tokenizer import Tokenizer
from headrace.plan.plan import Plan

NAMED = ("mixture", "curriculum")
"""Things of a fingerprint that begin with words, and are more than a digest."""
PACED = ("scores", "curriculum")
"""Things of a fingerprint that only data with a curriculum has."""
VERIFY_BYTES = 1 << 30
"""Sets up to this size are compared with their hashes whenever they are opened."""


@dataclass(frozen=True)
class Prepared:
    """Data that is ready to train on."""

    directory: Path
    tokenizer: Tokenizer
    train: tuple[Shards, ...]
    """One per source."""
    validation: Shards
    fingerprint: dict[str, str]
    """`data`, `tokenizer`, `mixture`, `manifests`, `cleaning` where there was some, and with a
    curriculum `scores` and `curriculum`: a resume compares them one by one."""
    left_out: tuple[LeftOut, ...] = ()
    """What of the sources is no text in it, by reason."""
    split: Record | None = None
    """How the sides were made; None where an earlier version made them."""
    cleaning: CleaningRecord | None = None
    """What was cleaned of the text; None where nothing was asked for."""
    scores: Scores | None = None
    """How hard each document is; None where the plan has no curriculum."""
    chat: ChatRecord | None = None
    """What is known of its conversations; None where it holds texts."""
    general: Shards | None = None
    """A held-out text of another kind (`eval.general`); None where the plan names none."""
    has_begun: bool = False
    """Whether a run that has begun opened it: the run's record says what its tokenizer is, and not
    what lies beside its first weights now."""

    def sides(self, asked: float | str) -> Sides:
        """Return both sides in numbers; `asked` is `data.validation`."""
        return Sides(self.train, self.validation, asked, self.split)

    @property
    def lost_share(self) -> float:
        """Share of the text's bytes that the tokens do not stand for; below 0 where they are more.

        What a tokenizer changes without changing the count of bytes is no part of it.
        """
        raw, counted = self._bytes
        return 1 - counted / max(1, raw)

    @property
    def loses(self) -> str:
        """Return what the tokenizer loses of this text, with an example; "" for nothing."""
        raw, counted = self._bytes
        amount = f"its tokens stand for {counted:,} bytes of a text of {raw:,}"
        example = self.tokenizer.loses or (self.split.loses if self.split else "")
        return "; ".join(filter(None, (example, amount if counted != raw else "")))

    @property
    def _bytes(self) -> tuple[int, int]:
        sets = [s for s in (*self.train, self.validation) if s]  # a model alone has none
        return sum(s.text_bytes for s in sets), sum(s.manifest.counted_bytes for s in sets)

    @property
    def loss_fields(self) -> dict[str, str]:
        """Return the field that a verb adds to its answer; nothing where nothing is lost."""
        return {"tokenizer_loses": self.loses} if self.loses else {}

    @property
    def cleaning_fields(self) -> dict[str, Any]:
        """Return the field that a verb or a report adds; nothing where nothing was cleaned."""
        return {"cleaning": self.cleaning.to_dict()} if self.cleaning else {}

    @property
    def trained_on(self) -> TrainedOn | None:
        """Return what its tokenizer learned from; None where it was brought along."""
        return self.split.trained_on if self.split else None

    @property
    def about_tokenizer(self) -> dict[str, Any]:
        """Return what a report records of the tokenizer, and of what it loses of this text."""
        about = {"vocab": self.tokenizer.vocab, "sha256": self.tokenizer.fingerprint}
        return about | ({"loses": self.loses, "lost_share": self.lost_share} if self.loses else {})

    def to_dict(self, asked: float | str) -> dict[str, Any]:
        """Return what it is, as JSON values; `asked` is `data.validation`."""
        return {
            "folder": str(self.directory),
            "vocab": self.tokenizer.vocab,
            "train_tokens": sum(s.tokens for s in self.train),
            "validation_tokens": self.validation.tokens,
            "documents": sum(s.documents for s in self.train),
            **self.sides(asked).to_dict(),
            **{k if k in NAMED else f"{k}_sha256": v for k, v in self.fingerprint.items()},
            **self.loss_fields,
            **self.cleaning_fields,
            **self.score_fields,
            **self.chat_fields,
            **({"trained_on": trained.model_dump()} if (trained := self.trained_on) else {}),
        }

    @property
    def chat_fields(self) -> dict[str, Any]:
        """Return the field that tells of conversations; nothing where there are none."""
        return {"chat": self.chat.to_dict()} if self.chat else {}

    @property
    def score_fields(self) -> dict[str, Any]:
        """Return the field that tells of the scores; nothing where there are none."""
        if self.scores is None:
            return {}
        record = self.scores.record
        return {
            "scores": record.model_dump(mode="json", include={"what", "least", "mean", "largest"})
        }

    def record(self) -> dict[str, Any]:
        """Return what a run records of its data: where it lies, and its fingerprint."""
        absolute = printable(self.directory.resolve())
        where = {"directory": str(self.directory), "absolute": absolute}
        return {**where, "fingerprint": self.fingerprint}


def check_same_data(was: Mapping[str, str], now: Mapping[str, str], where: str, run: Path) -> None:
    """Refuse data that is not what a run was trained on.

    Args:
        was: digests that the run keeps, by thing.
        now: those of what is there.
        where: what is there, for the message.
        run: the run's folder.

    Raises:
        ConfigError: with what changed, and both digests.
    """
    paced = [thing for thing in PACED if thing in now and thing not in was]
    changed = [*(thing for thing in was if now.get(thing) != was[thing]), *paced]
    if changed:
        things = " and the ".join(changed)
        digests = ", ".join(
            f"{t} {str(was.get(t))[:12]} -> {str(now.get(t))[:12]}" for t in changed
        )
        raise ConfigError(
            f"the {things} changed since the run was trained ({digests}); {where}",
            f"{rerun_train(run, 'name=NEW')} for a new run, or the {things} of then in its place",
        )


def open_prepared(plan: Plan, target: Path) -> Prepared:
    """Open a finished folder, checked.

    Raises:
        ConfigError: its tokenizer is another, or a file is damaged.
    """
    tokenizer = Tokenizer.load(target / "tokenizer.json")
    train = tuple(Shards.open(target / f"train-{i:02d}") for i in range(len(plan.source_list)))
    validation = Shards.open(target / "validation")
    for shards in (*train, validation):
        m, ids = shards.manifest, (tokenizer.vocab, tokenizer.document_token)
        if m.tokenizer != tokenizer.fingerprint or (m.vocab, m.document_token) != ids:
            manifest_ids = f" (vocab {m.vocab:,} and document_token {m.document_token:,}"
            raise ConfigError(
                f"{target / 'tokenizer.json'} is not the tokenizer that wrote {shards.directory}"
                f"{manifest_ids}; it: {ids[0]:,} and {ids[1]:,})"
            )
    if sum(s.text_bytes for s in (*train, validation)) <= VERIFY_BYTES:
        for shards in (*train, validation):
            shards.verify()
            shards.verify_bytes(tokenizer.token_bytes)
    if not plan.data.lossy_tokenizer:
        _check_counts(*train, validation)
    parts = [s.fingerprint for s in (*train, validation)]
    fingerprint = {
        "data": _digest(parts),
        "tokenizer": tokenizer.fingerprint,
        "mixture": mixture.fingerprint(plan),
        "manifests": _digest([s.manifest_digest for s in (*train, validation)]),
    }
    cleaning = CleaningRecord.load(target)
    if cleaning is not None:
        fingerprint["cleaning"] = cleaning.fingerprint
    if (chat := ChatRecord.load(target)) is not None:
        fingerprint["chat"] = chat.fingerprint
    return Prepared(
        target,
        tokenizer,
        train,
        validation,
        fingerprint,
        left_out.load(target),
        Record.load(target),
        cleaning,
        chat=chat,
    )


def _check_counts(*sets: Shards) -> None:
    """Compare the bytes of a text with those that its tokens stand for, where none may be lost.

    Bits per byte rests on both.

    Raises:
        ConfigError: with both.
    """
    for shards in sets:
        m = shards.manifest
        if m.text_bytes != m.counted_bytes:
            raise ConfigError(
                f"{shards.directory / 'manifest.json'} says text_bytes {m.text_bytes:,} and "
                f"counted_bytes {m.counted_bytes:,}, and its tokenizer loses nothing"
            )


def _digest(parts: list[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
