"""Find or make the scores that a plan's curriculum asks for, beside its prepared shards.

Length and compression follow from the shards. A loss is computed by a trained run, a number of the
source's rows is read with its text. Whatever they come from, the scores that lie beside the shards
are the ones that a run goes by: their digest is part of its fingerprint.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from headrace.core.errors import ConfigError, RunError, is_full_disk, is_out_of_memory
from headrace.core.files import hold_lock, shell
from headrace.core.progress import OnProgress
from headrace.core.remedy import mend
from headrace.data.number_column import NumberColumn
from headrace.data.prepared import Prepared
from headrace.data.quality.scores import (
    FILE,
    NotFinite,
    ScoreDocuments,
    ScoreRecord,
    compression,
    folder_of,
    lengths,
    open_scores,
    save_scores,
)
from headrace.data.shards import Shards
from headrace.plan.curriculum import CurriculumConfig
from headrace.plan.data_config import DataConfig
from headrace.plan.plan import Plan
from headrace.plan.until import unknown_end

KEY = "data.curriculum"
"""The plan's table that asks for scores."""


def column_of(data: DataConfig) -> str:
    """Return the field of the rows that scores them; "" where none does."""
    return data.curriculum.column if data.curriculum else ""


def table_of(plan: Plan) -> str:
    """Return the table of a plan that a user edits to change its curriculum."""
    writers = (name for name, keys in plan.made().items() if KEY in keys)
    return next((f"techniques.{name}" for name in writers), KEY)


def number_of(plan: Plan) -> NumberColumn | None:
    """Return what notes the numbers that score a plan's text; None where no field does."""
    column = column_of(plan.data)
    return NumberColumn(column, table_of(plan)) if column else None


def column_scores(column: str) -> str:
    """Return what scores are called that come from a field of the source's rows."""
    return f"column {column}"


def save_column(
    plan: Plan, directory: Path, scores: Sequence[Sequence[float]], progress: OnProgress
) -> None:
    """Write the scores that were read with the text, beside the shards of the training sides.

    Args:
        plan: names the field that they come from.
        directory: of the data that is being prepared.
        scores: of each source, one value a document.
        progress: as `with_scores` takes it.
    """
    sets = [Shards.open(directory / f"train-{number:02d}") for number in range(len(scores))]
    values = dict(zip((part.directory for part in sets), scores, strict=True))
    what = column_scores(column_of(plan.data))
    folder = folder_of(directory, what)
    _save(plan, folder, what, sets, lambda part, at: iter(values[part.directory][at:]), progress)


def _save(
    plan: Plan,
    folder: Path,
    what: str,
    sets: Sequence[Shards],
    scores: ScoreDocuments,
    progress: OnProgress,
) -> None:
    """Write scores as `save_scores` does.

    Raises:
        ConfigError: one of them is no finite number.
    """
    try:
        save_scores(folder, what, sets, scores, progress)
    except NotFinite as error:
        raise ConfigError(str(error), mend(f"{table_of(plan)}.score=compression")) from None


def open_shares(plan: Plan) -> list[tuple[int, float]]:
    """Return (first row of the stream, share of the rows that is open) by a plan's curriculum.

    Raises:
        ConfigError: nothing says where its pacing ends.
    """
    curriculum = plan.data.curriculum
    assert curriculum is not None
    ends = curriculum.ends(plan.horizon_steps)
    if ends is None:
        refused = unknown_end(f"{KEY}.until", curriculum.until)
        raise ConfigError(refused.reason, refused.remedy)
    rows = plan.batches.each(lambda tokens: tokens // plan.data.sequence_length)
    return [(rows.before(step), share) for step, share in curriculum.open_shares(ends)]


def with_scores(plan: Plan, prepared: Prepared, progress: OnProgress | None = None) -> Prepared:
    """Return prepared data with the scores that the plan's curriculum asks for.

    Args:
        plan: its `data.curriculum` says which.
        prepared: the data.
        progress: called now and then with (description, documents done, all documents).

    Raises:
        ConfigError: they cannot be computed, or those that are there are damaged.
        RunError: the disk is full.
    """
    curriculum = plan.data.curriculum
    if curriculum is None:
        return prepared
    what, make = _asked(curriculum, prepared)
    folder = folder_of(prepared.directory, what)
    if not folder.is_dir():
        lock = hold_lock(
            prepared.directory.with_name(f".{prepared.directory.name}.lock"),
            wait=True,
            key="data.directory",
        )
        try:
            if not folder.is_dir():
                _save(plan, folder, what, prepared.train, make(), progress or (lambda *_: None))
        except OSError as error:
            if is_out_of_memory(error):
                raise
            where = prepared.directory.resolve()
            if not is_full_disk(error):
                raise ConfigError(
                    f"scores cannot be written in {where}: {error}",
                    "data.directory=FOLDER that can be written, on a local disk",
                ) from None
            raise RunError(
                f"the disk is full while writing scores in {where}, which take 4 bytes a document",
                "free some space, or data.directory=FOLDER on another disk",
            ) from None
        finally:
            lock.release()
    scores = open_scores(folder, prepared.train)
    pace = [open_shares(plan), curriculum.first, curriculum.pacing == "sorted"]
    digest = hashlib.sha256(json.dumps(pace).encode()).hexdigest()
    fingerprint = {
        **prepared.fingerprint,
        "scores": scores.fingerprint,
        "curriculum": f"{curriculum.ends(plan.horizon_steps)} steps, {digest}",
    }
    return replace(prepared, scores=scores, fingerprint=fingerprint)


def _asked(
    curriculum: CurriculumConfig, prepared: Prepared
) -> tuple[str, Callable[[], ScoreDocuments]]:
    """Return what is to be computed, in words that name all it depends on, and what does it."""
    if curriculum.score == "length":
        return "length in tokens", lambda: lengths
    if curriculum.score == "compression":
        return "compression by zlib 6", lambda: compression(prepared.tokenizer)
    if curriculum.column:
        what = column_scores(curriculum.column)
        return what, lambda: _gone(prepared, what)
    run = Path(curriculum.run).expanduser()
    room = import_module("headrace.inference.document_loss")  # it stands above the data
    named = f"loss by {curriculum.run}"
    if not run.is_dir() and (kept := _kept(prepared.directory, named)):
        return kept, lambda: _gone(prepared, named)
    return f"{named}, {room.identity(run)}", lambda: room.losses(run, prepared.tokenizer)


def _kept(directory: Path, named: str) -> str:
    """Return what scores are called that a run made which is gone; "" unless there is one set."""
    whats = []
    for file in sorted(directory.glob(f"scores-*/{FILE}")):
        what = ScoreRecord.model_validate_json(file.read_bytes()).what
        if what.startswith(f"{named}, "):
            whats.append(what)
    return whats[0] if len(whats) == 1 else ""


def _gone(prepared: Prepared, what: str) -> ScoreDocuments:
    """Refuse to make scores whose origin is only at hand while the text is read.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"the scores by {what} are gone from {prepared.directory}, and they are made only when "
        "the text is read",
        f"rm -r {shell(prepared.directory)}",
    )
