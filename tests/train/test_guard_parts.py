"""The parts of the guard by hand: what is left out, how far is allowed, what is compared."""

import math
from typing import Any

import house
import pytest
import torch
from pieces import left

from headrace.assemble.sockets import RunNotes
from headrace.core.errors import RunError
from headrace.parallel.world import World
from headrace.train import guard
from headrace.train.guard import ALL, MEAN, First, apart, compare, limits_of, rounding
from headrace.train.train import step

EXACT = left(equality="exact", band=0.0, claims=("parts.head",), composes=())
ROUGH = left(equality="approximate", band=0.2, claims=(), composes=("linear",))
LEARNS = left(equality="learning", band=0.5, claims=("routes",), composes=())
KEY = left(equality="exact", band=0.3, claims=("config.kv_heads",), composes=())
WANTED = First(2.0, 5.0, {"a": 3.0, "b": 4.0})


def run(precision: str, *techniques: Any, told: list[str] | None = None) -> Any:
    """A build of which the guard reads no more than this."""
    named = {f"t{i}": technique for i, technique in enumerate(techniques)}
    return left(
        plan=left(techniques=named),
        run_notes=RunNotes(),
        optimizers={},
        world=left(any=bool),
        context=left(precision=precision),
        note_line=(told if told is not None else []).append,
    )


@pytest.mark.parametrize(
    ("precision", "loss", "one", "unit"),
    [
        ("fp32", 1e-4, 1e-3, 2.0**-21),
        ("bf16", 0.01, 0.1, 2.0**-9),
        ("fp16", 0.00125, 0.0125, 2.0**-12),
    ],
)
def test_bands_are_the_precisions_and_those_of_what_is_left_out(
    precision: str, loss: float, one: float, unit: float
) -> None:
    exact = limits_of(run(precision, EXACT, LEARNS, KEY))
    assert exact == pytest.approx({MEAN: loss, ALL: one, "": one})
    rough = limits_of(run(precision, EXACT, ROUGH, LEARNS))
    assert rough == pytest.approx({MEAN: loss + 0.2 / 20, ALL: one + 0.2 / 2, "": one + 0.2})
    assert rounding(run(precision, EXACT, LEARNS)) == unit
    assert rounding(run(precision, ROUGH)) == pytest.approx(unit + 0.2 * 2.0**-9 / 0.05)


def test_what_learns_otherwise_or_sets_a_key_stays() -> None:
    plan = run("fp32", EXACT, ROUGH, LEARNS, KEY).plan
    assert guard.left_out(plan) == ["t0", "t1"]


def test_small_gradients_are_compared_with_the_largest() -> None:
    wanted = First(2.0, 4.0, {"a": 4.0, "b": 1e-6, "c": 2.0})
    off = apart(First(2.2, 5.0, {"a": 3.0, "b": 3e-6, "d": 1e-3}), wanted)
    assert off == pytest.approx(
        {MEAN: 0.1, ALL: 0.25, "a": 0.25, "b": 2e-6 / 4e-3, "c": 1.0, "d": 0.25}
    )
    off = apart(First(2.2, 5.0, {"a": 3.0}), wanted, {"a", "c"})
    assert off["a"] == 0.25 and "c" not in off and off["b"] == pytest.approx(1e-6 / 4e-3)


def test_a_loss_is_compared_where_the_gradients_overflow() -> None:
    told: list[str] = []
    build = run("fp16", EXACT, told=told)
    compare(build, First(2.0, math.inf, {"a": math.inf, "b": 4.0}), WANTED, lambda draw: "none")
    assert build.run_notes.guard["worst"] == MEAN and "overflowed" in told[0]
    with pytest.raises(RunError, match=r"first loss is 2\.4"):
        compare(build, First(2.4, math.inf, {"a": 1.0}), WANTED, lambda draw: "none")


def test_a_loss_that_is_off_is_told_first() -> None:
    with pytest.raises(RunError, match=r"first loss is 2\.4"):
        compare(run("fp32", EXACT), First(2.4, 9.0, {"a": 9.0}), WANTED, lambda draw: "none")


def test_rounding_is_asked_until_it_is_enough() -> None:
    """The farthest of the draws counts, and one that goes too far ends them."""
    limits, asked = {MEAN: 0.1, ALL: 0.1, "": 0.1}, []

    def magnified(*totals: float | str) -> float:
        asked.clear()

        def again(draw: int) -> First | str:
            asked.append(draw)
            total = totals[draw - 1]
            return total if isinstance(total, str) else WANTED._replace(total=total)

        return guard._magnified(WANTED, limits, again)

    assert magnified(5.1, 5.05, 5.0, 5.0) == pytest.approx(0.2) and asked == [1, 2, 3, 4]
    assert magnified(5.0, 5.5, 5.0, 5.0) == pytest.approx(1.0) and asked == [1, 2]
    assert magnified(5.1, "no memory") == pytest.approx(0.2) and asked == [1, 2]


def test_gradients_are_as_an_update_would_see_them() -> None:
    """An optimizer may multiply them itself, as one that clips in the backward pass."""
    model = torch.nn.Linear(2, 1)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    build: Any = left(
        model=model,
        device=torch.device("cpu"),
        layouts={},
        routed={"mine": {"weight": model.weight}},
        optimizers={"mine": left(gradient_factor=torch.tensor(0.5)), "other": left()},
    )
    assert guard.norms_of(build) == {"weight": 2.5}, "a bias without a gradient has no norm"
    model.bias.grad = torch.zeros(1)
    assert guard.norms_of(build) == {"weight": 2.5, "bias": 0.0}


def test_what_another_process_finds_ends_the_run_here_too() -> None:
    build = run("fp32", EXACT)
    compare(build, WANTED, WANTED, lambda draw: "none")
    build.world = left(any=lambda mine: True)
    with pytest.raises(RunError, match="computes something else"):
        compare(build, WANTED, WANTED, lambda draw: "none")


def test_no_number_is_apart_from_any() -> None:
    for found in (WANTED._replace(loss=math.nan), WANTED._replace(total=math.nan)):
        with pytest.raises(RunError, match="nan"):
            compare(run("bf16", EXACT), found, WANTED, lambda draw: "none")


@pytest.mark.parametrize("update", [True, False])
def test_a_step_gives_its_first_pass_to_what_inspects_it(update: bool) -> None:
    """The loss is in nats, without its scale, and gradients that are refused are not applied."""
    build = house.build_of(house.make_plan())
    micros = build.loader.step(0).micros
    build.loader.close()
    build.loss_scale = lambda build: torch.tensor(2.0)
    before = {name: p.detach().clone() for name, p in build.model.named_parameters()}
    sockets = (build.passes, build.engine, build.clip)
    seen: list[First] = []
    loss, norm, finite, _ = step(build, micros, 0, guard.inspects(seen.append, update=update))
    (found,) = seen
    assert (found.loss, found.total) == pytest.approx((float(loss), float(norm))) and finite == 1
    assert found.norms.keys() == before.keys() and max(found.norms.values()) > 0
    moved = [n for n, p in build.model.named_parameters() if not torch.equal(p, before[n])]
    assert bool(moved) == update
    assert (build.passes, build.engine, build.clip) == sockets, "nothing is swapped for it"


def test_memory_of_the_host_is_for_all_of_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_plain", lambda build: "plan")
    monkeypatch.setattr(guard, "host_memory_bytes", lambda: 150.0)

    def made(*given: Any, **how: Any) -> Any:
        raise RunError("it was built")

    monkeypatch.setattr(guard, "make_build", made)
    needs = left(without=lambda lines: left(peak=lambda: ("", 100.0)))
    build: Any = left(
        model=torch.nn.Linear(1, 1),
        predicted=lambda plan: needs,
        world=World(ranks=1),
        layouts={},
        device=torch.device("cpu"),
        prepared=None,
    )
    with pytest.raises(RunError, match="it was built"):
        guard._first(build, lambda *given: torch.ones(()), 0, [])
    build.world = World(ranks=2)
    with pytest.raises(MemoryError):
        guard._first(build, lambda *given: torch.ones(()), 0, [])
