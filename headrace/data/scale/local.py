"""Processes that make parts: so many of this machine, or one that has an engine make them.

An engine's driver runs in a process of its own too, since one that loses its cluster may end the
process that it is in. Whatever ends one of them becomes one error here; finished parts stay.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headrace.core.errors import RunError
from headrace.core.files import shell
from headrace.data.scale.serve import PartFailure

END_S = 10.0
"""Seconds that a process has to end by itself when it is asked to."""


@dataclass
class _Server:
    """A process that makes parts, and the parts that it is at."""

    process: "subprocess.Popen[bytes]"
    busy: set[int] = field(default_factory=set)
    rest: bytes = b""
    """What was read of an answer that is not whole."""


class Processes:
    """Makes parts in processes of this machine.

    Args:
        count: how many processes.
        module: what each of them runs, which speaks as `serve` does.
        words: what follows it.
        slots: parts that a process is given at once.
        name: what a message calls one of them.
    """

    def __init__(
        self,
        count: int,
        *,
        module: str = "headrace.data.scale.serve",
        words: Sequence[str] = (),
        slots: int = 1,
        name: str = "a worker",
    ) -> None:
        self._count, self._slots, self._name = count, slots, name
        self._command = [sys.executable, "-m", module, *words]

    def run(
        self, folder: Path, stage: str, numbers: Sequence[int], done: Callable[[int], None]
    ) -> None:
        """Make parts; see `PartWorkers.run`."""
        waiting, log = deque(numbers), folder / "workers.log"
        servers: list[_Server] = []
        with log.open("a") as errors, selectors.DefaultSelector() as answers:
            try:
                for _ in range(min(self._count, len(numbers))):
                    process = subprocess.Popen(
                        self._command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        start_new_session=True,  # Ctrl-C is for the process that asks
                    )
                    servers.append(server := _Server(process))
                    assert process.stdout
                    answers.register(process.stdout, selectors.EVENT_READ, server)
                left = len(numbers)
                while left:
                    for server in servers:
                        self._feed(server, folder, stage, waiting)
                    for key, _ in answers.select():
                        for number in self._answered(key.data, log):
                            left -= 1
                            done(number)
            finally:
                for server in servers:
                    _end(server)

    def _feed(self, server: _Server, folder: Path, stage: str, waiting: deque[int]) -> None:
        """Give a process as many parts as it takes at once."""
        while waiting and len(server.busy) < self._slots:
            number = waiting.popleft()
            server.busy.add(number)
            asked = {"folder": str(folder), "stage": stage, "number": number}
            assert server.process.stdin
            try:
                server.process.stdin.write(json.dumps(asked).encode() + b"\n")
                server.process.stdin.flush()
            except BrokenPipeError:
                return  # that it ended is read from its answers

    def _answered(self, server: _Server, log: Path) -> Iterator[int]:
        """Yield the numbers of the parts that a process has made: all that it has told by now.

        Raises:
            HeadraceError: one could not be made, or the process died.
        """
        assert server.process.stdout
        chunk = os.read(server.process.stdout.fileno(), 1 << 16)  # no buffer hides a second answer
        if not chunk:
            raise self._died(server, log)
        *lines, server.rest = (server.rest + chunk).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if answer["failure"]:
                raise PartFailure.model_validate_json(answer["failure"]).error()
            server.busy.discard(answer["number"])
            yield answer["number"]

    def _died(self, server: _Server, log: Path) -> RunError:
        """Return what is told of a process that ended."""
        code = server.process.wait()
        try:
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        except ValueError:
            how = f"by signal {-code}"
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "")
        parts = ", ".join(f"{number:,}" for number in sorted(server.busy))
        return RunError(
            f"{self._name} ended {how} while it was at part {parts}"
            + (f"; the last line of {shell(log)}: {last[:200]}" if last and code > 0 else "")
            + "; finished parts are kept",
            "the same command again, which goes on with them",
        )


def _end(server: _Server) -> None:
    """End a process: one that waits by closing its input, a busy one by a signal."""
    process = server.process
    if process.stdin:
        with suppress(BrokenPipeError):
            process.stdin.close()
    steps = [process.terminate, process.kill]
    if server.busy:
        steps.pop(0)()
    for step in steps:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            step()
    process.wait()
    if process.stdout:
        process.stdout.close()
