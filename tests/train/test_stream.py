"""One global stream: whoever reads it and however it is cut, the same rows, loss and weights."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import tells
from tiny import PLAN, losses, report, tensors

from headrace.assemble.build import make_build
from headrace.assemble.sockets import Build
from headrace.data.ingest import prepare
from headrace.parallel.world import World
from headrace.plan.plan import Plan

Train = Callable[..., Path]


def assert_close_runs(one: Path, two: Path) -> None:
    """The stream is the same, loss and weights agree to rounding."""
    assert report(one)["stream_sha256"] == report(two)["stream_sha256"]
    torch.testing.assert_close(losses(one), losses(two), rtol=1e-5, atol=1e-5)
    first, second = (tensors(run / "checkpoints" / "latest") for run in (one, two))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        if name.startswith("model/"):
            torch.testing.assert_close(tensor, second[name], rtol=1e-5, atol=1e-5)


def test_workers_change_nothing(train: Train) -> None:
    one = train("name=one", "data.workers=0")
    for workers in (0, 1, 4):
        keys = (f"data.workers={workers}", f"data.prefetch={1 + workers}")
        two = train(f"name=with-{workers}", *keys)
        assert report(one)["stream_sha256"] == report(two)["stream_sha256"], workers
        assert torch.equal(losses(one), losses(two)), workers


def test_micro_batches_change_nothing_but_rounding(train: Train) -> None:
    one = train("name=one")
    for micro in (1, 2, 4):
        two = train(f"name=by-{micro}", f"batch.micro_sequences={micro}")
        assert_close_runs(one, two)
        bytes_ = [report(run)["peak_memory_bytes"]["allocated"] for run in (one, two)]
        assert 0 < bytes_[1] < bytes_[0], micro


def test_another_seed_is_another_stream(train: Train) -> None:
    hashes = {report(train(f"name=s{s}", f"seed={s}"))["stream_sha256"] for s in (1, 2)}
    assert len(hashes) == 2


@pytest.fixture(scope="module")
def alone(
    zygote: Any, tmp_path_factory: pytest.TempPathFactory, corpus: Path, prepared_folder: Path
) -> Iterator[Path]:
    """Yield a folder with tiny.toml and the run of one process, `alone`."""

    cwd = tmp_path_factory.mktemp("ranks")
    plan = PLAN.format(corpus=corpus, prepared=prepared_folder)
    (cwd / "tiny.toml").write_text(plan)
    assert zygote.run(cwd, "train", "tiny.toml", "name=alone").code == 0
    yield cwd


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (2, ("data.workers=0",)),
        (2, ("data.workers=4", "batch.micro_sequences=1")),
        pytest.param(4, (), marks=pytest.mark.slow),
        (4, ("data.workers=0", "batch.micro_sequences=1")),
    ],
)
def test_ranks_change_nothing_but_rounding(
    zygote: Any, alone: Path, ranks: int, how: tuple[str, ...]
) -> None:
    name = f"ranks-{ranks}-{len(how)}x"
    for ended in zygote.ranks(
        ranks, alone, "train", "tiny.toml", f"name={name}", f"mesh.data={ranks}", *how
    ):
        assert ended.code == 0, ended.err
    assert_close_runs(alone / "runs/alone", alone / "runs" / name)


def test_a_resume_under_other_ranks_continues_the_same_run(zygote: Any, alone: Path) -> None:
    for ranks, steps in ((1, 4), (2, 8), (4, 10), (1, 12)):
        resume = ["--resume"] if steps > 4 else []
        for ended in zygote.ranks(
            ranks,
            alone,
            "train",
            "tiny.toml",
            "name=moving",
            f"mesh.data={ranks}",
            f"goal.steps={steps}",
            *resume,
        ):
            assert ended.code == 0, ended.err
    assert report(alone / "runs/moving")["resumes"] == 3
    assert_close_runs(alone / "runs/alone", alone / "runs/moving")


def test_a_signal_to_one_rank_ends_all_of_them(
    zygote: Any, alone: Path, wait_until: Callable[..., None]
) -> None:
    children = [
        zygote.start(
            alone,
            "train",
            "tiny.toml",
            "name=told",
            "mesh.data=2",
            "goal.steps=100000",
            "eval.every_steps=100000",
            env=env,
        )
        for env in zygote.world(2)
    ]
    wait_until((alone / "runs/told/checkpoints/latest").exists)
    children[1].send(15)
    ended = [child.wait() for child in children]
    assert [e.code for e in ended] == [143, 143], ended[0].err + ended[1].err
    assert report(alone / "runs/told")["status"] == "interrupted"


def test_the_wrong_number_of_processes_is_one_message(zygote: Any, alone: Path) -> None:
    ended = zygote.run(alone, "train", "tiny.toml", "mesh.data=2")
    assert ended.code == 2 and tells(ended.err, "error:", "2 processes", 1)


@pytest.fixture
def make_tiny_build(tiny_plan: Callable[..., Plan]) -> Callable[..., Build]:
    def make(*overrides: str) -> Build:
        plan = tiny_plan(*overrides)
        return make_build(plan, prepare(plan), World(), torch.device("cpu"))

    return make


def test_a_resume_far_into_the_run_reads_its_own_rows_alone(
    make_tiny_build: Callable[..., Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    build, step = make_tiny_build("data.workers=0"), 10**9
    rows, asked = build.plan.rows_per_step, []
    packer, read = build.loader.packer, build.loader.packer.row
    monkeypatch.setattr(packer, "row", lambda s, u: asked.append((s, u)) or read(s, u))
    state = {"step": step, "rows": step * rows, "stream_hash": "0" * 64}
    build.loader.load_state(state)
    batch = build.loader.step(step)
    assert len(asked) == rows == sum(len(micro.ids_BT) for micro in batch.micros)
