"""What a command imports: as little as it works with."""

import json
import os
import subprocess
import sys
from pathlib import Path

LATER = ("headrace.doctor", "headrace.tuner", "headrace.report")
"""What a step of training needs nothing of."""
PROGRAM = """
import json, sys
from headrace.cli.app import app
from headrace.plan import technique
loaded = {}
def look():
    from headrace.train import train
    real = train.step
    def step(*given):
        loaded.setdefault("step", [*sys.modules])
        return real(*given)
    train.step = step
installed = technique.installed
def looked():
    look()
    technique.installed = installed
    return installed()
technique.installed = looked
try:
    app(sys.argv[1:], prog_name="headrace")
finally:
    loaded["end"] = [*sys.modules]
    print("loaded" + json.dumps(loaded))
"""


def loaded(*argv: str, cwd: Path) -> dict[str, list[str]]:
    """Run a command, and return the modules that it had loaded at its first step and its end."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *argv],
        cwd=cwd,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.rpartition("loaded")[2])


HELP = """
import sys
from typer.testing import CliRunner
from headrace.cli.app import Headrace, app
assert CliRunner().invoke(app, ["--help"]).exit_code == 0
heavy = {"torch", "numpy"}
assert not (heavy | {"pydantic", "headrace.plan.plan"}) & {*sys.modules}
for verb in [[verb.name] for verb in Headrace.verbs] + [["data", "ingest"], ["data", "mix"]]:
    shown = CliRunner().invoke(app, [*verb, "--help"])
    assert shown.exit_code == 0 and "Usage: " in shown.stdout
    assert not heavy & {*sys.modules}, f"the help of {verb} loads them"
"""


def test_help_loads_no_torch() -> None:
    """typer itself loads pydantic for the options of a verb, and not to list the verbs."""
    ended = subprocess.run(
        [sys.executable, "-c", HELP], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_training_loads_no_doctor_and_its_end_no_tuner(
    tiny_demo: list[str], tmp_path: Path
) -> None:
    modules = loaded("train", *tiny_demo, "--json", cwd=tmp_path)
    assert "headrace.train.train" in modules["step"]
    assert not [name for name in modules["step"] if name.startswith(LATER)]
    assert "headrace.doctor.advice" in modules["end"]  # the verdict of its closing words
    assert not [name for name in modules["end"] if name.startswith("headrace.tuner")]
