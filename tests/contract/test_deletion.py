"""Deletion: a technique is what can be deleted, and the baseline still trains.

All of them are hidden at once, in a process where importing one is an error; any is missing beside
any other, and the rest are still found.
"""

import ast
import importlib
import shutil
import sys
from pathlib import Path

import house
import pytest
from trees import tree_of

import headrace
import headrace.techniques
from headrace.core.errors import ConfigError
from headrace.model.zoo import families
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, discover

ROOT = Path(headrace.__path__[0])
TECHNIQUES = Path(headrace.techniques.__path__[0])

TRUNK_ALONE = """
import sys
from pathlib import Path

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("headrace.techniques."):
            raise ImportError(f"{name} is hidden")

sys.meta_path.insert(0, Hidden())
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Stage
from headrace.train.evaluate import evaluate
from headrace.inference.load import open_model
from headrace.model.zoo import families
from headrace.core.progress import Progress
from headrace.report.single import write_report
from headrace.train.run_folder import RunFolder
from headrace.train import train

catalogue = Catalogue({}, families())
plan = Plan.read(Path(sys.argv[1]).read_text(), catalogue)
folder = train.run(plan).folder
before = RunFolder(folder).read("report")
folder = train.run(plan, progress=Progress(), resume=True, checkpoint="step-2").folder
after = RunFolder(folder).read("report")
assert before["status"] == after["status"] == "done" and after["techniques"] == {}
assert before["val"][-1]["loss_nats"] == after["val"][-1]["loss_nats"]
build = open_model(folder, catalogue, checkpoint="latest", with_data=True)
found = evaluate(build, plan.eval.tokens)
assert found.loss_nats == after["val"][-1]["loss_nats"]
assert write_report(folder).stat().st_size > 1000
assert not [name for name in sys.modules if name.startswith("headrace.techniques.")]
print("the baseline stands alone")
"""


def test_the_baseline_trains_evaluates_resumes_and_reports_alone(tmp_path: Path) -> None:
    plan = house.make_plan(
        directory=str(tmp_path / "runs"), micro_rows=2, checkpoint={"every_steps": 2}
    )
    file = tmp_path / "plan.toml"
    file.write_text(plan.to_toml())
    ended = house.run_python(TRUNK_ALONE, str(file))
    assert ended.returncode == 0, ended.stderr
    assert "the baseline stands alone" in ended.stdout


def test_nothing_outside_of_techniques_imports_one() -> None:
    for file in ROOT.rglob("*.py"):
        if TECHNIQUES in file.parents:
            continue
        for node in ast.walk(tree_of(file)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{a.name}" for a in node.names]
            bad = [n for n in names if n.startswith("headrace.techniques.")]
            assert not bad, f"{file} imports {bad}"


def catalogue_without(names: set[str], folder: Path) -> Catalogue:
    """The catalogue of a copy of the package in which files are missing."""
    shutil.copytree(TECHNIQUES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in names:
        file = Path(sys.modules[house.CATALOGUE.find(name).__module__].__file__ or "")
        (folder / file.relative_to(TECHNIQUES)).unlink()
    return Catalogue(discover(importlib.import_module(folder.name)), families())


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("bit", range(len(house.CATALOGUE.techniques).bit_length()))
def test_the_others_are_still_there(
    bit: int, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them are missing. Of any two, one is missing beside the other in some half: the
    halves are those by each binary digit of their numbers."""
    missing = {n for i, n in enumerate(house.CATALOGUE.techniques) if (i >> bit) & 1 != kept}
    monkeypatch.syspath_prepend(tmp_path)
    rest = catalogue_without(missing, tmp_path / f"without_{bit}_{kept}")
    assert list(rest.techniques) == [n for n in house.CATALOGUE.techniques if n not in missing]
    for name in missing:
        with pytest.raises(ConfigError, match=f"there is no technique {name!r}"):
            Plan.read("goal.steps = 1", rest, with_=[name])


def test_a_new_file_is_found_without_a_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = tmp_path / "grown" / "room"
    room.mkdir(parents=True)
    for folder in (room, room.parent):
        (folder / "__init__.py").write_text('"""A room."""\n')
    source = Path(sys.modules[house.CATALOGUE.find("muon").__module__].__file__ or "")
    shutil.copy(source, room / "new_one.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(discover(importlib.import_module("grown"))) == ["new_one"]


def test_every_technique_is_complete() -> None:
    for name, technique in house.CATALOGUE.techniques.items():
        assert technique.line().endswith("."), name
        assert technique.room == technique.__module__.split(".")[-2]
        assert all(technique.card.whole().values()), f"{name}'s card has an empty field"
        assert technique.symptoms or name in house.BASELINE, f"{name} is a remedy for nothing"
        assert (technique.band > 0) == (technique.equality == "approximate")
        for knob, info in technique.model_fields.items():
            assert not info.is_required(), f"{name}.{knob} has no default"
