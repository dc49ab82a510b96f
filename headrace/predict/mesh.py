"""Choose how a plan lies on the ranks that were started, by what each layout is predicted to take.

A plan that says `mesh.auto = true` names no layout. Every layout of the ranks is predicted, each
with the techniques that split the model along its axes, and then those of the best with other
techniques of the parallel room beside them, such as `fsdp`, and then with the ranks of `data` in
groups: copies of slices, or shares of experts. The fastest that fits is taken. Rates of links are
those that `headrace probe` measured here, else a datasheet's.

A technique that cannot follow a plan to several ranks is left out or replaced as its own refusal
advises, where that keeps what is learned, and this is told. Where no layout can run, the refusal of
`mesh.data` alone is raised, which needs no technique.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.units import format_bytes, format_seconds
from headrace.costs.machine import Machine
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Context
from headrace.predict.candidates import Asking, Candidate, Words
from headrace.predict.layouts import FREE, layouts
from headrace.predict.sweep import fastest_first

ROOM = "parallel"
WIDTH = 4
"""Layouts beside which other techniques of the room are tried."""
MOST_REFUSALS = 8
"""Techniques that are left out of one plan at most."""


@dataclass(frozen=True)
class ChosenMesh:
    """Hold the layout that was chosen, and what it was chosen from.

    Args:
        plan: the plan with its layout.
        lines: what is told: the choice, the layouts beside it, and what could not follow.
    """

    plan: Plan
    lines: tuple[str, ...]


def choose_mesh(
    plan: Plan, ranks: int, context: Context, machine: Machine, catalogue: Catalogue
) -> ChosenMesh:
    """Return a plan of `mesh.auto = true` on so many ranks.

    Args:
        plan: a plan without a layout.
        ranks: the processes that were started.
        context: where the plan would run.
        machine: the rates there, with those of links.
        catalogue: the techniques that exist.

    Raises:
        ConfigError: no layout of the ranks can run, or none is predicted to fit.
    """
    plan = plan.replaced(mesh={**dict(plan.mesh), "auto": False})
    if ranks == 1:
        return ChosenMesh(plan, ())
    asking = Asking(plan, context, machine, catalogue, layouts=True)
    lines_of = dict[Words, tuple[str, ...]]()
    candidates = _every_layout(asking, ranks, lines_of)
    for parent in candidates[:WIDTH]:
        for words in asking.singles(parent.plan):
            if _is_parallel(words, catalogue):
                candidates += _tried(asking, parent, words, lines_of)
    candidates.sort(key=fastest_first)
    best = candidates[0]
    if best.prediction.memory.fits == "no":
        raise ConfigError(
            f"no layout of {ranks} ranks is predicted to fit; the nearest, {layout_name(best)}, "
            f"needs {format_bytes(best.prediction.memory.peak_bytes)} on a rank",
            "start more processes, or --with full_checkpoint",
        )
    other = [one for one in candidates if one.plan.mesh != best.plan.mesh]
    lines = [f"mesh: {ranks} ranks as {layout_name(best)}, {_numbers(best)}"]
    lines += [f"  next best {layout_name(one)}, {_numbers(one)}" for one in other[:1]]
    return ChosenMesh(best.plan, (*lines, *lines_of[best.changes]))


def _every_layout(
    asking: Asking, ranks: int, lines_of: dict[Words, tuple[str, ...]]
) -> list[Candidate]:
    """Return the candidates of all layouts that can run, the fastest first.

    Raises:
        HeadraceError: none can. It is the refusal of all ranks along `mesh.data`.
    """
    plan, catalogue = asking.start, asking.catalogue
    refusal: HeadraceError | None = None
    candidates = list[Candidate]()
    try:
        first = _follow(asking, None, (f"mesh.{FREE}={ranks}",), lines_of)
    except HeadraceError as error:
        first, refusal = None, error
    else:
        candidates, plan = [first], first.plan
    for words, _ in layouts(plan, catalogue, near=False, ranks=ranks):
        candidates += _tried(asking, first, words, lines_of)
    if refusal is not None and not candidates:
        raise refusal
    return sorted(candidates, key=fastest_first)


def _follow(
    asking: Asking, parent: Candidate | None, words: Words, lines_of: dict[Words, tuple[str, ...]]
) -> Candidate:
    """Return the candidate of a layout, without what refuses it.

    Args:
        asking: what predicts it.
        parent: the candidate that is changed; None is the plan without a layout.
        words: the change.
        lines_of: changes -> what was left out on the way to them; it gets those of the candidate.

    Raises:
        HeadraceError: a refusal has no way out that keeps what is learned.
    """
    plan = asking.start if parent is None else parent.plan
    lines = [] if parent is None else [*lines_of[parent.changes]]
    for _ in range(MOST_REFUSALS):
        try:
            candidate = asking.answer(plan, words)
            break
        except HeadraceError as error:
            more = next(asking.mended(words, error), None)
            if more is None:
                raise
            lines.append(f"  {' '.join(more[len(words) :])}: {error.message.splitlines()[0]}")
            words = more
    else:
        candidate = asking.answer(plan, words)
    lines_of.setdefault(candidate.changes, tuple(dict.fromkeys(lines)))
    return candidate


def _tried(
    asking: Asking, parent: Candidate | None, words: Words, lines_of: dict[Words, tuple[str, ...]]
) -> Iterator[Candidate]:
    """Yield the candidate of a change, unless it cannot run."""
    try:
        yield _follow(asking, parent, words, lines_of)
    except HeadraceError:
        return


def _is_parallel(words: Words, catalogue: Catalogue) -> bool:
    """Return whether a change adds a technique of the parallel room, and removes no other."""
    names = [word[1:] for word in words if word[0] in "+-"]
    rooms = {catalogue.techniques[name].room for name in names}
    return words[0].startswith("+") and rooms == {ROOM} and not any("mesh." in w for w in words)


def layout_name(candidate: Candidate) -> str:
    """Return a layout in words: sizes of its axes, and the techniques of the parallel room."""
    sizes = [f"{axis}={n}" for axis, n in candidate.plan.mesh.sizes.items() if n > 1]
    own = [n for n, t in candidate.plan.techniques.items() if t.room == ROOM]
    return " ".join(sizes) + (f" with {', '.join(own)}" if own else "")


def _numbers(candidate: Candidate) -> str:
    """Return what a layout is predicted to take."""
    time, memory = candidate.prediction.time, candidate.prediction.memory
    step = (
        "a step of unknown time" if time.step_s is None else f"{format_seconds(time.step_s)} a step"
    )
    return f"{step} and {format_bytes(memory.peak_bytes)} predicted"
