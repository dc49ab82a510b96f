"""A curriculum's stream is one whoever reads it, goes on where it stopped, and shows its pace."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import assert_same_run, report

from headrace.assemble.build import make_build
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.data.ingest import prepare
from headrace.data.loader import Loader, combine_hashes
from headrace.data.paced_order import PacedOrder
from headrace.data.quality.scores import open_scores
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.techniques.data.curriculum import Curriculum

NAME = "curriculum"
PACED = (f"techniques.{NAME}.until=8", f"techniques.{NAME}.stages=4")
Make = Callable[..., Build]


def stream(build: Build, steps: int, **how: Any) -> str:
    """Return the hash of the first steps, read by so many ranks and threads."""
    ranks, sums = how.pop("ranks", 1), []
    for rank in range(ranks):
        loader = build.loader
        with Loader(
            loader.packer,
            rows_per_step=loader.rows,
            order=loader.order,
            rank=rank,
            ranks=ranks,
            **how,
        ) as own:
            for _ in range(steps):
                own.step()
            sums.append(own.local_hash)
    return combine_hashes(sums)


def test_the_stream_is_one_whoever_reads_it(make_tiny: Make) -> None:
    build = make_tiny(*PACED)
    assert isinstance(build.loader.order, PacedOrder)
    wanted = stream(build, 10, micro_rows=8)
    assert wanted == stream(build, 10, micro_rows=2, workers=3, prefetch=7)
    assert wanted == stream(build, 10, micro_rows=1, ranks=4)
    assert wanted == stream(build, 10, micro_rows=4, ranks=2, workers=1)
    assert wanted != stream(make_tiny(), 10, micro_rows=8)
    # Cutting rows shorter at first leaves the rows; a growing batch reads them in its own steps.
    shorter = make_tiny(*PACED, "techniques.sequence_length_schedule.start=8")
    assert wanted == stream(shorter, 10, micro_rows=8)
    ramp = ("techniques.batch_ramp.divide=4", "techniques.batch_ramp.until=4.0")
    grown = make_tiny(*PACED, *ramp)
    order, rows = grown.loader.order, grown.loader.rows
    assert isinstance(order, PacedOrder)
    assert [rows.before(n) for n in (0, 2, 4, 6, 8)] == [0, 4, 12, 28, 44]
    assert [first for first, _ in order.pacers[0].stages] == [0, 4, 12, 28, 44]
    shares = [order.open_share(rows.before(n)) for n in range(9)]
    assert shares[0] == shares[1] < shares[2] < shares[4] < shares[6] < shares[8] == 1


def test_a_run_goes_on_and_shows_its_pace(train: Callable[..., Path]) -> None:
    words = (*PACED, "eval.every_steps=4", "checkpoint.every_steps=4", "checkpoint.keep_last=9")
    whole = train("name=whole", "goal.steps=8", *words)
    train("name=parts", "goal.steps=4", *words)
    parts = train("name=parts", "goal.steps=8", *words, resume=True)
    assert_same_run(whole, parts)
    told = report(whole)
    numbers = told["techniques"][NAME]["numbers"]
    means = [v for k, v in numbers.items() if k.startswith("mean_score_tenth")]
    assert means[0] < numbers["mean_score"] and means[0] < means[-1]
    assert numbers["passes"] >= 1 and told["data"]["scores"]["least"] < numbers["mean_score"]


def test_other_scores_and_another_pace_are_refused_by_name(
    train: Callable[..., Path], tiny_plan: Callable[..., Plan]
) -> None:
    train("name=a", "goal.steps=4", *PACED)
    for word, named in (
        (f"techniques.{NAME}.score=length", "curriculum.score was 'compression'"),
        (f"techniques.{NAME}.until=9", "curriculum.until was 8"),
    ):
        with pytest.raises(ConfigError, match=named):
            train("name=a", "goal.steps=8", *PACED, word, resume=True)
    # The scores lie there, whole, and are others than those of the run.
    prepared = prepare(tiny_plan("goal.steps=4", *PACED))
    assert prepared.scores is not None
    (folder,) = [
        f.parent
        for f in prepared.directory.glob("scores-*/scores.json")
        if '"compression' in f.read_text()
    ]
    from headrace.data.quality import scores as kept

    before = {file: file.read_bytes() for file in folder.iterdir()}
    other = iter(np.arange(prepared.train[0].documents, dtype=float).tolist())
    for file in before:
        file.unlink()
    folder.rmdir()
    kept.save_scores(
        folder, prepared.scores.record.what, prepared.train, lambda part, at: other, lambda *_: None
    )
    assert open_scores(folder, prepared.train).fingerprint != prepared.scores.fingerprint
    try:
        with pytest.raises(ConfigError, match="the scores changed since the run was trained"):
            train("name=a", "goal.steps=8", *PACED, resume=True)
    finally:
        for file, raw in before.items():
            file.write_bytes(raw)
    train("name=a", "goal.steps=6", *PACED, resume=True)


def test_another_horizon_is_another_pace(train: Callable[..., Path]) -> None:
    shared = (f"techniques.{NAME}.until=0.5", "schedule.kind=constant")
    train("name=h", "goal.steps=4", *shared, "schedule.steps=16")
    with pytest.raises(ConfigError, match=r"curriculum 8 steps, .* -> 4 steps, "):
        train("name=h", "goal.steps=8", *shared, "schedule.steps=8", resume=True)


def test_what_is_not_in_force_is_seen(make_tiny: Make) -> None:
    build = make_tiny(*PACED)
    technique = build.techniques[0]
    assert isinstance(technique, Curriculum)
    build.now["step"] = 0.0
    assert technique.active(build).active  # it reads a step where none was read yet
    assert not technique.active(make_tiny()).active
    order = build.loader.order
    assert isinstance(order, PacedOrder)
    order.pacers[0].sorted = order.pacers[0].sorted[::-1].copy()  # hard rows first
    assert not technique.active(build).active


def test_a_run_scores_what_another_trains_on(
    train: Callable[..., Path], tiny_plan: Callable[..., Plan]
) -> None:
    small = train("name=small", "goal.steps=4")
    plan = tiny_plan(*PACED, f"techniques.{NAME}.score=loss:{small}")
    prepared = prepare(plan)
    assert prepared.scores is not None
    values = prepared.scores.values[0]
    assert len(values) == prepared.train[0].documents and 0 < values.min() < values.max() < 7
    # A part of the documents, from any on, has the same scores.
    from headrace.inference.document_loss import losses

    again = [*losses(small, prepared.tokenizer)(prepared.train[0], 5)]
    assert again == pytest.approx(values[5:].tolist(), abs=1e-5)
    small.rename(small.with_name("gone"))
    kept = prepare(plan).scores  # what it computed still counts
    assert kept is not None and kept.fingerprint == prepared.scores.fingerprint


def test_sources_with_weights_are_paced_each(
    tiny_plan: Callable[..., Plan], corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.txt").write_text("salt and bread of the mill, again and again. " * 99)
    (tmp_path / "more" / "b.txt").write_text("the weir and the lock hold the winter flood. " * 99)
    sources = f"data.sources=['{corpus}', '{tmp_path / 'more'}']"
    plan = tiny_plan(*PACED, sources, "data.weights=[3, 1]", f"data.directory={tmp_path / 'p'}")
    build = make_build(plan, prepare(plan), World(), torch.device("cpu"))
    assert stream(build, 9, micro_rows=8) == stream(build, 9, micro_rows=2, ranks=2)
    assert Curriculum.model_validate(plan.techniques[NAME].model_dump()).active(build).active
