"""This module calls any verb in this process, and returns what it prints as an object."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from headrace.core.errors import (
    EXIT_PLAN,
    EXIT_UNSUPPORTED,
    ConfigError,
    HeadraceError,
    RunError,
    Stopped,
    UnsupportedError,
)

STOPPED = (75, 129, 130, 143)
"""Exit codes of a verb that a signal ended."""


def call_verb(*words: str | Path | float) -> Any:
    """Run a verb of `headrace` in this process, and return its JSON document.

    Args:
        *words: the verb, its arguments and its options, without `--json`.

    Raises:
        ConfigError: the words, the plan or the input are wrong.
        UnsupportedError: it cannot fit, or is not supported here.
        RunError: it began and failed.
        Stopped: a signal ended it.
    """
    from headrace.cli.app import app

    printed, given = StringIO(), [str(word) for word in words if word != "--json"]
    with redirect_stdout(printed):
        app([*given, "--json"], prog_name="headrace", standalone_mode=False)
    text = printed.getvalue()
    document: Any = json.loads(text) if text.strip() else None
    if isinstance(document, dict) and {"error", "remedy", "exit_code"} == {*document}:
        raise _error(document, document["exit_code"])
    return document


def _error(document: dict[str, Any], code: int) -> HeadraceError:
    """Return the error that a verb ended with, by its exit code."""
    message, remedy = document["error"], document["remedy"]
    if code in STOPPED:
        return Stopped(message, remedy, code)
    by_code = {EXIT_PLAN: ConfigError, EXIT_UNSUPPORTED: UnsupportedError}
    return by_code.get(code, RunError)(message, remedy)
