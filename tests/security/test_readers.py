"""No file that a user brings ends in a traceback, takes memory without bound, or hangs a reader.

`benchmarks/reliability.py fuzz` does the same for minutes and writes how many files it read.
"""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from security.readers import READERS, outcome
from security.spoil import spoiled

pytestmark = pytest.mark.timeout(300)  # a reader that hangs fails its test
QUICK, MANY = 5, 400
"""Spoiled files of each reader in `make test`, and in `make test-full`."""
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
        outcome(reader, file)

    try:
        read()
    finally:
        file.write_bytes(raw)


@pytest.mark.parametrize("name", READERS)
def test_a_valid_file_is_read_and_a_spoiled_one_read_or_refused(name: str, valid: Any) -> None:
    file, raw = valid(name)
    assert outcome(READERS[name], file) == "read"
    file.write_bytes(b"")
    outcome(READERS[name], file)
    file.write_bytes(raw)
    spoil_and_read(name, valid, QUICK // 4 if name in DEAR else QUICK)


ONCE_FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("config.json", {"architectures": True}),
    ("config.json", {"num_key_value_heads": 10**400}),
    ("adapter_config.json", {"lora_alpha": "<script>"}),
    ("adapter_config.json", {"r": 0}),
    ("adapter_config.json", {"r": float("nan")}),
    ("adapter_config.json", {"rank_pattern": {"(": 4}}),
    ("adapter_config.json", {"rank_pattern": {"(.*)*x": 4}}),
    ("environment.json", {"device": True}),
    ("report.json", {"signals": {"traces": {"folder": "9" * 5000, "trouble": ""}}}),
    ("report.json", {"input_wait": {"p50_s": "9" * 5000, "p99_s": "inf"}}),
    ("tokenizer.json", {"added_tokens": {"x": 1}}),
    ("machine rates", {"bytes_per_s": 10**400}),
    ("checkpoint.json", {"parts": [{"file": "9" * 5000, "bytes": 1}]}),
    ("index of weights", {"weight_map": {"lm_head.weight": "9" * 5000}}),
    ("index of weights", {"weight_map": {"lm_head.weight": "\x00"}}),
]
"""What fuzzing had ended in a traceback, or would have run on: reader, and keys of its file."""


@pytest.mark.parametrize(("name", "keys"), ONCE_FAULTS)
def test_what_was_a_fault_is_refused(name: str, keys: dict[str, Any], valid: Any) -> None:
    file, raw = valid(name)
    try:
        file.write_text(json.dumps({**json.loads(raw), **keys}))
        READERS[name].sealed(file)
        outcome(READERS[name], file)
    finally:
        file.write_bytes(raw)


def test_a_knob_that_no_technique_has_is_one_error(valid: Any) -> None:
    """Its remedy sets a knob, which read the plan again, and so without an end."""
    file, raw = valid("plan")
    try:
        file.write_bytes(raw + b'ave = "matmul"\n')
        assert outcome(READERS["plan"], file) == "refused"
    finally:
        file.write_bytes(raw)


def test_a_table_with_a_damaged_column_does_not_end_the_process() -> None:
    """What pyarrow 26.0.1 says of that column's chunk is an exception that nobody catches."""
    file = Path(__file__).with_name("damaged_column.parquet")
    script = f"from headrace.data.sources import *; print(len([*read_documents({str(file)!r})]))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "20\n"), ended.stderr


@pytest.mark.parametrize("tools", ["search", "[" * 5000])
def test_tools_that_are_no_json_are_refused(tools: str, valid: Any) -> None:
    file, raw = valid("conversations")
    try:
        row = {**json.loads(raw.splitlines()[0]), "tools": tools}
        file.write_bytes(raw + json.dumps(row).encode() + b"\n")
        assert outcome(READERS["conversations"], file) == "refused"
    finally:
        file.write_bytes(raw)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_many_spoiled_files_are_read_or_refused(name: str, valid: Any) -> None:
    spoil_and_read(name, valid, MANY // 8 if name in DEAR else MANY)
