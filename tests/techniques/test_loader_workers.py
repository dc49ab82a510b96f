"""Test reading workers as a technique: evidence, keys of the plan, refusals, a run on a GPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from facts import in_order

from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.data.tuned_loader import TunedLoader
from headrace.plan.technique import Unsupported
from headrace.techniques.data.loader_workers import LoaderWorkers
from headrace.train.train import step

Make = Callable[..., Build]


def test_evidence_grows_with_the_run_and_is_false_on_the_training_thread(make_tiny: Make) -> None:
    build = make_tiny("techniques.loader_workers={}")
    evidence = check_active(build)["loader_workers"]
    assert evidence.active and evidence.numbers["read_ahead"] == 1
    for _ in range(3):
        build.loader.step()
    micros = build.plan.rows_per_step // build.plan.micro_rows
    assert evidence.numbers["read_ahead"] == 1 + 3 * micros
    loader = build.loader
    assert isinstance(loader, TunedLoader)
    loader._pool.shutdown()  # type: ignore[union-attr]
    loader._pool = None
    loader.step()
    assert not LoaderWorkers().active(build).active
    loader.close()


def test_the_plan_tells_and_a_contradiction_is_an_error(tiny_plan: Callable[..., Any]) -> None:
    plan = tiny_plan("techniques.loader_workers={workers=3,prefetch=6}")
    assert (plan.data.workers, plan.data.prefetch) == (3, 6)
    with pytest.raises(ConfigError, match=in_order("data.workers", 2, "loader_workers", 1)) as told:
        tiny_plan("techniques.loader_workers={}", "data.workers=2")
    assert told.value.remedy.changes == (("-loader_workers",),)


def test_refuses_to_copy_what_is_cut_on_the_host(make_tiny: Make) -> None:
    keys = ("techniques.sequence_length_schedule.start=4", "techniques.loader_workers={}")
    gpu = replace(make_tiny(*keys).context, device="cuda")
    answer = LoaderWorkers().supports(gpu)
    assert isinstance(answer, Unsupported)
    assert answer.remedy.text == "techniques.loader_workers.side_copy=false"
    assert not isinstance(LoaderWorkers(side_copy=False).supports(gpu), Unsupported)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("side_copy", ["true", "false"])
def test_trains_on_the_same_tokens(make_tiny: Make, side_copy: str) -> None:
    build = make_tiny("device=cuda", f"techniques.loader_workers.side_copy={side_copy}")
    plain = make_tiny("device=cuda")
    for index in range(3):
        one, two = (step(b, b.loader.step(index).micros, index)[0] for b in (build, plain))
        assert float(one) == pytest.approx(float(two), rel=1e-3)
    loader = build.loader
    assert isinstance(loader, TunedLoader)
    assert (loader.waits.copied_bytes > 0) == (side_copy == "true")
    assert loader.stream_sha256 == plain.loader.stream_sha256
