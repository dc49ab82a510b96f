"""Check that any number of ranks, and a full disk, give one message or document and exit code."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.distributed import TCPStore

from headrace.cli.app import app
from headrace.cli.terminal import exit_codes, show_json
from headrace.core.errors import ConfigError
from headrace.core.loading import CODES as EARLY
from headrace.train.interrupts import CODES

FULL = f"standard output: {os.strerror(errno.ENOSPC)}"
"""What is told of a full disk: which file, and why the system refused."""


@pytest.fixture(scope="module")
def agent() -> Iterator[TCPStore]:
    """The store that torchrun's agent keeps for its ranks."""
    yield TCPStore("127.0.0.1", 0, is_master=True)


@pytest.fixture
def ranks(zygote: Any, agent: TCPStore, tmp_path: Path) -> Any:
    """Return a function that runs `headrace ARGV` on two ranks, and returns how both ended."""

    def run(*argv: str) -> list[Any]:
        agent.delete_key("headrace/told")  # as a store of its own
        shared = {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(agent.port),
            "WORLD_SIZE": "2",
            "TORCHELASTIC_RUN_ID": "one",
        }
        worlds = [{**shared, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)]
        return [c.wait() for c in [zygote.start(tmp_path, *argv, env=env) for env in worlds]]

    return run


WRONG = {
    "a plan": ("train", "demo", "model.dim=-3"),
    "the mesh": ("train", "demo", "mesh.data=3", "device=cpu"),
    "a verb of one process": ("explain", "demmo"),
    "no run": ("eval", "nothing"),
    "the data": ("data", "ingest", "demo", "data.sources=nowhere"),
    "an option": ("sample", "nothing", "--tokens", "none"),
}


@pytest.mark.parametrize("asked", WRONG.values(), ids=WRONG)
def test_ranks_tell_an_error_once(asked: tuple[str, ...], ranks: Any) -> None:
    ended = ranks(*asked, "--json")
    document = json.loads("".join(e.out for e in ended))
    assert document["exit_code"] == 2 == max(e.code for e in ended)
    assert document["error"]
    ended = ranks(*asked)
    told = "".join(e.err for e in ended)
    assert told.lower().count("error") == 1, told


def test_ranks_print_one_document_of_success(ranks: Any) -> None:
    for asked in (("explain", "muon"), ("list",), ("explain", "demo", "device=cpu")):
        ended = ranks(*asked, "--json")
        assert [e.code for e in ended] == [0, 0]
        json.loads("".join(e.out for e in ended))


def test_an_error_that_one_rank_alone_has_is_told(
    agent: TCPStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that rank 1 of two prints an error that it alone has, and prints it once."""
    agent.delete_key("headrace/told")
    for name, value in {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "RANK": "1",
        "MASTER_PORT": str(agent.port),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "one",
    }.items():
        monkeypatch.setenv(name, value)
    for expected in (1, 0):
        with pytest.raises(typer.Exit), exit_codes(as_json=True, together=True):
            raise ConfigError("only here")
        assert capsys.readouterr().out.count("only here") == expected
    show_json({"late": True})
    assert not capsys.readouterr().out


@contextmanager
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Standard output on a disk that is full."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115 - cannot be closed
        yield


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_full_disk_is_one_message(
    as_json: bool, wrong: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with full(monkeypatch), pytest.raises(typer.Exit) as ended, exit_codes(as_json):
        print("some text")
        if wrong:
            raise ConfigError("a wrong plan")
    assert ended.value.exit_code == (2 if wrong else 1)
    told = capsys.readouterr().err
    assert told.count("error:") == 1
    assert ("a wrong plan" if wrong else FULL) in told


@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["explain", "demo"]])
def test_what_is_full_is_named_of_every_verb(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with full(monkeypatch), pytest.raises(SystemExit) as ended:
        app(words, prog_name="headrace")
    told = capsys.readouterr().err
    assert ended.value.code == 1
    assert told.count("error:") == 1 and FULL in told


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"]])
def test_help_on_a_full_disk_is_one_message(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with full(monkeypatch), pytest.raises(SystemExit) as ended:
        app(words, prog_name="headrace")
    told = capsys.readouterr().err
    assert ended.value.code == 1 and told.count("error:") == 1 and "Traceback" not in told


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["--version"]])
def test_one_rank_prints_the_help(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ended:
        app(words, prog_name="headrace")
    assert ended.value.code == 0 and not capsys.readouterr().out


def test_a_name_that_is_no_utf_8_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, exit_codes(as_json=True):
        "caf\udce9.txt".encode()
    assert ended.value.exit_code == 2
    assert r"caf\udce9.txt" in json.loads(capsys.readouterr().out)["error"]


def test_a_second_ctrl_c_changes_no_message(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(typer.Exit) as ended, exit_codes(as_json=True):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
    assert ended.value.exit_code == 130
    assert json.loads(capsys.readouterr().out)["exit_code"] == 130
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("number", "as_json"),
    [
        (signal.SIGINT, False),
        (signal.SIGINT, True),
        (signal.SIGTERM, False),
        (signal.SIGHUP, True),
        (signal.SIGUSR1, False),
    ],
)
def test_a_signal_during_imports_is_one_message(
    number: signal.Signals, as_json: bool, tmp_path: Path
) -> None:
    """Check a signal during an import, with a slow file torch.py in the place of torch.

    It sleeps in short pieces: a signal that comes just before a sleep is answered after it.
    """
    (tmp_path / "torch.py").write_text(
        "import time\nprint('importing', flush=True)\nfor _ in range(600):\n    time.sleep(0.1)"
    )
    command = [sys.executable, "-m", "headrace", "list", *["--json"] * as_json]
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])}
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout and started.stdout.readline() == "importing\n"
        started.send_signal(number)
        out, err = started.communicate(timeout=20)
    assert started.returncode == EARLY[number.name] == CODES[number.name]
    word = "interrupted" if number == signal.SIGINT else number.name
    if as_json:
        told = json.loads(out)
        assert told["exit_code"] == EARLY[number.name] and told["error"].startswith(word)
        assert not err
    else:
        assert err.count("\n") == 1 and err.startswith(f"error: {word}")
