"""A Ray job runs torchrun on each node that Ray places; a real Ray of two nodes trains a plan."""

import subprocess
import time
from pathlib import Path

import pytest
from launched import ask, job
from ray_here import INSTALL, missing, ray_here
from tiny import PLAN, report
from torch.distributed.run import get_args_parser

from headrace.launch import ray_nodes
from headrace.launch.engines import engine_of

ENDS_S = 400
"""Seconds in which a job of 4 steps ends on a busy machine."""


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


@pytest.mark.parametrize(("first", "hosts"), [(True, "is_host=true"), (False, "is_host=false")])
def test_the_node_of_the_address_hosts_the_rendezvous(
    tmp_path: Path, first: bool, hosts: str
) -> None:
    """Check what torchrun reads; the name of a host may have the loopback's address alone."""
    script, found = tmp_path / "node.sh", tmp_path / "found"
    script.write_text(f'echo "$RENDEZVOUS $PET_RDZV_CONF" >{found}\n')
    ray_nodes._run(str(script), "10.0.0.1:5", first)
    assert found.read_text() == f"10.0.0.1:5 {hosts}\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PET_RDZV_CONF", hosts)
        assert get_args_parser().parse_args(["x"]).rdzv_conf == hosts


@pytest.mark.slow
@pytest.mark.skipif(missing(), reason=f"needs Ray with its dashboard: {INSTALL}")
def test_a_real_ray_trains_on_two_nodes(
    tmp_path: Path, corpus: Path, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    words = ("tiny.toml", "goal.steps=4", "guard=false", "mesh.data=2", "device=cpu")
    with ray_here() as address:
        where = ("--on", "ray", "--nodes", "2", "--set", f"address={address}")
        launched = ask("launch", *words, *where)
        assert (launched["engine"], launched["nodes"], launched["processes"]) == ("ray", 2, 1)
        until = time.monotonic() + ENDS_S
        while "SUCCEEDED" not in (state := ask("status", "tiny")["state"].upper()):
            assert "FAILED" not in state, ask("logs", "tiny")["log"]
            assert time.monotonic() < until, (state, ask("logs", "tiny")["log"])
            time.sleep(1)
        assert ask("status", "tiny")["progress"]["step"] == 4
        assert "step" in ask("logs", "tiny")["log"]
        # A plan that is refused on both nodes ends the driver, and Ray says so.
        ask("launch", *words, "--with", "fused_rope", "name=refused", *where)
        while "FAILED" not in ask("status", "refused")["state"].upper():
            assert time.monotonic() < until + ENDS_S
            time.sleep(1)
        assert "fused_rope" in ask("logs", "refused")["log"]
    assert report(tmp_path / "runs/tiny")["steps"] == 4
