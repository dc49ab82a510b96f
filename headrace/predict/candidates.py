"""Single changes of a plan that are worth asking about, and the answer to one of them.

Everything is read from the techniques themselves: whether they keep the gradients (`equality`),
which sockets they own, what they exclude, which knobs they have. None is known by name here. A
change is a tuple of words (headrace/plan/changes.py): putting a technique in takes out what it
cannot stand beside, so that one change may be several words.

An error of a technique's own code is told like a refusal, with the file and the line: a technique
that cannot say what it does costs nobody else a plan.

Left out: keys of the plan itself but for the rows of a micro-batch and those that a technique
rewrites, since they change what is trained (rows, rates, sizes) or cannot be foreseen
(`attention=measured`), and the number of ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from headrace.assemble.build import make_ledgers
from headrace.core.errors import HeadraceError, UnsupportedError
from headrace.core.units import divisors
from headrace.costs.machine import Machine
from headrace.costs.step import step_time
from headrace.plan.changes import changed, difference, flat, word
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Context, Technique
from headrace.predict.calibration import Calibration
from headrace.predict.layouts import layouts
from headrace.predict.prediction import Prediction, at, predict
from headrace.predict.ranks import slowest

Words = tuple[str, ...]
MICRO = "batch.micro_sequences"
MENDS = ("techniques.", f"{MICRO}=")
"""How keys begin that a remedy may set: they do not change what is trained."""
MOST_MENDS = 2
"""Alternatives of a remedy that are tried."""


class PredictionFailed(UnsupportedError):
    """A technique's own code failed where it was asked what it does: a bug, and told as one."""


@contextmanager
def _told() -> Iterator[None]:
    """What is no message for a user becomes one."""
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        at = extract_tb(error.__traceback__)[-1]
        raise PredictionFailed(
            f"its prediction failed: {type(error).__name__}: {error} "
            f"({Path(at.filename).name}, line {at.lineno})",
            "leave it out, and report this: it is a bug",
        ) from error


@dataclass(frozen=True)
class Candidate:
    """A plan that a sweep asked about.

    Args:
        changes: of the plan that it began with, in words; none for that plan itself.
        plan: with the changes.
        prediction: what the planner foresees of it.
    """

    changes: Words
    plan: Plan
    prediction: Prediction


@dataclass(frozen=True)
class Asking:
    """Who answers: a start, a place, a machine, and the techniques that there are.

    Args:
        start: the plan that changes are told from.
        context: where it would run.
        machine: the rates.
        catalogue: the techniques.
        learning: also change what is learned.
        calibration: by measured steps of one plan there.
        layouts: also lay several ranks out along other axes of the mesh.
    """

    start: Plan
    context: Context
    machine: Machine
    catalogue: Catalogue
    learning: bool = False
    calibration: Calibration | None = None
    layouts: bool = False

    def keeps(self, technique: type[Technique[Any]]) -> bool:
        """Whether putting it in, leaving it out or turning its knobs is allowed."""
        return self.learning or technique.equality != "learning"

    def answer(self, plan: Plan, words: Words = ()) -> Candidate:
        """What is foreseen of the plan with changes.

        Raises:
            ConfigError, UnsupportedError: it contradicts itself, or cannot run there.
        """
        return self.predict(*self.changed(plan, words))

    def attempt(self, plan: Plan, words: Words) -> Candidate:
        """The answer, or that to the first change that mends its error.

        Raises:
            ConfigError, UnsupportedError: of the change as it is.
        """
        try:
            return self.answer(plan, words)
        except HeadraceError as error:
            for more in self.mended(words, error):
                with suppress(HeadraceError):
                    return self.answer(plan, more)
            raise

    def changed(self, plan: Plan, words: Words) -> tuple[Words, Plan]:
        """The plan with changes, and all of its changes since the start, which are its name.

        Raises:
            ConfigError: it contradicts itself.
            PredictionFailed: a technique's own code failed.
        """
        with _told():
            plan = changed(plan, words, self.catalogue) if words else plan
            return difference(self.start, plan), plan

    def predict(self, changes: Words, plan: Plan) -> Candidate:
        """What is foreseen of what `changed` made.

        Raises:
            ConfigError, UnsupportedError: it cannot run there.
            PredictionFailed: a technique's own code failed.
        """
        with _told():
            there = at(self.context, plan)
            return Candidate(changes, plan, predict(plan, there, self.machine, self.calibration))

    def guess_s(self, plan: Plan) -> float | None:
        """Seconds of its step by the ledger, where no time is predicted too.

        The rates were never compared with measured steps there, so this is an order for whom
        measures, and nothing to tell a reader. A CPU that nobody probed has datasheet rates. None
        where a piece has no rate.
        """
        try:
            each = make_ledgers(plan, at(self.context, plan))
            if self.context.device == "cpu" and self.machine.source != "probes":
                one = each[0]
                return step_time(one.work, self.machine, one.sizes["micro_batches"]).step_s
            return slowest(each, self.machine).step_s
        except Exception:  # whatever it is, there is no guess; `predict` tells of bugs
            return None

    def mended(self, words: Words, error: HeadraceError) -> Iterator[Words]:
        """The change with what the error's remedy says, where that keeps what is trained."""
        names = {w[1:] for w in words if w[0] in "+-"}
        found = 0
        for more in error.remedy.changes:
            if all(self._may(w, names) for w in more) and found < MOST_MENDS:
                found += 1
                yield (*words, *more)

    def _may(self, word: str, names: set[str]) -> bool:
        if word[0] not in "+-":
            return word.startswith(MENDS)
        known = self.catalogue.techniques.get(word[1:])
        return word[1:] not in names and known is not None and known.equality != "learning"

    def singles(self, plan: Plan) -> Iterator[Words]:
        """Every single change of the plan that is worth asking about."""
        for name, kind in self.catalogue.techniques.items():
            new = name not in plan.techniques and self.keeps(kind) and not _is_so(plan, kind)
            if new and not _meaningless(plan, kind):
                out = self._taken_out(plan, kind)
                if out is not None:
                    yield (f"+{name}", *out, *_said_otherwise(plan, kind))
        if self.layouts and plan.mesh.ranks > 1:
            for words, kinds in layouts(plan, self.catalogue, near=plan is not self.start):
                gone = [self._taken_out(plan, kind) for kind in kinds]
                if None not in gone:
                    out = {word for one in gone if one for word in one}
                    yield (*words, *sorted(out - set(words)))
        for name, technique in plan.techniques.items():
            if self.keeps(type(technique)):
                yield (f"-{name}",)
                for key, value in _turned(technique):
                    yield (f"techniques.{name}.{key}={word(value)}",)
        rows = plan.rows_per_step // plan.mesh.data
        for fewer in divisors(rows):
            if fewer != plan.micro_rows:
                whole = fewer == rows and not self.start.batch.micro_sequences
                yield (f"{MICRO}={0 if whole else fewer}",)

    def _taken_out(self, plan: Plan, kind: type[Technique[Any]]) -> list[str] | None:
        """Words that make room for a technique; None where what would go has to stay."""
        clash = _clashes(plan, kind)
        kept = all(self.keeps(type(plan.techniques[other])) for other in clash)
        return [f"-{other}" for other in clash] if kept else None


def singles(
    asking: Asking, failed: Callable[[Words, str], None] = lambda words, why: None
) -> list[Candidate]:
    """Every single change of the start that can run there, mended if need be.

    Args:
        asking: who answers.
        failed: told of changes whose prediction failed.
    """
    found = []
    for words in asking.singles(asking.start):
        try:
            found.append(asking.attempt(asking.start, words))
        except PredictionFailed as error:
            failed(words, error.message)
        except HeadraceError:
            continue
    return found


def silent(plan: Plan) -> list[str]:
    """Its techniques that do not say what they do to a step's time."""
    return [name for name, technique in plan.techniques.items() if not technique.timed]


def _clashes(plan: Plan, kind: type[Technique[Any]]) -> list[str]:
    """Techniques of the plan that own one of its sockets, or that it excludes or is excluded by."""
    name, claims = kind.name(), set(kind.claims)
    return [
        other for other, technique in plan.techniques.items()
        if claims & set(technique.claims) or other in kind.excludes or name in technique.excludes
    ]  # fmt: skip


def _said_otherwise(plan: Plan, kind: type[Technique[Any]]) -> Iterator[str]:
    """Keys that the plan gives and the technique rewrites, as the technique has them."""
    given = plan.model_dump(exclude_unset=True)
    for key, value in _rewritten(plan, kind).items():
        table, _, leaf = key.partition(".")
        if given.get(table, {}).get(leaf, value) not in (value, "auto"):
            yield f"{key}={word(value)}"


def _is_so(plan: Plan, kind: type[Technique[Any]]) -> bool:
    """Whether all that the technique does is to rewrite keys, and the plan has them so."""
    if not all(socket.startswith("config.") for socket in (*kind.claims, *kind.composes)):
        return False
    keys = _rewritten(plan, kind)
    return bool(keys) and keys.items() <= flat(plan).items()


def _meaningless(plan: Plan, kind: type[Technique[Any]]) -> bool:
    """Return whether nothing can come of the technique as it is by default in the plan."""
    with suppress(Exception):  # knobs that have no default, or a bug: `changed` tells
        doubt = kind().doubt(plan)
        return doubt is not None and doubt.meaningless
    return False


def _rewritten(plan: Plan, kind: type[Technique[Any]]) -> Mapping[str, Any]:
    """Keys that the technique would rewrite -> their values there."""
    with suppress(Exception):  # knobs that have no default, or a bug: `changed` tells
        return kind().keys(plan)
    return {}


def _turned(technique: Technique[Any]) -> Iterator[tuple[str, Any]]:
    """Its knobs in another position: other choices, and counts halved and doubled."""
    for key, field in type(technique).model_fields.items():
        if key in technique.settled:
            continue
        now = getattr(technique, key)
        other = [choice for choice in _choices(field.annotation) if choice != now]
        if not other and isinstance(now, int) and not isinstance(now, bool):
            other = [n for n in (now // 2, now * 2) if n != now]
        elif not other and isinstance(now, float):
            other = [now / 2, now * 2]
        for value in other:
            try:
                type(technique).model_validate({**technique.model_dump(), key: value})
            except ValidationError:
                continue  # outside of its bounds
            yield key, value


def _choices(kind: Any) -> list[Any]:
    """What a knob may be, where its type says: of a Literal or a bool; None cannot be written."""
    if kind is bool:
        return [True, False]
    if get_origin(kind) is Literal:
        return [choice for choice in get_args(kind) if choice is not None]
    if get_origin(kind) in (Union, UnionType):
        return [choice for inner in get_args(kind) for choice in _choices(inner)]
    return []
