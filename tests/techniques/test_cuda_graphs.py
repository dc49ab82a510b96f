"""Recorded kernels: who may record, what leaves the pool between micro-batches, equal steps."""

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pieces import h200

from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.data.loader import Micro
from headrace.plan.plan import Plan
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.compile.cuda_graphs import CudaGraphs, counts, skips
from headrace.train.evaluate import evaluate
from headrace.train.train import step

Make = Callable[..., Build]
Batch = Callable[[Build], list[Micro]]
ON, COMPILE = "techniques.cuda_graphs={}", "techniques.torch_compile={}"
MUON = "techniques.muon={}"
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def on_a_gpu(plan: Plan, **facts: Any) -> Supported | Unsupported:
    """What it answers on an H200."""
    return CudaGraphs().supports(h200(plan, **facts))


def test_a_cpu_records_nothing(make_tiny: Make) -> None:
    with pytest.raises(UnsupportedError, match="no CUDA graphs"):
        make_tiny(ON, COMPILE)


@pytest.mark.parametrize(
    ("plan", "reason", "remedy"),
    [
        ((), "nothing is", "--with torch_compile"),
        (
            ("techniques.torch_compile.backend=aot_eager",),
            "records nothing",
            "techniques.torch_compile.backend=inductor",
        ),
    ],
)
def test_refused_with_its_reason(
    plan: tuple[str, ...], reason: str, remedy: str, tiny_plan: Callable[..., Plan]
) -> None:
    answer = on_a_gpu(tiny_plan(ON, *plan))
    assert isinstance(answer, Unsupported)
    assert reason in answer.reason and remedy in answer.remedy.text


def test_taken_with_a_compiler_on_one_gpu(tiny_plan: Callable[..., Plan]) -> None:
    plan = tiny_plan(ON, COMPILE)
    assert isinstance(on_a_gpu(plan), Supported)
    assert isinstance(on_a_gpu(tiny_plan(ON, COMPILE, "mesh.data=2"), ranks=2), Unsupported)


def test_rows_that_grow_are_taken(tiny_plan: Callable[..., Plan]) -> None:
    growing = "techniques.sequence_length_schedule.start=4"
    assert isinstance(on_a_gpu(tiny_plan(ON, COMPILE, growing)), Supported)


@pytest.mark.parametrize("other", sorted(CudaGraphs.excludes))
def test_what_recordings_cannot_hold_is_refused(other: str, make_tiny: Make) -> None:
    with pytest.raises(ConfigError, match=f"cuda_graphs cannot stand beside {other}"):
        make_tiny(ON, COMPILE, f"techniques.{other}={{}}")


def test_inductor_is_told_while_the_run_lasts(make_tiny: Make) -> None:
    from torch._inductor import config

    build = make_tiny()
    CudaGraphs().apply(build)
    assert not config.triton.cudagraphs
    with build.runtime[-1]():
        assert config.triton.cudagraphs
    assert not config.triton.cudagraphs


@pytest.mark.slow
@pytest.mark.parametrize("flags", [True, False])
def test_the_flag_reaches_what_a_step_compiles(flags: bool, make_tiny: Make, batch: Batch) -> None:
    """On a CPU inductor is asked to record, and counts what it cannot: states and loss.

    A backward graph follows its forward graph, and is not counted beside it.
    """
    build = make_tiny(COMPILE)
    CudaGraphs().apply(build)
    before = skips()
    with ExitStack() as stack:
        for enter in build.runtime if flags else ():
            stack.enter_context(enter())
        step(build, batch(build), 0)
    assert skips() - before == (2 if flags else 0)


def test_gradients_leave_the_pool_once_and_the_step_is_equal(make_tiny: Make, batch: Batch) -> None:
    """The second of four micro-batches finds the first's gradients, and moves them."""
    few = ("batch.tokens=128", "batch.micro_sequences=2")
    plain, build = make_tiny(*few), make_tiny(*few)
    CudaGraphs().apply(build)
    lies: list[int] = []
    weight = build.model.get_parameter("blocks.0.mixer.qkv.weight")
    inner = build.sync

    def watched(build: Build, last: bool) -> None:
        inner(build, last)
        lies.append(weight.grad.data_ptr() if weight.grad is not None else 0)
        kept.append(weight.grad)

    kept: list[Any] = []  # so that no address is used twice
    build.sync = watched
    for index in range(2):
        micros = plain.loader.step(index).micros
        assert torch.equal(step(build, micros, index), step(plain, micros, index))
        evaluate(build)
    assert lies[0] == 0 and lies[1] != 0 and len(set(lies[1:4])) == 1
    for one, two in zip(build.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_steps_first_gradients_are_copied(make_tiny: Make) -> None:
    build = make_tiny()
    CudaGraphs().apply(build)
    weight = build.model.embed.weight
    build.sync(build, False)
    first = weight.grad = torch.ones_like(weight)
    build.sync(build, False)
    second = weight.grad
    assert second is not first and torch.equal(second, first)
    build.sync(build, True)
    assert weight.grad is second, "the sum stays where it is"
    weight.grad = None
    build.sync(build, False)
    weight.grad = first
    with torch.no_grad():
        build.sync(build, True)
    assert weight.grad is first, "an evaluation moves nothing"
    build.sync(build, True)
    assert weight.grad is not first, "the next step begins anew"


def test_recordings_are_counted_down_the_tree() -> None:
    def node(*children: Any) -> Any:
        return SimpleNamespace(children={0: list(children)} if children else {})

    found = SimpleNamespace(
        roots={0: [node(node(), node(node()))], 1: [node()]},
        ids_to_funcs={0: 1, 1: 1, 2: 1},
        warmed_up_functions={0, 1},
    )
    assert counts(found) == (3, 2, 5)
    assert counts(None) == (0, 0, 0)


def test_nothing_recorded_is_no_evidence(make_tiny: Make) -> None:
    build = make_tiny()
    CudaGraphs().apply(build)
    assert CudaGraphs().active(build).active is False


def run_on_gpu(build: Build, steps: int) -> list[torch.Tensor]:
    """Return numbers of each step, with an evaluation after the second."""
    found = []
    with ExitStack() as flags:
        for enter in build.runtime:
            flags.enter_context(enter())
        for index in range(steps):
            found.append(step(build, build.loader.step(index).micros, index).cpu())
            if index == 1:
                found.append(torch.tensor([evaluate(build).loss_nats]))
    return found


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("scope", ["model", "block"])
@pytest.mark.parametrize("micro_rows", [8, 2])
@pytest.mark.parametrize("muon", [(), (MUON, "techniques.muon.normalize_rows=true")])
def test_a_recorded_run_is_the_compiled_run(
    scope: str,
    micro_rows: int,
    muon: tuple[str, ...],
    make_tiny: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare five steps, with an evaluation between, with the same kernels launched singly.

    Muon's compiled update is no graph of the recorder's: it launches as before.
    """
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(1), replay(graph))[1]
    )
    keys = (
        "device=cuda",
        "batch.tokens=128",
        f"batch.micro_sequences={micro_rows}",
        f"techniques.torch_compile.scope={scope}",
        *muon,
    )
    plain = run_on_gpu(make_tiny(*keys), 5)
    assert not replays
    build = make_tiny(ON, *keys)
    found = run_on_gpu(build, 5)
    for one, two in zip(found, plain, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)
    evidence = build.plan.techniques["cuda_graphs"].active(build)
    numbers = evidence.numbers
    assert evidence.active and numbers["recorded"] > 0 and numbers["skipped"] == 0
    assert len(replays) > 2 * numbers["recorded"]


@pytest.mark.gpu
@gpu
def test_rows_that_grow_are_recorded_at_each_length(make_tiny: Make) -> None:
    """Each of four lengths warms up, is recorded and replayed, and equals single launches."""
    keys = (
        COMPILE,
        "device=cuda",
        "data.sequence_length=32",
        "batch.tokens=256",
        "techniques.sequence_length_schedule.start=4",
        "techniques.sequence_length_schedule.until=12",
    )
    plain = run_on_gpu(make_tiny(*keys), 18)
    build = make_tiny(ON, *keys)
    for one, two in zip(run_on_gpu(build, 18), plain, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)
    assert len(build.notes["sequence_length_schedule"]) == 4
    numbers = build.plan.techniques["cuda_graphs"].active(build).numbers
    assert numbers["skipped"] == 0 and numbers["recorded"] >= 4 * 3, "states, loss and backward"


@pytest.mark.gpu
@gpu
def test_without_the_runs_flags_nothing_is_recorded(make_tiny: Make, batch: Batch) -> None:
    build = make_tiny(ON, COMPILE, "device=cuda")
    step(build, batch(build), 0)
    assert not build.plan.techniques["cuda_graphs"].active(build).active
