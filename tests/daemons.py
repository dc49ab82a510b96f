"""Start and stop the servers of an engine that a test needs on this machine."""

import socket
import subprocess
from contextlib import ExitStack


def stop(process: "subprocess.Popen[bytes]", grace_s: float = 10.0) -> None:
    """End a process, by force where it has not ended after `grace_s`."""
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_ports(count: int) -> list[int]:
    """Return so many ports of this machine that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
