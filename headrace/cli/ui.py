"""This module holds the verb `ui`, which shows a folder of runs in a browser on this machine."""

import secrets
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.arguments import Json
from headrace.cli.terminal import exit_codes, note, show_json
from headrace.core.command import rerun, rerun_with, typed
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.loading import loading

PORT = 8642
"""The port where none is asked for; nothing well known has it."""
LOOPBACK = ("127.0.0.1", "localhost")
NEEDS = ("starlette", "uvicorn")
"""Packages of the extra `ui`."""


def ui(
    folder: Annotated[Path, typer.Argument(help="A folder of runs.")] = Path("runs"),
    *,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Where it listens; 0 takes any free one.")
    ] = PORT,
    host: Annotated[str, typer.Option(help="A loopback address; any other is refused.")] = LOOPBACK[
        0
    ],
    token: Annotated[
        bool,
        typer.Option("--token", help="Make a token, and let who has it stop launched runs."),
    ] = False,
    json: Json = False,
) -> None:
    """Show a folder of runs in a browser on this machine, until Ctrl-C."""
    with exit_codes(json):
        _check(folder, host, port)
        with loading():
            from headrace.ui.server import listen, make_app, serve
        secret = secrets.token_urlsafe(24) if token else ""
        app, opened = make_app(folder, secret), listen(port)
        port = opened.getsockname()[1]
        address = f"http://{LOOPBACK[0]}:{port}/" + f"#token={secret}" * token
        if json:
            show_json({"address": address, "folder": str(folder), "token": secret or None})
        else:
            note(f"{folder} is shown at {address} until Ctrl-C")
        with suppress(KeyboardInterrupt), typed((), ()):
            serve(app, opened)


def _check(folder: Path, host: str, port: int) -> None:
    """Refuse what cannot be shown, and a host that others could reach.

    Raises:
        ConfigError: there is no such folder, or the host is no loopback address.
        UnsupportedError: the extra is not installed.
    """
    if host not in LOOPBACK:
        raise ConfigError(
            f"--host {host!r} is refused: pages of runs are shown on this machine alone, at "
            f"{LOOPBACK[0]}. From another machine they are reached through ssh: "
            f"ssh -L {port}:{LOOPBACK[0]}:{port} HOST",
            rerun_with("--host", LOOPBACK[0], verb="ui"),
        )
    if not folder.is_dir():
        what = "is a file, and not a folder of runs" if folder.exists() else "does not exist"
        near = folder.parent if folder.is_file() else Path()
        raise ConfigError(f"{folder} {what}", rerun((folder, near), verb="ui"))
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        raise UnsupportedError(
            f"headrace ui needs {' and '.join(missing)}, not installed here",
            "pip install 'headrace[ui]'",
        )
