"""A run goes on where it is asked to, and neither begins anew nor disturbs a job that goes on."""

import subprocess
from pathlib import Path

import pytest
from launched import ask, job, tool

from headrace.launch.engines import engine_of
from headrace.launch.local import Local
from headrace.launch.record import Launch

NEEDS = {
    "kubernetes": ("--set", "image=i", "--set", "claim=c"),
    "skypilot": ("--set", "accelerator=H100"),
}
"""What engines must be told."""
TOOLS = {"slurm": "squeue", "ray": "ray", "kubernetes": "kubectl", "skypilot": "sky"}
"""The command of each engine that says whether a job has ended."""
ACTIVE = {
    "slurm": ("PENDING Priority", "RUNNING None", "COMPLETING None", "REQUEUE_HOLD None"),
    "ray": ("I cli.py:92 -- Status for job 'a': RUNNING", "Status for job 'a': PENDING"),
    "kubernetes": ("JobSet", "JobSet Suspended", "JobSet StartupPolicyCompleted"),
    "skypilot": ("ID  NAME  STATUS\n1   demo  SETTING_UP", "1 demo PENDING", "1 demo RUNNING"),
}
"""What it prints of a job that goes on."""
ENDED = {
    "slurm": ("COMPLETED None", "CANCELLED None", "TIMEOUT TimeLimit", ""),
    "ray": ("Job 'demo-RUNNING' succeeded", "Job 'demo-1' failed", "Job 'demo-1' was stopped"),
    "kubernetes": ("JobSet Completed", "JobSet Failed", "JobSet StartupPolicyCompleted Failed", ""),
    "skypilot": ("ID  NAME  STATUS", ""),
}
"""What it prints of one that has ended."""
CASES = [
    (engine, answer, answer in active)
    for engine, active in ACTIVE.items()
    for answer in (*active, *ENDED[engine])
]


def answer_with(tools: Path, engine: str, answer: str) -> None:
    """Let the tool of an engine print an answer when it is asked, and count what is submitted."""
    (tools / "answer").write_text(answer)
    asks = f'case "$*" in *jobset*|*status*|*queue*|*jobs*) cat {tools}/answer; exit;; esac\n'
    tool(tools, TOOLS[engine], asks + f'echo "$@" >>{tools}/submitted')


@pytest.mark.parametrize("engine", [*TOOLS])
def test_the_script_of_a_run_that_goes_on_never_begins_anew(engine: str, tmp_path: Path) -> None:
    words = [word for word in NEEDS.get(engine, ()) if word != "--set"]
    for resume, known in ((True, "--resume"), (False, "")):
        files = engine_of(engine, words).files(job(resume=resume))
        (script,) = [text for name, text in files.items() if name != "asked.toml"]
        decided = script[script.index("resume=") : script.index("exec ")]
        lines = "\n".join(line.strip() for line in decided.splitlines())
        done = subprocess.run(
            ["sh", "-c", f'{lines}\necho "$resume"'], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.stdout.strip() == known, done.stderr


@pytest.mark.parametrize("engine", ["local", "slurm", "ray"])
def test_a_run_that_is_not_here_does_not_go_on(engine: str, tools: Path, tmp_path: Path) -> None:
    for more in ((), ("--dry-run",)):
        answer = ask("launch", "demo", "name=nope", "--on", engine, "--resume", *more, code=2)
        assert answer["error"] == "there is no run 'nope' in runs to resume"
        assert answer["remedy"] == "leave out --resume"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("engine", "answer", "active"), CASES)
def test_a_run_goes_on_once_its_job_has_ended(
    engine: str, answer: str, active: bool, tools: Path, tmp_path: Path
) -> None:
    words = ("launch", "demo", "--on", engine, *NEEDS.get(engine, ()))
    answer_with(tools, engine, "")
    first = ask(*words)
    (tmp_path / "runs/demo").mkdir()
    answer_with(tools, engine, answer)
    again = ask(*words, "--resume", code=2 if active else 0)
    if active:
        assert "runs/demo has not ended" in again["error"]
        assert again["remedy"].startswith("headrace stop demo; ")
        record = ask("status", "demo") if answer else {}
        assert record.get("identity") == first["identity"]
    else:
        assert again["name"] == "demo"
        fresh = engine in ("slurm", "ray")
        assert (again["identity"] != first["identity"]) == fresh


def test_a_job_set_that_has_ended_is_replaced_and_no_other(tools: Path, tmp_path: Path) -> None:
    words = ("launch", "demo", "--on", "kubernetes", *NEEDS["kubernetes"])
    answer_with(tools, "kubernetes", "JobSet Completed")
    answer = ask(*words, code=2)
    assert "has a job demo already" in answer["error"]
    assert answer["remedy"].startswith("name=demo-2 or --resume")
    assert not (tmp_path / "runs").exists()
    ask(*words, "--resume")
    submitted = (tools / "submitted").read_text()
    assert (
        submitted == "replace --force --cascade=foreground --filename runs/demo.launch/job.yaml\n"
    )


def test_what_an_engine_refuses_keeps_its_name(tools: Path, tmp_path: Path) -> None:
    tool(tools, "sbatch", "exit 1")
    ask("launch", "demo", "--on", "slurm", code=1)
    assert not [*(tmp_path / "runs").iterdir()]
    tool(tools, "sbatch", "echo 7")
    assert ask("launch", "demo", "--on", "slurm")["name"] == "demo"
    (tmp_path / "runs/demo").mkdir()
    tool(tools, "sbatch", "exit 1")
    ask("launch", "demo", "--on", "slurm", "--resume", code=1)
    assert ask("status", "demo")["identity"] == "7"


def test_a_run_here_does_not_go_on_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "demo.launch"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    known = {"name": "demo", "engine": "local", "nodes": 1, "processes": 1, "command": []}
    mine = {"identity": Local(None).job_id(job()), "settings": {}, "cwd": str(tmp_path)}
    Launch.model_validate({**known, **mine}).write(tmp_path / "runs/demo.launch")
    answer = ask("launch", "demo", "--resume", code=2)
    assert "runs/demo has not ended" in answer["error"]
    assert ask("status", "demo")["identity"] == mine["identity"]
