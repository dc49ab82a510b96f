"""Simulate schedules; compare the engine on real ranks with one model in one process."""

from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crosses import crossed
from facts import in_order
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from headrace.core.errors import ConfigError
from headrace.parallel.pipeline import (
    Action,
    bubble,
    forward_only,
    interleaved,
    one_forward_one_backward,
)
from headrace.parallel.zero_bubble import bubble_of_v, dual_pipe_v, most_of_v, zero_bubble

FUNCTIONS = Path(__file__).with_name("pipeline_ranks.py")
ONE = [(ranks, 1, micros) for ranks in range(1, 9) for micros in (1, 2, 3, 5, 7, 8, 16, 33)]
MANY = [(r, c, r * groups) for r in range(2, 7) for c in (1, 2, 3) for groups in (1, 2, 5)]
FORWARD = [(r, c, m) for r in range(2, 6) for c in (1, 2, 3) for m in (1, 3, 4, 9)]


def schedules(ranks: int, chunks: int, micros: int) -> list[list[Action]]:
    """Return the schedule of every rank."""
    if chunks == 1:
        return [one_forward_one_backward(ranks, r, micros) for r in range(ranks)]
    return [interleaved(ranks, r, micros, chunks) for r in range(ranks)]


def route(ranks: int, chunks: int, rank: int, action: Action) -> tuple[Any, Any]:
    """(what the action takes, what it gives): (edge, stage, micro) or None."""
    stage = action.chunk * ranks + rank
    step = 1 if action.kind == "forward" else -1
    name = (action.kind, action.micro)
    takes = ((rank - step) % ranks, rank, action.kind), (stage, name)
    gives = (rank, (rank + step) % ranks, action.kind), (stage + step, name)
    has_before = 0 <= stage - step < ranks * chunks
    has_after = 0 <= stage + step < ranks * chunks
    return takes if has_before else None, gives if has_after else None


def simulate(plans: list[list[Action]], chunks: int) -> tuple[list[int], int]:
    """Run the ranks as processes whose sends wait for the message `ranks` before.

    Returns:
        the most micro-batches that each rank held, and the time until all are done, where a
        forward takes one tick and a backward two.
    """
    ranks = len(plans)
    edges: dict[Any, deque[Any]] = defaultdict(deque)
    at, clock, held, most = [0] * ranks, [0] * ranks, [0] * ranks, [0] * ranks
    computed = [False] * ranks
    done: set[tuple[int, Action]] = set()
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            if at[rank] == len(plans[rank]):
                continue
            action = plans[rank][at[rank]]
            takes, gives = route(ranks, chunks, rank, action)
            if not computed[rank]:
                if takes is not None:
                    edge, wanted = takes
                    if not edges[edge]:
                        continue
                    name, ready = edges[edge].popleft()  # what comes is what is wanted, untagged
                    assert name == wanted, (rank, action, name)
                    clock[rank] = max(clock[rank], ready)
                if action.kind == "backward":
                    assert (rank, action._replace(kind="forward")) in done
                clock[rank] += 1 if action.kind == "forward" else 2
                held[rank] += 1 if action.kind == "forward" else -1
                most[rank] = max(most[rank], held[rank])
                computed[rank] = moved = True
            if gives is not None:
                edge, name = gives
                if len(edges[edge]) == ranks:
                    continue
                edges[edge].append((name, clock[rank]))
            done.add((rank, action))
            at[rank], computed[rank], moved = at[rank] + 1, False, True
    assert at == [len(plan) for plan in plans], "deadlock"
    assert not any(edges.values()), "messages that nobody takes"
    return most, max(clock)


@pytest.mark.parametrize(("ranks", "chunks", "micros"), [*ONE, *MANY])
def test_a_schedule_is_complete_and_never_stands_still(
    ranks: int, chunks: int, micros: int
) -> None:
    plans = schedules(ranks, chunks, micros)
    everything = {
        Action(kind, c, m)
        for kind in ("forward", "backward")
        for c in range(chunks)
        for m in range(micros)
    }
    for plan in plans:
        assert len(plan) == len(everything) and set(plan) == everything
    most, ticks = simulate(plans, chunks)
    if chunks == 1:
        assert most == [min(ranks - rank, micros) for rank in range(ranks)]
    else:
        ahead = [2 * (ranks - r - 1) + (chunks - 1) * ranks + 1 for r in range(ranks)]
        assert most == [min(a, micros * chunks) for a in ahead]
    assert 1 - 3 * micros * chunks / ticks == pytest.approx(bubble(ranks, micros, chunks))


@pytest.mark.parametrize(("ranks", "chunks", "micros"), FORWARD)
def test_forwards_alone_take_any_number(ranks: int, chunks: int, micros: int) -> None:
    plans = [forward_only(ranks, micros, chunks)] * ranks
    assert all(len(set(plan)) == chunks * micros for plan in plans)
    simulate(plans, chunks)


def test_the_simulation_sees_a_wrong_schedule() -> None:
    plans = schedules(2, 1, 4)
    plans[1] = [plans[1][2], plans[1][3], *plans[1][:2], *plans[1][4:]]
    with pytest.raises(AssertionError):
        simulate(plans, 1)
    backward_first = [[a for a in p if a.kind == "backward"] for p in schedules(2, 1, 2)]
    with pytest.raises(AssertionError):
        simulate(backward_first, 1)
    with pytest.raises(AssertionError, match="deadlock"):
        simulate([schedules(2, 1, 2)[0], []], 1)


@pytest.mark.parametrize(("ranks", "micros", "near"), [(4, 5, 4), (4, 7, 8), (3, 1, 3)])
def test_interleaving_names_the_nearest_number(ranks: int, micros: int, near: int) -> None:
    with pytest.raises(ConfigError, match=in_order(micros, "nearest", near)) as raised:
        interleaved(ranks, 0, micros, 2)
    assert "1f1b" in raised.value.remedy.text


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("micros", [1, 2, 5, 8, 33])
def test_a_v_is_complete_and_waits_least(ranks: int, micros: int) -> None:
    everything = {
        Action(kind, c, m)
        for kind in ("forward", "inputs", "weights")
        for c in range(2)
        for m in range(micros)
    }
    for rank in range(ranks):
        plan = zero_bubble(ranks, rank, micros)
        assert len(plan) == len(everything) and set(plan) == everything
        for c, m in {(a.chunk, a.micro) for a in plan}:
            at = [plan.index(Action(kind, c, m)) for kind in ("forward", "inputs", "weights")]
            assert at == sorted(at)
        assert most_of_v(ranks, rank, micros) <= 2 * ranks  # as 1F1B's first rank
    waits = bubble_of_v(ranks, micros)  # which simulates them: a deadlock would not reach the end
    if micros >= 2 * ranks:
        assert waits == pytest.approx((ranks - 1) / (6 * micros + ranks - 1))
        assert waits < bubble(ranks, micros, 2) < bubble(ranks, micros)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5, 17])
def test_dual_pipe_v_is_torchs_order(ranks: int, more: int) -> None:
    micros = 2 * ranks + more
    theirs = SimpleNamespace(pp_group_size=ranks, _n_microbatches=micros)
    kinds = {
        "FORWARD": "forward",
        "FULL_BACKWARD": "backward",
        "BACKWARD_INPUT": "inputs",
        "BACKWARD_WEIGHT": "weights",
    }
    for rank in range(ranks):
        order = ScheduleDualPipeV._calculate_single_rank_operations(theirs, rank)  # type: ignore[arg-type]
        flat = [one for action in order if action for one in (action.sub_actions or (action,))]
        wanted = [
            Action(
                kinds[a.computation_type.name],  # type: ignore[arg-type]
                int(a.stage_index != rank),
                a.microbatch_index or 0,
            )
            for a in flat
        ]
        assert dual_pipe_v(ranks, rank, micros) == wanted


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("micros", [1, 2, 5, 8, 33])
def test_dual_pipe_v_is_complete(ranks: int, micros: int) -> None:
    for rank in range(ranks):
        plan = dual_pipe_v(ranks, rank, micros)
        for c, m in {(a.chunk, a.micro) for a in plan}:
            kinds = [a.kind for a in plan if (a.chunk, a.micro) == (c, m)]
            assert kinds in (["forward", "backward"], ["forward", "inputs", "weights"])
        assert len({(a.chunk, a.micro) for a in plan}) == 2 * micros
        assert most_of_v(ranks, rank, micros, "dualpipev") <= 2 * ranks + 1
    waits = bubble_of_v(ranks, micros, "dualpipev")  # a deadlock would not reach the end
    assert bubble_of_v(ranks, micros) <= waits
    if micros >= 2 * ranks:
        assert waits < bubble(ranks, micros)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_loss_and_gradients_along_a_v(
    zygote: Any, tmp_path: Path, ranks: int, schedule: str
) -> None:
    zygote.call(ranks, tmp_path, FUNCTIONS, "check", chunks=2, schedule=schedule)


@crossed(together=1, ranks=(4, 2), chunks=(1, 2))
def test_loss_and_gradients_are_the_whole_models(
    zygote: Any, tmp_path: Path, ranks: int, chunks: int
) -> None:
    zygote.call(ranks, tmp_path, FUNCTIONS, "check", chunks=chunks)


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [1, 2])
def test_loss_and_gradients_on_gpus(zygote: Any, tmp_path: Path, chunks: int) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    zygote.call(2, tmp_path, FUNCTIONS, "check", chunks=chunks, kind="cuda")
