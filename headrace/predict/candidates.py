"""Propose single changes of a plan that are worth predicting, and predict one of them.

Everything is read from the techniques themselves: whether they keep the gradients (`equality`),
which sockets they own, what they exclude, and which knobs they have. No technique is known by name
here. A change is a tuple of words (headrace/plan/changes.py). Adding a technique removes the
techniques that it cannot stand beside, so one change may be several words.

An error in a technique's own code is reported like a refusal, with the file and the line. So a
technique that fails does not stop the predictions of other plans.

These are left out: the number of ranks, and keys of the plan itself. Most of those change what is
trained (rows, rates, sizes) or cannot be predicted (`attention=measured`). The sequences of a
micro-batch and the keys that a technique rewrites are not left out.
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
from headrace.predict.layouts import groups, layouts
from headrace.predict.prediction import Prediction, at, predict
from headrace.predict.ranks import slowest

Words = tuple[str, ...]
MICRO = "batch.micro_sequences"
MENDS = ("techniques.", f"{MICRO}=")
"""Prefixes of the keys that a remedy may set. These keys do not change what is trained."""
MOST_MENDS = 2
"""Largest number of a remedy's alternatives that are tried."""


class PredictionFailed(UnsupportedError):
    """A technique's own code failed while its effect was predicted. It is reported as a bug."""


@contextmanager
def _bugs_reported() -> Iterator[None]:
    """Turn an error that is no message for a user into one.

    Raises:
        PredictionFailed: the code inside raised something else than a HeadraceError.
    """
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
    """A candidate is a plan that a sweep predicted.

    Args:
        changes: words that make it from the plan that the sweep began with; empty for that plan.
        plan: the plan with these changes.
        prediction: what the planner predicts of it.
    """

    changes: Words
    plan: Plan
    prediction: Prediction


@dataclass(frozen=True)
class Asking:
    """Hold what predictions of changed plans need: the start, the place, the rates, the techniques.

    Args:
        start: the plan that changes are counted from.
        context: where the plans would run.
        machine: the rates of the device there.
        catalogue: the techniques that exist.
        learning: whether techniques that change what is learned may be changed too.
        calibration: correction by measured steps of one plan there; None without.
        layouts: whether several ranks may also be laid out along other axes of the mesh.
    """

    start: Plan
    context: Context
    machine: Machine
    catalogue: Catalogue
    learning: bool = False
    calibration: Calibration | None = None
    layouts: bool = False

    def keeps(self, technique: type[Technique[Any]]) -> bool:
        """Return whether a technique may be added, removed or given other knobs."""
        return self.learning or technique.equality != "learning"

    def answer(self, plan: Plan, words: Words = ()) -> Candidate:
        """Return the candidate that changes of a plan make.

        Raises:
            ConfigError, UnsupportedError: the changed plan contradicts itself, or cannot run there.
        """
        return self.predict(*self.changed(plan, words))

    def attempt(self, plan: Plan, words: Words) -> Candidate:
        """Return the candidate that changes make, mended by its error's remedy if need be.

        Raises:
            ConfigError, UnsupportedError: the changes fail, and so does every remedy that was
                tried.
        """
        try:
            return self.answer(plan, words)
        except HeadraceError as error:
            for more in self.mended(words, error):
                with suppress(HeadraceError):
                    return self.answer(plan, more)
            raise

    def changed(self, plan: Plan, words: Words) -> tuple[Words, Plan]:
        """Return all changes since the start, and the plan with them.

        The changes since the start identify a plan.

        Raises:
            ConfigError: the changed plan contradicts itself.
            PredictionFailed: a technique's own code failed.
        """
        with _bugs_reported():
            plan = changed(plan, words, self.catalogue) if words else plan
            return difference(self.start, plan), plan

    def predict(self, changes: Words, plan: Plan) -> Candidate:
        """Return the candidate of a plan that `changed` returned.

        Raises:
            ConfigError, UnsupportedError: the plan cannot run there.
            PredictionFailed: a technique's own code failed.
        """
        with _bugs_reported():
            there = at(self.context, plan)
            return Candidate(changes, plan, predict(plan, there, self.machine, self.calibration))

    def guess_s(self, plan: Plan) -> float | None:
        """Return a guess of a step's seconds from the ledger, even where no time is predicted.

        The rates were never compared with measured steps there. So the guess only orders what is
        measured first, and is not shown to a reader. A CPU that was not probed has the rates of a
        datasheet. The guess is None where a piece of work has no rate.
        """
        try:
            each = make_ledgers(plan, at(self.context, plan))
            if self.context.device == "cpu" and self.machine.source != "probes":
                one = each[0]
                return step_time(one.work, self.machine, one.sizes["micro_batches"]).step_s
            return slowest(each, self.machine).step_s
        except Exception:  # there is no guess for any error; `predict` reports bugs
            return None

    def mended(self, words: Words, error: HeadraceError) -> Iterator[Words]:
        """Yield the change with each set of words that the error's remedy adds.

        Only words that keep what is trained are used, and `MOST_MENDS` sets of them at most.
        """
        names = {w[1:] for w in words if w[0] in "+-"}
        attempts = 0
        for more in error.remedy.changes:
            if all(self._may(w, names) for w in more) and attempts < MOST_MENDS:
                attempts += 1
                yield (*words, *more)

    def _may(self, word: str, names: set[str]) -> bool:
        if word[0] not in "+-":
            return word.startswith(MENDS)
        known = self.catalogue.techniques.get(word[1:])
        return word[1:] not in names and known is not None and known.equality != "learning"

    def singles(self, plan: Plan) -> Iterator[Words]:
        """Yield every single change of the plan that is worth predicting."""
        for name, kind in self.catalogue.techniques.items():
            new = name not in plan.techniques and self.keeps(kind) and not _is_so(plan, kind)
            if new and not _meaningless(plan, kind):
                out = self._taken_out(plan, kind)
                if out is not None:
                    yield (f"+{name}", *out, *_keys_set_otherwise(plan, kind))
        if self.layouts and plan.mesh.ranks > 1:
            for words, classes in layouts(plan, self.catalogue, near=plan is not self.start):
                gone = [self._taken_out(plan, kind) for kind in classes]
                if None not in gone:
                    out = {word for one in gone if one for word in one}
                    yield (*words, *sorted(out - set(words)))
            yield from groups(plan, self.catalogue, near=plan is not self.start)
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
        """Return words that remove what a technique clashes with.

        It is None where one of the techniques that clash must stay.
        """
        clash = _clashes(plan, kind)
        kept = all(self.keeps(type(plan.techniques[other])) for other in clash)
        return [f"-{other}" for other in clash] if kept else None


def singles(
    asking: Asking, failed: Callable[[Words, str], None] = lambda words, why: None
) -> list[Candidate]:
    """Return the candidates of all single changes of the start that can run there.

    A change that fails is mended by its error's remedy if need be.

    Args:
        asking: what predicts them.
        failed: called with the words and the error of each change whose prediction failed.
    """
    candidates = []
    for words in asking.singles(asking.start):
        try:
            candidates.append(asking.attempt(asking.start, words))
        except PredictionFailed as error:
            failed(words, error.message)
        except HeadraceError:
            continue
    return candidates


def silent(plan: Plan) -> list[str]:
    """Return the names of the plan's techniques that do not say how they change a step's time."""
    return [name for name, technique in plan.techniques.items() if not technique.timed]


def _clashes(plan: Plan, kind: type[Technique[Any]]) -> list[str]:
    """Return the names of the plan's techniques that a technique cannot stand beside.

    They own one of its sockets, or one of the two excludes the other, or both train something in
    the place of the weights.
    """
    name, claims = kind.name(), set(kind.claims)
    return [
        other
        for other, technique in plan.techniques.items()
        if claims & set(technique.claims)
        or other in kind.excludes
        or name in technique.excludes
        or None not in (kind.usual_rate, technique.usual_rate)
    ]


def _keys_set_otherwise(plan: Plan, kind: type[Technique[Any]]) -> Iterator[str]:
    """Yield `key=value`, as a technique rewrites them, for keys that the plan sets otherwise."""
    given = plan.model_dump(exclude_unset=True)
    for key, value in _rewritten(plan, kind).items():
        table, _, leaf = key.partition(".")
        if given.get(table, {}).get(leaf, value) not in (value, "auto"):
            yield f"{key}={word(value)}"


def _is_so(plan: Plan, kind: type[Technique[Any]]) -> bool:
    """Return whether a technique only rewrites keys, and the plan has these values already."""
    if not all(socket.startswith("config.") for socket in (*kind.claims, *kind.composes)):
        return False
    keys = _rewritten(plan, kind)
    return bool(keys) and keys.items() <= flat(plan).items()


def _meaningless(plan: Plan, kind: type[Technique[Any]]) -> bool:
    """Return whether a technique with its default knobs means nothing in the plan."""
    with suppress(Exception):  # a knob without a default, or a bug: `changed` reports it
        doubt = kind().doubt(plan)
        return doubt is not None and doubt.meaningless
    return False


def _rewritten(plan: Plan, kind: type[Technique[Any]]) -> Mapping[str, Any]:
    """Return the keys that a technique would rewrite -> their values then."""
    with suppress(Exception):  # a knob without a default, or a bug: `changed` reports it
        return kind().keys(plan)
    return {}


def _turned(technique: Technique[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each knob of a technique with another value.

    A knob with choices gets each other choice. A number is halved and doubled.
    """
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
                continue  # outside the knob's bounds
            yield key, value


def _choices(kind: Any) -> list[Any]:
    """Return the values that a knob's type lists; empty where it lists none.

    The type is a Literal, a bool, or a union with one. None is left out, since it cannot be
    written.
    """
    if kind is bool:
        return [True, False]
    if get_origin(kind) is Literal:
        return [choice for choice in get_args(kind) if choice is not None]
    if get_origin(kind) in (Union, UnionType):
        return [choice for inner in get_args(kind) for choice in _choices(inner)]
    return []
