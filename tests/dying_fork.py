"""A resume that forks and is killed at one of the operations on files that make the fork."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from headrace.cli.app import app
from headrace.core import files
from headrace.train import run_folder


def fork(*, at: int, argv: list[str], log: str = "", pause_s: float = 0.0) -> None:
    """Run a command that dies at the operation of that number.

    Args:
        at: counted from the first file of the fork.
        argv: the command.
        log: a file that gets a line for each operation.
        pause_s: how long it waits there instead.
    """
    count, began = 0, False

    def watched(name: str, make: Any) -> Any:
        def run(*args: Any, **named: Any) -> Any:
            nonlocal count
            if began:
                count += 1
                if log:
                    with Path(log).open("a") as lines:
                        lines.write(f"{name}\n")
                if count == at and pause_s:
                    time.sleep(pause_s)
                elif count == at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return make(*args, **named)

        return run

    make = run_folder.RunFolder.fork

    def begins(*args: Any) -> Any:
        nonlocal began
        began = True
        made = make(*args)
        began = False
        return made

    run_folder.RunFolder.fork = begins
    shutil.copyfile = watched("copy", shutil.copyfile)
    files.sync_path = watched("sync", files.sync_path)
    run_folder.sync_path = watched("sync", run_folder.sync_path)
    os.replace = watched("replace", os.replace)
    os.mkdir = watched("mkdir", os.mkdir)
    sys.argv = ["headrace", *argv]
    app()
