"""A job to render, and a `headrace` that is asked about it."""

import json
import stat
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.launch.job import Job


def job(**given: Any) -> Job:
    """Return a job of two nodes with four GPUs each, changed as given."""
    usual: dict[str, Any] = {
        "name": "large",
        "directory": "runs",
        "data": "data",
        "plan": "plans/large one.toml",
        "text": 'name = "large"\n',
        "words": ("mesh.data=8", "--with", "fsdp"),
        "nodes": 2,
        "processes": 4,
        "gpus": True,
        "cwd": Path("/home/anne/my work"),
        "at": "now",
    }
    return Job(**{**usual, **given})


def tool(folder: Path, name: str, script: str) -> None:
    """Write a command that stands for one of an engine's."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def ask(*argv: str, code: int = 0) -> Any:
    """Run `headrace ARGV --json` in this process, check its code, and return the JSON value."""
    return json.loads(read(*argv, "--json", code=code))


def read(*argv: str, code: int = 0) -> str:
    """Run `headrace ARGV` in this process, check its code, and return what it printed."""
    ended = CliRunner().invoke(app, [*argv], prog_name="headrace")
    assert ended.exit_code == code, ended.output
    return ended.stdout if "--json" in argv else ended.output
