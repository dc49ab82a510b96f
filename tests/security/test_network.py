"""Nothing connects to another machine unless a plan asks for it.

An audit hook sees every socket of the process, of C libraries' through Python's too, and every name
that is resolved. Local sockets of one machine (gloo's, a profiler's) stay allowed.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app

LOCAL = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "")
_SEEN: list[str] | None = None


def _watch(event: str, given: tuple[Any, ...]) -> None:
    if _SEEN is None:
        return
    if event in ("socket.connect", "socket.sendto"):
        address = given[1]
        if isinstance(address, tuple) and address[0] not in LOCAL:
            _SEEN.append(f"{event} {address}")
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        name = given[0].decode() if isinstance(given[0], bytes) else str(given[0] or "")
        if name not in LOCAL:
            _SEEN.append(f"{event} {name}")
    elif event.startswith(("urllib.", "http.", "ftplib.", "smtplib.")):
        _SEEN.append(f"{event} {given[:2]}")


sys.addaudithook(_watch)


@pytest.fixture
def connections() -> Iterator[list[str]]:
    """Hold what this process asked of the network meanwhile."""
    global _SEEN
    _SEEN = []
    yield _SEEN
    _SEEN = None


def test_the_hook_sees_a_connection(connections: list[str]) -> None:
    import socket
    import urllib.request

    with pytest.raises(OSError), socket.socket() as made:
        made.settimeout(0.01)
        made.connect(("192.0.2.1", 9))
    with pytest.raises(OSError):
        urllib.request.urlopen("http://192.0.2.1:9/", timeout=0.01)
    assert len(connections) >= 2 and "192.0.2.1" in connections[0]


def test_no_verb_of_a_run_connects_to_anything(
    connections: list[str], tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = [
        *("demo", "device=cpu", f"data.sources={corpus}", "model.dim=16", "model.layers=1"),
        *("model.heads=2", "model.ffn=32", "data.vocab=300", "data.sequence_length=16"),
        *("batch.tokens=128", "goal.steps=4", "schedule.steps=40", "schedule.warmup_steps=0"),
        *("eval.every_steps=2", "eval.tokens=512", "checkpoint.every_steps=2"),
    ]
    for argv in (
        ["plan", *tiny],
        ["train", *tiny],
        ["doctor", "runs/demo"],
        ["report", "runs/demo"],
        ["eval", "runs/demo"],
        ["sample", "runs/demo", "--tokens", "2"],
        ["export", "runs/demo", "--to", "hf", "--output", "out"],
        ["explain", "muon"],
        ["train", "runs/demo/plan.toml", "goal.steps=6", "--resume"],
    ):
        ended = CliRunner().invoke(app, argv, prog_name="headrace")
        assert ended.exit_code == 0, (argv, ended.output)
        assert connections == [], argv
