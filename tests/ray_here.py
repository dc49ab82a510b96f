"""Start a Ray cluster of two nodes on this machine, and stop it."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

from daemons import free_ports, stop

INSTALL = "pip install 'headrace[engines]'"
START_S = 240.0
STORE_BYTES = 80 * 10**6
"""Bytes of each node's object store, near the least that Ray takes: a job puts nothing there."""


def missing() -> bool:
    """Return whether the jobs of Ray cannot be started here."""
    return not all(find_spec(name) for name in ("ray", "aiohttp_cors")) or _ray() is None


def _ray() -> str | None:
    return shutil.which(
        "ray", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )


@contextmanager
def ray_here() -> Iterator[str]:
    """Give the address of the dashboard of a cluster whose two nodes have one core each."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-")))
        head, dashboard, client, *agents = free_ports(5)
        env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
        address = f"http://127.0.0.1:{dashboard}"
        served = [f"--port={head}", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1"]
        roles = (
            ["--head", *served, f"--ray-client-server-port={client}", f"--temp-dir={folder}"],
            [f"--address=127.0.0.1:{head}"],
        )
        for number, (role, agent) in enumerate(zip(roles, agents, strict=True)):
            command = [str(_ray()), "start", *role, "--node-ip-address=127.0.0.1", "--block"]
            command += ["--num-cpus=1", "--num-gpus=0", "--disable-usage-stats"]
            command += [f"--object-store-memory={STORE_BYTES}"]
            command += [f"--dashboard-agent-listen-port={agent}"]
            log = stack.enter_context((folder / f"{number}.out").open("w"))
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
            stack.callback(stop, process, 60.0)
            _wait(f"{address}/api/version", process, folder)
        yield address


def _wait(url: str, process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Wait until the dashboard answers."""
    until = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    logs = "\n".join(f"{p.name}: {p.read_text()[-2000:]}" for p in folder.glob("*.out"))
    raise AssertionError(f"Ray did not start:\n{logs}")
