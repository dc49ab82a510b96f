"""A signal while the first rank prepares data and the second waits for it."""

import json
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crosses import crossed
from facts import tells
from tiny import PLAN, report
from torch.distributed import TCPStore

from headrace.core.errors import UnsupportedError
from headrace.parallel.first import by_first
from headrace.parallel.world import join
from headrace.plan.mesh_config import MeshConfig

SLOW = Path(__file__).parents[1] / "data" / "slow_ingest.py"
KEYS = ("mesh.data=2", "goal.steps=1", "guard=false")
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
WHO = {"all ranks": (0, 1), "the first rank": (0,), "the second rank, then the first": (1, 0)}
"""The ranks that a signal reaches, in the order of their ends; torchrun sends it to all."""


@pytest.fixture
def agent() -> Iterator[TCPStore]:
    """The store that torchrun's agent keeps for its ranks."""
    yield TCPStore("127.0.0.1", 0, is_master=True)


@pytest.fixture
def here(tmp_path: Path, corpus: Path) -> Path:
    """A folder with a plan whose data is not prepared yet."""
    (tmp_path / "tiny.toml").write_text(PLAN.format(corpus=corpus, prepared="prepared"))
    return tmp_path


@pytest.fixture
def begin(zygote: Any, here: Path, wait_until: Callable[..., None]) -> Callable[..., list[Any]]:
    """Start two ranks of a world, and wait until the first is in the midst of preparing."""

    def start(worlds: list[dict[str, str]]) -> list[Any]:
        argv = ["train", "tiny.toml", *KEYS]
        call = [str(SLOW), "run", {"argv": argv, "moment": "encoding"}]
        children = [zygote._start(here, env, call=call) for env in worlds]
        wait_until(lambda: (here / "reached").exists())
        return children

    return start


def words_of(told: str) -> list[str]:
    """Return the words behind `headrace` in the command of a remedy."""
    (remedy,) = [line for line in told.splitlines() if line.startswith("  try: ")]
    command = remedy.removeprefix("  try: ").partition("; ")[0]
    before, _, words = command.partition(" -m headrace ")
    assert before == "torchrun --nproc-per-node 2", remedy
    return shlex.split(words)


@crossed(together=1, number={number.name: number for number in CODES}, who=WHO)
def test_a_signal_is_one_message_and_the_same_command_starts_again(
    number: signal.Signals,
    who: tuple[int, ...],
    begin: Callable[..., list[Any]],
    here: Path,
    zygote: Any,
    agent: TCPStore,
) -> None:
    elastic = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "one",
        "MASTER_PORT": str(agent.port),
    }
    ranks = begin([{**env, **elastic} for env in zygote.world(2)])
    ended: dict[int, Any] = {}
    if who[0] == 1:  # the agent ends the first rank when it sees that the second has ended
        ranks[1].send(number)
        ended[1] = ranks[1].wait()
        ranks[0].send(number)
    else:
        for rank in who:
            ranks[rank].send(number)
    ended |= {rank: child.wait() for rank, child in enumerate(ranks) if rank not in ended}

    assert [ended[rank].code for rank in (0, 1)] == [CODES[number]] * 2, ended
    told = ended[0].err + ended[1].err
    assert told.count("error: ") == 1 and "Traceback" not in told, told
    assert tells(told, "error:", number.name, "before its first step")
    assert not [path for path in (here / "prepared").iterdir() if path.is_dir()]
    assert not (here / "runs").exists()

    again = zygote.ranks(2, here, *words_of(told))
    assert [e.code for e in again] == [0, 0], again
    assert report(here / "runs" / "tiny")["steps"] == 1


def test_a_first_rank_that_is_killed_is_told_by_the_one_that_waits(
    begin: Callable[..., list[Any]], here: Path, zygote: Any
) -> None:
    """Check that a killed preparation ends both ranks, and the next one removes what it left."""
    ranks = begin(zygote.world(2))
    ranks[0].send(signal.SIGKILL)
    assert ranks[0].wait().code == -signal.SIGKILL
    ended = ranks[1].wait()
    assert ended.code == 1 and "Traceback" not in ended.err, ended
    assert ended.err.count("error: another rank ended") == 1
    again = zygote.ranks(2, here, "train", "tiny.toml", *KEYS, "--json")
    assert [e.code for e in again] == [0, 0], again
    assert json.loads(again[0].out)["steps"] == 1
    (made,) = [path for path in (here / "prepared").iterdir() if path.is_dir()]
    assert not made.name.startswith(".")


def outlasts_a_collective() -> None:
    """Each process: the first makes something for longer than a collective waits."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    world = join(MeshConfig(data=2), torch.device("cpu"))
    made = by_first(world, lambda: time.sleep(1.5) or [world.rank, "made"])
    assert made == [0, "made"]
    with pytest.raises(UnsupportedError, match="too large"):
        by_first(world, refuse)
    dist.destroy_process_group()


def refuse() -> None:
    """End as a plan that does not fit."""
    raise UnsupportedError("too large", "model.dim=8")


def test_the_first_rank_may_take_longer_than_a_collective_waits(zygote: Any, here: Path) -> None:
    """Its limit of 30 minutes ended runs whose text took longer; here it is a second."""
    zygote.call(2, here, Path(__file__), "outlasts_a_collective")
