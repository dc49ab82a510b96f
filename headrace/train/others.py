"""End a run of several ranks by one message that says which rank ended it, and why.

A rank that ends by an error leaves its message in the world's store. The others notice that it is
gone in the middle of a collective, and raise its message in the place of their own. A rank that was
killed leaves none, and is named by its lock, which the system has released. A rank that hangs, or
was stopped, is named by the heartbeats of all (parallel/heartbeat), and ends every process.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from headrace.core.command import train_command
from headrace.core.errors import HeadraceError, RunError, Stopped
from headrace.parallel.heartbeat import Culprit, Heartbeats
from headrace.parallel.world import World
from headrace.train.checkpoint import Checkpoints, RankGone
from headrace.train.interrupts import LAST_WORDS_S, Interrupts, end_children, is_compiling
from headrace.train.run_folder import RankLost

HEARD_S = 3.0
"""Seconds that a rank which lost another waits for its last words, or for the release of its
lock."""


class RankHung(RunError):
    """A rank held up all others, and every process was ended."""


def share_end(
    world: World, checkpoints: Checkpoints, ended: BaseException | None
) -> BaseException | None:
    """Return the error that ends the run on every rank, from the one that ended this rank.

    Args:
        world: the ranks.
        checkpoints: those of the run, whose locks tell which ranks live.
        ended: what ended this rank, in words; None where it ended well.
    """
    if ended is None or world.store is None or isinstance(ended, Stopped):
        return ended
    if isinstance(ended, RankLost | RankGone):
        return _heard(world, checkpoints, ended)
    message, remedy = f"{type(ended).__name__}: {ended}".splitlines()[0], ""
    if isinstance(ended, HeadraceError):
        message, remedy = ended.message, ended.remedy.text
    with suppress(RuntimeError):  # the store is gone, and with it who would read it
        world.store.set(f"ended/{world.rank}", json.dumps([message, remedy]))
    return ended


def _heard(world: World, checkpoints: Checkpoints, lost: RankLost | RankGone) -> RunError:
    """Return the error with the last words of a rank that is gone, or else with its name."""
    assert world.store is not None
    others = [rank for rank in range(world.ranks) if rank != world.rank]
    give_up_s, gone = time.monotonic() + HEARD_S, list[int]()
    while time.monotonic() < give_up_s:
        with suppress(RuntimeError):
            for rank in others:
                if world.store.check([f"ended/{rank}"]):
                    message, remedy = json.loads(world.store.get(f"ended/{rank}"))
                    return RunError(f"rank {rank} of {world.ranks}: {message}", remedy)
        if gone:  # it was gone before, and has left no words
            break
        gone = [rank for rank in others if checkpoints.has_ended(rank)]
        time.sleep(0.2)
    if not gone or isinstance(lost, RankGone):
        return lost
    return RankGone(
        f"rank {gone[0]} ended without a word, as a process that is killed; {checkpoints.intact()}",
        f"{checkpoints.go_on}, once what ended rank {gone[0]} is mended",
    )


def heartbeats(
    world: World,
    patience_s: float,
    run: Path,
    step: Callable[[], int],
    stop: Interrupts,
    last_words: Callable[[RunError], None],
) -> AbstractContextManager[Any]:
    """Return a context in which a rank that holds up the others is found, and ends the run.

    Args:
        world: the ranks.
        patience_s: seconds for which a rank may be silent, or do nothing while others wait for it;
            0 looks for none.
        run: the run's folder.
        step: returns the number of complete steps.
        stop: how the command prints an error of a process that is ended by another thread.
        last_words: writes the report; called with the error on the rank that tells it.
    """
    if world.ranks == 1 or not patience_s or os.environ.get("MASTER_ADDR") is None:
        return nullcontext()

    def end(culprit: Culprit, mine: bool) -> None:
        remedy = f"{train_command(run, '--resume')}, once what holds it up is mended"
        error = RankHung(f"{culprit.words}; every process was ended", remedy)
        if mine:
            speaker = threading.Thread(target=last_words, args=(error,), daemon=True)
            speaker.start()
            speaker.join(LAST_WORDS_S)
            with suppress(Exception):
                type(stop).print_error(error)
            beats.release()
        end_children()
        os._exit(error.exit_code)

    beats = Heartbeats(world, patience_s, step=step, compiles=is_compiling, end=end)
    return beats
