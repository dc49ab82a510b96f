"""A tuned loader: one stream for any setting, waits by stage, tuning until none is left."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from statistics import median
from typing import Any

import pytest
import torch

from headrace.core.errors import ConfigError
from headrace.data.loader import Loader
from headrace.data.rows import Cut, Row
from headrace.data.shards import Shards
from headrace.data.tuned_loader import (
    REST_WINDOWS,
    STAGES,
    WINDOW_STEPS,
    Made,
    TunedLoader,
    Tuner,
    Waits,
    WaitWindow,
)

STEPS = 5


class Slow:
    """A packer that takes its time."""

    def __init__(self, inner: Cut, delay_s: float) -> None:
        self.inner, self.delay_s = inner, delay_s
        self.sequence_length, self.units = inner.sequence_length, inner.units

    def row(self, source: int, unit: int) -> Row:
        time.sleep(self.delay_s)
        return self.inner.row(source, unit)


@pytest.fixture
def packer(make_shards: Callable[..., Shards]) -> Cut:
    return Cut([make_shards([900] * 4)], 16)


@pytest.fixture
def tuned(packer: Cut) -> Iterator[Callable[..., TunedLoader]]:
    """A loader over the tiny plan's rows, slowed down where `delay_s` says so; closed after."""
    made: list[TunedLoader] = []

    def make(delay_s: float = 0.0, **options: Any) -> TunedLoader:
        given = {"device": None, "workers": 0, "most": 8, "wait_share": 0.05, "prefetch": 2}
        rows = Slow(packer, delay_s) if delay_s else packer
        made.append(TunedLoader(rows, seed=1, rows_per_step=8, micro_rows=2, **given | options))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def ids(loader: Loader, steps: range) -> torch.Tensor:
    return torch.stack([torch.cat([m.ids_BT.cpu() for m in loader.step(s).micros]) for s in steps])


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 1, "prefetch": 1},
        {"workers": 3},
        {"prefetch": 9},
        {"wait_share": 1e-9},
    ],
)
def test_the_stream_is_the_baselines(
    packer: Cut, tuned: Callable[..., TunedLoader], options: dict[str, Any]
) -> None:
    steps = range(2 * WINDOW_STEPS + 2)
    plain = Loader(packer, seed=1, rows_per_step=8, micro_rows=2)
    right, one = ids(plain, steps), tuned(**options)
    assert torch.equal(ids(one, steps), right)
    assert one.stream_sha256 == plain.stream_sha256


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_goes_on_where_it_was(
    packer: Cut, tuned: Callable[..., TunedLoader], workers: int
) -> None:
    plain = Loader(packer, seed=1, rows_per_step=8, micro_rows=2)
    right = ids(plain, range(STEPS))
    first = tuned(workers=workers)
    ids(first, range(2))
    state = first.state()
    again = tuned(workers=3 - workers)
    again.load_state(state)
    assert torch.equal(ids(again, range(2, STEPS)), right[2:])
    assert again.stream_sha256 == plain.stream_sha256
    assert torch.equal(ids(again, range(1, 3)), right[1:3])  # sought backwards
    with pytest.raises(ConfigError):
        TunedLoader(
            packer,
            device=None,
            workers=1,
            most=1,
            wait_share=0.1,
            prefetch=1,
            seed=1,
            rows_per_step=4,
            micro_rows=2,
        ).load_state(state)


def test_threads_double_while_steps_wait_too_long() -> None:
    tuner = Tuner(1, 6, 0.01)
    waits_s = (0.0009, 0.05, 0.03, 0.01, 0.0, 0.02)
    told = [tuner.judge(WaitWindow([wait_s, wait_s, 0.0], 0.1)) for wait_s in waits_s]
    assert told == [1, 2, 4, 6, 6, 6]
    asks = Tuner(1, 16, 0.01)
    told = [asks.judge(WaitWindow([wait_s] * 2, 0.1, 5)) for wait_s in (0.0, 0.3, 0.0, 0.05)]
    assert told == [1, 5, 5, 10]  # what is read asks for five; five with a wait left ask for more


def test_one_step_that_waited_is_no_reason_and_one_of_each_window_is() -> None:
    tuner = Tuner(1, 8, 0.01)
    told = [tuner.judge(WaitWindow([0.0, wait_s, 0.0], 0.1)) for wait_s in (0.3, 0.0, 0.3, 0.3)]
    assert told == [1, 1, 1, 2]


def test_threads_that_do_not_help_are_taken_back_for_a_while() -> None:
    tuner = Tuner(2, 16, 0.01)
    told = [tuner.judge(WaitWindow([0.05] * 2, 0.1)) for _ in range(REST_WINDOWS + 3)]
    assert told == [4, *[2] * (REST_WINDOWS + 1), 4]


def test_a_leap_that_does_not_help_is_followed_by_doubling() -> None:
    """A disk that is best at four readers: thirteen are asked for, and take as long as one."""
    tuner, waits_s, told = Tuner(1, 23, 0.01), {1: 0.1, 2: 0.05, 4: 0.02, 8: 0.06, 13: 0.1}, [1]
    for _ in range(6):
        told.append(tuner.judge(WaitWindow([waits_s[told[-1]]] * 8, 0.1, 13)))
    assert told == [1, 13, 1, 2, 4, 8, 4]


def test_threads_asked_for_are_what_is_read_over_what_is_trained() -> None:
    """0.4 s of each 1.0 are waited for; what 0.6 s train takes two readers 1.1 s to make."""
    waits, made = Waits(0.01), [Made(1, (0.5, 0.04, 0.01), None)] * 2
    for _ in range(8):
        waits.add(1.0, 0.4, made)
    window = waits.newest(8)
    assert window.waits_s == pytest.approx([0.4] * 8) and window.step_s == 1.0
    assert window.asked_for == 2
    for n in range(8):  # every other step waits, and takes so much longer
        waits.add(0.1 + 0.1 * (n % 2), 0.1 * (n % 2), [Made(1, (0.11, 0.0, 0.0), None)])
    assert waits.newest(8).asked_for == 2
    for n in range(8):  # one row in four is slow: what they take together counts
        waits.add(0.1, 0.0, [Made(1, (0.8 * (n % 4 == 0), 0.0, 0.0), None)])
    assert waits.newest(8).asked_for == 2


@pytest.mark.parametrize("workers", [4, 1, 3])
def test_threads_come_and_go_during_a_run(
    packer: Cut, tuned: Callable[..., TunedLoader], workers: int
) -> None:
    plain = Loader(packer, seed=1, rows_per_step=8, micro_rows=2)
    one, right = tuned(0.001), ids(plain, range(3 * STEPS))
    first = ids(one, range(STEPS))
    one._go_on_with(workers)
    second = ids(one, range(STEPS, 2 * STEPS))
    one._go_on_with(2)
    assert torch.equal(torch.cat([first, second, ids(one, range(2 * STEPS, 3 * STEPS))]), right)


def test_tuning_takes_the_wait_away(tuned: Callable[..., TunedLoader]) -> None:
    """Eight rows of 4 ms for a step of 20 ms: one thread is too slow, a few are enough."""
    fixed, one = tuned(0.004, workers=1), tuned(0.004)
    for loader in (fixed, one):
        for _ in range(5 * WINDOW_STEPS):
            loader.step()
            time.sleep(0.02)
    assert fixed.waits.workers == 1 < one.waits.workers
    slow, fast = (median(x.waits.newest(WINDOW_STEPS).waits_s) for x in (fixed, one))
    assert fast < 0.5 * slow
    assert fixed.waits["read_stalled_steps"] > 4 * WINDOW_STEPS
    assert fixed.waits["wait_p50_s"] > 0.005 and fixed.waits["read_p50_s"] > 0.005


def test_what_was_read_during_a_long_first_step_hides_no_slow_thread(
    tuned: Callable[..., TunedLoader],
) -> None:
    """Check that rows read ahead in a first step of 200 ms are not counted as fast reading."""
    one = tuned(0.004, prefetch=16)
    told = []
    for n in range(2 * WINDOW_STEPS):
        one.step()
        told.append(one.waits.workers)
        time.sleep(0.01 if n else 0.2)
    judged = 1 + 4 + WINDOW_STEPS  # the first, 16 micro-batches read ahead, 4 a step, and a window
    assert {*told[:judged]} == {1}
    assert told[judged] > 1


def test_other_threads_begin_where_the_first_ones_are(tuned: Callable[..., TunedLoader]) -> None:
    """What no thread has begun goes to the new ones; nothing is read twice, or out of turn."""
    one, begun = tuned(0.002, prefetch=12), []
    plain = one._clock.row
    one._clock.row = lambda *a: (begun.append(a), plain(*a))[1]  # type: ignore[method-assign]
    one.step()
    one._go_on_with(4)
    for _ in range(4):
        one.step()
    one.close()
    assert len(begun) == len({*begun}) >= 5 * 8


class Gate:
    """A packer whose rows wait until it opens, and that tells which threads asked."""

    def __init__(self, inner: Cut) -> None:
        self.inner, self.opened, self.threads = inner, threading.Event(), set[int]()
        self.sequence_length, self.units = inner.sequence_length, inner.units

    def row(self, source: int, unit: int) -> Row:
        self.threads.add(threading.get_ident())
        assert self.opened.wait(60)
        return self.inner.row(source, unit)


def test_a_change_waits_for_no_reader_and_close_for_all(
    packer: Cut, tuned: Callable[..., TunedLoader]
) -> None:
    one = tuned(prefetch=12)
    one.step()
    futures.wait(one._ahead)
    gate = Gate(packer)
    one._clock.inner = gate
    one.step()  # of what was read ahead
    one.step()
    while not gate.threads:
        time.sleep(0.001)
    one._go_on_with(4)  # one micro-batch of eight is begun, and it returns all the same
    while len(gate.threads) < 5:  # the old one, and four
        time.sleep(0.001)
    gate.opened.set()
    assert one.waits.workers == 4 and one.waits.prefetch == 12
    one._go_on_with(8)
    assert one.waits.prefetch == 16
    one._go_on_with(1)
    assert one.waits.prefetch == 12
    one.close()
    left = {thread.ident for thread in threading.enumerate()}
    assert not gate.threads & left


def test_a_system_without_more_threads_ends_the_tuning_and_not_the_run(
    packer: Cut, tuned: Callable[..., TunedLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, one = ids(Loader(packer, seed=1, rows_per_step=8, micro_rows=2), range(6)), tuned(0.001)
    found = [ids(one, range(2))]

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        one._go_on_with(4)
    assert one.waits.workers == 1 and one._tuner is None
    found.append(ids(one, range(2, 6)))
    assert torch.equal(torch.cat(found), right)


def test_nothing_changes_while_nothing_waits(tuned: Callable[..., TunedLoader]) -> None:
    one = tuned(prefetch=8, wait_share=1e3)
    pool = one._pool
    for _ in range(3 * WINDOW_STEPS):
        one.step()
        time.sleep(0.002)
    assert one._pool is pool and not one._retired


def test_a_step_that_is_sought_is_not_judged_as_one_that_waited(
    tuned: Callable[..., TunedLoader],
) -> None:
    one = tuned(0.001, workers=1)
    for _ in range(4):
        one.step()
    assert len(one.waits._steps_s) == 2  # not the first, nor what no step follows yet
    one.step(2)
    one.step()
    assert len(one.waits._steps_s) == 3  # what is open when another is sought ends there
    one.step()
    assert len(one.waits._steps_s) == 4


def test_all_of_a_step_is_read_ahead_where_a_run_tunes(tuned: Callable[..., TunedLoader]) -> None:
    assert (
        tuned(prefetch=1).waits.prefetch == 4 and tuned(prefetch=1, workers=1).waits.prefetch == 1
    )


def test_waits_are_divided_by_stage() -> None:
    waits = Waits(0.1)
    waits.add(1.0, 0.2, [Made(1, (3.0, 1.0, 0.0), None), Made(1, (0.0, 0.0, 4.0), None)])
    waits.add(1.0, 0.05, [Made(1, (0.0, 1.0, 0.0), None)])
    numbers = dict(waits)
    assert numbers["stalled_steps"] == numbers["copy_stalled_steps"] == 1
    assert numbers["read_stalled_steps"] == numbers["collate_stalled_steps"] == 0
    assert numbers["wait_p50_s"] == pytest.approx(0.125)
    assert numbers["copy_p99_s"] == pytest.approx(0.1 * 0.99)
    assert sum(waits._by_stage[name][0] for name in STAGES) == pytest.approx(0.2)
    assert all(value == 0.0 for value in Waits(0.1).values())


# --- on a GPU --------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_readers_copy_beside_the_computation(
    packer: Cut, tuned: Callable[..., TunedLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A micro-batch's copy ends while the computing stream is still busy with earlier work."""
    steps = range(2 * WINDOW_STEPS)
    right = ids(Loader(packer, seed=1, rows_per_step=8, micro_rows=2), steps)
    one = tuned(device=torch.device("cuda", 0), pin=True, segments=True)
    busy, copies, beside = torch.randn(4096, 4096, device="cuda"), [], 0
    take_over = TunedLoader._take_over
    monkeypatch.setattr(
        TunedLoader,
        "_take_over",
        lambda self, micro: (copies.append(micro.made.copied), take_over(self, micro))[1],
    )
    found = []
    for index in steps:
        for _ in range(200):
            busy = (busy @ busy).tanh()
        computed = torch.cuda.current_stream().record_event()
        batch = one.step(index)
        for copied in copies:
            copied.synchronize()
        beside += not computed.query()
        copies.clear()
        assert all(m.ids_BT.is_cuda and m.positions_BT.is_cuda for m in batch.micros)
        found.append(torch.cat([m.ids_BT for m in batch.micros]))
        del batch
    assert torch.equal(torch.stack(found).cpu(), right)
    assert one.waits.copied_bytes > right.nbytes
    assert beside >= len(steps) - 2, "copies wait for the computing stream"
