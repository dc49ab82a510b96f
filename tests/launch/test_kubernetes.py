"""A manifest is a JobSet that the published models know every key of, and finds its own pods."""

import re
import subprocess
from typing import Any, get_args

import pytest
import yaml
from launched import ask, job
from pydantic import BaseModel

from headrace.launch.engines import engine_of
from headrace.launch.kubernetes import LONGEST, object_name

INSTALL = "pip install 'headrace[engines]'"
SETTINGS = ("image=registry/mine:1", "claim=shared", "queue=team", "memory=200Gi")


def manifest(**given: Any) -> list[dict[str, Any]]:
    """Return the documents of a job's manifest."""
    text = engine_of("kubernetes", SETTINGS).files(job(**given))["job.yaml"]
    return [*yaml.safe_load_all(text)]


def test_a_job_set_starts_a_pod_a_node_and_all_again() -> None:
    plan, job_set = manifest(name="Large_1")
    assert plan["data"] == {"asked.toml": 'name = "large"\n'}
    assert plan["metadata"]["name"] == job_set["metadata"]["name"] == "large-1-3e36b9"
    assert job_set["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    assert job_set["spec"]["failurePolicy"] == {"maxRestarts": 3}
    pods = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert pods["parallelism"] == pods["completions"] == 2 and pods["backoffLimit"] == 0
    (container,) = pods["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4", "memory": "200Gi"}
    (script,) = container["args"]
    assert '--rdzv-endpoint "large-1-3e36b9-node-0-0.large-1-3e36b9:29500"' in script
    assert "train /headrace/asked.toml mesh.data=8 --with fsdp name=Large_1 $resume" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert len(manifest(plan="demo", text=None)) == 1


def check_known(model: Any, value: Any, path: str = "") -> None:
    """Refuse keys that a model does not have, which the models themselves take."""
    for inner in get_args(model):
        if isinstance(value, list | dict) and inner is not type(None):
            check_known(inner, value, path)
    if isinstance(value, list):
        for item in value:
            check_known(model, item, path)
    elif isinstance(value, dict) and isinstance(model, type) and issubclass(model, BaseModel):
        known = {field.alias or name: field for name, field in model.model_fields.items()}
        assert value.keys() <= known.keys(), f"{path}: {value.keys() - known.keys()}"
        for key, inner in value.items():
            check_known(known[key].annotation, inner, f"{path}.{key}")


def test_the_published_models_know_every_key() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=INSTALL)
    _, job_set = manifest()
    model = models.JobsetV1alpha2JobSet
    (container,) = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ]
    container["resources"] = {}  # the model refuses quantities as words, which Kubernetes reads
    model.model_validate(job_set)
    check_known(model, job_set)
    job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 0
    with pytest.raises(AssertionError, match="backofLimit"):
        check_known(model, job_set)


@pytest.mark.parametrize(
    ("name", "begin"),
    [("A.b_c", "a-b-c"), ("1b", "run-1b"), ("x" * 60, "x" * 33), ("a-", "a"), ("demo-2", "")],
)
def test_names_of_runs_become_names_of_objects(name: str, begin: str) -> None:
    wanted = rf"{begin}-[0-9a-f]{{6}}" if begin else name
    for_pods = object_name("runs", name)
    assert re.fullmatch(wanted, for_pods) and len(for_pods) <= LONGEST


def test_no_two_runs_have_one_object() -> None:
    names = (
        "a-b",
        "a.b",
        "a_b",
        "A-b",
        "1b",
        "run-1b",
        *("x" * 40 + end for end in ("", "y", "z")),
    )
    runs = [(directory, name) for directory in ("runs", "out", "a/runs") for name in names]
    for engine in (engine_of("kubernetes", SETTINGS), engine_of("skypilot")):
        objects = {engine.job_id(job(directory=d, name=n)) for d, n in runs}
        assert len(objects) == len(runs)
        same = ("runs", "./runs", "runs/", "out/../runs")
        assert {engine.job_id(job(directory=d, name="a-b")) for d in same} == {"a-b"}
    assert engine_of("kubernetes", SETTINGS).job_id(job(directory="/work/runs")) == "large"


@pytest.mark.parametrize(
    ("folders", "remedy"),
    [
        (("directory=/scratch/runs",), "directory=runs"),
        (("directory=../runs",), "directory=runs"),
        (("directory=/work/../runs", "data.directory=/d"), "directory=runs data.directory=data"),
        (("data.directory=/worked",), "data.directory=data"),
        (("directory=/work/mine", "data.directory=a/../b"), ""),
    ],
)
def test_what_would_not_be_on_the_volume_is_refused(folders: tuple[str, ...], remedy: str) -> None:
    more = [word for each in SETTINGS[:2] for word in ("--set", each)]
    words = ("launch", "demo", *folders, "--on", "kubernetes", *more, "--dry-run")
    answer = ask(*words, code=2 if remedy else 0)
    assert answer.get("remedy", "") == remedy
    assert not remedy or "/work" in answer["error"]


def test_what_kubernetes_needs_is_asked_for() -> None:
    told = ask("launch", "demo", "--on", "kubernetes", "--dry-run", code=2)
    assert told["remedy"] == "--set image=IMAGE --set claim=CLAIM"
    more = [word for each in SETTINGS[:2] for word in ("--set", each)]
    command = ask("launch", "demo", "--on", "kubernetes", *more, "--dry-run")["command"]
    assert command == ["kubectl", "apply", "--filename", "runs/demo.launch/job.yaml"]


def test_a_namespace_is_kept_by_every_command() -> None:
    engine = engine_of("kubernetes", [*SETTINGS, "namespace=ours"])
    for command in (engine.status("a"), engine.stop("a"), engine.logs("a", job().folder)):
        assert command[-2:] == ["--namespace", "ours"]
