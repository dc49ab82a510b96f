"""From the command to the gradient: few frames, and eight files that a newcomer reads."""

import ast
import re
import traceback
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import headrace.train.train
from headrace.assemble.sockets import SOCKETS, Build
from headrace.cli.app import app
from headrace.plan.technique import Stage

MOST_FRAMES = 4


class FromTheGradient(Exception):
    """Raised while a gradient is made."""


def test_four_frames_at_most(plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Build] = headrace.train.train.make_build

    def hooked(*args: Any, **kwargs: Any) -> Build:
        build = real(*args, **kwargs)

        def stop(gradient: Any) -> None:
            raise FromTheGradient

        build.model.embed.weight.register_hook(stop)
        return build

    monkeypatch.setattr(headrace.train.train, "make_build", hooked)
    monkeypatch.chdir(plan_file.parent)
    with pytest.raises(FromTheGradient) as caught:
        app(["train", str(plan_file), "--json"], prog_name="headrace")
    stack = [frame for frame, _ in traceback.walk_tb(caught.tb)]
    ours = [f for f in stack if f.f_globals["__name__"].startswith("headrace.")]
    names = [f"{f.f_globals['__name__']}.{f.f_code.co_name}" for f in ours]
    assert names[:3] == [
        "headrace.cli.train.train",
        "headrace.train.train.run",
        "headrace.train.train.step",
    ]
    assert len(names) <= MOST_FRAMES, names
    assert stack[-1].f_code.co_name == "stop"


def test_the_first_step_is_compared_before_the_loop(trees: dict[str, ast.Module]) -> None:
    """Find the loop of `run`: it takes plain steps, and whoever inspects one stands before it."""
    (run,) = (
        node
        for node in trees["headrace.train.train"].body
        if isinstance(node, ast.FunctionDef) and node.name == "run"
    )
    (loop,) = (node for node in ast.walk(run) if isinstance(node, ast.While))
    inside = [node.id for node in ast.walk(loop) if isinstance(node, ast.Name)]
    whole = [node.id for node in ast.walk(run) if isinstance(node, ast.Name)]
    assert inside.count("step") == 1 and whole.count("step") == 3, "guard's, the first, the loop's"
    assert {"guard", "inspect"} <= {*whole} - {*inside}


def test_the_newcomers_files_are_there(root: Path) -> None:
    design = (root / "docs" / "design.md").read_text()
    walk = design.split("### A newcomer's walk", 1)[1].split("###", 1)[0]
    files = re.findall(r"^\d\. `([^`]+)`", walk, re.MULTILINE)
    assert len(files) == 8
    assert not [f for f in files if not (root / f).is_file()]


def test_the_design_names_every_socket_in_order_and_every_stage(root: Path) -> None:
    design = (root / "docs" / "design.md").read_text()
    tables = design.split("### The sockets", 1)[1].split("## 3.", 1)[0]
    rows = re.findall(r"^\| (`[^|]+`) \|", tables, re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`([^`]+)`", row)] == list(SOCKETS)
    held = {f.name for f in fields(Build)}
    assert {socket.split(".")[0] for socket in SOCKETS} <= held
    stages = design.split("**Build-time only.**", 1)[1].split("What varies", 1)[0]
    words = re.findall(r"[a-z]+", stages.split("\n\n")[1].replace("\n", " "))
    places = [words.index(stage.name.lower()) for stage in Stage]
    assert places == sorted(places)
