"""Compare a run that was trained on longer rows with the weights that it began from.

Both models read the same validation rows: of the length that the weights were trained on, of twice
that, and so on up to the run's own. What the run lost on short rows stands beside what it gained on
long ones. The weights that it began from keep their own rotation, so far places of theirs show what
was there before. Where documents are masked, a place is one in its document.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.assemble.build import make_build
from headrace.assemble.context import choose_device
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.core.files import shell
from headrace.core.progress import OnProgress
from headrace.data.ingest import reopen
from headrace.inference.load import open_model, read_plan, resolve_run
from headrace.inference.needle import NeedleCell, find_needles
from headrace.parallel.world import World
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue
from headrace.train.evaluate import LossByPlace, bins_of, evaluate, finite
from headrace.train.run_folder import RunFolder

TOLERATED = 0.5
"""Percent by which the loss at the trained length may rise, and still counts as kept."""
NAME = "yarn"
"""The technique of a run that was trained on longer rows."""


@dataclass(frozen=True)
class LossAtLength:
    """Hold the loss on rows of one length.

    Args:
        length: tokens of a row.
        loss_nats: a target's mean loss.
        bits_per_byte: the same for each byte of text.
        targets: how many there were.
        places: the loss by place, as `LossByPlace.rows` gives it.
    """

    length: int
    loss_nats: float
    bits_per_byte: float
    targets: int
    places: list[dict[str, Any]]


@dataclass(frozen=True)
class LengthReading:
    """Hold what one model computes on rows of several lengths.

    Args:
        losses: by length, rising.
        needles: how often it finds a sentence, by length and depth.
    """

    losses: list[LossAtLength]
    needles: list[NeedleCell]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        needles = [cell.to_dict() for cell in self.needles]
        return {"losses": [dict(vars(loss)) for loss in self.losses], "needles": needles}


@dataclass(frozen=True)
class Extension:
    """Hold what a run on longer rows gained and lost.

    Args:
        run: its folder.
        base: the folder of the weights that it began from.
        trained: tokens of a row that those were trained on.
        length: tokens of a row of the run.
        before, after: what the weights that it began from compute, and what the run does.
    """

    run: Path
    base: str
    trained: int
    length: int
    before: LengthReading
    after: LengthReading

    @property
    def change_percent(self) -> float:
        """Return by how many percent the loss rose on rows of the trained length."""
        return 100 * (self.after.losses[0].loss_nats / self.before.losses[0].loss_nats - 1)

    @property
    def is_kept(self) -> bool:
        """Return whether the loss on rows of the trained length rose by less than `TOLERATED`."""
        return self.change_percent < TOLERATED

    @property
    def gains_long(self) -> bool:
        """Return whether the loss of the longest rows is below the base's at its own length."""
        return self.after.losses[-1].loss_nats < self.before.losses[0].loss_nats

    @property
    def verdict(self) -> str:
        """Return in a sentence what became of short rows and of long ones."""
        word = "kept" if self.is_kept else "lost"
        long, base = self.after.losses[-1].loss_nats, self.before.losses[0].loss_nats
        return (
            f"short rows are {word}: the loss at {self.trained:,} tokens changed by "
            f"{self.change_percent:+.2f}% ({TOLERATED:g}% is tolerated); at {self.length:,} tokens "
            f"it is {long:.3f} nats, {'below' if self.gains_long else 'not below'} the {base:.3f} "
            f"of the base at {self.trained:,}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "run": str(self.run),
            "base": self.base,
            "trained_length": self.trained,
            "length": self.length,
            "change_percent": self.change_percent,
            "is_kept": self.is_kept,
            "gains_long": self.gains_long,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
        }


def lengths_of(trained: int, length: int) -> list[int]:
    """Return the trained length, twice that and so on, and the run's own."""
    lengths = [trained]
    while 2 * lengths[-1] < length:
        lengths.append(2 * lengths[-1])
    return [*lengths, length]


def read_extension(
    run: Path,
    catalogue: Catalogue,
    *,
    questions: int,
    progress: OnProgress = lambda description, done, total: None,
) -> Extension:
    """Measure a run on longer rows, and the weights that it began from.

    Args:
        run: its folder or name.
        catalogue: the techniques and model families.
        questions: needles of each length and depth.
        progress: takes how far it is.

    Raises:
        ConfigError: it is no run on longer rows, or the weights that it began from are gone.
        Diverged: a loss is not finite.
    """
    folder = resolve_run(run)
    plan = read_plan(folder, catalogue)
    trained = trained_length(plan, folder)
    lengths = lengths_of(trained, plan.data.sequence_length)
    before = _reading(_open_base(plan, folder), trained, lengths, questions, progress)
    opened = open_model(folder, catalogue, with_data=True)
    after = _reading(opened, trained, lengths, questions, progress)
    return Extension(folder, plan.model.pretrained, trained, lengths[-1], before, after)


def trained_length(plan: Plan, run: Path) -> int:
    """Return the tokens of a row that the weights of a run on longer rows were trained on.

    Raises:
        ConfigError: it is no such run.
    """
    rule: Any = plan.techniques.get(NAME)
    trained = rule.original(plan) if rule else plan.data.sequence_length
    if not plan.model.pretrained or trained >= plan.data.sequence_length:
        raise ConfigError(
            f"{run} was not trained on longer rows than weights before it: its rows have "
            f"{plan.data.sequence_length:,} tokens",
            f"headrace extend {shell(run)} --to {2 * plan.data.sequence_length}",
        )
    return trained


def _open_base(plan: Plan, run: Path) -> Build:
    """Return the model that a run began from, with the run's validation text."""
    techniques = {n: t for n, t in plan.techniques.items() if t.room == "data"}
    data = {**dict(plan.data), "curriculum": None}
    base = plan.replaced(device="auto", techniques=techniques, mesh=MeshConfig(), data=data)
    prepared = reopen(base, RunFolder(run).read_data(), run)
    return make_build(base, prepared, World(), choose_device(base))


def _reading(
    build: Build, trained: int, lengths: list[int], questions: int, progress: OnProgress
) -> LengthReading:
    """Return what a model computes on rows of several lengths."""
    losses = []
    for done, length in enumerate(lengths):
        progress("reading rows", done, len(lengths))
        places = LossByPlace(bins_of(trained, length), build.device)
        loss = finite(evaluate(build, build.plan.eval.tokens, length=length, places=places))
        by_place = places.rows(trained)
        losses.append(
            LossAtLength(length, loss.loss_nats, loss.bits_per_byte, loss.tokens, by_place)
        )
    needles = find_needles(
        build, lengths, questions=questions, seed=build.plan.seed, progress=progress
    )
    return LengthReading(losses, needles)
