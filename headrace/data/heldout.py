"""Which text is held out: a share of the bytes, found from the hash of every document's text.

`data.validation` = p asks for p of the text. Between LEAST and MOST times that many bytes are held
out, or the split is refused. A document is held out when the hash of its text falls below a border,
so the order of files and the number of processes change nothing, and equal documents are on one
side. The border is p of all hashes. Where that would leave the bounds, it moves by as few documents
as it must.

A document with more bytes than may be held out whole is cut: its last p is held out, the rest is
trained on. Equal documents count as one here. Of each source the document with the highest hash is
never held out whole, so every source keeps text to train on.

Added documents change the side of others only where the bounds ask for it: the border moves, or a
document that was cut has become small beside the whole and is no longer cut.
"""

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import AliasChoices, Field, ValidationError

from headrace.core.errors import ConfigError
from headrace.core.files import write_whole
from headrace.core.remedy import mend
from headrace.core.strict import Strict
from headrace.data.bpe import TrainedOn

RULE = 2
"""Version of what stands above; other prepared data belongs to another version."""
LEAST, MOST = 0.5, 1.5
"""Bounds of the bytes that are held out, in times what was asked for."""
CUT_SLACK = 0.25
"""Share of a held-out end that may be given up to begin it with a line, or with a word."""
PLACES = 1 << 64
"""Places that a hash can fall on."""
MOST_UNITS = 1 << 18
"""Groups of documents whose bytes are counted. Equal documents are a group; with more different
ones than this, neighbours by hash share one."""

SHARES = (1e-6, 1e-5, 1e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Shares that are tried in place of one that is refused."""
MOST_READ_BYTES = 64 << 20
"""Bytes of text that are read again to find one of them; one is tried of any text."""
FILE = "held-out.json"
"""What prepared data keeps of its sides lies in this file."""


def cut_at(raw: bytes, share: float) -> int:
    """Return where the held-out end of a text begins, in bytes; its length if it is too short."""
    size = len(raw)
    cut = int(size * (1 - share))
    while cut < size and raw[cut] & 0xC0 == 0x80:  # within a character
        cut += 1
    limit = cut + int((size - cut) * CUT_SLACK)
    for mark in (b"\n", b" "):
        if (end := raw.find(mark, cut, limit)) >= 0:
            cut = end + 1
            break
    return cut or size


@dataclass(frozen=True)
class Split:
    """Which text is held out, decided.

    Attributes:
        share: what was asked for.
        natural: the border that the share alone would give, as a place of hashes.
        shift: low bits of a place that its unit leaves out.
        border: units below it are held out whole.
        cut: units whose documents are cut.
        kept: units below the border that are trained on all the same.
        validation_bytes: bytes that are held out.
        text_bytes: bytes of all text.
    """

    share: float
    natural: int
    shift: int
    border: int
    cut: frozenset[int]
    kept: frozenset[int]
    validation_bytes: int
    text_bytes: int

    def state(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self) | {"cut": sorted(self.cut), "kept": sorted(self.kept)}

    @staticmethod
    def of_state(state: Mapping[str, Any]) -> "Split":
        """Return the split that `state` was taken of."""
        sets = {key: frozenset(state[key]) for key in ("cut", "kept")}
        return Split(**{**state, **sets})

    def is_cut(self, place: int) -> bool:
        """Return whether the document whose hash falls on `place` is cut."""
        return _unit(place, self.natural, self.shift) in self.cut

    def is_validation(self, place: int) -> bool:
        """Return whether it is held out whole."""
        unit = _unit(place, self.natural, self.shift)
        return unit < self.border and unit not in self.cut and unit not in self.kept

    def parts(self, text: str, place: int) -> tuple[str, str]:
        """Return what of a document is trained on, and what of it is held out."""
        if self.is_cut(place):
            raw = text.encode()
            cut = cut_at(raw, self.share)
            return raw[:cut].decode(), raw[cut:].decode()
        return ("", text) if self.is_validation(place) else (text, "")


class Weights:
    """How the bytes of a text are spread over the hashes of its documents.

    Args:
        share: of the text, that is to be held out.
        cuts: whether a large document may be cut; a conversation is on one side whole.
    """

    def __init__(self, share: float, *, cuts: bool = True) -> None:
        self.share, self.cuts = share, cuts
        self.text_bytes = self.documents = 0
        self._natural, self._shift = int(share * PLACES), 0
        self._units: dict[int, list[int]] = {}
        self._last: dict[int, int] = {}

    def add(self, raw: bytes, place: int, source: int = 0) -> int:
        """Count a document.

        Args:
            raw: its text.
            place: where the hash of its text falls.
            source: number of the source that it stands in.

        Returns:
            Where its end would begin if it were cut, in bytes.
        """
        cut = cut_at(raw, self.share) if self.cuts else len(raw)
        self.documents += 1
        self.text_bytes += len(raw)
        self._last[source] = max(place, self._last.get(source, 0))
        sizes = self._units.setdefault(_unit(place, self._natural, self._shift), [0, 0])
        sizes[0] += len(raw)
        sizes[1] += len(raw) - cut
        while len(self._units) > MOST_UNITS:
            self._coarsen()
        return cut

    def merge(self, other: "Weights") -> None:
        """Count the documents of another text too; in any order and grouping the sum is the same.

        Args:
            other: of the same share.
        """
        self.documents += other.documents
        self.text_bytes += other.text_bytes
        for source, place in other._last.items():
            self._last[source] = max(place, self._last.get(source, 0))
        while self._shift < other._shift:
            self._coarsen()
        for unit, (whole, end) in other._units.items():
            down = self._shift - other._shift  # the lowest bit says on which side of the share
            sizes = self._units.setdefault((unit >> 1 + down) << 1 | unit & 1, [0, 0])
            sizes[0] += whole
            sizes[1] += end
        while len(self._units) > MOST_UNITS:
            self._coarsen()

    def state(self) -> dict[str, Any]:
        """Return all that was counted, as JSON values."""
        return {
            "share": self.share,
            "documents": self.documents,
            "text_bytes": self.text_bytes,
            "shift": self._shift,
            "units": [[unit, *sizes] for unit, sizes in self._units.items()],
            "last": [*self._last.items()],
        }

    @staticmethod
    def of_state(state: Mapping[str, Any]) -> "Weights":
        """Return the weights that `state` was taken of."""
        weights = Weights(state["share"])
        weights.documents, weights.text_bytes = state["documents"], state["text_bytes"]
        weights._shift = state["shift"]
        weights._units = {unit: [whole, end] for unit, whole, end in state["units"]}
        weights._last = dict(state["last"])
        return weights

    def _coarsen(self) -> None:
        """Count half as many units."""
        self._shift += 1
        units: dict[int, list[int]] = {}
        for unit, (whole, end) in self._units.items():
            sizes = units.setdefault(unit >> 2 << 1 | unit & 1, [0, 0])
            sizes[0] += whole
            sizes[1] += end
        self._units = units

    def split(self) -> Split | None:
        """Decide what is held out; None where nothing within the bounds can be."""
        units = sorted(self._units)
        sizes = np.array([self._units[unit] for unit in units], dtype=np.int64).reshape(-1, 2)
        spared = {_unit(last, self._natural, self._shift) for last in self._last.values()}
        is_spared = np.array([unit in spared for unit in units], dtype=bool)
        wanted = self.share * self.text_bytes
        for largest, cuts_all in ((MOST, True), (1.0, True), (1.0, False)):
            is_large = sizes[:, 0] > largest * wanted
            if (split := self._decide(units, sizes, is_large, is_spared, cuts_all)) is not None:
                return split
        return None

    def _decide(
        self,
        units: list[int],
        sizes: np.ndarray,
        is_large: np.ndarray,
        is_spared: np.ndarray,
        cuts_all: bool,
    ) -> Split | None:
        """Return the split that cuts what is large, or as much of it as the bounds allow."""
        wanted = self.share * self.text_bytes
        least, most = LEAST * wanted, MOST * wanted
        ends = np.where(is_large, sizes[:, 1], 0)
        if not cuts_all:
            is_large &= ends.cumsum() <= most
            ends = np.where(is_large, ends, 0)
        whole = np.where(is_spared, sizes[:, 1], sizes[:, 0])
        whole[is_large | (sizes[:, 0] > most)] = 0
        taken = ends.sum() + np.concatenate([[0], whole.cumsum()])
        fits = np.flatnonzero((taken >= least) & (taken <= most) & (taken > 0))
        if not len(fits):
            return None
        natural = sum(1 for unit in units if not unit & 1)
        count = int(fits[np.abs(fits - natural).argmin()])
        below = np.arange(len(units)) < count
        cut = (is_large | (is_spared & below)) & (sizes[:, 1] > 0)
        kept = below & (whole == 0) & ~cut  # too large to be held out, and not to be cut
        return Split(
            share=self.share,
            natural=self._natural,
            shift=self._shift,
            border=units[count] if count < len(units) else PLACES << 1,
            cut=frozenset(compress(units, cut)),
            kept=frozenset(compress(units, kept)),
            validation_bytes=int(taken[count]),
            text_bytes=self.text_bytes,
        )


def _unit(place: int, natural: int, shift: int) -> int:
    """Return the number of a place's unit. It rises with the place and is odd from `natural` on."""
    return place >> shift << 1 | (place >= natural)


def refused_split(weights: Weights, sources: str, weigh: Callable[[float], Weights]) -> ConfigError:
    """Return the error of a share that no split comes near to, with the nearest that works.

    Args:
        weights: of the text.
        sources: what the user named.
        weigh: the same text again, for another share.
    """
    size, share, documents = weights.text_bytes, weights.share, weights.documents
    texts = "one short document" if documents == 1 else f"{documents:,} short documents"
    asked = f"data.validation = {share:g} of them is {share * size:.3g}"
    message = (
        f"data.sources = {sources} give {texts}, {size:,} bytes; {asked}, and between "
        f"{LEAST * share * size:.3g} and {MOST * share * size:.3g} bytes cannot be held out"
    )
    nearest = sorted(SHARES, key=lambda other: abs(math.log(other / share)))
    looks = max(1, MOST_READ_BYTES // max(1, size))
    for other in [other for other in nearest if other * size >= 1][:looks]:
        if weigh(other).split() is not None:
            return ConfigError(message, mend(f"data.validation={other:g}") | "more text")
    return ConfigError(message, "data.validation=PATH of a text of its own, or more text")


class Overlap(Strict):
    """How much of a validation text of its own is trained on, too, letter case and marks aside."""

    documents: int = Field(ge=0)
    """Documents of which nearly all passages are trained on."""
    of_documents: int = Field(ge=0)
    bytes: int = Field(ge=0)
    of_bytes: int = Field(ge=0)
    passages: int = Field(default=0, ge=0, validation_alias=AliasChoices("passages", "lines"))
    """Different runs of words that are trained on; earlier records have long lines."""
    of_passages: int = Field(
        default=0, ge=0, validation_alias=AliasChoices("of_passages", "of_lines")
    )

    @property
    def passages_share(self) -> float:
        """Share of the validation text's passages that are trained on."""
        return self.passages / max(1, self.of_passages)

    @property
    def share(self) -> float:
        """Share of the validation text's bytes that is trained on."""
        return self.bytes / max(1, self.of_bytes)


class RecordDamaged(ConfigError):
    """The record of how the sides were made is no record."""


class Record(Strict):
    """What prepared data keeps of how its sides and its tokenizer were made."""

    rule: int = RULE
    cut_documents: int = Field(default=0, ge=0)
    """Documents whose end is held out."""
    overlap: Overlap | None = None
    """None where a share is held out: equal documents are on one side."""
    loses: str = ""
    """What a tokenizer that was accepted as one that loses text loses of the held-out side."""
    trained_on: TrainedOn | None = None
    """What a tokenizer that was trained for this data learned from."""

    def save(self, folder: Path) -> None:
        """Write it beside the shards."""
        write_whole(folder / FILE, self.model_dump_json(indent=1))

    @staticmethod
    def load(folder: Path) -> "Record | None":
        """Read it; None where an earlier version prepared the folder.

        Raises:
            RecordDamaged: it is no record; the shards stand without it.
        """
        try:
            return Record.model_validate_json((folder / FILE).read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            problem = error.errors()[0]["msg"].lower()
            raise RecordDamaged(
                f"{folder / FILE} is damaged: {problem}; it only tells how the sides were made",
                f"rm {shlex.quote(str(folder / FILE))}",
            ) from None
