"""Which rank holds up the others is read from the heartbeats of all."""

import threading
import time
from typing import Any

from headrace.parallel.heartbeat import Heartbeat, Pulse, find_culprit

PATIENCE_S = 45.0


def four(**changed: Heartbeat) -> dict[int, Heartbeat]:
    """Four ranks after step 7 that all have just been busy; `r2` replaces the third."""
    beats = {rank: Heartbeat(9, 7, "train.py:1 in step") for rank in range(4)}
    return beats | {int(name[1:]): beat for name, beat in changed.items()}


def waits(seconds: float, number: int, name: str = "gloo:all_reduce") -> Heartbeat:
    """A rank that waits in a collective of one group."""
    return Heartbeat(
        9, 7, "world.py:1 in sum_", seconds, seconds, {"0": number}, {"0": (number, name)}
    )


def find(beats: dict[int, Heartbeat], **silent_s: float) -> Any:
    quiet = dict.fromkeys(beats, 0.5) | {int(name[1:]): s for name, s in silent_s.items()}
    return find_culprit(beats, quiet, PATIENCE_S)


def test_ranks_that_work_or_wait_for_one_that_works_are_left_alone() -> None:
    assert find(four()) is None
    late = four(r0=waits(60, 5), r1=waits(60, 5), r3=waits(60, 5))
    assert find(late) is None  # rank 2 computes
    idle = Heartbeat(9, 7, "loader.py:8 in read", 0.0, 44.0)
    assert find({**late, 2: idle}) is None
    assert find(four(r2=Heartbeat(9, 7, "x", 0.0, 99.0))) is None  # nobody waits for it


def test_a_silent_rank_is_named_first() -> None:
    found = find(four(r0=waits(60, 5)), r2=46.0)
    assert found.rank == 2 and "has not answered for 46 s after step 7" in found.words
    begun = find(four(r3=Heartbeat(0)), r3=46.0)
    assert begun.rank == 3 and "has not begun" in begun.words


def test_a_rank_that_does_nothing_is_named_with_the_collective_that_it_lacks() -> None:
    idle = Heartbeat(9, 7, "loader.py:8 in read", 0.0, 46.0, {"0": 4})
    found = find(four(r0=waits(60, 5), r1=waits(60, 5), r2=idle, r3=waits(50, 5)))
    assert found.rank == 2
    for words in ("46 s at loader.py:8 in read", "ranks 0, 1, 3 wait", "all_reduce, number 5"):
        assert words in found.words


def test_a_rank_in_another_collective_is_named_where_all_wait() -> None:
    open_ = {"0": (4, "gloo:all_reduce"), "1": (1, "gloo:broadcast")}
    apart = Heartbeat(9, 7, "x", 60, 60, {"0": 4, "1": 1}, open_)
    found = find(four(r0=waits(60, 5), r1=waits(60, 5), r2=apart, r3=waits(60, 5)))
    assert found.rank == 2
    assert "broadcast" in found.words and "ranks 0, 1, 3 wait in" in found.words
    same = four(**{f"r{rank}": waits(60, 5) for rank in range(4)})
    assert find(same) is None  # nobody is missing: a link, of which torch's own timeout tells


def test_a_pulse_tells_idleness_from_work() -> None:
    done, compiling = threading.Event(), [False]
    thread = threading.Thread(target=done.wait)
    thread.start()
    pulse = Pulse(thread.ident or 0, lambda main: compiling[0], 1e9)
    pulse.read(1, 0)
    time.sleep(0.3)
    idle = pulse.read(2, 0)
    assert idle.waits_s == 0 and "threading.py" in idle.where
    began = time.process_time()
    while time.process_time() - began < 0.1:
        pass
    assert pulse.read(3, 0).idle_s == 0.0
    compiling[0] = True
    time.sleep(0.3)
    assert pulse.read(4, 0).idle_s == 0.0
    compiling[0] = False
    time.sleep(0.3)
    assert pulse.read(5, 0).idle_s > 0.2
    done.set()
    thread.join()
