"""No file that a user brings ends in a traceback, takes memory without bound, or hangs a reader.

`benchmarks/reliability.py fuzz` does the same for minutes and writes how many files it read.
"""

import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from security.readers import READERS, outcome, spoiled

QUICK, MANY = 12, 400
"""Spoiled files of each reader in `make test`, and in `make test-full`."""
LONGEST_S = 20.0
"""Seconds that one small file may take on a machine that is busy with other things."""
DEAR = ("conversations", "gguf")
"""Readers whose one file takes a tenth of a second: fewer of them are spoiled."""


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Make a valid file of each reader in a folder of its own, and its bytes."""
    kept: dict[str, tuple[Path, bytes]] = {}

    def of(name: str) -> tuple[Path, bytes]:
        if name not in kept:
            folder = tmp_path_factory.mktemp("valid")
            file = READERS[name].make(folder)
            kept[name] = file, file.read_bytes()
        return kept[name]

    return of


@pytest.mark.parametrize("name", READERS)
def test_a_valid_file_is_read(name: str, valid: Any) -> None:
    file, _ = valid(name)
    assert outcome(READERS[name], file) == "read"


def spoil_and_read(name: str, valid: Any, times: int) -> None:
    """Let hypothesis choose how a file is spoiled, and read it so many times."""
    file, raw = valid(name)
    reader = READERS[name]

    @settings(
        max_examples=times, deadline=None, suppress_health_check=[*HealthCheck], database=None
    )
    @given(st.randoms(use_true_random=False))
    def read(chance: random.Random) -> None:
        file.write_bytes(spoiled(raw, reader.values, chance))
        reader.sealed(file)
        begun = time.perf_counter()
        outcome(reader, file)
        assert time.perf_counter() - begun < LONGEST_S

    try:
        read()
    finally:
        file.write_bytes(raw)


@pytest.mark.parametrize("name", READERS)
def test_a_spoiled_file_is_read_or_refused(name: str, valid: Any) -> None:
    spoil_and_read(name, valid, QUICK // 4 if name in DEAR else QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_many_spoiled_files_are_read_or_refused(name: str, valid: Any) -> None:
    spoil_and_read(name, valid, MANY // 8 if name in DEAR else MANY)


@pytest.mark.parametrize("name", READERS)
def test_a_folder_and_an_empty_file_are_refused_or_read(name: str, valid: Any) -> None:
    file, raw = valid(name)
    try:
        file.write_bytes(b"")
        outcome(READERS[name], file)
    finally:
        file.write_bytes(raw)
