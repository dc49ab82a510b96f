"""Run a script once on each of several nodes of a Ray cluster; the driver of a Ray job.

It is called as `python -m headrace.launch.ray_nodes NODES GPUS CPUS SCRIPT`. The first node's
address becomes RENDEZVOUS in the environment of the script, and torchrun is told there which node
has that address: by itself it asks for the addresses of the host's name, which may be the loopback
alone. The driver fails when a node fails.
"""

import subprocess
import sys
from importlib import import_module
from typing import Any


def run_nodes(nodes: int, gpus: int, cpus: int, script: str) -> None:
    """Run a script on each of so many nodes, and wait for all of them.

    Args:
        nodes: how many nodes, each of which is another machine.
        gpus: the GPUs that each node gives.
        cpus: the CPU cores that each node gives.
        script: the path of the script, which every node can read.
    """
    ray: Any = import_module("ray")  # which is the cluster's, and no dependency of Headrace
    placing: Any = import_module("ray.util.placement_group")
    strategies: Any = import_module("ray.util.scheduling_strategies")
    ray.init()
    bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
    group = placing.placement_group([bundle] * nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on(node: int, function: Any) -> Any:
        place = strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=node
        )
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": 0}
        return ray.remote(function).options(scheduling_strategy=place, **options)

    rendezvous = ray.get(on(0, _address).remote())
    ray.get([on(node, _run).remote(script, rendezvous, node == 0) for node in range(nodes)])


def _address() -> str:
    """Return HOST:PORT of this node, with a port that is free now."""
    import socket

    ray: Any = import_module("ray")
    with socket.socket() as free:
        free.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"


def _run(script: str, rendezvous: str, first: bool) -> None:
    """Run a script with the address of the first node, and whether it is this, in its environment.

    PET_RDZV_CONF is what torchrun reads as `--rdzv-conf`.
    """
    hosts = f"PET_RDZV_CONF=is_host={str(first).lower()}"
    subprocess.run(["env", f"RENDEZVOUS={rendezvous}", hosts, "bash", script], check=True)


if __name__ == "__main__":
    nodes, gpus, cpus = map(int, sys.argv[1:4])
    run_nodes(nodes, gpus, cpus, sys.argv[4])
