"""Refuses well: where a technique cannot run it says why and what would help, with exit code 3."""

import ast
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import house
import pytest
import torch
from typer.testing import CliRunner

import headrace.techniques
from headrace.assemble.build import make_build
from headrace.cli.app import app
from headrace.core.errors import EXIT_UNSUPPORTED, UnsupportedError
from headrace.parallel.world import World
from headrace.plan.technique import Context, Stage, Supported, Unsupported

NAMES = list(house.CATALOGUE.techniques)
ALWAYS_THERE = {"torch", "numpy", "pydantic", "headrace", *sys.stdlib_module_names}


def contexts() -> list[Context]:
    """Return places of every kind: three devices, old and new GPUs, with and without compilers."""
    base = house.context_on("cpu", house.make_plan())
    places = [
        ("cpu", "cpu", None),
        ("mps", "mps", None),
        ("cuda", "NVIDIA H200", (9, 0)),
        ("cuda", "Tesla V100", (7, 0)),
    ]
    return [
        replace(
            base,
            device=device,
            device_name=name,
            capability=capability,
            has_triton=tools,
            has_compiler=tools,
            precision=precision,
            ranks=ranks,
            torch=version,
        )
        for (device, name, capability), tools, precision, ranks, version in itertools.product(
            places, (False, True), ("fp32", "bf16"), (1, 2), ((2, 11), (2, 13))
        )
    ]


def refusals(name: str) -> list[tuple[Context, Unsupported]]:
    """Where the technique, as a user gets it by its name, cannot run."""
    technique = house.CATALOGUE.find(name)()
    answers = [(context, technique.supports(context)) for context in contexts()]
    assert all(isinstance(answer, Supported | Unsupported) for _, answer in answers)
    return [(c, answer) for c, answer in answers if isinstance(answer, Unsupported)]


@pytest.mark.parametrize("name", NAMES)
def test_refuses_with_a_reason_and_a_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = house.make_plan(house.CATALOGUE.find(name)())
    prepared, device = house.prepared_of(plan), torch.device("cpu")
    for context, answer in refusals(name):
        monkeypatch.setattr("headrace.assemble.build.make_context", lambda *_, c=context: c)
        with pytest.raises(UnsupportedError) as caught:
            make_build(plan, prepared, World(), device, until=Stage.DESIGN)
        assert answer.reason and answer.reason in caught.value.message
        assert name in caught.value.message
        assert answer.remedy.text and answer.remedy.text in caught.value.remedy.text
        assert f"--without {name}" in caught.value.remedy.text


@pytest.mark.parametrize("name", [n for n in NAMES if refusals(n)])
def test_refuses_through_the_command_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, answer = refusals(name)[0]
    monkeypatch.setattr("headrace.train.train.make_context", lambda *_: context)
    file = tmp_path / "plan.toml"
    file.write_text(house.make_plan(directory=str(tmp_path / "runs")).to_toml())
    ended = CliRunner().invoke(app, ["train", str(file), "--with", name, "--json"])
    assert ended.exit_code == EXIT_UNSUPPORTED
    assert answer.reason in ended.stdout
    assert not list((tmp_path / "runs").glob("*"))


def test_nothing_optional_is_imported_before_supports_is_asked() -> None:
    for file in Path(headrace.techniques.__path__[0]).rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            optional = {n.split(".")[0] for n in names} - ALWAYS_THERE
            assert not optional, f"{file.name} imports {optional} at its top"
