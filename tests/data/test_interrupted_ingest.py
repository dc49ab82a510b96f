"""Ctrl-C while data is prepared: one message, exit code 130, and the same command goes on."""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from facts import tells

from headrace.core.native import call_native

MOMENTS = (
    "reading",
    "training the tokenizer",
    "inside of the tokenizer's training",
    "encoding",
    "inside of the tokenizer",
)
KEYS = ("device=cpu", "data.sources=a.jsonl", "data.directory=prepared", "data.vocab=300")


@pytest.fixture
def interrupted(zygote: Any, tmp_path: Path, wait_until: Callable[..., None]) -> Any:
    """`headrace ARGV` that gets a signal at a moment of its preparation."""
    rows = [{"text": f"document {i} says {i * i} and no more"} for i in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(moment: str, *argv: str, number: signal.Signals = signal.SIGINT) -> Any:
        what = [str(Path(__file__).with_name("slow_ingest.py")), "run"]
        child = zygote._start(tmp_path, {}, call=[*what, {"argv": [*argv], "moment": moment}])
        wait_until(lambda: (tmp_path / "reached").exists())
        child.send(number)
        return child.wait()

    return run


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupted_ingest_leaves_nothing_and_goes_on(
    moment: str, interrupted: Any, zygote: Any, tmp_path: Path
) -> None:
    ended = interrupted(moment, "data", "ingest", "demo", *KEYS)
    assert ended.code == 130 and not ended.out, ended
    told, remedy = ended.err.splitlines()
    assert tells(told, "error:", "SIGINT", "preparation of data")
    assert not [p for p in (tmp_path / "prepared").iterdir() if p.is_dir()]
    _, *same = shlex.split(remedy.removeprefix("  try: "))
    again = zygote.run(tmp_path, *same)
    assert again.code == 0, again.err
    (made,) = [p for p in (tmp_path / "prepared").iterdir() if p.is_dir()]
    assert str(made.relative_to(tmp_path)) in again.out


@pytest.mark.parametrize(
    ("verb", "number", "code"),
    [(("data", "ingest"), signal.SIGTERM, 143), (("train",), signal.SIGINT, 130)],
)
def test_an_interrupted_preparation_is_one_document(
    verb: tuple[str, ...], number: signal.Signals, code: int, interrupted: Any, tmp_path: Path
) -> None:
    ended = interrupted(MOMENTS[2], *verb, "demo", *KEYS, "--json", number=number)
    assert ended.code == code == json.loads(ended.out)["exit_code"] and not ended.err, ended
    assert not [p for p in (tmp_path / "prepared").iterdir() if p.is_dir()]
    assert not (tmp_path / "runs").exists()


SCRIPT = """
import hashlib
from headrace.core.native import call_native, exit_beside_native

def long():
    print("begun", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000_000)

try:
    call_native(long)
except KeyboardInterrupt:
    print("told")
    exit_beside_native(130)
"""


def test_a_process_ends_beside_a_library_that_goes_on() -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as started:
        assert started.stdout and started.stdout.readline() == "begun\n"
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=20)
    assert (started.returncode, out, err) == (130, "told\n", "")


def test_a_native_call_is_a_call() -> None:
    assert call_native(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        call_native(lambda: 1 // 0)
