"""A Ray job runs torchrun on each node that Ray places."""

import subprocess

from launched import job

from headrace.launch.engines import engine_of


def test_a_job_of_ray_runs_the_script_on_each_node() -> None:
    engine = engine_of("ray", ("address=http://head:8265", "cpus=8"))
    text = engine.files(job())["node.sh"]
    assert text.startswith("#!/bin/bash\ncd '/home/anne/my work'\n")
    assert '--rdzv-endpoint "$RENDEZVOUS"' in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert engine.submit(job()) == [
        *("ray", "job", "submit", "--address", "http://head:8265", "--no-wait"),
        *("--submission-id", "large-now", "--", "python", "-m", "headrace.launch.ray_nodes"),
        *("2", "4", "8", "/home/anne/my work/runs/large.launch/node.sh"),
    ]
    assert engine.job_id(job(at="later")) == "large-later"
    assert engine.status("large-now")[-1] == "large-now"
