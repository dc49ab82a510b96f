"""A task file asks for machines by the name of their GPU, and is taken by SkyPilot itself."""

from typing import Any

import pytest
import yaml
from launched import ask, job

from headrace.launch.engines import engine_of

INSTALL = (
    "SkyPilot takes older click and uvicorn than the tests: python -m venv sky && "
    "sky/bin/pip install -e . pytest pytest-timeout pytest-xdist skypilot && "
    "sky/bin/python -m pytest tests/launch/test_skypilot.py"
)
"""How the test is run, in an environment of its own: no extra can hold the package."""


def task(*settings: str, **given: Any) -> dict[str, Any]:
    """Return the task of a job as it is read."""
    return yaml.safe_load(engine_of("skypilot", settings).files(job(**given))["task.yaml"])


def test_a_task_asks_for_nodes_and_carries_the_plan() -> None:
    found = task("accelerator=H100", "use_spot=true", "infra=aws")
    assert found["num_nodes"] == 2
    assert found["resources"] == {"infra": "aws", "use_spot": True, "accelerators": "H100:4"}
    assert found["file_mounts"] == {"~/headrace-plan/asked.toml": "runs/large.launch/asked.toml"}
    assert "$SKYPILOT_NODE_IPS" in found["run"]
    assert "train ~/headrace-plan/asked.toml mesh.data=8" in found["run"]
    assert task(gpus=False)["resources"] == {}


def test_sky_takes_the_task() -> None:
    sky = pytest.importorskip("sky", reason=INSTALL)
    found = task("accelerator=H100", plan="demo", text=None)
    assert sky.Task.from_yaml_config(found).num_nodes == 2
    with pytest.raises(ValueError, match="num_node"):
        sky.Task.from_yaml_config({**found, "num_nodess": 2})


def test_a_gpu_without_a_name_is_refused() -> None:
    told = ask("launch", "demo", "--on", "skypilot", "--dry-run", code=2)
    assert "--set accelerator=H100" in told["remedy"]
    named = ("--set", "accelerator=H100")
    command = ask("launch", "demo", "--on", "skypilot", *named, "--dry-run")["command"]
    assert command[:4] == ["sky", "launch", "--cluster", "demo"]
