"""What a preference is compared with: how likely answers were before training.

A model with adapters has its base inside, so its reference is read anew from each micro-batch.
Without adapters the weights that a run begins from are gone after its first step. Then the
log-probability of every answer is computed before that step, once, and kept beside the shards:
`reference-DIGEST.safetensors`, 5 bytes a document, where the digest is made of the weights, the
shards, and all that decides what the model computes of them. The file says of which documents it
knows, and is written every `KEPT_S` seconds while it is made: what was interrupted goes on with the
documents that are missing, and rows of another length have only those read that no row had before.
Another run from the same weights reads it; a resume reads the file that the run began with, and
refuses one whose numbers have changed. Where two runs read the same documents at once, each writes
under a lock, and both go on with the number that was written first.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from headrace.assemble.sockets import PARTS, Build, MicroBatch
from headrace.core.errors import ConfigError, Diverged
from headrace.core.files import hold_lock, sha256_of, write_whole
from headrace.core.remedy import mend
from headrace.costs.adapters import ADAPTERS
from headrace.data.loader import collate
from headrace.data.packing.pairs import DOCUMENTS, PairRows
from headrace.data.rows import IGNORE
from headrace.model.adapter import weights_digest
from headrace.model.lora import has_adapters
from headrace.parallel.world import World

RULE = 2
"""Version of how references are computed; a file of another version is not read."""
KEPT_S = 30.0
"""Seconds of reading after which what was read is written: this much is lost at most."""
MODEL = {"config", "source", *PARTS, "mask", "linear", "storage", "block_forward"}
"""Sockets whose filler decides what a model computes."""
ReadLogs = Callable[[Build, MicroBatch], Tensor]
"""(build, micro-batch) -> log-probability of each document's answers, by the model as it is."""


@dataclass
class Known:
    """Hold the log-probabilities of documents as far as they are known.

    Args:
        values: fp32 [documents of all sources, and of the validation text]; 0 where not known.
        is_read: uint8 [documents]: 1 where it is known.
    """

    values: np.ndarray
    is_read: np.ndarray

    _names: ClassVar[tuple[str, str, str]] = ("log_probabilities", "is_read", "sha256")

    @classmethod
    def nothing(cls, documents: int) -> "Known":
        """Return what is known at first."""
        return cls(np.zeros(documents, np.float32), np.zeros(documents, np.uint8))

    @classmethod
    def opened(cls, path: Path, documents: int) -> "Known":
        """Return what a file knows: nothing where there is none, or it is damaged."""
        nothing = cls.nothing(documents)
        try:
            tensors = load(path.read_bytes())
            made = cls(*(tensors[name] for name in cls._names[:2]))
            is_whole = tensors[cls._names[2]].tobytes() == made.digest()
        except (OSError, SafetensorError, KeyError):
            return nothing
        fits = all(
            (one.shape, one.dtype) == (two.shape, two.dtype)
            for one, two in ((made.values, nothing.values), (made.is_read, nothing.is_read))
        )
        return made if is_whole and fits else nothing

    def keep(self, path: Path) -> "Known":
        """Add it to a file under a lock, and return all that the file holds then.

        A document that another run has written meanwhile keeps that run's number, with which it
        trains.

        Raises:
            ConfigError: the file system has no locks.
        """
        lock = hold_lock(path.with_name(f".{path.name}.lock"), wait=True, key="data.directory")
        try:
            first = Known.opened(path, len(self.values))
            values = np.where(first.is_read > 0, first.values, self.values)
            made = Known(values, self.is_read | first.is_read)
            seal = np.frombuffer(made.digest(), np.uint8)
            parts = dict(zip(self._names, (made.values, made.is_read, seal), strict=True))
            write_whole(path, save(parts))
        finally:
            lock.release()
        return made

    def of_first_rank(self, world: World) -> "Known":
        """Return the first rank's on every rank, bit for bit."""
        if world.ranks == 1:
            return self
        values, is_read = (
            world.sum_(torch.from_numpy(part) * (world.rank == 0)).numpy()
            for part in (self.values.view(np.int32), self.is_read)
        )
        return Known(values.view(np.float32), is_read)

    def digest(self, documents: np.ndarray | None = None) -> bytes:
        """Return the sha256 of it, or of what it knows of some documents."""
        chosen = slice(None) if documents is None else documents
        digest = hashlib.sha256(self.values[chosen].tobytes())
        digest.update(self.is_read[chosen].tobytes())
        return digest.digest()

    def missing(self, documents: np.ndarray) -> bool:
        """Return whether any of these documents is not known."""
        return not self.is_read[documents].all()


class References:
    """Find the reference's log-probabilities of documents; a technique's state in a checkpoint.

    Args:
        owner: the technique that compares.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.kept: Tensor | None = None
        """fp32 [documents], on the device, as `Known.values`; None where adapters have the base."""
        self._begun_with: dict[str, str] = {}
        self._is_made = False

    def tensors(self) -> dict[str, Tensor]:
        """Return no tensors: the file beside the shards holds them."""
        return {}

    def values(self) -> dict[str, Any]:
        """Return which file the run began with, and the sha256 of what the run reads of it."""
        return dict(self._begun_with)

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Take over what `values` returned."""
        self._begun_with = {str(key): str(value) for key, value in values.items()}

    def of(self, work: MicroBatch) -> Tensor | None:
        """Return the kept log-probability of each document, [N]; None where none are kept."""
        if self.kept is None:
            return None
        assert work.extras is not None
        return self.kept[work.extras[DOCUMENTS]]

    def make(self, build: Build, read: ReadLogs) -> None:
        """Open or compute what is kept, where it is needed and was not yet.

        Raises:
            ConfigError: the file that a resumed run began with is gone or has changed.
            Diverged: the weights that the run begins with give no finite log-probability.
        """
        if self._is_made:
            return
        self._is_made = True
        if is_inside(build):
            return
        begun = self._begun_with
        path = build.prepared.directory / (begun.get("file") or self._name(build))
        every = build.loader.packer, validation_rows(build)
        packers = [packer for packer in every if isinstance(packer, PairRows)]
        rows = [(p, unit) for p in packers for unit in units_of(p)]
        ours = [p.documents(*unit) + p.first_documents[unit[0]] for p, unit in rows]
        needed = np.concatenate(ours)
        known = Known.opened(path, documents_of(build))
        if begun and known.digest(needed).hex() != begun["sha256"]:
            what = "has changed" if path.is_file() else "is gone"
            raise ConfigError(
                f"{path} {what}: it holds how likely answers were before the run began, and its "
                "losses compare with them",
                "the file as it was, or a new run: nothing else knows the weights of that time",
            )
        if len({*build.world.gather(known.digest().hex())}) > 1:
            known = Known.nothing(len(known.values))  # another run writes it while ranks look
        if known.missing(needed):
            known = _Reading(build, path, known, read).all_of(packers)
        self.kept = torch.from_numpy(known.values).to(build.device)
        self._begun_with = {"file": path.name, "sha256": known.digest(needed).hex()}

    def _name(self, build: Build) -> str:
        """Return the name of the file, made of all that decides how likely an answer is at first.

        Techniques that only split or speed up the model are left out, and so is the loss.
        """
        model = build.plan.model
        base: Any = ["random", build.plan.seed]
        if model.pretrained:
            base = [weights_digest(Path(model.pretrained))]
            for file in sorted(Path(model.adapter).glob("*.safetensors")) if model.adapter else ():
                base.append(sha256_of(file))
        config = build.config.model_dump(mode="json", exclude={"pretrained", "adapter"})
        others = {
            one.name(): one.model_dump(mode="json")
            for one in build.techniques
            if one.name() != self.owner
            and one.equality != "exact"
            and MODEL & {*one.claims, *one.composes}
        }
        shards = [one.fingerprint for one in (*build.prepared.train, build.prepared.validation)]
        facts = [RULE, base, config, others, shards, build.context.precision]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return f"reference-{digest[:12]}.safetensors"


def is_inside(build: Build) -> bool:
    """Return whether a model without its adapters is what it was before training.

    It is not where other weights learn too, or where the run begins from trained adapters.
    """
    learned = [n for n, p in build.model.named_parameters() if p.requires_grad]
    has_only_adapters = all(name.endswith(ADAPTERS) for name in learned)
    return has_adapters(build.model) and has_only_adapters and not build.plan.model.adapter


def documents_of(build: Build) -> int:
    """Return the documents of all sources and of the validation text."""
    prepared = build.prepared
    return sum(part.documents for part in (*prepared.train, prepared.validation))


def validation_rows(build: Build) -> PairRows | None:
    """Return the rows of held-out pairs, whose documents are counted behind those of all sources.

    None where none of them fits a row.
    """
    first = sum(part.documents for part in build.prepared.train)
    length = build.plan.data.sequence_length
    try:
        return PairRows([build.prepared.validation], length, first=first)
    except ConfigError:
        return None


def units_of(packer: PairRows) -> list[tuple[int, int]]:
    """Return each row of a packer as its source, and its number in it."""
    return [(s, unit) for s, count in enumerate(packer.units) for unit in range(count)]


def shared(
    build: Build, packer: PairRows, units: Sequence[tuple[int, int]]
) -> Iterator[tuple[Sequence[tuple[int, int]], MicroBatch]]:
    """Yield rows in micro-batches, of which each data rank has its part, and as many as any other.

    Args:
        build: the run.
        packer: makes the rows.
        units: what is read, the same on every rank.

    Yields:
        The rows that all ranks read at once, and this rank's micro-batch of them, which has first
        its own of these rows, then rows without targets.
    """
    rank, ranks = build.world.place("data"), build.world.size("data")
    size = build.plan.micro_rows
    for begin in range(0, len(units), size * ranks):
        together = units[begin : begin + size * ranks]
        mine = together[rank * size : (rank + 1) * size]
        padding = [units[-1]] * (size - len(mine))
        micro = collate([packer.row(*unit) for unit in (*mine, *padding)], segments=True)
        micro.targets_BT[len(mine) :] = IGNORE
        yield together, build.place(build, micro)


class _Reading:
    """Read what is not known yet, and keep it while it goes.

    Args:
        build: the run.
        path: where it is kept.
        known: what is known already; the same on every rank.
        read: computes log-probabilities.
    """

    def __init__(self, build: Build, path: Path, known: Known, read: ReadLogs) -> None:
        self.build, self.path, self.read = build, path, read
        self.before = known
        self.is_read = known.is_read.copy()
        self.own = torch.zeros(len(known.values), device=build.device)
        """What this rank has read."""
        self.written_s = time.monotonic()

    def all_of(self, packers: Sequence[PairRows]) -> Known:
        """Return what is known after all documents of all rows were read.

        Raises:
            Diverged: see `References.make`.
        """
        note, world = self.build.note_line, self.build.world
        missing = [(packer, self._missing(packer)) for packer in packers]
        rows, done, shown = sum(len(units) for _, units in missing), 0, 0
        pairs = sum(packer.pairs for packer in packers)
        if (every := sum(sum(packer.units) for packer in packers)) > rows:
            note(f"reference: {every - rows:,} of {every:,} rows were read before, and are kept")
        try:
            for packer, units in missing:
                for together, work in shared(self.build, packer, units):
                    self._take(packer, together, work)
                    done += len(together)
                    if (tenths := 10 * done // rows) > shown:
                        shown = tenths
                        note(f"reference of {pairs:,} preference pairs: {10 * shown}% read")
                    if world.any(time.monotonic() - self.written_s > KEPT_S):
                        self._write()
        except BaseException:
            if world.ranks == 1:  # several would wait for each other
                self._write()
                note(f"reference: {done:,} of {rows:,} rows are kept; the same command goes on")
            raise
        return self._write()

    def _missing(self, packer: PairRows) -> list[tuple[int, int]]:
        """Return the rows of which a document is not known.

        They are as many together as a step reads at once, from the same row on: what is read in two
        parts is then what is read in one, bit for bit.
        """
        units = units_of(packer)
        size = self.build.plan.micro_rows * self.build.world.size("data")
        missing = []
        for begin in range(0, len(units), size):
            together = units[begin : begin + size]
            ours = [packer.documents(*u) + packer.first_documents[u[0]] for u in together]
            if self.before.missing(np.concatenate(ours)):
                missing += together
        return missing

    def _take(
        self, packer: PairRows, together: Sequence[tuple[int, int]], work: MicroBatch
    ) -> None:
        """Read a micro-batch, and take the sums of this rank's rows of it."""
        length, size = self.build.plan.data.sequence_length, self.build.plan.micro_rows
        sums = self.read(self.build, work)
        rank = self.build.world.place("data")
        for number, (source, unit) in enumerate(together):
            ours = packer.documents(source, unit) + packer.first_documents[source]
            if rank * size <= number < (rank + 1) * size:
                begin = (number - rank * size) * length
                places = torch.from_numpy(ours).to(self.build.device)
                self.own[places] = sums[begin : begin + len(ours)]
        for source, unit in together:
            self.is_read[packer.documents(source, unit) + packer.first_documents[source]] = 1

    def _write(self) -> Known:
        """Return what is known by now on all ranks, and keep it."""
        own = self.build.world.sum_(self.own.clone(), "data").cpu().numpy()
        is_new = (self.is_read > 0) & (self.before.is_read == 0)
        values = np.where(is_new, own, self.before.values).astype(np.float32)
        if wrong := int((~np.isfinite(values)).sum()):
            raise Diverged(
                f"{wrong:,} of {len(values):,} answers have no finite log-probability by the "
                "weights that the run begins with: there is nothing to compare with",
                "model.pretrained=FOLDER of other weights"
                if self.build.context.precision == "fp32"
                else mend("model.precision=fp32"),
            )
        known = Known(values, self.is_read.copy())
        if self.build.world.rank == 0:
            known = known.keep(self.path)
        self.written_s = time.monotonic()
        return known.of_first_rank(self.build.world)
