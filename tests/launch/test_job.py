"""What is launched has its own name, as many processes as the mesh has ranks, and all its words."""

from pathlib import Path

import pytest
from facts import in_order
from launched import ask, job

from headrace.core.errors import ConfigError
from headrace.launch.engine import ENGINES
from headrace.launch.engines import CLASSES
from headrace.launch.job import processes_of, unused_name
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.plan import Plan
from headrace.train.run_folder import RunFolder


@pytest.mark.parametrize(
    ("mesh", "nodes", "gpus", "here", "wanted"),
    [
        ({"data": 8}, 2, None, None, 4),
        ({"data": 8}, 2, 4, None, 4),
        ({"auto": True}, 1, None, 2, 2),
        ({"auto": True}, 1, None, 0, 1),
        ({"auto": True}, 3, 8, None, 8),
    ],
)
def test_each_node_starts_its_share_of_the_mesh(
    mesh: dict[str, int], nodes: int, gpus: int | None, here: int | None, wanted: int
) -> None:
    assert processes_of(MeshConfig.model_validate(mesh), nodes, gpus, here) == wanted


@pytest.mark.parametrize(
    ("mesh", "nodes", "gpus", "facts", "remedy"),
    [
        ({"data": 4}, 2, 4, (2, 4, 8, 4), "mesh.data=8"),
        ({"tensor": 2}, 1, 3, (1, 3, 3, 2), "headrace launch PLAN --gpus 2"),
        ({"data": 3}, 2, None, (3, 2), "mesh.data=2"),
        ({"auto": True}, 2, None, ("mesh.auto", "--gpus"), "headrace launch PLAN --gpus 8"),
    ],
)
def test_another_number_of_processes_is_refused_with_what_fits(
    mesh: dict[str, int], nodes: int, gpus: int | None, facts: tuple[object, ...], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=in_order(*facts)) as refused:
        processes_of(MeshConfig.model_validate(mesh), nodes, gpus, None)
    assert refused.value.remedy.text == remedy


def test_a_name_that_a_run_or_a_launch_has_is_not_taken(tmp_path: Path) -> None:
    for taken, wanted in (("a", "a"), ("a-2.launch", "a-2"), ("b", "a-3")):
        assert unused_name(str(tmp_path), "a") == wanted
        (tmp_path / taken).mkdir()


def test_a_launched_run_has_the_name_of_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan.model_validate({"name": "a", "directory": str(tmp_path), "goal": {"steps": 1}})
    assert "export HEADRACE_RUN=a\n" in job(name="a").script(rendezvous="")
    for launched, begun, resumed in (("a", "a", "a"), ("b", "a-3", "a-3")):
        (tmp_path / "a-2").mkdir(exist_ok=True)  # a later launch, which began earlier
        (tmp_path / "a-2/plan.toml").touch()
        monkeypatch.setenv("HEADRACE_RUN", launched)
        path = RunFolder.create(plan).path
        (path / "plan.toml").touch()
        assert (path.name, RunFolder.find(plan).path.name) == (begun, resumed)


def test_the_command_repeats_every_word_and_the_plan_as_it_is_now() -> None:
    assert job().train() == [
        *("train", "runs/large.launch/asked.toml", "mesh.data=8", "--with", "fsdp", "name=large")
    ]
    assert job().files == {"asked.toml": 'name = "large"\n'}
    assert job(plan="demo", text=None).train()[1] == "demo"


def test_every_engine_has_its_class() -> None:
    assert {*CLASSES} <= {*ENGINES}


def test_what_was_never_launched_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in ("status", "logs", "stop"):
        told = ask(verb, "demo", code=2)
        assert "'demo'" in told["error"] and told["remedy"] == "headrace launch demo --dry-run"


def test_a_damaged_record_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/a.launch").mkdir(parents=True)
    for text in ("{", '{"name": "a"}', "[]"):
        (tmp_path / "runs/a.launch/launch.json").write_text(text)
        told = ask("status", "a", code=1)
        assert "damaged" in told["error"] and told["remedy"].startswith("mv ")
    assert "nearest is a" in ask("status", "b", code=2)["error"]


@pytest.mark.parametrize(
    ("words", "code", "fact"),
    [
        ("--with lion --with sophia", 2, "sophia"),
        ("--with full_checkpoint --with selective_checkpoint", 2, "full_checkpoint"),
        ("model.precision=fp16", 2, "not scaled"),
        ("--with pipeline_parallel", 3, "several ranks"),
        ("--with pipeline_parallel device=cpu", 3, "several ranks"),
        ("--with document_packing --with liger_kernels", 0, ""),  # which a GPU decides
        ("--with flash_attention_3", 0, ""),  # which a package decides
        ("--with rms_norm model.pretrained=weights-there", 0, ""),
        ("--with fsdp mesh.auto=true --gpus 8", 0, ""),
        ("--with pipeline_parallel mesh.pipeline=2", 0, ""),
    ],
)
def test_a_plan_that_no_device_runs_is_not_launched(
    words: str, code: int, fact: str, tools: Path, tmp_path: Path
) -> None:
    answer = ask("launch", "demo", "--on", "slurm", *words.split(), code=code)
    assert fact in answer.get("error", "")
    assert (tmp_path / "runs").exists() is (code == 0)
