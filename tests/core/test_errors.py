"""A full GPU is one message: what was asked for, what was left of it, and what mends it."""

from typing import Any

import pytest
from facts import tells

from headrace.core.errors import LESS_PER_STEP as LESS
from headrace.core.errors import MemoryFull
from headrace.core.remedy import as_remedy, mend

SAID = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 139.80 GiB of "
    "which {free} is free. Including non-PyTorch memory, this process has 139.39 GiB memory in "
    "use. Of the allocated memory {held} is allocated by PyTorch, {pools}and {pieces} is reserved "
    "by PyTorch but unallocated. If reserved but unallocated memory is large try"
)


def full(asked: str, free: str, pieces: str, held: str = "130.86 GiB", pools: str = "") -> Any:
    said = SAID.format(asked=asked, free=free, held=held, pieces=pieces, pools=pools)
    return MemoryFull(RuntimeError(said))


@pytest.mark.parametrize("pools", ["", "with 1.00 GiB allocated in private pools (of graphs), "])
def test_a_full_gpu_is_told_with_what_lay_free_in_pieces(pools: str) -> None:
    """Check the words for an error that torch 2.11 raised on an H200 (results/limits.jsonl)."""
    told = full("430.00 MiB", "409.12 MiB", "7.78 GiB", pools=pools)
    assert told.message == (
        "it does not fit in memory: CUDA out of memory: 430.00 MiB were asked for; tensors held "
        "130.86 GiB of the GPU's 139.80 GiB, 7.78 GiB were free in pieces between them, and 409.12 "
        "MiB beside them"
    )
    assert told.remedy.changes == (("+expandable_segments",), *LESS.changes)
    assert told.remedy.text.endswith(LESS.text)


@pytest.mark.parametrize(
    ("asked", "free", "pieces", "would_fit"),
    [
        ("12.28 GiB", "8.32 GiB", "11.60 GiB", True),
        ("8.00 GiB", "343.06 MiB", "7.67 GiB", True),
        ("1.00 GiB", "24.00 MiB", "1000 MiB", True),
        ("1.00 GiB", "23.00 MiB", "1000 MiB", False),
        ("2.00 MiB", "1.00 MiB", "1024 KiB", True),
        ("2.00 MiB", "1.00 MiB", "1023 KiB", False),
        ("1.00 KiB", "0 bytes", "1024 bytes", True),
        ("1.00 KiB", "0 bytes", "1023 bytes", False),
        ("1.00 GiB", "0 bytes", "9 parsecs", False),
        ("1.00 GiB", "2.00 GiB", "9.00 GiB", False),
    ],
)
def test_segments_that_grow_are_a_remedy_where_pieces_and_what_is_left_would_do(
    asked: str, free: str, pieces: str, would_fit: bool
) -> None:
    assert ("expandable_segments" in full(asked, free, pieces).remedy.text) is would_fit


def test_what_others_hold_of_a_full_gpu_is_told() -> None:
    assert tells(
        full("2.00 GiB", "1.00 GiB", "1.00 GiB", "9 GiB").message, "the rest", "other processes"
    )
    assert "the rest" not in full("2.00 GiB", "1.00 GiB", "1.00 GiB", "126.00 GiB").message


def test_a_last_resort_is_not_offered_twice() -> None:
    one = mend("mesh.context=1", "-context_parallel")
    assert one.otherwise(mend("mesh.context=1", "-context_parallel")) == one
    assert str(one.otherwise(mend("-alibi"))).endswith("(or --without alibi)")
    assert str(as_remedy("pip install x").otherwise("pip install y")).endswith("(or pip install y)")
