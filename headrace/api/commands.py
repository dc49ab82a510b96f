"""Run any verb of the command line in this process, and return what it prints as an object."""

from pathlib import Path
from typing import Any

from headrace.cli.called import call_verb


def run_command(*words: str | Path | float) -> Any:
    """Run a verb of `headrace` in this process, and return its JSON document.

    It is what `headrace WORDS --json` prints: a dict, or a list of `list` and `doctor`. No progress
    is shown. What takes words on the command line takes the same words here:
    `headrace.run_command("compress", "runs/demo", "--budget-mb", 100)`.

    Args:
        *words: the verb, its arguments and its options, without `--json`.

    Raises:
        ConfigError: the words, the plan or the input are wrong.
        UnsupportedError: it cannot fit, or is not supported here.
        RunError: it began and failed.
        Stopped: a signal ended it.
    """
    return call_verb(*words)
