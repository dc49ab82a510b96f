"""An sbatch file says what Slurm needs; a real Slurm runs it, queues it again, and ends it."""

import json
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import ask, job, read, tool
from slurm_here import INSTALL, missing, slurm_here
from tiny import PLAN

from headrace.launch.engines import engine_of


def options(text: str) -> dict[str, str]:
    """Return the options of an sbatch file."""
    lines = [line.split(" ", 1)[1] for line in text.splitlines() if line.startswith("#SBATCH ")]
    pairs = [shlex.split(line)[0].removeprefix("--").partition("=") for line in lines]
    return {key: value for key, _, value in pairs}


def test_an_sbatch_file_asks_for_nodes_and_is_queued_again() -> None:
    settings = ("partition=long", "time=04:00:00", "cpus_per_task=8", "exclusive=true", "mem=0")
    text = engine_of("slurm", settings).files(job())["job.sbatch"]
    assert options(text) == {
        "job-name": "large",
        "nodes": "2",
        "ntasks-per-node": "1",
        "gpus-per-node": "4",
        "partition": "long",
        "time": "04:00:00",
        "cpus-per-task": "8",
        "mem": "0",
        "exclusive": "",
        "chdir": "/home/anne/my work",
        "output": "/home/anne/my work/runs/large.launch/slurm-%j.log",
        "open-mode": "append",
        "requeue": "",
        "signal": "B:TERM@120",
    }
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert "--nnodes 2 --nproc-per-node 4 --rdzv-backend c10d" in text
    assert "mesh.data=8 --with fsdp name=large $resume" in text
    assert "gpus-per-node" not in engine_of("slurm").files(job(gpus=False))["job.sbatch"]


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("partitin=x", "--set partition=x"),
        ("cpus_per_task=0", "--set cpus_per_task=1"),
        ("x", "--set key=value, of partition"),
        ("gpu=1", "--set key=value, of partition"),
    ],
)
def test_a_setting_that_slurm_has_not_is_refused(word: str, remedy: str) -> None:
    told = ask("launch", "demo", "--on", "slurm", "--set", word, "--dry-run", code=2)
    assert told["remedy"].startswith(remedy)


def test_a_dry_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = ask("launch", "demo", "--on", "slurm", "mesh.data=4", "--nodes", "2", "--dry-run")
    assert told["command"] == ["sbatch", "--parsable", "runs/demo.launch/job.sbatch"]
    assert [*told["files"]] == ["job.sbatch"] and not [*tmp_path.iterdir()]


def test_jobs_of_one_name_in_two_directories_are_followed_apart(
    tools: Path, tmp_path: Path
) -> None:
    words = ("launch", "demo", "name=exp", "--on", "slurm")
    for directory, argument in (("runs", "exp"), ("out of it", "'out of it/exp'"), (".", "./exp")):
        printed = read(*words, f"directory={directory}")
        assert f"slurm has {argument} as" in printed and f" status {argument}\n" in printed
    for argument, number in (("out of it/exp", 2), ("exp", 1), ("./exp", 3), ("runs/exp", 1)):
        ask("stop", argument)
        assert (tmp_path / "stopped").read_text() == f"{number}\n"


def test_srun_gives_a_task_the_cores_of_the_job(tmp_path: Path) -> None:
    text = engine_of("slurm", ("cpus_per_task=8",)).files(job())["job.sbatch"]
    for name in ("srun", "scontrol", "squeue"):
        tool(tmp_path, name, f'echo "{name} $SRUN_CPUS_PER_TASK" >>{tmp_path}/seen')
    for cores in ("8", ""):
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CPUS_PER_TASK": cores}
        env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a"}
        subprocess.run(["bash", "-c", text], env=env, check=True)
        assert f"srun {cores}\n" in (tmp_path / "seen").read_text()
        (tmp_path / "seen").unlink()


def test_what_was_submitted_is_followed(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tools, "sbatch", "echo '4711;cluster'")
    tool(tools, "squeue", 'echo "RUNNING None"')
    submitted = ask("launch", "demo", "--on", "slurm", "--set", "partition=p")
    assert submitted["identity"] == "4711" and submitted["settings"]["partition"] == "p"
    assert (tmp_path / "runs/demo.launch/job.sbatch").is_file()
    (tmp_path / "runs/demo.launch/slurm-4711.log").write_text("step 1\n")
    (tmp_path / "runs/demo").mkdir()
    (tmp_path / "runs/demo/metrics.jsonl").write_text('{"step": 3, "loss": 2.5}\n{"st')
    told = ask("status", "demo")
    assert told["state"] == "RUNNING None" and told["progress"] == {"step": 3, "loss": 2.5}
    assert ask("logs", "demo")["log"] == "step 1\n"
    ask("stop", "runs/demo")
    assert (tmp_path / "stopped").read_text() == "4711\n"
    assert ask("launch", "demo", "--on", "slurm")["name"] == "demo-2"
    tool(tools, "sbatch", "echo 'invalid partition' >&2; exit 1")
    assert "invalid partition" in ask("launch", "demo", "--on", "slurm", code=1)["error"]
    (tools / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(tools))
    refused = ask("launch", "demo", "--on", "slurm", code=3)
    assert "`sbatch`" in refused["error"] and "--dry-run" in refused["remedy"]


def until(true: Callable[[], Any], seconds: float = 120) -> Any:
    """Wait until something is true, and return it."""
    ends = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < ends, "it did not become true"
        time.sleep(0.5)
    return found


@pytest.mark.slow
def test_a_real_slurm_queues_a_run_again_and_ends_another(
    tmp_path: Path, corpus: Path, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking := missing():
        pytest.skip(f"no {', '.join(lacking)} here: {INSTALL}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    words = ("tiny.toml", "goal.steps=20000", "schedule.steps=20000", "guard=false", "mesh.data=2")
    quick = ("checkpoint.every_steps=200", "eval.every_steps=5000")
    run = tmp_path / "runs/tiny"

    def steps() -> int:
        return ask("status", "tiny")["progress"].get("step", 0) if run.is_dir() else 0

    with slurm_here() as env:
        for key, value in env.items():
            monkeypatch.setenv(key, value)
        number = ask("launch", *words, *quick, "--on", "slurm", "--gpus", "2")["identity"]
        until(lambda: ask("status", "tiny")["progress"])
        # As Slurm itself does before the time limit:
        subprocess.run(["scancel", "--batch", "--signal=TERM", number], check=True)
        until(lambda: "PENDING" in ask("status", "tiny")["state"])
        assert json.loads((run / "report.json").read_text())["steps"] > 0
        soon = ["scontrol", "update", f"jobid={number}", "starttime=now"]
        time.sleep(3)  # the first start is still being cleared away; Slurm itself waits for 120 s
        subprocess.run(soon, check=True)
        until(lambda: json.loads((run / "environment.json").read_text())["starts"] == 2, 200)
        assert not (tmp_path / "runs/tiny-2").exists()
        ask("stop", "tiny")
        until(lambda: "CANCELLED" in ask("status", "tiny")["state"])
        assert "error:" in ask("logs", "tiny")["log"]
