"""Make parts as tasks of Ray: the driver, in a process of its own that speaks as `serve` does.

Plain tasks, each a folder, a stage and a number: all data goes through the job's folder, so nothing
of it is put into Ray's object store, and the memory of a node is that of its workers. A task that
its worker or its node took down with it is tried again by Ray. It joins the cluster that
`RAY_ADDRESS` names, or starts one of this machine.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]

from headrace.core.errors import EXIT_FAILED
from headrace.core.files import in_one_line
from headrace.data.scale.serve import PartFailure, answer, answers, attempt

RETRIES = 3
"""Times that Ray makes a part anew whose worker or node died."""


def main(cpus: int) -> None:
    """Make the parts that are asked for as tasks, at most so many at once."""
    options: dict[str, Any] = {"log_to_driver": False, "include_dashboard": False}
    with answers() as out, ThreadPoolExecutor(cpus) as waiting:
        try:
            ray.init(num_cpus=cpus, **options)
        except ValueError:  # a cluster that runs has its own CPUs
            ray.init(**options)
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(attempt)

        def make(folder: str, stage: str, number: int) -> None:
            try:
                failure = ray.get(task.remote(folder, stage, number))
            except RayError as error:
                why = in_one_line(str(error))[:200]
                message = f"Ray lost part {number:,} more than {RETRIES} times: {why}"
                remedy = "the same command again, which goes on with the parts that are finished"
                lost = PartFailure(exit_code=EXIT_FAILED, message=message, remedy=remedy)
                failure = lost.model_dump_json()
            with one_at_once:
                answer(out, number, failure)

        one_at_once = Lock()
        for line in sys.stdin:
            waiting.submit(make, **json.loads(line))


if __name__ == "__main__":
    main(int(sys.argv[1]))
