"""Sockets of the step that no real technique fills yet, filled by toys, under accumulation.

Each toy does what a known technique would (z-loss, a router's balance, distillation, a second-order
pass, averaged weights, a skipped spike) and is compared with the plainest computation of it.
"""

from pathlib import Path
from typing import Any

import house
import pytest
import torch
from house import COMPILE, ROWS, Variant, tiny_knobs, toy
from torch import Tensor

from headrace.assemble.build import absorb, local_engine
from headrace.assemble.sockets import Build, MicroBatch, Pass
from headrace.data.rows import IGNORE
from headrace.model.head import Vocabulary, cross_entropy
from headrace.model.mlp import SwiGLU
from headrace.plan.technique import Stage, Technique
from headrace.train import train
from headrace.train.run_folder import RunFolder

VOCAB = house.SHAPES["grouped"]["vocab"]
ROWS_IGNORED = house.make_rows(VOCAB, ignored=True)


def real(name: str, **knobs: Any) -> Technique[Build]:
    """Return a real technique with the knobs of tiny models."""
    return Variant(name, {**tiny_knobs(name, "cpu"), **knobs}).technique()


BESIDE: dict[str, tuple[Technique[Build], ...]] = {
    "alone": (),
    "chunked": (real("chunked_cross_entropy"),),
    "checkpointed": (real("selective_checkpoint"),),
    "compiled": (real(COMPILE),),
    "all": (
        real("chunked_cross_entropy"),
        real("selective_checkpoint"),
        real(COMPILE, scope="block"),
    ),
}
"""What each socket is used beside."""
beside = pytest.mark.parametrize(
    "others",
    [  # the last compiles, too
        pytest.param(others, id=name, marks=[pytest.mark.slow] * (name == "compiled"))
        for name, others in BESIDE.items()
    ],
)


def built(*techniques: Technique[Build], micro_rows: int = 2, **keys: Any) -> Build:
    """Return a toy's build with three micro-batches, the first without targets."""
    return house.random_build(house.make_plan(*techniques, micro_rows=micro_rows, **keys))


# --- terms, auxiliary, enrich ----------------------------------------------------------------


def z_loss(logits_NV: Tensor, targets_N: Tensor, extras: Any, vocabulary: Vocabulary) -> Tensor:
    """Summed square of the log partition of every token that has a target (arXiv 2204.02311)."""
    partition_N = vocabulary.logsumexp(logits_NV)
    return 0.1 * partition_N.square()[targets_N != IGNORE].sum()


@beside
def test_terms_add_to_the_objective(others: tuple[Technique[Build], ...]) -> None:
    term = toy("z", Stage.STEP, lambda build: build.terms.append(z_loss), composes=("terms",))
    found = house.take_step(built(term, *others), ROWS_IGNORED)
    right = house.reference(
        built(),
        ROWS_IGNORED,
        more=lambda build, ids, logits, targets: z_loss(logits, targets, None, Vocabulary()),
    )
    house.assert_equal(found, right)


class Balanced(SwiGLU):
    """A network that keeps a sum over its tokens, as a router keeps its balance loss."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        y_BTD = super().forward(x_BTD)
        self.balance = 0.1 * y_BTD.square().sum()
        return y_BTD


def all_balances(build: Build) -> Tensor:
    """Add up what the last forward kept, over blocks."""
    return torch.stack([block.mlp.balance for block in build.model.blocks.values()]).sum()


def use_balance(build: Build) -> None:
    build.parts.mlp = Balanced
    build.auxiliary.append(all_balances)


BALANCE = toy("balance", Stage.PARTS, use_balance, claims=("parts.mlp",), composes=("auxiliary",))


@beside
def test_auxiliary_is_added_once_per_micro_batch(others: tuple[Technique[Build], ...]) -> None:
    found = house.take_step(built(BALANCE, *others), ROWS_IGNORED)
    right = house.reference(
        built(BALANCE), ROWS_IGNORED, more=lambda build, *_: all_balances(build)
    )
    house.assert_equal(found, right)


TABLE_VV = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))
"""A teacher that knows the last token only."""


def distilled(logits_NV: Tensor, targets_N: Tensor, extras: Any, vocabulary: Vocabulary) -> Tensor:
    """Compute cross-entropy with the teacher's distribution, by reductions over the vocabulary."""
    seen_NV = vocabulary.sum(extras["teacher"].softmax(-1) * logits_NV)
    return (vocabulary.logsumexp(logits_NV) - seen_NV)[targets_N != IGNORE].sum()


def teach(build: Build, works: Any) -> list[MicroBatch]:
    """Give each micro-batch its teacher's logits, one row a token."""
    return [work._replace(extras={"teacher": TABLE_VV[work.ids_BT.flatten()]}) for work in works]


def use_teacher(build: Build) -> None:
    build.enrich.append(teach)
    build.terms.append(distilled)


@beside
def test_enrich_gives_the_objective_what_it_needs(others: tuple[Technique[Build], ...]) -> None:
    teacher = toy("teacher", Stage.STEP, use_teacher, composes=("enrich", "terms"))
    found = house.take_step(built(teacher, *others), ROWS_IGNORED)
    right = house.reference(
        built(),
        ROWS_IGNORED,
        more=lambda build, ids, logits, targets: distilled(
            logits, targets, {"teacher": TABLE_VV[ids]}, Vocabulary()
        ),
    )
    house.assert_equal(found, right)


# --- passes, engine, clip, values ------------------------------------------------------------


def test_passes_of_different_objectives_and_absorbers() -> None:
    curvature: dict[str, Tensor] = {}

    def keep(build: Build, finite: Tensor) -> None:
        curvature.update(house.gradients_of(build))

    def doubled(*args: Any) -> Tensor:
        return 2 * cross_entropy(*args)

    def two(build: Build, step: int) -> list[Pass]:
        update = Pass("update", build.objective, lambda works: works, absorb)
        second = Pass("curvature", doubled, lambda works: works[1:2], keep)
        return [update, second] if step % 2 == 0 else [update]

    second_order = toy(
        "second", Stage.STEP, lambda build: setattr(build, "passes", two), claims=("passes",)
    )
    build, plain = built(second_order), built()
    house.take_step(build, ROWS_IGNORED)
    loss = house.take_step(plain, ROWS_IGNORED).loss
    for (name, ours), theirs in zip(
        build.model.named_parameters(), plain.model.parameters(), strict=True
    ):
        assert ours.equal(theirs), f"the second pass moved {name}"
    moved = house.reference(plain, ROWS_IGNORED[2:4])
    assert curvature.keys() == moved.gradients.keys()
    for name, gradient in moved.gradients.items():
        torch.testing.assert_close(curvature[name], 2 * gradient, rtol=1e-4, atol=1e-6)
    curvature.clear()
    assert house.take_step(build, ROWS_IGNORED, index=1).loss < loss
    assert not curvature, "the second pass ran in a step that has none"


def test_a_bad_second_pass_is_told() -> None:
    """Its absorber sees the flag, and so must whoever counts skipped steps."""
    flags: list[float] = []

    def bad(*args: Any) -> Tensor:
        return float("nan") * cross_entropy(*args)

    def two(build: Build, step: int) -> list[Pass]:
        update = Pass("update", build.objective, lambda works: works, absorb)
        second = Pass("bad", bad, lambda works: works, lambda build, f: flags.append(float(f)))
        return [update, second]

    second_order = toy(
        "second", Stage.STEP, lambda build: setattr(build, "passes", two), claims=("passes",)
    )
    build = built(second_order)
    micros = house.make_micros(ROWS_IGNORED, micro_rows=2, segments=False)
    loss, _, finite, _ = train.step(build, micros, 0).tolist()
    assert flags == [0.0] and loss > 0
    assert finite == 0.0


def test_engine_sync_reduce_and_clip_are_called_in_order() -> None:
    events: list[Any] = []

    def engine(build: Build, *args: Any) -> Tensor:
        events.append("engine")
        return local_engine(build, *args)

    def clip(build: Build, limit: float) -> Tensor:
        events.append(("clip", limit))
        return torch.tensor(7.0)

    def fill(build: Build) -> None:
        build.engine, build.clip = engine, clip
        build.sync = lambda build, last: events.append(last)
        build.reduce = lambda build: events.append("reduce")

    mine = toy("mine", Stage.STEP, fill, claims=("engine", "sync", "reduce", "clip"))
    build = built(mine, optimizer={"clip_norm": 0.5})
    micros = house.make_micros(ROWS_IGNORED, micro_rows=2, segments=False)
    numbers = train.step(build, micros, 0)
    assert events == ["engine", False, False, True, "reduce", ("clip", 0.5)]
    assert numbers[1] == 7.0
    house.assert_equal(
        house.Result(float(numbers[0]), house.gradients_of(build)),
        house.reference(built(), ROWS_IGNORED),
    )


def test_values_set_the_learning_rate_of_every_route() -> None:
    slow = toy(
        "slow",
        Stage.SCHEDULE,
        lambda build: build.values.update(lr=lambda step: 0.0),
        composes=("values",),
    )
    build = built(slow, real("muon"))
    before = [p.clone() for p in build.model.parameters()]
    house.take_step(build, ROWS_IGNORED)
    assert set(build.optimizers) == {"muon", "adamw"}
    for optimizer in build.optimizers.values():
        assert all(group["lr"] == 0.0 for group in optimizer.param_groups)
    assert all(p.equal(b) for p, b in zip(build.model.parameters(), before, strict=True))


def test_block_forward_wraps_in_the_order_of_stages() -> None:
    ran: list[str] = []

    def wrapping(name: str, stage: Stage) -> Technique[Build]:
        def wrap(forward: Any, layer: int) -> Any:
            def wrapped(x_BTD: Tensor, shared: Any) -> Tensor:
                ran.append(f"{name}{layer}")
                return forward(x_BTD, shared)

            return wrapped

        return toy(
            name, stage, lambda build: build.wrap_blocks(name, wrap), composes=("block_forward",)
        )

    build = built(
        wrapping("gate", Stage.GATE), wrapping("again", Stage.CHECKPOINT), micro_rows=ROWS
    )
    found = house.take_step(build, ROWS_IGNORED)
    assert build.block_forward == ["again", "gate"]
    assert ran == ["gate0", "again0", "gate1", "again1"]
    house.assert_equal(found, house.reference(built(), ROWS_IGNORED))


# --- recover, after_update -------------------------------------------------------------------


@pytest.mark.parametrize("others", [(), (real("muon"),)], ids=["adamw", "muon"])
def test_a_skipped_step_leaves_everything_as_it_was(
    others: tuple[Technique[Build], ...], tmp_path: Path
) -> None:
    seen: list[dict[str, Tensor]] = []
    finite_flags: list[float] = []
    recovered: list[int] = []

    def spoil(build: Build, works: Any) -> Any:
        spoil.steps += 1  # type: ignore[attr-defined]
        bad = float("nan") if spoil.steps == 2 else 0.0  # type: ignore[attr-defined]
        return [w._replace(extras={"bad": torch.full((w.ids_BT.numel(),), bad)}) for w in works]

    def look(build: Build, finite: Tensor) -> None:
        finite_flags.append(float(finite))
        now = {f"model/{n}": p.detach().clone() for n, p in build.model.named_parameters()}
        for route, optimizer in build.optimizers.items():
            for name, parameter in build.routed[route].items():
                for key, value in optimizer.state[parameter].items():
                    now[f"{route}/{name}/{key}"] = value.clone()
        seen.append(now)

    def fill(build: Build) -> None:
        build.enrich.append(spoil)
        build.terms.append(lambda logits, targets, extras, vocabulary: extras["bad"].sum())
        build.after_update.append(look)
        build.recover = lambda build, step, metrics: recovered.append(step)

    spoil.steps = 0  # type: ignore[attr-defined]
    patient = toy(
        "patient",
        Stage.STEP,
        fill,
        claims=("recover",),
        composes=("enrich", "terms", "after_update"),
    )
    plan = house.make_plan(patient, *others, micro_rows=2, directory=str(tmp_path))
    report = RunFolder(train.run(plan).folder).read_report()
    assert finite_flags == [1.0, 0.0, 1.0, 1.0]
    assert recovered == [2] and report["skipped_steps"] == 1 and report["steps"] == 4
    first, skipped, third, _ = seen
    assert first.keys() == skipped.keys()
    assert all(skipped[name].equal(value) for name, value in first.items())
    assert all(value.isfinite().all() for value in third.values())
    assert not all(third[name].equal(value) for name, value in first.items())
