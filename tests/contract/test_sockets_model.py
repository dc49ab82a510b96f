"""Sockets of model, weights, data and run that no real technique fills yet, filled by toys."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import house
import numpy as np
import pytest
import torch
from house import LENGTH, ROWS, Variant, tiny_knobs, toy
from tiny import metrics
from torch import Tensor, nn

from headrace.assemble.sockets import Build
from headrace.core.errors import RunError
from headrace.core.progress import Progress
from headrace.data.loader import Loader
from headrace.data.rows import IGNORE, Row
from headrace.plan.technique import Stage, Technique
from headrace.train import train
from headrace.train.evaluate import evaluate
from headrace.train.run_folder import RunFolder

ROWS_PLAIN = house.make_rows(house.SHAPES["grouped"]["vocab"], ignored=False)


# --- storage, shard, frozen, source ----------------------------------------------------------


def test_weights_are_real_then_stored_then_sharded_block_by_block() -> None:
    events: list[str] = []

    def store(name: str, value: Tensor) -> Tensor:
        assert not value.is_meta
        events.append(name)
        return value.bfloat16().float()

    def shard(module: nn.Module) -> None:
        assert not any(p.is_meta for p in module.parameters())
        events.append(type(module).__name__)

    def fill(build: Build) -> None:
        build.storage.append(store)
        build.shard.append(shard)

    packed = toy("packed", Stage.MATERIALIZE, fill, composes=("storage", "shard"))
    build, baseline = house.build_of(house.make_plan(packed)), house.build_of(house.make_plan())
    names = [n for n, _ in build.model.named_parameters()]
    inner = [[n for n in names if n.startswith(f"blocks.{i}.")] for i in range(house.LAYERS)]
    outer = [n for n in names if not n.startswith("blocks.")]
    expected = [*inner[0], "Block", *inner[1], "Block", *outer, "Decoder"]
    assert [*map(sorted_run, split_at_modules(events))] == [
        *map(sorted_run, split_at_modules(expected))
    ]
    for (name, ours), plain in zip(
        build.model.named_parameters(), baseline.model.parameters(), strict=True
    ):
        assert ours.equal(plain.bfloat16().float()), name


def split_at_modules(events: list[str]) -> list[list[str]]:
    """Runs of parameter names, each ending with the module that was sharded."""
    runs: list[list[str]] = [[]]
    for event in events:
        runs[-1].append(event)
        if event in ("Block", "Decoder"):
            runs.append([])
    return runs


def sorted_run(run: list[str]) -> list[str]:
    """A run with its names in order, its module still last."""
    return [*sorted(run[:-1]), *run[-1:]]


def freezing(prefix: str) -> Technique[Build]:
    """Freeze what begins with `prefix`."""
    return toy(
        "freeze",
        Stage.LINEAR,
        lambda b: b.frozen.append(lambda n: n.startswith(prefix)),
        composes=("frozen",),
    )


def thaw(build: Build) -> None:
    """Make every parameter anew, as a split does that knows nothing of frozen ones."""
    for module in build.model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(parameter.detach()))


@pytest.mark.parametrize("prefix", ["blocks.0.", "head."])
@pytest.mark.parametrize("others", [(), ("muon",), ("chunked_cross_entropy",)], ids=str)
def test_frozen_holds_after_splits_and_has_no_optimizer_state(
    prefix: str, others: tuple[str, ...]
) -> None:
    split = toy("split", Stage.TENSOR, thaw)
    more = [Variant(n, tiny_knobs(n, "cpu")).technique() for n in others]
    plan = house.make_plan(freezing(prefix), split, *more, micro_rows=2)
    build = house.random_build(plan)
    before = {n: p.detach().clone() for n, p in build.model.named_parameters()}
    found = house.take_step(build, ROWS_PLAIN)
    right = house.baseline_reference("grouped", ROWS_PLAIN, documents=False, device="cpu")
    frozen = {n for n in before if n.startswith(prefix)}
    assert frozen
    held = {n for route in build.routed.values() for n in route}
    assert held == set(before) - frozen
    for name, parameter in build.model.named_parameters():
        if name in frozen:
            assert parameter.grad is None and parameter.equal(before[name])
            assert all(parameter not in o.state for o in build.optimizers.values())
            assert name not in found.gradients
            del right.gradients[name]
        else:
            assert not parameter.equal(before[name])
    house.assert_equal(found, right)


def test_source_gives_every_weight_its_value() -> None:
    def ones(name: str, shape: torch.Size) -> Tensor:
        return torch.full(shape, float(len(name)))

    mine = toy("mine", Stage.PARTS, lambda b: setattr(b, "source", ones), claims=("source",))
    build = house.build_of(house.make_plan(mine))
    for name, parameter in build.model.named_parameters():
        assert (parameter == len(name)).all()


# --- state, weights_for_eval, after_update: averaged weights ---------------------------------


class Average:
    """A running average of all weights, as a technique would keep it."""

    def __init__(self, build: Build, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.shadow = {n: p.detach().clone() for n, p in build.model.named_parameters()}

    def tensors(self) -> dict[str, Tensor]:
        return self.shadow

    def values(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_values(self, values: Any) -> None:
        self.updates = values["updates"]

    @torch.no_grad()
    def update(self, build: Build, finite: Tensor) -> None:
        for name, parameter in build.model.named_parameters():
            self.shadow[name].lerp_(parameter, (1 - self.decay) * finite)
        self.updates += 1

    @contextmanager
    def swapped(self, build: Build) -> Iterator[None]:
        kept = {n: p.detach().clone() for n, p in build.model.named_parameters()}
        self._set(build, self.shadow)
        try:
            yield
        finally:
            self._set(build, kept)

    @torch.no_grad()
    def _set(self, build: Build, values: dict[str, Tensor]) -> None:
        for name, parameter in build.model.named_parameters():
            parameter.copy_(values[name])


def averaging(decay: float, made: list[Average]) -> Technique[Build]:
    """Return the average as a technique."""

    def fill(build: Build) -> None:
        average = Average(build, decay)
        made.append(average)
        build.state["average"] = average
        build.after_update.append(average.update)
        build.weights_for_eval.append(average.swapped)

    return toy("average", Stage.STEP, fill, composes=("state", "after_update", "weights_for_eval"))


def test_weights_for_eval_are_swapped_in_and_out() -> None:
    made: list[Average] = []
    build = house.build_of(house.make_plan(averaging(1.0, made)))
    at_first = evaluate(build)
    house.take_step(build, ROWS_PLAIN)
    after = {n: p.detach().clone() for n, p in build.model.named_parameters()}
    assert evaluate(build) == at_first, "the average did not move, and neither does its loss"
    assert all(p.equal(after[n]) for n, p in build.model.named_parameters())
    build.weights_for_eval.clear()
    assert evaluate(build) != at_first


def test_state_is_saved_and_restored(tmp_path: Path) -> None:
    made: list[Average] = []
    plan = house.make_plan(
        averaging(0.9, made),
        directory=str(tmp_path),
        micro_rows=2,
        eval={"every_steps": 2, "tokens": 4 * LENGTH},
        checkpoint={"every_steps": 2},
    )
    folder = train.run(plan).folder
    first = metrics(folder)
    assert first[1]["val_loss_nats"] != first[3]["val_loss_nats"]
    folder = train.run(plan, progress=Progress(), resume=True, checkpoint="step-2").folder
    for before, after in zip(first, metrics(folder), strict=True):
        assert before["loss"] == after["loss"]
        assert before.get("val_loss_nats") == after.get("val_loss_nats")
    whole, resumed = made
    assert whole.updates == resumed.updates == 4
    assert all(whole.shadow[n].equal(t) for n, t in resumed.shadow.items())


def test_after_update_follows_a_plain_average() -> None:
    made: list[Average] = []
    build = house.build_of(house.make_plan(averaging(0.5, made), micro_rows=1))
    right = {n: p.detach().double() for n, p in build.model.named_parameters()}
    for index in range(3):
        house.take_step(build, ROWS_PLAIN, index=index)
        for name, parameter in build.model.named_parameters():
            right[name] = 0.5 * right[name] + 0.5 * parameter.detach().double()
    for name, shadow in made[0].shadow.items():
        torch.testing.assert_close(shadow.double(), right[name], rtol=1e-6, atol=1e-7)


# --- order, pack, transport, runtime ---------------------------------------------------------


class InOrder:
    """This order has the units of source 0 as they lie."""

    end = None

    def __call__(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(count, dtype=np.int64), np.arange(first, first + count)


def test_order_says_which_rows_come_next() -> None:
    sorted_ = toy(
        "sorted",
        Stage.DATA,
        lambda b: setattr(b, "order", lambda build, packer: InOrder()),
        claims=("order",),
    )
    build = house.build_of(house.make_plan(sorted_, micro_rows=2))
    for step in range(2):
        ids = torch.cat([m.ids_BT for m in build.loader.step(step).micros])
        for place, row in enumerate(ids):
            right = build.loader.packer.row(0, step * ROWS + place)
            assert row.tolist() == right.ids[:-1].tolist()


class Padded:
    """Put a document's first tokens in a row of its own; the rest is padding."""

    def __init__(self, shards: Any, sequence_length: int, kept: int) -> None:
        self.shards, self.sequence_length, self.kept = shards, sequence_length, kept
        self.units = tuple(s.documents for s in shards)

    def row(self, source: int, unit: int) -> Row:
        part = self.shards[source]
        start = int(part.document_starts(0, part.tokens)[unit])
        ids = np.zeros(self.sequence_length + 1, dtype=np.int64)
        ids[: self.kept + 1] = part.read(start, self.kept + 1)
        targets = np.full(self.sequence_length, IGNORE, dtype=np.int64)
        targets[: self.kept] = ids[1 : self.kept + 1]
        return Row(ids, np.array([0]), targets)


def test_pack_makes_the_rows_and_its_padding_counts_as_waste(tmp_path: Path) -> None:
    kept = 5
    padded = toy(
        "padded",
        Stage.DATA,
        claims=("pack",),
        apply=lambda b: setattr(b, "pack", lambda b, shards: Padded(shards, LENGTH, kept)),
    )
    packing = Variant(house.PACKING).technique()
    plan = house.make_plan(padded, packing, directory=str(tmp_path), micro_rows=2, guard=False)
    report = RunFolder(train.run(plan).folder).read_report()
    assert report["wasted_token_fraction"] == pytest.approx(1 - kept / LENGTH)
    build = house.build_of(plan)
    ids = build.loader.step(0).micros[0].ids_BT
    assert (ids[:, kept + 1 :] == 0).all() and (ids[:, 0] == ids[0, 0]).all()


def test_transport_takes_the_rows_to_the_device() -> None:
    def pairs(build: Build, packer: Any) -> Loader:
        return Loader(packer, seed=1, rows_per_step=ROWS, micro_rows=2, workers=2)

    mine = toy("mine", Stage.DATA, lambda b: setattr(b, "transport", pairs), claims=("transport",))
    build = house.build_of(house.make_plan(mine))
    assert [len(m.ids_BT) for m in build.loader.step(0).micros] == [2, 2, 2]
    build.loader.close()


def test_runtime_flags_hold_in_the_run_and_are_put_back(tmp_path: Path) -> None:
    seen: list[bool] = []

    @contextmanager
    def deterministic() -> Iterator[None]:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)

    def fill(build: Build) -> None:
        build.runtime.append(deterministic)
        build.after_update.append(
            lambda build, finite: seen.append(torch.are_deterministic_algorithms_enabled())
        )

    for active in (True, False):
        flag = toy("flag", Stage.STEP, fill, composes=("runtime", "after_update"), active=active)
        plan = house.make_plan(flag, directory=str(tmp_path), name=f"run{active}")
        if active:
            train.run(plan, progress=Progress())
        else:
            with pytest.raises(RunError, match="not in force"):
                train.run(plan, progress=Progress())
        assert not torch.are_deterministic_algorithms_enabled()
    assert seen and all(seen)
