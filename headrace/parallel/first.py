"""What one process makes for all: the first rank works, and the others wait for what it says.

A collective does not serve for that wait. It gives up after 30 minutes, in which much text is not
prepared, and while it lasts Python answers no signal. So the waiting ranks ask the world's store
again and again. The first rank writes there what it made, or why it made nothing.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed.distributed_c10d import Store

from headrace.core.command import rerun
from headrace.core.errors import (
    EXIT_FAILED,
    EXIT_PLAN,
    EXIT_UNSUPPORTED,
    ConfigError,
    HeadraceError,
    RunError,
    Stopped,
    UnsupportedError,
)
from headrace.parallel.world import World

ASK_S, PATIENCE = (0.005, 0.5), 0.1
"""Seconds between two looks at the store, the least and the most, and the share of the time waited
that lies between two: what was made is read so much later at most."""
HEARD_S = 5.0
"""Seconds that a first rank which ends waits for the others to read why: it may keep the store."""
ERROR_OF_CODE = {EXIT_FAILED: RunError, EXIT_PLAN: ConfigError, EXIT_UNSUPPORTED: UnsupportedError}
"""The error that another rank raises for an exit code; of other codes it is that of a signal."""


def by_first(world: World, make: Callable[[], Any]) -> Any:
    """Return on every rank what the first one makes, as JSON, or raise there what it raised.

    Args:
        world: the ranks; all of them call this, in one order.
        make: called on the first rank. It may take hours, and a signal ends the wait of the others.

    Raises:
        HeadraceError: what `make` raised, with the same exit code on every rank.
        RuntimeError: the process that keeps the store is gone.
    """
    if world.store is None:
        return make()
    key = f"made/{next(world.made)}"
    if world.rank == 0:
        return _make(world.store, key, make, others=world.ranks - 1)
    return _wait(world.store, key)


def _make(store: Store, key: str, make: Callable[[], Any], *, others: int) -> Any:
    """Make it, and write into the store what became of it."""
    try:
        made = make()
    except BaseException as error:
        with suppress(RuntimeError):  # the store is gone, and with it who would read it
            store.set(key, json.dumps({"error": _in_words(error)}))
            give_up_s = time.monotonic() + HEARD_S
            while store.add(f"{key}/heard", 0) < others and time.monotonic() < give_up_s:
                time.sleep(ASK_S[0])
        raise
    store.set(key, json.dumps({"made": made}))
    return made


def _in_words(error: BaseException) -> tuple[int, str, str]:
    """Return an error's exit code, message and remedy, for the ranks that did not have it."""
    if isinstance(error, HeadraceError):
        return error.exit_code, error.message, error.remedy.text
    remedy = f"{rerun(verb='train PLAN')}, once that is mended"
    return EXIT_FAILED, "the first process ended, and says itself why", remedy


def _wait(store: Store, key: str) -> Any:
    """Wait for the first rank's word, however long it takes."""
    least_s, most_s = ASK_S
    began_s = time.monotonic()
    try:
        while not store.check([key]):
            waited_s = time.monotonic() - began_s
            time.sleep(min(max(PATIENCE * waited_s, least_s), most_s))
        reply = json.loads(store.get(key))
    finally:  # also where a signal ends the wait: the first rank need not wait for this one
        with suppress(RuntimeError):
            store.add(f"{key}/heard", 1)
    if "error" not in reply:
        return reply["made"]
    code, message, remedy = reply["error"]
    if (kind := ERROR_OF_CODE.get(code)) is None:
        raise Stopped(message, remedy, code)
    raise kind(message, remedy)
