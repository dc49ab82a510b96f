"""The process that makes parts for another: a line in names a part, a line out says it is done.

Lines are JSON. When the one who asks is gone its end of the pipe closes, and this process ends
after the part that it is at. What libraries print goes to the standard error stream, which is a
log.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from headrace.core.errors import (
    EXIT_PLAN,
    EXIT_UNSUPPORTED,
    ConfigError,
    HeadraceError,
    RunError,
    Stopped,
    UnsupportedError,
)
from headrace.core.strict import Strict
from headrace.data.scale.job import run_part


class PartFailure(Strict):
    """Why a part could not be made, as its worker tells it."""

    exit_code: int
    message: str
    remedy: str

    def error(self) -> HeadraceError:
        """Return it as an error of this process."""
        by_code = {EXIT_PLAN: ConfigError, EXIT_UNSUPPORTED: UnsupportedError}
        return by_code.get(self.exit_code, RunError)(self.message, self.remedy)


def attempt(folder: str, stage: str, number: int) -> str:
    """Make a part, and return "" or the failure as JSON: an error need not be one elsewhere.

    Raises:
        Stopped: a signal asked this process to end, which says nothing about the part.
    """
    try:
        run_part(Path(folder), stage, number)
    except Stopped:
        raise
    except HeadraceError as error:
        remedy = error.remedy.text
        failure = PartFailure(exit_code=error.exit_code, message=error.message, remedy=remedy)
        return failure.model_dump_json()
    return ""


@contextmanager
def answers() -> Iterator[TextIO]:
    """Give the stream of answers, and let everybody else's output go to the log."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        yield out


def answer(out: TextIO, number: int, failure: str) -> None:
    """Say that a part is done, or why not."""
    print(json.dumps({"number": number, "failure": failure}), file=out, flush=True)


def main() -> None:
    """Make the parts that are asked for, one after the other."""
    with answers() as out:
        for line in sys.stdin:
            asked = json.loads(line)
            answer(out, asked["number"], attempt(asked["folder"], asked["stage"], asked["number"]))


if __name__ == "__main__":
    main()
