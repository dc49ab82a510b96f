"""Small data sets for the tests of the data path."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.core.strict import read_table
from headrace.data.shards import Shards, ShardWriter
from headrace.plan.plan import Plan

DOCUMENT_TOKEN = 0


@pytest.fixture
def make_shards(tmp_path: Path) -> Callable[..., Shards]:
    """Write documents of the given lengths (document token not counted) with random ids."""
    count = 0

    def make(lengths: list[int], *, vocab: int = 1000, shard_tokens: int = 100) -> Shards:
        nonlocal count
        count += 1
        directory = tmp_path / f"set-{count}"
        writer = ShardWriter(
            directory, vocab, document_token=DOCUMENT_TOKEN, shard_tokens=shard_tokens
        )
        random = np.random.RandomState(count)  # whose stream is frozen: a hash is pinned on it
        for length in lengths:
            ids = random.randint(1, vocab, length)
            writer.add(ids, text_bytes=2 * length)
        writer.close()
        return Shards.open(directory)

    return make


@pytest.fixture
def make_plan(tmp_path: Path) -> Callable[..., Plan]:
    """A plan whose `data` table has the given keys."""

    def make(**data: object) -> Plan:
        data = {"directory": str(tmp_path / "prepared"), "vocab": 300, **data}
        return read_table(
            Plan, {"data": data, "goal": {"steps": 1}, "schedule": {"kind": "constant"}}
        )

    return make
